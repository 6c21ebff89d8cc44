package plugin

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// The devices are released only after answers of the kubelet that no older allocation can escape.
func TestRelease(t *testing.T) {
	t.Parallel()
	since := time.Unix(1000, 0)
	early, late := since.Add(time.Second), since.Add(3*time.Second)
	by := func(h podresources.Holder) map[health.DeviceID][]podresources.Holder {
		return map[health.DeviceID][]podresources.Holder{"GPU-0": {h}}
	}
	ours := by(podresources.Holder{Namespace: "ml", Pod: "train", Resource: gpu, DeviceID: "GPU-0"})
	foreign := by(podresources.Holder{Namespace: "ml", Pod: "other", Resource: gpu, DeviceID: "nvidia0"})
	claim := by(podresources.Holder{
		Namespace: "ml", Pod: "train", Claim: podresources.ClaimRef{Name: "c", Driver: "gpu.nvidia.com"},
		DeviceID: "gpu-0",
	})
	none := map[health.DeviceID][]podresources.Holder{}
	free := podresources.Holders{At: late, By: none}
	allocatable := func(at time.Time, err string, ids map[string][]string) *podresources.Allocatable {
		return &podresources.Allocatable{At: at, Err: err, IDs: ids}
	}
	empty := allocatable(late, "", map[string][]string{"example.com/nic": {"nic0"}})
	for name, c := range map[string]struct {
		holders     podresources.Holders
		allocatable *podresources.Allocatable
		serves      bool
		serve       bool
		reason      string // a part; empty: released
	}{
		"released":                          {free, empty, false, false, ""},
		"pods with claims do not count":     {podresources.Holders{At: late, By: claim}, empty, false, false, ""},
		"never asked":                       {podresources.Holders{}, empty, false, false, "asked"},
		"never asked while serving":         {podresources.Holders{}, empty, true, true, "asked"},
		"the last answer is old":            {podresources.Holders{At: late, By: none, Err: "no kubelet"}, empty, true, true, "no kubelet"},
		"the kubelet is new":                {podresources.Holders{At: late, By: none, Settling: true}, empty, true, true, "all its pods"},
		"a pod holds ours":                  {podresources.Holders{At: late, By: ours}, empty, true, true, "ml/train"},
		"a pod holds ours after a restart":  {podresources.Holders{At: late, By: ours}, empty, false, true, "ml/train"},
		"a pod holds one of another plugin": {podresources.Holders{At: late, By: foreign}, empty, false, false, "ml/other"},
		"asked too early":                   {podresources.Holders{At: early, By: none}, empty, true, true, "which pods"},
		"no pod holds any":                  {free, empty, true, false, "empty device list"},
		"stopped, pods asked too early":     {podresources.Holders{At: early, By: none}, empty, false, false, "which pods"},
		"stopped, devices not asked":        {free, nil, false, false, "which devices"},
		"stopped, devices asked too early":  {free, allocatable(early, "", nil), false, false, "which devices"},
		"stopped, devices unknown":          {free, allocatable(late, "broken", nil), false, false, "broken"},
		"stopped, the kubelet still lists devices": {
			free, allocatable(late, "", map[string][]string{gpu: {"GPU-0", "GPU-1"}}), false, false,
			"2 devices of " + gpu,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := handover{taken: true, waits: map[bool]waits{true: forPods, false: forDevices}[c.serves], since: since}
			next, got := h.next(&handoverFacts{
				now: late, settle: 2 * time.Second, enabled: true, toDRA: true, polled: true, serves: c.serves,
				offer: offer.Facts{Holders: c.holders}, allocatable: c.allocatable,
				isDevice: func(_, id string) (health.DeviceID, bool) { return health.DeviceID(id), strings.HasPrefix(id, "GPU-") },
			})
			r, released := got.released, c.reason == ""
			if got.serve != c.serve || r.Released != released || (r.Reason == "") != released || !strings.Contains(r.Reason, c.reason) {
				t.Errorf("%+v, want serve %v, reason %q", got, c.serve, c.reason)
			}
			if forPods := strings.HasPrefix(name, "a pod holds"); r.Pods != forPods {
				t.Errorf("waits only for pods: %v, want %v", r.Pods, forPods)
			}
			if next.taken == released || next.since != since {
				t.Errorf("then %+v", next)
			}
		})
	}
}

// While the kubelet does not tell who holds devices, they are released only if no device plugin has served since the boot.
func TestReleaseUnknownHolders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ noPlugin, silent, serves, released bool }{
		{true, true, false, true}, {false, true, false, false}, {true, false, false, false}, {true, true, true, false},
	} {
		_, got := handover{}.next(&handoverFacts{
			enabled: true, toDRA: true, polled: true, serves: c.serves,
			offer: offer.Facts{Holders: podresources.Holders{Err: "denied", Silent: c.silent}, NoPlugin: c.noPlugin},
		})
		if got.released.Released != c.released || got.serve != c.serves {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

// The plugin offers the devices when dynamic resource allocation has released them and the kubelet has said since then who holds them.
func TestClaim(t *testing.T) {
	t.Parallel()
	since := time.Unix(1000, 0)
	known := podresources.Holders{At: since.Add(2 * time.Second), By: map[health.DeviceID][]podresources.Holder{}}
	waiting := handover{waits: forHolders, since: since}
	released := &Handover{Released: true}
	claims := &Handover{Reason: "claim ml/c", Pods: true}
	for name, c := range map[string]struct {
		h       handover
		polled  bool
		serves  bool
		dra     *Handover
		holders podresources.Holders

		taken, serve     bool
		reason           string // of notOffered
		absent, withheld string // of turn
		ask              bool
	}{
		"no poll":               {absent: holdersUnknown},
		"no poll, serves":       {serves: true, serve: true, absent: holdersUnknown},
		"no poll, taken":        {h: handover{taken: true}, taken: true, serve: true},
		"DRA unknown":           {polled: true, reason: draUnknown, absent: draUnknown},
		"DRA has claims":        {polled: true, dra: claims, reason: claims.Reason, absent: claims.Reason},
		"DRA has claims, taken": {h: handover{taken: true}, polled: true, dra: claims, taken: true, serve: true},
		"DRA has claims, serves": {
			polled: true, serves: true, dra: claims, serve: true, reason: claims.Reason, withheld: claims.Reason,
		},
		"just released": {polled: true, dra: released, holders: known, reason: holdersUnknown, absent: holdersUnknown, ask: true},
		"an old answer": {
			h: handover{waits: forHolders, since: since.Add(3 * time.Second)}, polled: true, dra: released, holders: known,
			reason: holdersUnknown, absent: holdersUnknown,
		},
		"an answer": {h: waiting, polled: true, dra: released, holders: known, taken: true, serve: true},
		"no kubelet": {
			h: waiting, polled: true, dra: released, holders: podresources.Holders{Err: "denied"},
			reason: holdersUnknown + ": denied", absent: holdersUnknown + ": denied",
		},
		"silent kubelet": {
			h: waiting, polled: true, dra: released, holders: podresources.Holders{Err: "denied", Silent: true}, serve: true,
		},
		"changed its mind": {
			h: handover{taken: true, waits: forPods, since: since}, polled: true, serves: true, dra: claims, taken: true, serve: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next, s := c.h.next(&handoverFacts{
				now: since.Add(4 * time.Second), settle: time.Second, enabled: true, polled: c.polled, serves: c.serves, dra: c.dra,
				offer: offer.Facts{Now: since.Add(4 * time.Second), Holders: c.holders},
			})
			if next.taken != c.taken || s.serve != c.serve || s.ordersMPS != c.serve || s.notOffered.Reason != c.reason || s.ask != c.ask ||
				s.turn != (turn{c.absent, c.withheld}) || s.released.Released || s.notOffered.Pods != (c.reason == claims.Reason) {
				t.Errorf("%+v, then %+v", s, next)
			}
			if next.taken && next.waits != forNothing {
				t.Errorf("waits for %v", next.waits)
			}
		})
	}
}

// With plugin.api dra the plugin withholds what is free, waits for the pods, releases the devices, and offers them again only when dynamic
// resource allocation has released them.
func TestHandover(t *testing.T) {
	t.Parallel()
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h := newHarness(t, snapshot(2))
		h.version = v
		var dra health.Latest[Handover]
		h.p.SetDRAReleased(&dra)
		k := h.kubelet()
		h.run()
		h.waitPlugin(func(s Status) bool { return s.Err != "" && len(s.Resources) == 0 }) // whether claims are prepared is unknown
		dra.Store(&Handover{Reason: "claim ml/c"})
		h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, "claim ml/c") && len(s.Resources) == 0 })
		dra.Store(&Handover{Released: true})
		h.waitResource(k, gpu, listed(2, 2))
		dra.Store(&Handover{Reason: "must not matter now"}) // the plugin has the devices
		a, err := k.Allocate(h.ctx, gpu, 1)
		if err != nil {
			t.Fatal(err)
		}
		h.waitHolders(heldBy(a.Devices[0], a.Container.Pod))

		setAPI := func(api string) { h.setConfig(func(c *Config) { c.API = api }) }
		setAPI(APIDRA)
		h.waitResource(k, gpu, listed(2, 1))
		setAPI(APIDevicePlugin)
		h.waitResource(k, gpu, listed(2, 2))
		setAPI(APIDRA)
		h.waitResource(k, gpu, listed(2, 1))
		if r := h.p.PluginReleased().Load(); r.Released || h.p.Status().Off {
			t.Errorf("released while a pod holds %v: %+v", a.Devices, r)
		}
		poll(h, "the reason", h.p.PluginReleased().Load, func(r *Handover) bool { return r.Pods && strings.Contains(r.Reason, a.Container.Pod) })
		k.SetFault(kubelettest.Fault{ListError: "no answer"})
		h.waitHolders(func(h podresources.Holders) bool { return h.Err != "" }) // no answer from before the fault is under way
		k.Free(gpu, a.Devices...)
		if _, err := k.Allocate(h.ctx, gpu, 1); err == nil || !strings.Contains(err.Error(), "plugin.api has changed to dra") ||
			!strings.Contains(err.Error(), createAgain) {
			t.Errorf("a waiting pod gets the freed device: %v", err)
		}
		if r := h.p.PluginReleased().Load(); r.Released {
			t.Error("released while the kubelet does not answer")
		}
		k.SetFault(kubelettest.Fault{})
		h.waitPlugin(func(s Status) bool { return s.Off && s.Err == "" && len(s.Resources) == 0 })
		if r := h.p.PluginReleased().Load(); !r.Released {
			t.Errorf("off, but not released: %+v", r)
		}
		if r := k.State().Resources[gpu]; r.Allocatable() > 0 {
			t.Errorf("released, but the kubelet has %+v", r)
		}

		setAPI(APIDevicePlugin) // dynamic resource allocation still has the devices
		h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, "must not matter now") })
		if r := h.p.PluginReleased().Load(); r.Released || k.State().Resources[gpu].Allocatable() > 0 {
			t.Errorf("offered while the other API has the devices: %+v", r)
		}
		dra.Store(&Handover{Released: true})
		h.waitResource(k, gpu, listed(2, 2))
	})
}

// While the plugin does not release the devices, it says why.
func TestReleasedReason(t *testing.T) {
	t.Parallel()
	h := newHarness(t, nil)
	wait := func(reason string) {
		t.Helper()
		poll(h, reason, h.p.PluginReleased().Load, func(r *Handover) bool {
			return r != nil && !r.Released && !r.Pods && strings.Contains(r.Reason, reason)
		})
	}
	h.setConfig(func(c *Config) { c.API = APIDRA })
	h.kubelet()
	h.run()
	wait("no poll of the GPUs has succeeded yet")
	h.setConfig(func(c *Config) { c.Enabled = false })
	wait("plugin.enabled is false")
	h.setConfig(func(c *Config) { c.Enabled, c.API = true, APIDevicePlugin })
	wait("plugin.api is devicePlugin")
	h.setConfig(func(c *Config) { c.API = APIDRA })
	wait("no poll of the GPUs has succeeded yet")
	h.snaps.Store(snapshot(1))
	h.waitPlugin(func(s Status) bool { return s.Off && s.Err == "" })
	if r := h.p.PluginReleased().Load(); !r.Released || r.Reason != "" {
		t.Errorf("%+v", r)
	}
}

// What the plugin allocated just before it stopped is in no answer of the kubelet that was asked earlier.
func TestHandoverAsksAgainAfterStop(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(1))
	h.p.timing.settle = 500 * time.Millisecond
	h.register()
	h.setConfig(func(c *Config) { c.API = APIDRA })
	h.waitPlugin(func(s Status) bool { return s.Off && s.Err == "" })
	stopped, released := h.logs.FilterMessage("resource no longer served").All(), h.logs.FilterMessage(msgReleased).All()
	if len(stopped) != 1 || len(released) != 1 {
		t.Fatalf("stopped %v, released %v", stopped, released)
	}
	if d := released[0].Time.Sub(stopped[0].Time); d < h.p.timing.settle {
		t.Errorf("released %v after the stop, want at least %v", d, h.p.timing.settle)
	}
}

// While dynamic resource allocation has the devices, it orders the MPS daemons of its claims, whatever the configuration says.
func TestHandoverMPS(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Config){
		"devicePlugin": func(*Config) {},
		"disabled":     func(c *Config) { c.Enabled = false },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, snapshot(2))
			h.setConfig(change)
			dra := &health.Latest[Handover]{}
			dra.Store(&Handover{Reason: "claim ml/c"})
			h.p.SetDRAReleased(dra)
			ordered := &mps.Desired{Daemons: []mps.Spec{{Device: "GPU-0"}}}
			h.p.MPS().Store(ordered)
			h.kubelet()
			h.run()
			h.waitHolders(func(h podresources.Holders) bool { return h.Err == "" && !h.Pending })
			h.waitPlugin(func(s Status) bool { return s.Off == (name == "disabled") && s.Err != "starting" })
			h.snaps.Store(snapshot(2))
			dra.Store(&Handover{Reason: "claim ml/d"})
			h.waitPlugin(func(s Status) bool { return s.Off || strings.Contains(s.Err, "ml/d") })
			if d := h.p.MPS().Load(); d != ordered {
				t.Errorf("the plugin stopped the daemons of claims: %+v", d)
			}
			dra.Store(&Handover{Released: true})
			for _, changed := h.p.MPS().Watch(); h.p.MPS().Load() == ordered; _, changed = h.p.MPS().Watch() {
				select {
				case <-changed:
				case <-h.ctx.Done():
					t.Fatal("the daemons of claims still run")
				}
			}
		})
	}
}

func TestDRAConfig(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Config)
		key    string // of the error; empty: none
		notes  int
	}{
		"defaults": {func(*Config) {}, "", 0},
		"memory":   {func(c *Config) { c.Sharing.Memory.Resource = "nvidia.com/gpu-memory" }, "", 0},
		"replicas": {sharedBy(2), "sharing.timeSlicing.resources", 0},
		"MPS": {
			func(c *Config) { c.Sharing.MPS.Resources = []MPSResource{{Name: gpu, Replicas: 2}} }, "sharing.mps.resources",
			0,
		},
		"keys without effect":  {func(c *Config) { c.MIGStrategy, c.DeviceID, c.PassDeviceSpecs = MIGMixed, DeviceIDIndex, true }, "", 3},
		"a bad name of an API": {func(c *Config) { c.API = "DRA" }, "api", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := configured(func(c *Config) { c.API = APIDRA }, c.change)
			err := cfg.Validate()
			if (err == nil) != (c.key == "") || err != nil && !strings.HasPrefix(err.Error(), c.key+":") {
				t.Errorf("%v, want an error of %q", err, c.key)
			}
			if notes := cfg.Notes(); err == nil && len(notes) != c.notes {
				t.Errorf("%q, want %d", notes, c.notes)
			}
			if cfg.API = APIDevicePlugin; cfg.Validate() != nil || len(cfg.Notes()) > 0 {
				t.Errorf("with devicePlugin: %v, %q", cfg.Validate(), cfg.Notes())
			}
		})
	}
}
