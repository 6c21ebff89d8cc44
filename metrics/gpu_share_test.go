package metrics

import (
	"math"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestGPUShareOfDevice(t *testing.T) {
	const gib = 1024 // MiB; sizes as the driver reports them
	for name, c := range map[string]struct {
		gpu, device uint64 // MiB
		profile     string
		want        float64
	}{
		"H100 1g.10gb":              {81559, 9984, "1g.10gb", 1. / 8},
		"H100 1g.20gb":              {81559, 20096, "1g.20gb", 2. / 8},
		"H100 3g.40gb":              {81559, 40448, "3g.40gb", 4. / 8},
		"H100 7g.80gb":              {81559, 81038, "7g.80gb", 1},
		"A100 40 GB 1g.5gb":         {40536, 4864, "1g.5gb", 1. / 8},
		"A100 40 GB 2g.10gb":        {40536, 9856, "2g.10gb", 2. / 8},
		"A30 1g.6gb":                {24576, 5952, "1g.6gb", 2. / 8},
		"A30 2g.12gb+me":            {24576, 11968, "2g.12gb+me", 4. / 8},
		"RTX PRO 6000 1g.24gb":      {97887, 24 * gib, "1g.24gb", 2. / 8},
		"a compute instance of two": {81559, 40448, "1c.3g.40gb", 4. / 8 / 3},
		"a compute instance of all": {81559, 40448, "3c.3g.40gb", 4. / 8},
		"unreadable profile":        {81559, 40448, "xc.3g.40gb", 0},
		"memory of GPU unknown":     {0, 9984, "1g.10gb", 0},
		"memory of device unknown":  {81559, 0, "1g.10gb", 0},
		"more memory than the GPU":  {9984, 81559, "1g.10gb", 0},
		"tiny":                      {81559, 1, "1g.10gb", 1. / 8},
	} {
		devices := []health.DeviceState{
			{Device: health.Device{ID: "GPU-a", MIGMode: true, Memory: c.gpu << 20}},
			{Device: health.Device{ID: "MIG-a", Kind: health.KindMIG, Parent: "GPU-a", Profile: c.profile, Memory: c.device << 20}},
		}
		holders := []podresources.Holder{{Namespace: "n", Pod: "a", Resource: "r", DeviceID: "MIG-a"}}
		if got := NewGPUShares(devices, nil, nil).Of("MIG-a", holders)[0]; got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		if got := NewGPUShares(devices[1:], nil, nil).Of("MIG-a", holders)[0]; got != 0 {
			t.Errorf("%s, the GPU is not listed: %v, want 0", name, got)
		}
	}
}

func TestGPUShareOfHolders(t *testing.T) {
	held := func(pod, id string) podresources.Holder {
		return podresources.Holder{Namespace: "n", Pod: pod, Container: "c", Resource: "r", DeviceID: id}
	}
	claimed := func(namespace, pod, share string) podresources.Holder {
		return podresources.Holder{
			Namespace: namespace, Pod: pod, Container: "c", DeviceID: "gpu-0",
			Claim: podresources.ClaimRef{Name: "x", ShareID: share},
		}
	}
	four := []plugin.ShareUnits{{Resource: "r", Device: "GPU-a", Form: deviceid.Form{Kind: deviceid.Replica}, Total: 4}}
	claims := &dra.Claims{ByUID: map[types.UID]dra.Claim{
		"1": {Devices: []dra.ClaimDevice{{Device: "GPU-a", ShareID: "s1", Memory: 20 << 30}, {Device: "GPU-b", ShareID: "s1", Memory: 1}}},
	}}
	for name, c := range map[string]struct {
		shares  []plugin.ShareUnits
		holders []podresources.Holder
		want    []float64
	}{
		"whole GPU":                 {nil, []podresources.Holder{held("a", "GPU-a")}, []float64{1}},
		"two containers of one pod": {nil, []podresources.Holder{held("a", "GPU-a"), held("a2", "GPU-a")}, []float64{.5, .5}},
		"replicas": {
			four,
			[]podresources.Holder{held("a", "GPU-a::0"), held("a", "GPU-a::1"), held("b", "GPU-a::3")},
			[]float64{.25, .25, .25},
		},
		"held before it was shared":    {four, []podresources.Holder{held("a", "GPU-a")}, []float64{1}},
		"held before and after":        {four, []podresources.Holder{held("a", "GPU-a"), held("b", "GPU-a::1")}, []float64{.8, .2}},
		"held with more replicas":      {four, []podresources.Holder{held("a", "GPU-a::4")}, []float64{0}},
		"held in another way":          {four, []podresources.Holder{held("a", "GPU-a::mps4::0")}, []float64{0}},
		"a unit of another resource":   {four, []podresources.Holder{{Resource: "q", DeviceID: "GPU-a::0"}}, []float64{0}},
		"a unit of another plugin":     {nil, []podresources.Holder{held("a", "GPU-a::0")}, []float64{0}},
		"shares of GKE's plugin":       {nil, []podresources.Holder{held("a", "nvidia0/vgpu0"), held("b", "nvidia0/gi1/vgpu1")}, []float64{0, 0}},
		"a MIG device of GKE's plugin": {nil, []podresources.Holder{held("a", "nvidia0/gi1")}, []float64{1}},
		"a claim":                      {nil, []podresources.Holder{claimed("n", "a", "")}, []float64{1}},
		"two pods with one claim":      {nil, []podresources.Holder{claimed("n", "a", ""), claimed("n", "b", "")}, []float64{.5, .5}},
		"claims of one name":           {nil, []podresources.Holder{claimed("n", "a", "s1"), claimed("m", "b", "s1")}, []float64{.25, .25}},
		"a share of memory by a claim": {nil, []podresources.Holder{claimed("n", "a", "s1")}, []float64{.25}},
		"a share that is not prepared": {nil, []podresources.Holder{claimed("n", "a", "s2")}, []float64{0}},
	} {
		devices := []health.DeviceState{{Device: health.Device{ID: "GPU-a", Memory: 80 << 30}}}
		got := NewGPUShares(devices, c.shares, claims).Of("GPU-a", c.holders)
		for i := range c.want {
			if got[i] != c.want[i] {
				t.Errorf("%s: %v, want %v", name, got, c.want)
				break
			}
		}
	}
	if got := NewGPUShares(nil, nil, nil).Of("GPU-a", []podresources.Holder{held("a", "GPU-a")}); len(got) != 1 || got[0] != 0 {
		t.Errorf("a device that is not listed: %v, want 0", got)
	}
}

func TestGPUPartsAddUpToGPUs(t *testing.T) {
	mig := func(id health.DeviceID, profile string, mib uint64) health.DeviceState {
		return health.DeviceState{Device: health.Device{ID: id, Kind: health.KindMIG, Parent: "GPU-a", Profile: profile, Memory: mib << 20}}
	}
	gpu := func(id health.DeviceID, migMode bool) health.DeviceState {
		return health.DeviceState{Device: health.Device{ID: id, MIGMode: migMode, Memory: 81559 << 20}}
	}
	for name, c := range map[string]struct {
		devices []health.DeviceState
		want    []float64
	}{
		"two GPUs":          {[]health.DeviceState{gpu("GPU-a", false), gpu("GPU-b", false)}, []float64{1, 1}},
		"no MIG device yet": {[]health.DeviceState{gpu("GPU-a", true)}, []float64{1}},
		"one of seven": {
			[]health.DeviceState{gpu("GPU-a", true), mig("MIG-a", "1g.10gb", 9984), gpu("GPU-b", true)},
			[]float64{7. / 8, 1. / 8, 1},
		},
		"whole": {[]health.DeviceState{gpu("GPU-a", true), mig("MIG-a", "7g.80gb", 81038)}, []float64{0, 1}},
		"thirds of a half": {
			[]health.DeviceState{gpu("GPU-a", true), mig("MIG-a", "1c.3g.40gb", 40448), mig("MIG-b", "2c.3g.40gb", 40448)},
			[]float64{1. / 2, 1. / 6, 1. / 3},
		},
		"memory unknown": {[]health.DeviceState{gpu("GPU-a", true), mig("MIG-a", "1g.10gb", 0)}, []float64{1, 0}},
		"more than the memory": {
			[]health.DeviceState{gpu("GPU-a", true), mig("MIG-a", "4g.40gb", 70000), mig("MIG-b", "3g.40gb", 70000)},
			[]float64{0, 7. / 8, 7. / 8},
		},
	} {
		shares := NewGPUShares(c.devices, nil, nil)
		for i := range c.devices {
			if got := shares.withoutMIG(&c.devices[i].Device); math.Abs(got-c.want[i]) > 1e-9 {
				t.Errorf("%s: %s: %v, want %v", name, c.devices[i].Device.ID, got, c.want[i])
			}
		}
	}
}
