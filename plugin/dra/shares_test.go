package dra

import (
	"reflect"
	"testing"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sharedNode is a driver that serves GPU-0 to GPU-2. GPU-0 and GPU-1 are shared: each offers 80 GiB in units of 10 GiB.
func sharedNode(t *testing.T, change func(*plugin.Config, *PoolInput)) *Driver {
	t.Helper()
	cfg := plugin.DefaultConfig()
	cfg.API = plugin.APIDRA
	cfg.Sharing.Memory.Resource, cfg.Sharing.Memory.Unit, cfg.Sharing.Memory.Reserve = "nvidia.com/gpu-memory", "10Gi", "0"
	cfg.Sharing.Memory.Devices, cfg.Sharing.Memory.Enforcement = []string{"0", "1"}, plugin.EnforceNone
	snap := &health.Snapshot{Seq: 1, At: time.Now()}
	for i, id := range []health.DeviceID{"GPU-0", "GPU-1", "GPU-2"} {
		snap.Devices = append(snap.Devices, health.DeviceState{Device: health.Device{ID: id, Index: i, Minor: i, Memory: 80 << 30}})
	}
	in := PoolInput{Config: &cfg, Snapshot: snap}
	if change != nil {
		change(&cfg, &in)
	}
	d := New(Options{Config: new(health.Latest[plugin.Config]), Snapshots: new(health.Latest[health.Snapshot]), Log: zap.NewNop()})
	d.Config.Store(&cfg)
	d.Snapshots.Store(snap)
	pool := BuildPool(in)
	d.pool.Store(&pool)
	d.setSession(&session{Driver: d, instance: configuredInstance(&cfg)})
	return d
}

func sharesOf(devices ...ClaimDevice) *Claims {
	c := &Claims{ByUID: map[types.UID]Claim{}}
	for i, d := range devices {
		uid := types.UID(rune('a' + i))
		c.ByUID[uid] = Claim{UID: uid, Namespace: "ns", Name: "claim-" + string(uid), Devices: []ClaimDevice{d}}
	}
	return c
}

func TestShares(t *testing.T) {
	const gib = 1 << 30
	share := func(memory uint64) ClaimDevice {
		return ClaimDevice{Name: "gpu-0", Device: "GPU-0", ShareID: "1", Memory: memory}
	}
	for name, c := range map[string]struct {
		change        func(*plugin.Config, *PoolInput)
		claims        *Claims
		free, largest int
	}{
		"free":                 {nil, nil, 8, 8},
		"two shares":           {nil, sharesOf(share(30*gib), share(30*gib)), 2, 2},
		"full":                 {nil, sharesOf(share(40*gib), share(40*gib)), 0, 0},
		"another size of unit": {nil, sharesOf(share(15 * gib)), 6, 6},
		"more than is offered": {nil, sharesOf(share(50*gib), share(40*gib)), 0, 0},
		"whole, from before":   {nil, sharesOf(ClaimDevice{Name: "gpu-0", Device: "GPU-0"}), 0, 0},
		"adminAccess":          {nil, sharesOf(ClaimDevice{Name: "gpu-0", Device: "GPU-0", Admin: true}), 8, 8},
		"of another GPU":       {nil, sharesOf(ClaimDevice{Name: "gpu-2", Device: "GPU-2"}), 8, 8},
		"unhealthy": {
			func(_ *plugin.Config, in *PoolInput) { in.Snapshot.Devices[0].Verdict.State = health.Unhealthy },
			sharesOf(share(30 * gib)), 5, 0,
		},
		"nothing enforces it": {func(c *plugin.Config, _ *PoolInput) {
			c.Sharing.Memory.Enforcement, c.Sharing.Memory.RequireEnforcement = plugin.EnforceDriver, true
		}, nil, 8, 0},
		"no shares in the API": {func(_ *plugin.Config, in *PoolInput) { in.NoShares = true }, nil, -1, 0},
		"the plugin serves":    {func(c *plugin.Config, _ *PoolInput) { c.API = plugin.APIDevicePlugin }, nil, -1, 0},
		"sharing is switched off": {
			func(c *plugin.Config, _ *PoolInput) { c.Sharing.Memory.Resource, c.Sharing.Memory.Devices = "", nil },
			sharesOf(share(30 * gib)), -1, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := sharedNode(t, c.change)
			if c.claims != nil {
				d.claims.Store(c.claims)
			}
			all := d.Shares()
			if c.free < 0 {
				if len(all) > 0 {
					t.Fatalf("%+v", all)
				}
				return
			}
			want := plugin.ShareUnits{
				Device: "GPU-0", Sharing: plugin.SharingMemory, Unit: 10 * gib, Total: 8, Free: c.free, Largest: c.largest, Enforcement: memlimits.None,
			}
			if len(all) != 2 || all[1].Device != "GPU-1" || all[1].Free != 8 {
				t.Fatalf("%+v", all)
			}
			if all[0].Reason = ""; !reflect.DeepEqual(all[0], want) {
				t.Errorf("%+v, want %+v", all[0], want)
			}
		})
	}
	d := sharedNode(t, nil)
	if d.setSession(nil); d.Shares() != nil {
		t.Error("shares of a driver that does not serve")
	}
}

func TestMemory(t *testing.T) {
	d := sharedNode(t, nil)
	holder := func(namespace, claim, share string) podresources.Holder {
		return podresources.Holder{Namespace: namespace, DeviceID: "gpu-0", Claim: podresources.ClaimRef{Name: claim, ShareID: share}}
	}
	if bytes, _ := d.Memory(holder("ns", "claim-a", "1")); bytes != 0 {
		t.Error("before the claims are known:", bytes)
	}
	d.claims.Store(sharesOf(ClaimDevice{Name: "gpu-0", Device: "GPU-0", ShareID: "1", Memory: 3 << 30, MPS: true},
		ClaimDevice{Name: "gpu-0", Device: "GPU-0"},
		ClaimDevice{Name: "gpu-0", Device: "GPU-0", ShareID: "1", Memory: 3 << 30, Admin: true}))
	for h, want := range map[podresources.Holder]uint64{
		holder("ns", "claim-a", "1"): 3 << 30, holder("ns", "claim-a", "2"): 0, holder("other", "claim-a", "1"): 0,
		holder("ns", "claim-b", ""):  0,
		holder("ns", "claim-c", "1"): 0,
	} {
		if bytes, byMPS := d.Memory(h); bytes != want || byMPS != (want > 0) {
			t.Errorf("%+v: %d, %v, want %d", h, bytes, byMPS, want)
		}
	}
}
