package plugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const memoryResource = "nvidia.com/gpu-memory"

func mpsShared(resources ...MPSResource) func(*Config) {
	return func(c *Config) { c.Sharing.MPS.Resources = resources }
}

func mpsSharedBy(n int) func(*Config) { return mpsShared(MPSResource{Name: gpu, Replicas: n}) }

func memoryShared(unit string, devices ...string) func(*Config) {
	return func(c *Config) {
		m := &c.Sharing.Memory
		m.Resource, m.Unit, m.Devices, m.Enforcement = memoryResource, unit, devices, EnforceNone
	}
}

func timeSliced(resources ...SharedResource) func(*Config) {
	return func(c *Config) { c.Sharing.TimeSlicing.Resources = resources }
}

// both applies two changes.
func both(a, b func(*Config)) func(*Config) { return func(c *Config) { a(c); b(c) } }

// withReserved returns whole GPUs with the memory of an H100, of which the driver withholds 551 MiB.
func withReserved(n int) *health.Snapshot {
	snap := partitioned(slices.Repeat([]string{whole}, n)...)
	for i := range snap.Devices {
		snap.Devices[i].Device.Reserved = 551 << 20
	}
	return snap
}

// withMPS returns a copy of the snapshot with the state of the daemon of each device.
func withMPS(snap *health.Snapshot, daemons ...*health.MPSDaemon) *health.Snapshot {
	next := *snap
	next.Devices = slices.Clone(snap.Devices)
	for i, d := range daemons {
		next.Devices[i].MPS = d
	}
	return &next
}

func readyDaemon() *health.MPSDaemon { return &health.MPSDaemon{Ready: true} }

func TestLayoutOfMPSAndMemory(t *testing.T) {
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rename := func(c *Config) { c.Sharing.MPS.RenameByDefault = true }
	two := partitioned(whole, whole)
	pascal := partitioned(whole, whole)
	pascal.Devices[1].Device.ComputeCapability = health.ComputeCapability{Major: 6, Minor: 1}
	volta := partitioned(whole)
	volta.Devices[0].Device.ComputeCapability = health.ComputeCapability{Major: 7}
	sizes := partitioned(whole, whole, whole, whole)
	sizes.Devices[1].Device.Memory, sizes.Devices[1].Device.Model = 23034<<20, "NVIDIA L4"
	sizes.Devices[2].Device.Memory, sizes.Devices[3].Device.Memory = 0, 500<<20
	ids := func(prefix string, n int) string {
		var all []string
		for i := range n {
			all = append(all, prefix+strconv.Itoa(i))
		}
		return strings.Join(all, " ")
	}
	checkLayouts(t, []layoutCase{
		{
			"MPS", configured(rename, mpsSharedBy(2)), two, "nvidia.com/gpu.shared: GPU-0::mps2::0 GPU-0::mps2::1 GPU-1::mps2::0 GPU-1::mps2::1",
			nil,
		},
		{
			"all kinds", configured(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}, Rename: "a.com/t"}),
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"1"}, Rename: "a.com/m", PinnedMemory: "8Gi"}),
				memoryShared("16Gi", "2")),
			partitioned(whole, whole, whole, whole),
			"a.com/m: GPU-1::mps8192Mi::0 GPU-1::mps8192Mi::1; a.com/t: GPU-0::0 GPU-0::1; nvidia.com/gpu: GPU-3; nvidia.com/gpu-memory: " +
				ids("GPU-2::16384Mi::", 4),
			nil,
		},
		{
			"MIG devices by MPS and by memory", configured(mixed, mpsShared(MPSResource{Name: migResource, Replicas: 2}),
				memoryShared("8Gi", "mig-3g.*")),
			partitioned("1g.10gb 3g.40gb", whole),
			"nvidia.com/gpu: GPU-1; nvidia.com/gpu-memory: " + ids("MIG-0-1::8192Mi::", 4) +
				"; nvidia.com/mig-1g.10gb: MIG-0-0::mps2::0 MIG-0-0::mps2::1", nil,
		},
		{
			"memory of each GPU's size", configured(memoryShared("10Gi")), sizes,
			"nvidia.com/gpu-memory: " + ids("GPU-0::10240Mi::", 7) + " " + ids("GPU-1::10240Mi::", 2),
			[]string{"GPU 2 (GPU-2)", "GPU 3 (GPU-3)"},
		},
		{
			"memory and MPS of one GPU", configured(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"GPU-0"}}),
				memoryShared("16Gi", "0")), two,
			"nvidia.com/gpu: GPU-1",
			[]string{"plugin.sharing.mps.resources[0] and plugin.sharing.memory: a device is shared in one way only, and both select these: GPU 0 " +
				"(GPU-0)"},
		},
		{
			"time-slicing and MPS of one GPU",
			configured(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"*H100*"}}),
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"1"}})), two,
			"nvidia.com/gpu: GPU-0::0 GPU-0::1",
			[]string{"plugin.sharing.timeSlicing.resources[0] and plugin.sharing.mps.resources[0]: "},
		},
		{
			"two entries of MPS: the first applies",
			configured(mpsShared(MPSResource{Name: gpu, Replicas: 3, Devices: []string{"1"}}, MPSResource{Name: gpu, Replicas: 2})), two,
			"nvidia.com/gpu: GPU-0::mps2::0 GPU-0::mps2::1 GPU-1::mps3::0 GPU-1::mps3::1 GPU-1::mps3::2", nil,
		},
		{
			"two kinds under one name",
			configured(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}),
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"1"}})), two,
			"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::mps2::0 GPU-1::mps2::1", nil,
		},
		{
			"GPU in MIG mode by MPS", configured(mpsSharedBy(2)), partitioned("1g.10gb", whole), "nvidia.com/gpu: GPU-1::mps2::0 GPU-1::mps2::1",
			[]string{"plugin.sharing.mps.resources[0]: expected MIG devices or GPUs that are not in MIG mode; set plugin.migStrategy to mixed or " +
				"single, or disable MIG mode: GPU 0 (GPU-0)"},
		},
		{
			"GPU in MIG mode by memory", configured(memoryShared("40Gi", "0")), partitioned("1g.10gb", whole), "nvidia.com/gpu: GPU-1",
			[]string{"plugin.sharing.memory: "},
		},
		{
			"the resource of GPUs, with a GPU in MIG mode: its MIG devices stay whole", configured(mixed,
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0", "1"}})),
			partitioned("1g.10gb", whole), "nvidia.com/gpu: GPU-1::mps2::0 GPU-1::mps2::1; nvidia.com/mig-1g.10gb: MIG-0-0", nil,
		},
		{
			"MIG devices by the index of their GPU", configured(mixed,
				mpsShared(MPSResource{Name: migResource, Replicas: 2, Devices: []string{"0"}})),
			partitioned("1g.10gb", whole), "nvidia.com/gpu: GPU-1; nvidia.com/mig-1g.10gb: MIG-0-0::mps2::0 MIG-0-0::mps2::1", nil,
		},
		{
			"too many shares for the architecture", configured(mpsSharedBy(17)), pascal, "nvidia.com/gpu: " + ids("GPU-0::mps17::", 17),
			[]string{"plugin.sharing.mps.resources[0].replicas: expected at most 16 with compute capability 6.1, got 17: GPU 1 (GPU-1)"},
		},
		{
			"16 shares of an old architecture", configured(mpsSharedBy(16)), pascal,
			"nvidia.com/gpu: " + ids("GPU-0::mps16::", 16) + " " + ids("GPU-1::mps16::", 16), nil,
		},
		{"48 shares of Volta", configured(mpsSharedBy(48)), volta, "nvidia.com/gpu: " + ids("GPU-0::mps48::", 48), nil},
		{
			"more pinned memory than there is", configured(mpsShared(MPSResource{Name: gpu, Replicas: 8, PinnedMemory: "10Gi"})), partitioned(whole),
			"",
			[]string{"plugin.sharing.mps.resources[0].pinnedMemory: expected at most 10194Mi for each of 8 shares, got 10240Mi: GPU 0 (GPU-0)"},
		},
		{
			"all pinned memory", configured(mpsShared(MPSResource{Name: gpu, Replicas: 8, PinnedMemory: "10194Mi"})), partitioned(whole),
			"nvidia.com/gpu: " + ids("GPU-0::mps10194Mi::", 8), nil,
		},
	})
}

// The limits of a share are equal parts of what the driver leaves, or as configured.
func TestShareLimits(t *testing.T) {
	for name, c := range map[string]struct {
		change          func(*Config)
		threads         int
		pinned, daemonP uint64 // MiB
		daemonT         int
	}{
		"equal parts": {mpsSharedBy(4), 25, 20252, 20252, 25},
		"odd number":  {mpsSharedBy(48), 2, 1687, 1687, 2},
		"configured":  {mpsShared(MPSResource{Name: gpu, Replicas: 3, ActiveThreadPercentage: 70, PinnedMemory: "1Gi"}), 70, 1024, 1024, 70},
		"several shares for a container": {func(c *Config) {
			mpsSharedBy(4)(c)
			c.Sharing.MPS.FailRequestsGreaterThanOne = false
		}, 25, 20252, 0, 100},
		"memory": {func(c *Config) {
			memoryShared("2Gi")(c)
			c.Sharing.Memory.Enforcement = EnforceMPS
		}, 100, 2048, 0, 100},
	} {
		cfg := configured(c.change)
		l := newLayout(layoutInput{cfg: &cfg, snap: withReserved(1)})
		s := l.resources[0].Devices[0].share
		if !s.mps || s.threads != c.threads || s.pinned != c.pinned<<20 {
			t.Errorf("%s: %+v", name, s)
		}
		want := []mps.Spec{{Device: "GPU-0", GPU: "GPU-0", ThreadPercentage: c.daemonT, PinnedMemory: c.daemonP << 20}}
		if got := l.mpsSpecs(); !slices.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

// The daemons have one order, whatever the resources of their devices are: another order would be another specification.
func TestMPSDaemonsAreSorted(t *testing.T) {
	var all []MPSResource
	for _, name := range []string{"nvidia.com/mig-3g.40gb", gpu, migResource} {
		all = append(all, MPSResource{Name: name, Replicas: 2})
	}
	cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed }, mpsShared(all...))
	l := newLayout(layoutInput{cfg: &cfg, snap: partitioned("3g.40gb 1g.10gb 1g.10gb", whole)})
	var got []health.DeviceID
	for _, s := range l.mpsSpecs() {
		got = append(got, s.Device)
	}
	if want := []health.DeviceID{"MIG-0-0", "MIG-0-1", "MIG-0-2", "GPU-1"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A container that holds a device otherwise ends before MPS serves the device, and a device that left MPS waits for its daemon's end.
func TestMPSWaitsForHolders(t *testing.T) {
	snap := withReserved(2)
	for name, c := range map[string]struct {
		change   func(*Config)
		daemon   *health.MPSDaemon
		holder   string
		withheld int
		specs    int
	}{
		"unchanged":                    {mpsSharedBy(4), readyDaemon(), "GPU-0::mps4::1", 0, 2},
		"time-sliced before":           {mpsSharedBy(4), readyDaemon(), "GPU-0::1", 4, 1},
		"whole before":                 {mpsSharedBy(4), nil, "GPU-0", 4, 1},
		"larger shares before":         {mpsSharedBy(4), readyDaemon(), "GPU-0::mps2::1", 4, 1},
		"leaving":                      {sharedBy(4), &health.MPSDaemon{Reason: "x"}, "GPU-1::0", 4, 0},
		"leaving, still held":          {sharedBy(4), &health.MPSDaemon{Reason: "x"}, "GPU-0::mps2::0", 4, 0},
		"left":                         {sharedBy(4), nil, "GPU-1::0", 0, 0},
		"whole now":                    {func(*Config) {}, &health.MPSDaemon{}, "GPU-1", 1, 0},
		"other unit of memory before":  {memoryShared("16Gi"), nil, "GPU-0::8192Mi::0", 4, 0},
		"memory with another resource": {memoryShared("16Gi"), nil, "GPU-0::16384Mi::0", 4, 0}, // held under nvidia.com/gpu
		"memory, now with MPS": {
			func(c *Config) { memoryShared("16Gi")(c); c.Sharing.Memory.Enforcement = EnforceMPS }, readyDaemon(),
			"GPU-0::16384Mi::0", 4, 1,
		},
		"memory with MPS, without now":  {memoryShared("16Gi"), &health.MPSDaemon{}, "GPU-1::16384Mi::0", 8, 0},
		"held under an unknown replica": {mpsSharedBy(4), readyDaemon(), "GPU-0::mps4::4", 4, 1},
	} {
		cfg := configured(c.change)
		now := withMPS(snap, c.daemon)
		l := newLayout(layoutInput{cfg: &cfg, snap: now, facts: factsOf(holdersOf(now, cfg, gpu+" "+c.holder))})
		n := 0
		for _, w := range l.withheld {
			n += w.ids
		}
		if specs := l.mpsSpecs(); n != c.withheld || len(specs) != c.specs {
			t.Errorf("%s: %d withheld, daemons %+v; %+v", name, n, specs, l.withheld)
		}
	}
}

// A device that MPS serves is offered while its daemon is ready.
func TestMPSReadiness(t *testing.T) {
	for name, c := range map[string]struct {
		daemon           *health.MPSDaemon
		usable, starting bool
	}{
		"ready":             {readyDaemon(), true, false},
		"ready with limits": {&health.MPSDaemon{Ready: true, ThreadPercentage: 50.5, PinnedMemory: 40 << 30}, true, false}, // rounded
		"threads of before": {&health.MPSDaemon{Ready: true, ThreadPercentage: 100}, false, true},
		"memory of before":  {&health.MPSDaemon{Ready: true, ThreadPercentage: 50, PinnedMemory: 60 << 30}, false, true},
		"unknown":           {nil, false, true},
		"leaving":           {&health.MPSDaemon{Ready: true, Leaving: true, Reason: "stopping"}, false, true},
		"starting":          {&health.MPSDaemon{Reason: "limits are not set yet"}, false, true},
		"faulty":            {&health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1"}, false, false},
	} {
		cfg := configured(mpsSharedBy(2))
		l := newLayout(layoutInput{cfg: &cfg, snap: withMPS(withReserved(2), c.daemon, c.daemon)})
		if n := l.resources[0].healthy(); n == 4 != c.usable || n == 0 == c.usable {
			t.Errorf("%s: %d of 4 healthy", name, n)
		}
		waiting, reason, starting := l.waiting(func(string) bool { return false })
		if slices.Equal(waiting, []string{gpu}) == c.usable || !c.usable && starting != c.starting ||
			!c.usable && (!strings.Contains(reason, "GPU 0 (GPU-0)") || c.daemon != nil && !strings.Contains(reason, c.daemon.Reason)) {
			t.Errorf("%s: waiting for %v, %q, starting: %v", name, waiting, reason, starting)
		}
		if waiting, _, _ := l.waiting(func(string) bool { return true }); waiting != nil {
			t.Errorf("%s: %v waits although it runs", name, waiting)
		}
		one := newLayout(layoutInput{cfg: &cfg, snap: withMPS(withReserved(2), c.daemon, readyDaemon())})
		if waiting, _, _ := one.waiting(func(string) bool { return false }); waiting != nil {
			t.Errorf("%s: %v waits although one device is ready", name, waiting)
		}
	}
}

// Each resource that waits says for which device, for how many more, and whether that is the start only.
func TestLayoutWaiting(t *testing.T) {
	down := &health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1"}
	held := factsOf(map[health.DeviceID][]podresources.Holder{"GPU-0": {{
		Namespace: "ml", Pod: "train", Container: "c", Resource: gpu,
		DeviceID: "GPU-0",
	}}})
	driver := func(c *Config) { c.Sharing.Memory.Enforcement = EnforceDriver }
	two := both(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}, Rename: "a.com/x"}),
		both(memoryShared("1Gi", "1"), driver))
	for name, c := range map[string]struct {
		change   func(*Config)
		in       layoutInput
		want     string
		starting bool
	}{
		"one": {
			mpsSharedBy(2),
			layoutInput{snap: withReserved(1)},
			gpu + ": waiting for the MPS daemon of GPU 0 (GPU-0): not examined yet",
			true,
		},
		"several": {
			mpsSharedBy(2),
			layoutInput{snap: withReserved(3)},
			gpu + ": waiting for the MPS daemon of GPU 0 (GPU-0): not examined yet (and 2 more)", true,
		},
		"two": {
			mpsSharedBy(2),
			layoutInput{snap: withReserved(2)},
			gpu + ": waiting for the MPS daemon of GPU 0 (GPU-0): not examined yet (and 1 more)", true,
		},
		"one of two is faulty": {
			mpsSharedBy(2),
			layoutInput{snap: withMPS(withReserved(2), nil, down)},
			gpu + ": waiting for the MPS daemon of GPU 0 (GPU-0): not examined yet (and 1 more)", false,
		},
		"held otherwise": {
			mpsSharedBy(2),
			layoutInput{snap: withMPS(withReserved(1), down), facts: held},
			gpu + ": waiting for GPU 0 (GPU-0): ml/train (c) holds it as GPU-0 of nvidia.com/gpu", true,
		},
		"one is ready": {mpsSharedBy(2), layoutInput{snap: withMPS(withReserved(2), down, readyDaemon())}, "", true},
		"not shared":   {func(*Config) {}, layoutInput{snap: withReserved(1)}, "", true},
		"not examined": {
			both(memoryShared("1Gi"), driver),
			layoutInput{snap: withReserved(1), examined: true},
			memoryResource + ": GPU 0 (GPU-0): the driver's memory limits are not examined yet", true,
		},
		"two resources, one faulty": {
			two,
			layoutInput{snap: withMPS(withReserved(2), down), examined: true},
			"a.com/x: waiting for the MPS daemon of GPU 0 (GPU-0): exit status 1; " + memoryResource +
				": GPU 1 (GPU-1): the driver's memory limits are not examined yet", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := configured(c.change)
			c.in.cfg = &cfg
			l := newLayout(c.in)
			resources, reason, starting := l.waiting(func(string) bool { return false })
			if reason != c.want || starting != c.starting || (len(resources) > 0) != (c.want != "") {
				t.Errorf("%q: got  %s, starting %v\nwant %s, %v", resources, reason, starting, c.want, c.starting)
			}
			if resources, reason, starting := l.waiting(func(string) bool { return true }); len(resources) > 0 || reason != "" || !starting {
				t.Errorf("running: %q, %s, %v", resources, reason, starting)
			}
		})
	}
}

// A device of unknown size would give shares without a limit.
func TestMPSNeedsMemorySize(t *testing.T) {
	cfg := configured(mpsSharedBy(2))
	snap := withMPS(snapshot(1), readyDaemon())
	l := newLayout(layoutInput{cfg: &cfg, snap: snap})
	if r := l.resources[0]; r.units() != 2 || r.healthy() != 0 {
		t.Errorf("%+v", r)
	}
}

func TestEnforcement(t *testing.T) {
	whole, part := &health.Device{ID: "GPU-0"}, &health.Device{ID: "MIG-0", Kind: health.KindMIG, Parent: "GPU-0"}
	capable, old := &memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": ""}},
		&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": "driver 570 is too old"}}
	for name, c := range map[string]struct {
		enforcement   string
		required      bool
		device        *health.Device
		caps          *memlimits.Capabilities
		examined      bool
		want          memlimits.Enforcement
		reason        string
		blocked, soon bool
	}{
		"none":               {EnforceNone, false, whole, capable, true, memlimits.None, "", false, false},
		"mps":                {EnforceMPS, true, whole, nil, true, memlimits.MPS, "", false, false},
		"auto":               {EnforceAuto, false, whole, capable, true, memlimits.Driver, "", false, false},
		"auto, old driver":   {EnforceAuto, false, whole, old, true, memlimits.None, "too old", false, false},
		"auto, not examined": {EnforceAuto, false, whole, nil, true, memlimits.None, "not examined", true, true},
		"auto, new device": {
			EnforceAuto, false, whole, &memlimits.Capabilities{}, true, memlimits.None, "not examined", true,
			true,
		},
		"auto, nothing examines":         {EnforceAuto, false, whole, nil, false, memlimits.None, "examines", false, false},
		"auto, MIG device":               {EnforceAuto, false, part, capable, true, memlimits.None, "MIG", false, false},
		"driver":                         {EnforceDriver, true, whole, capable, true, memlimits.Driver, "", false, false},
		"driver, old":                    {EnforceDriver, false, whole, old, true, memlimits.None, "too old", false, false},
		"driver, old, required":          {EnforceDriver, true, whole, old, true, memlimits.None, "too old", true, false},
		"auto, MIG device, required":     {EnforceAuto, true, part, capable, true, memlimits.None, "MIG", true, false},
		"auto, not examined, required":   {EnforceAuto, true, whole, nil, true, memlimits.None, "not examined", true, true},
		"auto, nothing examines, needed": {EnforceAuto, true, whole, nil, false, memlimits.None, "examines", true, false},
	} {
		m := MemorySharing{Enforcement: c.enforcement, RequireEnforcement: c.required}
		e := m.enforce(c.device, c.caps, c.examined)
		if e.by != c.want || (e.reason == "") != (c.reason == "") || !strings.Contains(e.reason, c.reason) || (e.blocked != "") != c.blocked ||
			e.pending != c.soon {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

// While nothing enforces the limits although that is required, new containers get no units, and containers keep theirs.
func TestRequiredEnforcementLost(t *testing.T) {
	cfg := configured(memoryShared("16Gi"), func(c *Config) {
		c.Sharing.Memory.Enforcement, c.Sharing.Memory.RequireEnforcement = EnforceAuto, true
	})
	snap := withReserved(1)
	layoutOf := func(reason string) layout {
		return newLayout(layoutInput{
			cfg: &cfg, snap: snap, examined: true, capabilities: &memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": reason}},
			facts: factsOf(holdersOf(snap, cfg, memoryResource+" GPU-0::16384Mi::1")),
		})
	}
	if l := layoutOf(""); l.resources[0].healthy() != 4 || l.withheld != nil {
		t.Errorf("enforced: %+v", l)
	}
	l := layoutOf("driver 570 is too old")
	if ids := l.resources[0].healthyIDs(); !slices.Equal(ids, []string{"GPU-0::16384Mi::1"}) {
		t.Errorf("not enforced: %v", ids)
	}
	if texts := withheldTexts(l.withheld); len(texts) != 1 || !strings.Contains(texts[0], "requireEnforcement") ||
		!strings.Contains(texts[0], "570") {
		t.Errorf("%q", texts)
	}
	if waiting, reason, starting := l.waiting(func(string) bool { return false }); !slices.Equal(waiting, []string{memoryResource}) ||
		starting || !strings.Contains(reason, "570") {
		t.Errorf("%v, %q, %v", waiting, reason, starting)
	}
}

func TestShares(t *testing.T) {
	several := func(c *Config) { mpsSharedBy(4)(c); c.Sharing.MPS.FailRequestsGreaterThanOne = false }
	for name, c := range map[string]struct {
		change        func(*Config)
		snap          *health.Snapshot
		holders       []string // nil: unknown
		free, largest int      // of GPU 0
	}{
		"unknown holders": {memoryShared("8Gi"), withReserved(2), nil, -1, -1},
		"memory, free":    {memoryShared("8Gi"), withReserved(2), []string{}, 9, 9},
		"memory, held": {
			memoryShared("8Gi"), withReserved(2),
			[]string{memoryResource + " GPU-0::8192Mi::0", memoryResource + " GPU-0::8192Mi::8", memoryResource + " GPU-1::8192Mi::3"},
			7, 7,
		},
		"held by two containers": {
			memoryShared("8Gi"), withReserved(2),
			[]string{memoryResource + " GPU-0::8192Mi::0", memoryResource + " GPU-0::8192Mi::0"},
			8, 8,
		},
		"unhealthy": {
			memoryShared("8Gi"), with(withReserved(2), 0, health.Unhealthy),
			[]string{memoryResource + " GPU-0::8192Mi::0"},
			8, 0,
		},
		"withheld":               {memoryShared("8Gi"), withReserved(2), []string{gpu + " GPU-0", memoryResource + " GPU-0::8192Mi::0"}, 0, 0},
		"whole GPU held":         {sharedBy(4), withReserved(2), []string{gpu + " GPU-0"}, 0, 0},
		"all held":               {memoryShared("40Gi"), withReserved(2), []string{memoryResource + " GPU-0::40960Mi::0"}, 0, 0},
		"MPS, one per container": {mpsSharedBy(4), withMPS(withReserved(2), readyDaemon()), []string{gpu + " GPU-0::mps4::0"}, 3, 1},
		"MPS, several":           {several, withMPS(withReserved(2), readyDaemon()), []string{gpu + " GPU-0::mps4::0"}, 3, 3},
		"MPS, not ready":         {several, withReserved(2), []string{gpu + " GPU-0::mps4::0"}, 3, 0},
		"time-slicing":           {sharedBy(4), withReserved(2), []string{gpu + " GPU-0::0"}, 3, 1},
	} {
		cfg := configured(c.change)
		p := New(&health.Latest[Config]{}, &health.Latest[health.Snapshot]{}, zap.NewNop())
		p.cfg.Store(&cfg)
		p.snapshots.Store(c.snap)
		if c.holders != nil {
			p.pods.Holders.Store(&podresources.Holders{By: holdersOf(c.snap, cfg, c.holders...)})
		}
		all := p.Shares()
		if len(all) != 2 {
			t.Fatalf("%s: %+v", name, all)
		}
		s, sharing := all[0], cfg.Sharing
		want := ShareUnits{
			Resource: gpu, Device: "GPU-0", Sharing: SharingTimeSlicing, Total: 4, Free: c.free, Largest: c.largest,
			Form: deviceid.Form{Kind: deviceid.Replica},
		}
		form := ""
		switch {
		case len(sharing.MPS.Resources) > 0:
			want.Sharing, want.Form, form = SharingMPS, deviceid.Form{Kind: deviceid.MPSShare, Size: 4}, "mps4::"
		case sharing.Memory.Resource != "":
			want.Resource, want.Sharing, want.Enforcement = memoryResource, SharingMemory, memlimits.None
			want.Unit, _ = parseSize(sharing.Memory.Unit)
			want.Total = int((80496 << 20) / want.Unit) //nolint:gosec // less than 100
			want.Form, form = deviceid.Form{Kind: deviceid.Memory, Size: want.Unit >> 20}, fmt.Sprintf("%dMi::", want.Unit>>20)
		}
		if s != want {
			t.Errorf("%s: %+v, want %+v", name, s, want)
		}
		for id, want := range map[string]bool{
			fmt.Sprint("GPU-0::", form, s.Total-1): true, fmt.Sprint("GPU-0::", form, s.Total): false, "GPU-0": false, "GPU-0::x": false,
			"GPU-1::" + form + "0": false, "GPU-0::mps7::0": false,
		} {
			if s.HasUnit(id) != want {
				t.Errorf("%s: %s is a unit: %t, want %t", name, id, !want, want)
			}
		}
	}
	if claimed := (ShareUnits{Device: "GPU-0", Total: 4}); claimed.HasUnit("GPU-0") {
		t.Error("of a device that claims share, the whole device is a unit")
	}
}

// The units of each device fill its memory, whatever the sizes are.
func TestMemoryUnitsFillDevices(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		unit, reserve := 1+rng.Uint64N(4096), rng.Uint64N(3000)
		snap := withReserved(1 + rng.IntN(16))
		for i := range snap.Devices {
			snap.Devices[i].Device.Memory, snap.Devices[i].Device.Reserved = rng.Uint64N(100<<10)<<20, rng.Uint64N(2<<30)
		}
		cfg := configured(memoryShared(fmt.Sprintf("%dMi", unit)), func(c *Config) { c.Sharing.Memory.Reserve = fmt.Sprintf("%dMi", reserve) })
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		l := newLayout(layoutInput{cfg: &cfg, snap: snap})
		r := findResource(l.resources, memoryResource)
		if l.err != "" { // too many for the kubelet
			if len(r.Devices) > 0 {
				t.Fatalf("%s, and %d devices", l.err, len(r.Devices))
			}
			continue
		}
		for _, state := range snap.Devices {
			d := &state.Device
			var n uint64
			if device := r.byID[d.ID]; device != nil {
				n = uint64(device.units()) //nolint:gosec // not negative
			}
			used := d.Reserved + reserve<<20 + n*unit<<20
			if n > 0 && used > d.Memory || used+unit<<20 <= d.Memory {
				t.Errorf("unit %d MiB, reserve %d MiB, memory %d, reserved %d: %d units", unit, reserve, d.Memory, d.Reserved, n)
			}
		}
		for _, u := range unitsOf(r) {
			id := u.text()
			if found, ok := r.unit(id); !ok || found != u || deviceid.Parse(id).Device() != u.State.Device.ID || len(id) > maxIDLength {
				t.Errorf("%s: found %+v", id, found)
			}
		}
	}
}

// The kubelet can receive the list with the unit in the error, and half of that unit is too small.
func TestSmallestUnit(t *testing.T) {
	snap := withReserved(16)
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		d.ID = health.DeviceID(fmt.Sprintf("GPU-09ee17f8-f59d-55e2-a8b5-%012d", i))
	}
	layoutOf := func(unit int) layout {
		cfg := configured(memoryShared(fmt.Sprintf("%dMi", unit)))
		return newLayout(layoutInput{cfg: &cfg, snap: unhealthyCopy(snap)})
	}
	l := layoutOf(1)
	var smallest int
	if _, err := fmt.Sscanf(l.err, "plugin.sharing.memory.unit: expected at least %dMi, got 1Mi", &smallest); err != nil ||
		len(l.resources) != 0 {
		t.Fatalf("%q: %v", l.err, err)
	}
	fits, tooSmall := layoutOf(smallest), layoutOf(smallest/2)
	size := proto.Size(&pluginapi.ListAndWatchResponse{Devices: fits.resources[0].message()})
	if size > maxListBytes || !strings.Contains(tooSmall.err, "at most 32768 device IDs") {
		t.Errorf("%d MiB: %d bytes; half: %q", smallest, size, tooSmall.err)
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]uint64{
		"1Gi": 1 << 30, "1": 1, "0": 0, "1e3": 1000, "1.5Ki": 1536, "1024Ki": 1 << 20,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%s: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "x", "-1", "0.5", "1500m", "1 Gi", "1GiB", "0x1"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%q: %d", text, got)
		}
	}
}

// A valid size of a unit is a whole number of MiB, and writing that number gives the same size.
func FuzzValidateSize(f *testing.F) {
	for _, text := range []string{"1Gi", "1Mi", "1.5Gi", "1G", "1048576", "-1", "1e9", "9999999999999Gi", "1024Ki"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n, err := parseSize(text)
		if validateSize("k", text) != nil {
			return
		}
		if err != nil || n == 0 || n%mebibyte != 0 {
			t.Fatalf("%q: %d, %v", text, n, err)
		}
		if again, err := parseSize(fmt.Sprintf("%dMi", n/mebibyte)); err != nil || again != n {
			t.Errorf("%q: %d, then %d, %v", text, n, again, err)
		}
	})
}

func benchmarkUnits(b *testing.B, unit string, devices int) {
	benchmarkLayout(b, configured(memoryShared(unit)), withReserved(8), devices)
}

func BenchmarkLayout624Units(b *testing.B) { benchmarkUnits(b, "1Gi", 624) }

func BenchmarkLayout5064Units(b *testing.B) { benchmarkUnits(b, "127Mi", 5064) }

func BenchmarkLayout8x48MPS(b *testing.B) {
	benchmarkLayout(b, configured(mpsSharedBy(48)), withReserved(8), 384)
}
