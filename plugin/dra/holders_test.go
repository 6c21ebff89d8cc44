package dra

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// namedDevices has GPU-0 with two MIG devices of one profile and one of another, of unknown placement, and GPU-1 with two of known
// placement. The minor numbers are not the indexes.
func namedDevices() *health.Snapshot {
	mig := func(parent health.DeviceID, minor int, id health.DeviceID, profile string, p *health.MIGProperties) health.DeviceState {
		d := health.Device{ID: id, Parent: parent, Kind: health.KindMIG, Minor: minor, Profile: profile, Index: 1 - minor/4}
		if p != nil {
			d.Properties = &health.Properties{MIG: p}
		}
		return health.DeviceState{Device: d}
	}
	return &health.Snapshot{At: time.Now(), Devices: []health.DeviceState{
		{Device: health.Device{ID: "GPU-0", Index: 0, Minor: 4}},
		mig("GPU-0", 4, "MIG-0a", "1g.10gb", nil),
		mig("GPU-0", 4, "MIG-0b", "1g.10gb", nil),
		mig("GPU-0", 4, "MIG-0c", "3g.40gb", nil),
		{Device: health.Device{ID: "GPU-1", Index: 1, Minor: 0}},
		mig("GPU-1", 0, "MIG-1a", "1g.10gb", &health.MIGProperties{ProfileID: 19, PlacementStart: 0}),
		mig("GPU-1", 0, "MIG-1b", "1g.10gb", &health.MIGProperties{ProfileID: 19, PlacementStart: 3}),
		{Device: health.Device{ID: "GPU-2", Index: 2, Minor: 7, Memory: 81920 << 20}},
		// as DCGM rounds it
		{Device: health.Device{ID: "MIG-2", Parent: "GPU-2", Kind: health.KindMIG, Index: 2, Minor: 7, Memory: 81069 << 20, Profile: "7g.79gb"}},
	}}
}

func TestDeviceByName(t *testing.T) {
	snap := namedDevices()
	for name, want := range map[string]health.DeviceID{
		"gpu-4":                  "GPU-0",
		"gpu-0":                  "GPU-1",
		"gpu-1":                  "",
		"gpu-0-mig-1g10gb-19-0":  "MIG-1a",
		"gpu-0-mig-1g10gb-19-3":  "MIG-1b",
		"gpu-0-mig-1g10gb-19-2":  "",
		"gpu-0-mig-1g10gb-14-3":  "",
		"gpu-4-mig-3g40gb-9-4":   "MIG-0c",
		"gpu-7-mig-7g80gb-0-0":   "MIG-2",
		"gpu-4-mig-1g10gb-19-0":  "", // one of two
		"gpu-4-mig-7g80gb-0-0":   "",
		"gpu-0-mig-1g10gb-19":    "",
		"gpu-00000000000":        "",
		"gpu-99999999999999999":  "",
		"gpu-vfio-0":             "",
		"gpu-4\n":                "",
		"":                       "",
		"xgpu-4":                 "",
		"gpu-4-mig-3g40gb-9-4-x": "",
		"gpu-4-mig-3g.40gb-9-4":  "",
		"gpu--1":                 "",
		"gpu-4-mig--9-4":         "",
	} {
		if id, ok := deviceByName(snap, name); id != want || ok != (want != "") {
			t.Errorf("%q is %q, %v, want %q", name, id, ok, want)
		}
	}
	if _, ok := deviceByName(nil, "gpu-0"); ok {
		t.Error("a name resolves without a snapshot")
	}
}

// FuzzDeviceByName checks that a name has the minor number of its device.
func FuzzDeviceByName(f *testing.F) {
	for _, name := range []string{"gpu-4", "gpu-0-mig-1g10gb-19-0", "gpu-4-mig-3g40gb-9-4", "gpu-00", "gpu-4-mig-", "gpu-\u0660"} {
		f.Add(name)
	}
	snap := namedDevices()
	f.Fuzz(func(t *testing.T, name string) {
		id, ok := deviceByName(snap, name)
		if ok == (id == "") {
			t.Fatalf("%q: %q, %v", name, id, ok)
		}
		for i := range snap.Devices {
			gpu := fmt.Sprintf("gpu-%d", snap.Devices[i].Device.Minor)
			if d := &snap.Devices[i].Device; d.ID == id && name != gpu && (d.Kind == health.KindGPU || !strings.HasPrefix(name, gpu+"-mig-")) {
				t.Errorf("%q is %q", name, id)
			}
		}
	})
}

// The text names each driver and pod once, in the same order each time.
func TestOrphans(t *testing.T) {
	holder := func(pod, driver, name string) podresources.Holder {
		return podresources.Holder{Namespace: "ns", Pod: pod, Claim: podresources.ClaimRef{Name: "c", Driver: driver, CDI: name}}
	}
	ours := cdi.ClaimDeviceName("uid-gpu-0")
	h := podresources.Holders{
		By: map[health.DeviceID][]podresources.Holder{
			"GPU-0": {holder("b", "gpu.example.com", ours)}, "GPU-1": {holder("a", "gpu.nvidia.com", ours)},
			"GPU-2": {holder("a", "gpu.nvidia.com", ours)},
			"GPU-3": {holder("foreign", "gpu.nvidia.com", "k8s.gpu.nvidia.com/claim=uid-gpu-3")},
		},
		Admin: map[health.DeviceID][]podresources.Holder{"GPU-0": {holder("monitor", "gpu.nvidia.com", ours)}},
	}
	d := New(Options{
		Config: new(health.Latest[plugin.Config]), Holders: new(health.Latest[podresources.Holders]),
		PluginReleased: new(health.Latest[plugin.Handover]), Log: zap.NewNop(),
	})
	cfg := plugin.DefaultConfig()
	d.Config.Store(&cfg)
	d.Holders.Store(&h)
	if text := d.Orphans(); text != "" {
		t.Errorf("before it is known whether a checkpoint is left: %s", text)
	}
	d.setReleased("")
	for range 20 {
		if text := d.Orphans(); !strings.Contains(text,
			"no driver gpu.example.com, gpu.nvidia.com for the claims of pods ns/a, ns/b and ns/monitor:") {
			t.Fatal(text)
		}
	}
	d.Holders.Store(&podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-0": {holder("b", "gpu.example.com", ours)}}})
	if text := d.Orphans(); !strings.Contains(text, "no driver gpu.example.com for the claims of pod ns/b:") {
		t.Errorf("of one pod: %s", text)
	}
	if s := d.Status(); s.Warning != d.Orphans() {
		t.Errorf("the status warns %q", s.Warning)
	}
	none := func(when string) {
		t.Helper()
		if text := d.Orphans(); text != "" {
			t.Errorf("%s: %s", when, text)
		}
	}
	d.setReleased("the lock of the node is held by another agent")
	none("beside another agent")
	d.setReleased("")
	cfg.Enabled = false
	none("without plugin and driver")
	cfg.Enabled = true
	d.setSession(&session{Driver: d, instance: configuredInstance(&cfg)})
	none("while a driver still serves")
	d.setSession(nil)
	cfg.API = plugin.APIDRA
	none("with a driver")
	d.Config.Store(nil)
	none("without a configuration")
}

func TestClaimDevice(t *testing.T) {
	const driver = "gpu.nvidia.com"
	now := time.Now()
	ref := func(claim, driver, share string) podresources.ClaimRef {
		return podresources.ClaimRef{Name: claim, Driver: driver, Pool: "node-1", ShareID: share}
	}
	own := func(driver string) podresources.ClaimRef {
		return podresources.ClaimRef{Name: "lost", Driver: driver, Pool: "node-1", CDI: cdi.ClaimDeviceName("uid-gpu")}
	}
	claims := &Claims{ByUID: map[types.UID]Claim{
		"1": {UID: "1", Namespace: "ns", Name: "gpus", Prepared: now.Add(-time.Hour), Devices: []ClaimDevice{{Name: "gpu-0", Device: "GPU-old"}}},
		"2": {UID: "2", Namespace: "ns", Name: "gpus", Prepared: now, Devices: []ClaimDevice{{Name: "gpu-0", Device: "GPU-new"}}},
		"3": {UID: "3", Namespace: "ns", Name: "memory", Devices: []ClaimDevice{{Name: "gpu-0", Device: "GPU-share", ShareID: "s1"}}},
		"4": {UID: "4", Namespace: "ns", Name: "monitor", Devices: []ClaimDevice{{Name: "gpu-0", Device: "GPU-old", Admin: true}}},
	}}
	off := plugin.DefaultConfig()
	serves := off
	serves.API = plugin.APIDRA
	for name, c := range map[string]struct {
		cfg             plugin.Config
		claims          *Claims
		namespace, name string
		ref             podresources.ClaimRef
		want            health.DeviceID
		admin           bool
	}{
		"the newest prepared claim":                     {serves, claims, "ns", "gpu-0", ref("gpus", driver, ""), "GPU-new", false},
		"a share":                                       {serves, claims, "ns", "gpu-0", ref("memory", driver, "s1"), "GPU-share", false},
		"admin access":                                  {serves, claims, "ns", "gpu-0", ref("monitor", driver, ""), "GPU-old", true},
		"of another namespace":                          {serves, claims, "other", "gpu-4", ref("gpus", driver, ""), "GPU-0", false},
		"before the first pool":                         {serves, nil, "ns", "gpu-0", ref("gpus", driver, ""), "GPU-1", false},
		"another driver serves":                         {off, nil, "ns", "gpu-0", ref("gpus", driver, ""), "GPU-1", false},
		"a driver of another name":                      {off, nil, "ns", "gpu-0", ref("gpus", "nic.example.com", ""), "", false},
		"prepared by an agent with another driver name": {off, nil, "ns", "gpu-0", own("gpu.example.com"), "GPU-1", false},
		"one of two MIG devices, prepared by an agent":  {off, nil, "ns", "gpu-4-mig-1g10gb-19-0", own(driver), "GPU-0", false},
		"a MIG device of no GPU, prepared by an agent":  {off, nil, "ns", "gpu-5-mig-1g10gb-19-0", own(driver), "", false},
		"one of two MIG devices, prepared by NVIDIA's":  {off, nil, "ns", "gpu-4-mig-1g10gb-19-0", ref("x", driver, ""), "", false},
		"prepared before the API was left":              {off, claims, "ns", "gpu-0", ref("gpus", driver, ""), "GPU-new", false},
	} {
		t.Run(name, func(t *testing.T) {
			d := New(Options{Config: new(health.Latest[plugin.Config]), Snapshots: new(health.Latest[health.Snapshot]), Log: zap.NewNop()})
			d.Config.Store(&c.cfg)
			d.Snapshots.Store(namedDevices())
			if c.claims != nil {
				d.claims.Store(c.claims)
			}
			id, admin, ok := d.ClaimDevice(c.namespace, c.name, c.ref)
			if id != c.want || admin != c.admin || ok != (c.want != "") {
				t.Errorf("%q, %v, %v", id, admin, ok)
			}
		})
	}
}

// The names of the published pool count, and no others.
func TestClaimDeviceOfPool(t *testing.T) {
	cfg := plugin.DefaultConfig()
	cfg.API = plugin.APIDRA
	d := New(Options{
		Config: new(health.Latest[plugin.Config]), Snapshots: new(health.Latest[health.Snapshot]), Node: "node-1", Log: zap.NewNop(),
	})
	d.Config.Store(&cfg)
	d.Snapshots.Store(namedDevices())
	d.storeNames(configuredInstance(&cfg), &Pool{ByName: map[string]health.DeviceID{"gpu-0": "GPU-pool"}}, nil)
	for name, want := range map[string]health.DeviceID{"gpu-0": "GPU-pool", "gpu-4": ""} {
		ref := podresources.ClaimRef{Name: "gpus", Driver: plugin.DefaultDRADriver, Pool: "node-1"}
		if id, admin, ok := d.ClaimDevice("ns", name, ref); id != want || admin || ok != (want != "") {
			t.Errorf("%s: %q, %v, %v", name, id, admin, ok)
		}
	}
}

func TestPreparedAt(t *testing.T) {
	now := time.Now()
	d := New(Options{Config: new(health.Latest[plugin.Config]), Log: zap.NewNop()})
	h := podresources.Holder{Namespace: "ns", Claim: podresources.ClaimRef{Name: "gpus"}}
	if at := d.PreparedAt(h); !at.IsZero() {
		t.Errorf("%v before the claims are known", at)
	}
	d.claims.Store(&Claims{ByUID: map[types.UID]Claim{
		"1": {Namespace: "ns", Name: "gpus", Prepared: now.Add(-time.Hour)},
		"2": {Namespace: "ns", Name: "gpus", Prepared: now.Add(-time.Minute)}, // the one before was deleted by force
		"3": {Namespace: "other", Name: "gpus", Prepared: now},
		"4": {Namespace: "ns", Name: "other", Prepared: now},
	}})
	if at := d.PreparedAt(h); !at.Equal(now.Add(-time.Minute)) {
		t.Errorf("%v, want a minute ago", at)
	}
	h.Claim.Name = "none"
	if at := d.PreparedAt(h); !at.IsZero() {
		t.Errorf("%v of a claim that is not prepared", at)
	}
}
