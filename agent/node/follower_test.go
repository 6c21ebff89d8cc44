package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func newContext(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithCancel(t.Context())
}

// harness is a follower with its inputs.
type harness struct {
	*Follower
	t         *testing.T
	config    health.Latest[Config]
	plugin    health.Latest[plugin.Config]
	health    health.Latest[judge.Config]
	snapshots *health.Latest[health.Snapshot] // of one process
	read      func(context.Context, []health.Device) map[health.DeviceID]*health.Properties
	dir       string
	node      string // of the next restart
	withheld  atomic.Bool
	cleaned   health.Latest[string]
}

func newFollowerHarness(t *testing.T, output string) *harness {
	t.Helper()
	h := &harness{t: t, dir: t.TempDir()}
	h.setConfig(func(c *Config) { c.Labels.Output, c.Labels.File = output, filepath.Join(h.dir, "labels") })
	config := plugin.DefaultConfig()
	h.plugin.Store(&config)
	h.health.Store(new(judge.Config))
	h.restart(nil, true)
	return h
}

// Run runs the follower with what it needs of the host.
func (h *harness) Run(ctx context.Context) error {
	go h.examineHost(ctx)
	return h.Follower.Run(ctx)
}

func (h *harness) setConfig(change func(*Config)) {
	c := DefaultConfig()
	if last := h.config.Load(); last != nil {
		c = *last
	}
	change(&c)
	h.config.Store(&c)
}

// restart replaces the follower by one of another process, with the saved section.
func (h *harness) restart(section *[]byte, sameBoot bool) {
	h.t.Helper()
	h.snapshots = new(health.Latest[health.Snapshot])
	h.Follower = NewFollower(Options{
		Config: &h.config, Plugin: &h.plugin, Health: &h.health, Snapshots: h.snapshots, Node: h.node,
		Serving:   plugin.New(&h.plugin, h.snapshots, nop).Serving,
		OffersAll: func() bool { return !h.withheld.Load() }, SysFS: func() string { return "" },
		Properties: func(ctx context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			if h.read == nil {
				all := map[health.DeviceID]*health.Properties{}
				for _, d := range devices {
					all[d.ID] = &health.Properties{}
				}
				return all
			}
			return h.read(ctx, devices)
		},
		Cleaned: &h.cleaned, Log: nop,
	})
	if section != nil {
		if err := h.Restore(*section, sameBoot); err != nil {
			h.t.Fatal(err)
		}
	}
}

// poll stores a snapshot and waits until the follower has seen it.
func (h *harness) poll(devices []health.DeviceState) {
	h.snapshots.Store(snapshotOf(devices))
	synctest.Wait()
}

func (h *harness) wantDesired(want map[string]string, of func(*kube.NodeState) map[string]string) {
	h.t.Helper()
	s := h.Desired().Load()
	if s == nil {
		h.t.Fatal("nothing desired")
	}
	if got := of(s); (got == nil) != (want == nil) || !maps.Equal(got, want) {
		h.t.Errorf("got %v\n%s\nwant %v\n%s", got != nil, text(got), want != nil, text(want))
	}
}

func nodeLabels(s *kube.NodeState) map[string]string    { return s.Labels }
func featureLabels(s *kube.NodeState) map[string]string { return s.Feature }

var noLabels = map[string]string{}

// The labels stay where they are until they are known, over a restart too, and change with the health only.
func TestFollowerKeepsLabels(t *testing.T) {
	for _, sameBoot := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := newFollowerHarness(t, LabelsAPI)
			stop := healthtest.Run(t, h.Run)
			synctest.Wait()
			h.wantDesired(nil, nodeLabels)
			h.poll(gpus(8, h100))
			labels := h.Desired().Load().Labels
			if labels["nvidia.com/gpu.count"] != "8" || labels["gpu-node-agent/gpus-healthy"] != "8" {
				t.Fatal(text(labels))
			}
			first := h.Desired().Load()
			made, saved := 0, h.Saved().Load()
			h.Serving = func(s *health.Snapshot) plugin.Serving { made++; return serving()(s) }
			for i := range 10 {
				devices := gpus(8, h100)
				devices[3].Sample.Values[health.FieldGPUTemp] = float64(i)
				h.poll(devices)
			}
			if h.Desired().Load() != first || h.Saved().Load() != saved || made != 0 {
				t.Errorf("stored or saved again, or made again %d times, although nothing has changed", made)
			}
			down := snapshotOf(gpus(8, h100))
			down.Source.Status, down.Source.Versions = health.SourceDown, health.Versions{}
			h.snapshots.Store(down)
			synctest.Wait()
			h.wantDesired(labels, nodeLabels)
			stop()
			h.wantDesired(labels, nodeLabels)

			h.restart(h.Saved().Load(), sameBoot)
			stop = healthtest.Run(t, h.Run)
			synctest.Wait()
			h.wantDesired(labels, nodeLabels)
			h.snapshots.Store(&health.Snapshot{Source: health.Source{Kind: "dcgm", Status: health.SourceDown, Err: "refused"}})
			healthtest.Advance(time.Hour)
			h.wantDesired(labels, nodeLabels)
			if l, err := h.Labels(t.Context()); err != nil || !maps.Equal(l.Labels, labels) || len(l.Warnings) != 1 {
				t.Errorf("%+v, %v", l, err)
			}
			stop()

			h.restart(h.Saved().Load(), true) // and again
			stop = healthtest.Run(t, h.Run)
			h.poll(nil)
			if sameBoot {
				h.wantDesired(labels, nodeLabels)
			} else {
				h.wantDesired(noLabels, nodeLabels)
			}
			stop()
		})
	}
}

// Labels are removed from where they are not configured any more, until they are, also by a later process.
func TestFollowerRemovesLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(1, l4))
		h.wantDesired(nil, nodeLabels)
		h.wantDesired(nil, featureLabels)
		h.setConfig(func(c *Config) { c.Labels.Output = LabelsAPI })
		synctest.Wait()
		labels := h.Desired().Load().Labels
		h.setConfig(func(c *Config) { c.Labels.Output = LabelsNodeFeature })
		synctest.Wait()
		h.wantDesired(noLabels, nodeLabels)
		h.wantDesired(labels, featureLabels)
		h.Written().Store(h.Desired().Load())
		synctest.Wait()
		h.wantDesired(nil, nodeLabels)
		stop()

		h.setConfig(func(c *Config) { c.Labels.Output = LabelsOff })
		h.restart(h.Saved().Load(), true)
		stop = healthtest.Run(t, h.Run)
		synctest.Wait()
		h.wantDesired(nil, nodeLabels)
		h.wantDesired(noLabels, featureLabels)
		h.Written().Store(h.Desired().Load())
		synctest.Wait()
		h.wantDesired(nil, featureLabels)
		stop()

		h.restart(h.Saved().Load(), true)
		stop = healthtest.Run(t, h.Run)
		synctest.Wait()
		h.wantDesired(nil, featureLabels) // forgotten
		stop()
	})
}

// The startup taint stays until every device is offered.
func TestFollowerStartupTaint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		h.setConfig(func(c *Config) { c.StartupTaint = "a/not-ready:NoSchedule" })
		h.withheld.Store(true)
		defer healthtest.Run(t, h.Run)()
		for _, offersAll := range []bool{false, true, false} {
			h.withheld.Store(!offersAll)
			h.poll(gpus(1, l4))
			if s := h.Desired().Load(); s.OffersAll != offersAll || s.StartupTaint == nil || s.StartupTaint.Key != "a/not-ready" || s.Taints != nil {
				t.Errorf("every device offered: %v: %+v", offersAll, s)
			}
		}
	})
}

// Taints that are no longer configured are removed, also by a later process, until that has succeeded.
func TestFollowerRemovesTaints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		h.setConfig(func(c *Config) { c.Taints = []TaintConfig{{When: WhenAllUnhealthy, Key: "a/b", Effect: "NoSchedule"}} })
		stop := healthtest.Run(t, h.Run)
		devices := gpus(1, l4)
		devices[0].Verdict = health.Verdict{
			State:    health.Unhealthy,
			Findings: []health.Finding{{Cause: health.CauseLost, State: health.Unhealthy}},
		}
		h.poll(devices)
		if s := h.Desired().Load(); len(s.Taints) != 1 {
			t.Errorf("%+v", s)
		}
		stop()

		h.setConfig(func(c *Config) { c.Taints = nil })
		for i, left := range []bool{true, true, false} {
			h.restart(h.Saved().Load(), true)
			stop = healthtest.Run(t, h.Run)
			h.poll(devices)
			if s := h.Desired().Load(); (s.Taints != nil) != left || len(s.Taints)+len(s.Undecided) > 0 {
				t.Errorf("left %v: %+v", left, s)
			}
			if i == 1 {
				h.Written().Store(h.Desired().Load())
				synctest.Wait()
			}
			stop()
		}
	})
}

// A condition that is no longer reported is removed, also by a later process, until the agent or somebody else has removed it.
func TestFollowerRemovesCondition(t *testing.T) {
	for _, byOthers := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newFollowerHarness(t, LabelsOff)
			stop := healthtest.Run(t, h.Run)
			report := func(on bool) {
				h.health.Store(&judge.Config{Kubernetes: judge.KubernetesConfig{Enabled: on}})
				synctest.Wait()
			}
			removes := func(want bool) {
				t.Helper()
				if synctest.Wait(); h.Desired().Load().RemoveCondition != want {
					t.Errorf("%+v, want a removal: %v", h.Desired().Load(), want)
				}
			}
			removes(false) // was never reported
			report(true)
			removes(false)
			report(false)
			removes(true)
			report(true)
			removes(false)
			stop()
			h.health.Store(new(judge.Config))
			h.restart(h.Saved().Load(), true)
			stop = healthtest.Run(t, h.Run)
			removes(true)
			if byOthers {
				h.cleaned.Store(new("1"))
			} else {
				h.Written().Store(h.Desired().Load())
			}
			removes(false)
			stop()
			h.restart(h.Saved().Load(), true)
			stop = healthtest.Run(t, h.Run)
			removes(false)
			stop()
		})
	}
}

// A node that had no taint has none to remove, so that an agent without rights warns of nothing.
func TestFollowerRemovesNoTaintsOfHealthyNode(t *testing.T) {
	sick := func() []health.DeviceState {
		devices := gpus(1, l4)
		devices[0].Verdict = health.Verdict{
			State:    health.Unhealthy,
			Findings: []health.Finding{{Cause: health.CauseLost, State: health.Unhealthy}},
		}
		return devices
	}
	for name, c := range map[string]struct {
		polls   []func() []health.DeviceState // while taints are configured
		written bool                          // what is desired then
		removes bool                          // once they are not
	}{
		"never unhealthy": {[]func() []health.DeviceState{func() []health.DeviceState { return gpus(1, l4) }}, true, false},
		"never measured":  {nil, true, true},
		// from an earlier process
		"not written yet":         {[]func() []health.DeviceState{func() []health.DeviceState { return gpus(1, l4) }}, false, true},
		"healthy again":           {[]func() []health.DeviceState{sick, func() []health.DeviceState { return gpus(1, l4) }}, true, false},
		"healthy, not written":    {[]func() []health.DeviceState{sick, func() []health.DeviceState { return gpus(1, l4) }}, false, true},
		"unhealthy, and unhealed": {[]func() []health.DeviceState{sick}, true, true},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %v", name, restart), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := newFollowerHarness(t, LabelsOff)
					h.setConfig(func(c *Config) { c.Taints = []TaintConfig{{When: WhenAllUnhealthy, Key: "a/b", Effect: "NoSchedule"}} })
					stop := healthtest.Run(t, h.Run)
					synctest.Wait()
					for _, devices := range c.polls {
						h.poll(devices())
					}
					if c.written {
						h.Written().Store(h.Desired().Load())
						synctest.Wait()
					}
					if restart {
						stop()
					}
					h.setConfig(func(c *Config) { c.Taints = nil })
					if restart {
						h.restart(h.Saved().Load(), true)
						stop = healthtest.Run(t, h.Run)
					}
					synctest.Wait()
					if s := h.Desired().Load(); (s.Taints != nil) != c.removes || len(s.Taints)+len(s.Undecided) > 0 {
						t.Errorf("%+v, want a removal: %v", s, c.removes)
					}
					stop()
				})
			})
		}
	}
}

func TestFollowerForgetsWhatWasCleaned(t *testing.T) {
	taints := []TaintConfig{{When: WhenAnyUnhealthy, Key: "a/b", Effect: "NoSchedule"}}
	for name, c := range map[string]struct {
		change  func(h *harness)
		labels  bool // are to be removed
		taints  bool
		restart bool
	}{
		"no annotation":           {func(*harness) {}, true, true, false},
		"of this pod":             {func(h *harness) { h.cleaned.Store(new("2")) }, false, false, false},
		"of this pod, restarted":  {func(h *harness) { h.cleaned.Store(new("2")) }, false, false, true},
		"from before the removal": {func(h *harness) { h.cleaned.Store(new("1")) }, true, true, false},
		"the same after restart":  {func(h *harness) { h.cleaned.Store(new("1")) }, true, true, true},
		"a new pod without one":   {func(h *harness) { h.cleaned.Store(new("")) }, true, true, true},
		"taints are configured": {func(h *harness) {
			h.setConfig(func(c *Config) { c.Taints = taints })
			h.cleaned.Store(new("2"))
			synctest.Wait()
			h.setConfig(func(c *Config) { c.Taints = nil })
		}, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newFollowerHarness(t, LabelsAPI)
				h.setConfig(func(c *Config) { c.Taints = taints })
				h.cleaned.Store(new("1")) // while both are configured
				stop := healthtest.Run(t, h.Run)
				h.poll(gpus(2, h100))
				h.setConfig(func(c *Config) { c.Labels.Output, c.Taints = LabelsOff, nil })
				synctest.Wait()
				if s := h.Desired().Load(); s.Labels == nil || s.Taints == nil {
					t.Fatalf("nothing is to be removed: %+v", s)
				}
				if c.restart {
					stop()
					h.cleaned.Store(nil)
					h.restart(h.Saved().Load(), true)
					stop = healthtest.Run(t, h.Run)
					h.poll(gpus(2, h100))
				}
				c.change(h)
				synctest.Wait()
				if s := h.Desired().Load(); (s.Labels != nil) != c.labels || (s.Taints != nil) != c.taints || len(s.Labels)+len(s.Taints) > 0 {
					t.Errorf("%+v, want labels to be removed: %v, taints: %v", s, c.labels, c.taints)
				}
				stop()
			})
		})
	}
}

func TestFollowerRemovesLabelsOnExit(t *testing.T) {
	for _, output := range []string{LabelsFile, LabelsAPI, LabelsNodeFeature} {
		for _, remove := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				h := newFollowerHarness(t, output)
				h.setConfig(func(c *Config) { c.Labels.RemoveOnExit = remove })
				stop := healthtest.Run(t, h.Run)
				h.poll(gpus(1, l4))
				healthtest.Advance(time.Second)
				began := time.Now()
				if stop(); time.Since(began) != 0 {
					t.Errorf("%s: ended after %v", output, time.Since(began))
				}
				var left bool
				switch s := h.Desired().Load(); output {
				case LabelsFile:
					_, err := os.Stat(h.config.Load().Labels.File)
					left = err == nil
				case LabelsAPI:
					left = s.Labels == nil || len(s.Labels) > 0
				case LabelsNodeFeature:
					left = s.Feature == nil || len(s.Feature) > 0
				}
				if left == remove {
					t.Errorf("%s: left %v, removeOnExit %v", output, left, remove)
				}
			})
		}
	}
}

// Labels stay where they were while the place that is configured now cannot get them.
func TestFollowerKeepsLabelsUntilKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsFile)
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(1, l4))
		stop()
		old := h.config.Load().Labels.File
		section := []byte(`{"labels": true, "files": ["` + old + `"]}`) // without an inventory
		h.setConfig(func(c *Config) { c.Labels.File = filepath.Join(h.dir, "other") })
		h.restart(&section, true)
		defer healthtest.Run(t, h.Run)()
		healthtest.Advance(time.Minute)
		if _, err := os.Stat(old); err != nil {
			t.Error(err)
		}
		h.wantDesired(nil, nodeLabels)
		h.poll(gpus(1, l4))
		if _, err := os.Stat(old); err == nil {
			t.Error("the old file is left")
		}
		if _, err := os.Stat(h.config.Load().Labels.File); err != nil {
			t.Error(err)
		}
		h.wantDesired(noLabels, nodeLabels)
	})
}

func TestFollowerMovesFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsFile)
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(1, l4))
		files := func() (names []string) {
			entries, _ := os.ReadDir(h.dir)
			for _, e := range entries {
				names = append(names, e.Name())
			}
			return names
		}
		want := func(name string) {
			t.Helper()
			synctest.Wait()
			if got := files(); len(got) != 1 && name != "" || len(got) == 1 && got[0] != name {
				t.Errorf("files %q, want %q", got, name)
			}
		}
		want("labels")
		h.setConfig(func(c *Config) { c.Labels.File = filepath.Join(h.dir, "other") })
		want("other")
		stop()

		h.setConfig(func(c *Config) { c.Labels.File = filepath.Join(h.dir, "third") })
		h.restart(h.Saved().Load(), true)
		stop = healthtest.Run(t, h.Run)
		want("third") // with the saved labels
		stop()

		h.setConfig(func(c *Config) { c.Labels.Output = LabelsOff })
		h.restart(h.Saved().Load(), false)
		stop = healthtest.Run(t, h.Run)
		want("")
		stop()
		if len(h.memory.Files) > 0 {
			t.Errorf("not forgotten: %q", h.memory.Files)
		}
	})
}

// The first labels wait for what NVML has, but not for a driver that hangs.
func TestFollowerWhileNVMLHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		release := make(chan struct{})
		h.read = func(ctx context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			select {
			case <-release:
			case <-ctx.Done():
			}
			all := map[health.DeviceID]*health.Properties{}
			for _, d := range devices {
				all[d.ID] = &health.Properties{Clique: "a.1"}
			}
			return all
		}
		stop := healthtest.Run(t, h.Run)
		healthtest.Advance(2 * hostWait) // before the first poll
		h.poll(gpus(1, l4))
		h.wantDesired(nil, nodeLabels)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if l, err := h.Labels(ctx); err != nil || l.Labels["nvidia.com/gpu.count"] != "1" {
			t.Errorf("%+v, %v", l, err)
		}
		healthtest.Advance(hostWait)
		if l := h.Desired().Load().Labels; l["nvidia.com/gpu.count"] != "1" || l["nvidia.com/gpu.clique"] != "" {
			t.Error(text(l))
		}
		close(release)
		synctest.Wait()
		if l := h.Desired().Load().Labels; l["nvidia.com/gpu.clique"] != "a.1" {
			t.Error(text(l))
		}
		stop()
	})
}

// NVML is read only if somebody needs it, and what it does not have yet is read again.
func TestFollowerReadsNVML(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		var reads atomic.Int32
		var properties atomic.Pointer[health.Properties]
		properties.Store(&health.Properties{FabricPending: true})
		h.read = func(context.Context, []health.Device) map[health.DeviceID]*health.Properties {
			reads.Add(1)
			return map[health.DeviceID]*health.Properties{"GPU-0": properties.Load()}
		}
		defer healthtest.Run(t, h.Run)()
		h.poll(gpus(1, l4))
		healthtest.Advance(time.Hour)
		if reads.Load() != 0 {
			t.Fatalf("%d reads", reads.Load())
		}
		_, err := h.Labels(t.Context())
		if synctest.Wait(); err != nil || reads.Load() != 1 {
			t.Fatalf("%d reads, %v", reads.Load(), err)
		}
		properties.Store(&health.Properties{Clique: "a.1"})
		healthtest.Advance(examineAgain)
		l, _ := h.Labels(t.Context())
		if synctest.Wait(); l.Labels["nvidia.com/gpu.clique"] != "a.1" || reads.Load() != 2 {
			t.Errorf("%d reads: %s", reads.Load(), text(l.Labels))
		}
		for _, clique := range []string{"b.1", "", "b.2"} { // a new partition
			for _, pending := range []bool{true, false} {
				want := l.Labels["nvidia.com/gpu.clique"] // stays while pending
				if properties.Store(&health.Properties{FabricPending: true}); !pending {
					properties.Store(&health.Properties{Clique: clique})
					want = clique
				}
				healthtest.Advance(maxExamineAgain)
				if l, _ = h.Labels(t.Context()); l.Labels["nvidia.com/gpu.clique"] != want {
					t.Errorf("clique %q, pending %v: %s", clique, pending, text(l.Labels))
				}
			}
		}
		before := reads.Load()
		healthtest.Advance(time.Hour)
		if n := reads.Load() - before; n < 5 || n > 12 {
			t.Errorf("%d reads in an hour", n)
		}
	})
}

// NVML is read for dynamic resource allocation. Known tells which devices it was asked for. It is asked at once about a new device, and
// again for what it did not have. Removed devices are forgotten.
func TestFollowerReadsNVMLForDRA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		var asked atomic.Pointer[[]health.DeviceID] // newest question
		h.read = func(_ context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			var ids []health.DeviceID
			for _, d := range devices {
				ids = append(ids, d.ID)
			}
			asked.Store(&ids)
			found := map[health.DeviceID]*health.Properties{}
			if slices.Contains(ids, "GPU-1") {
				found["GPU-1"] = &health.Properties{Brand: "Nvidia"}
			}
			return found
		}
		want := func(question []health.DeviceID, known health.KnownProperties) {
			t.Helper()
			synctest.Wait()
			if ids := asked.Swap(nil); (ids == nil) != (question == nil) || ids != nil && !slices.Equal(*ids, question) {
				t.Errorf("asked for %v, want %v", ids, question)
			}
			if got := *h.Known().Load(); !reflect.DeepEqual(got, known) {
				t.Errorf("known %v, want %v", got, known)
			}
		}
		defer healthtest.Run(t, h.Run)()
		h.poll(gpus(2, l4))
		want(nil, health.KnownProperties{})
		config := plugin.DefaultConfig()
		config.API = plugin.APIDRA
		h.plugin.Store(&config)
		known := health.KnownProperties{"GPU-0": nil, "GPU-1": {Brand: "Nvidia"}}
		want([]health.DeviceID{"GPU-0", "GPU-1"}, known)
		h.poll(gpus(2, l4))
		want(nil, known)
		healthtest.Advance(examineAgain)
		want([]health.DeviceID{"GPU-0"}, known)
		h.poll(gpus(3, l4))
		want([]health.DeviceID{"GPU-0", "GPU-2"}, health.KnownProperties{"GPU-0": nil, "GPU-1": {Brand: "Nvidia"}, "GPU-2": nil})
		h.poll(gpus(1, l4))
		want([]health.DeviceID{"GPU-0"}, health.KnownProperties{"GPU-0": nil})

		// While the device plugin serves, nobody gets a device by its name.
		back := config
		back.API = plugin.APIDevicePlugin
		h.plugin.Store(&back)
		want(nil, health.KnownProperties{"GPU-0": nil})
		release := make(chan struct{})
		answer := h.read
		h.read = func(ctx context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			<-release
			return answer(ctx, devices)
		}
		h.plugin.Store(&config)
		want(nil, health.KnownProperties{}) // that it did not answer long ago does not count
		close(release)
		want([]health.DeviceID{"GPU-0"}, health.KnownProperties{"GPU-0": nil})
	})
}

// A reading that the end interrupts is no answer: a MIG device would get a name without its properties, which stays.
func TestFollowerEndsWhileNVMLHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		h.read = func(ctx context.Context, _ []health.Device) map[health.DeviceID]*health.Properties {
			<-ctx.Done()
			return nil
		}
		stop := healthtest.Run(t, h.Run)
		h.poll(gpu(0, a100, "1g.5gb"))
		stop()
		synctest.Wait()
		if known := *h.Known().Load(); len(known) > 0 {
			t.Errorf("known %v", known)
		}
	})
}

// What does not change is read once.
func TestFollowerReadsNVMLOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		var reads atomic.Int32
		h.read = func(_ context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			if reads.Add(1); len(devices) != 1 || devices[0].ID != "GPU-0" {
				t.Errorf("reads %+v: the source has the properties of the MIG device", devices)
			}
			return map[health.DeviceID]*health.Properties{"GPU-0": {}}
		}
		defer healthtest.Run(t, h.Run)()
		h.poll(gpu(0, a100, "1g.5gb"))
		healthtest.Advance(time.Hour)
		if reads.Load() != 1 {
			t.Errorf("%d reads", reads.Load())
		}
	})
}

func TestLabelsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		defer healthtest.Run(t, h.Run)()
		for _, s := range []*health.Snapshot{nil, {Source: health.Source{Status: health.SourceDown, Err: "refused"}}} {
			h.snapshots.Store(s)
			synctest.Wait()
			if l, err := h.Labels(t.Context()); err == nil {
				t.Errorf("%+v", l)
			}
		}
	})
}

// The labels of the machine from which an image was made do not apply to a machine with the image.
func TestFollowerInClonedMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(8, h100))
		stop()
		section := h.Saved().Load()
		for _, n := range []string{"", "clone"} {
			h.node = n
			h.restart(section, false)
			stop = healthtest.Run(t, h.Run)
			synctest.Wait()
			if known := h.Desired().Load().Labels != nil; known != (n == "") {
				t.Errorf("node %q: labels before the first poll: %v", n, known)
			}
			stop()
		}
	})
}

func TestRestoreDamagedSection(t *testing.T) {
	for _, section := range []string{"", "[]", `{"files": 1}`, `{"inventory": []}`} {
		f := NewFollower(Options{Log: nop})
		if err := f.Restore([]byte(section), true); err == nil {
			t.Errorf("%q: no error", section)
		}
	}
}

// sectionOfEarlierProcess returns the section of a process that wrote to each place, and its file with labels, which is not removed yet.
func sectionOfEarlierProcess(t *testing.T) (text *[]byte, file string) {
	t.Helper()
	h := newFollowerHarness(t, LabelsFile)
	file = h.config.Load().Labels.File
	h.health.Store(&judge.Config{Kubernetes: judge.KubernetesConfig{Enabled: true}})
	stop := healthtest.Run(t, h.Run)
	h.poll(gpus(8, h100))
	h.setConfig(func(c *Config) {
		c.Labels.Output, c.Taints = LabelsNodeFeature, []TaintConfig{{When: WhenAllUnhealthy, Key: "a/b", Effect: "NoSchedule"}}
	})
	devices := gpus(8, h100)
	for i := range devices {
		devices[i].Verdict = health.Verdict{
			State:    health.Unhealthy,
			Findings: []health.Finding{{Cause: health.CauseLost, State: health.Unhealthy}},
		}
	}
	h.poll(devices)
	h.setConfig(func(c *Config) { c.Labels.Output = LabelsAPI })
	stop()
	var s map[string]any
	if err := json.Unmarshal(*h.Saved().Load(), &s); err != nil {
		t.Fatal(err)
	}
	s["files"] = []string{file} // not removed yet
	saved, err := json.Marshal(s)
	if err = errors.Join(err, os.WriteFile(file, []byte(fileMark), 0o600)); err != nil {
		t.Fatal(err)
	}
	return &saved, file
}

// checkRemovals checks that the taints, the condition and the file of an earlier process are removed. Its feature is removed too, unless it
// may have the only labels of the node.
func checkRemovals(t *testing.T, s *kube.NodeState, file string, labelsKnown bool) {
	t.Helper()
	if s.Taints == nil || len(s.Taints) > 0 || !s.RemoveCondition || (s.Feature != nil) != labelsKnown || len(s.Feature) > 0 {
		t.Errorf("want a removal of taints, condition and feature: %+v", s)
	}
	if _, err := os.Stat(file); (err != nil) != labelsKnown {
		t.Errorf("the file of the earlier process: %v", err)
	}
}

// checkRemovedOnce checks that a section is continued once: what was removed is not removed again.
func checkRemovedOnce(t *testing.T, h *harness, removed *kube.NodeState) {
	t.Helper()
	h.Written().Store(removed)
	synctest.Wait()
	if s := h.Desired().Load(); s.Taints != nil || s.RemoveCondition || s.Feature != nil {
		t.Errorf("removed once more: %+v", s)
	}
}

// The section of an earlier process that could be read only late is continued: its labels stay until the first poll, and what that process
// may have written is removed where it is not configured.
func TestFollowerRestoresLate(t *testing.T) {
	for name, c := range map[string]struct {
		polled   bool // before the section is read
		sameBoot bool
		node     string
		count    string // of GPUs in the labels, "" while they are unknown
	}{
		"before the first poll":             {sameBoot: true, count: "8"},
		"before the first poll of a reboot": {count: "8"},
		"after a poll":                      {polled: true, sameBoot: true, count: "1"},
		"of another node":                   {sameBoot: true, node: "clone"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				saved, file := sectionOfEarlierProcess(t)
				h := newFollowerHarness(t, LabelsAPI)
				h.node = c.node
				h.restart(nil, true)
				defer healthtest.Run(t, h.Run)()
				if synctest.Wait(); c.polled {
					h.poll(gpus(1, l4))
				}
				if err := h.RestoreLate([]byte("["), true); err == nil {
					t.Error("no error of a damaged section")
				}
				if err := h.RestoreLate(*saved, c.sameBoot); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				s := h.Desired().Load()
				if s.Labels["nvidia.com/gpu.count"] != c.count || (s.Labels == nil) != (c.count == "") {
					t.Errorf("labels %s", text(s.Labels))
				}
				checkRemovals(t, s, file, c.count != "")
				if c.polled {
					checkRemovedOnce(t, h, s)
				}
				h.poll(nil)
				if s := h.Desired().Load(); (s.Labels["nvidia.com/gpu.count"] == "8") != (name == "before the first poll") {
					t.Errorf("no GPU is listed: %s", text(s.Labels))
				}
			})
		})
	}
}

// What an earlier process may have written is added to what this one may have.
func TestFollowerAddsEarlierPlaces(t *testing.T) {
	for _, field := range []string{"labels", "feature", "taints", "condition"} {
		synctest.Test(t, func(t *testing.T) {
			h := newFollowerHarness(t, LabelsOff)
			defer healthtest.Run(t, h.Run)()
			h.poll(gpus(1, l4))
			if err := h.RestoreLate([]byte(`{"`+field+`": true}`), true); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			s := h.Desired().Load()
			for name, removes := range map[string]bool{
				"labels": s.Labels != nil, "feature": s.Feature != nil, "taints": s.Taints != nil,
				"condition": s.RemoveCondition,
			} {
				if removes != (name == field) {
					t.Errorf("%s: removes %s: %v", field, name, removes)
				}
			}
		})
	}
	synctest.Test(t, func(t *testing.T) { // that the earlier process has followed an annotation is known too
		h := newFollowerHarness(t, LabelsOff)
		defer healthtest.Run(t, h.Run)()
		if err := h.RestoreLate([]byte(`{"labels": true, "cleaned": "1"}`), true); err != nil {
			t.Fatal(err)
		}
		for _, at := range []string{"1", "2"} {
			synctest.Wait()
			h.cleaned.Store(&at)
			synctest.Wait()
			if s := h.Desired().Load(); (s.Labels != nil) != (at == "1") {
				t.Errorf("after %s: %+v", at, s)
			}
		}
	})
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsFile)
		defer healthtest.Run(t, h.Run)()
		h.poll(gpus(1, l4))
		file, old := h.config.Load().Labels.File, filepath.Join(h.dir, "old")
		if err := os.WriteFile(old, []byte(fileMark), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := h.RestoreLate([]byte(`{"files": ["`+file+`", "`+old+`"]}`), true); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, err := os.Stat(old); err == nil {
			t.Error("the old file is left")
		}
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	})
}

// A change of the plugin's configuration changes the labels at once.
func TestFollowerFollowsPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		options := h.Options
		options.Cleaned = nil // as without an annotation
		h.Follower = NewFollower(options)
		defer healthtest.Run(t, h.Run)()
		h.poll(gpus(2, h100))
		config := plugin.DefaultConfig()
		timeSlicing("", 4)(&config)
		h.plugin.Store(&config)
		synctest.Wait()
		if l := h.Desired().Load().Labels; l["nvidia.com/gpu.replicas"] != "4" {
			t.Error(text(l))
		}
	})
}

// Nothing is desired, and no file written, before there is a configuration.
func TestFollowerWithoutConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsFile)
		config := h.config.Load()
		h.config.Store(nil)
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(1, l4))
		if s := h.Desired().Load(); s != nil || h.Saved().Load() != nil {
			t.Errorf("%+v", s)
		}
		h.config.Store(config)
		synctest.Wait()
		if _, err := os.Stat(config.Labels.File); err != nil || h.Desired().Load() == nil || h.FileErr() != "" {
			t.Error(err, h.FileErr())
		}
		h.setConfig(func(c *Config) { c.Labels.File = filepath.Join(h.dir, "missing", "labels") })
		synctest.Wait()
		if !strings.Contains(h.FileErr(), "no such directory") {
			t.Error(h.FileErr())
		}
		h.config.Store(nil)
		stop()
	})
}

// A disk that hangs delays the end by a second at most.
func TestFollowerEndsWhileDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsFile)
		hang := make(chan struct{})
		h.file.wall = func() time.Time { <-hang; return time.Now() }
		stop := healthtest.Run(t, h.Run)
		h.poll(gpus(1, l4))
		began := time.Now()
		if stop(); time.Since(began) != fileEndTimeout {
			t.Errorf("ended after %v", time.Since(began))
		}
		close(hang)
		synctest.Wait()
	})
}

// The command without a running agent shows the labels with what NVML and the machine have.
func TestLabelsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsOff)
		h.read = func(context.Context, []health.Device) map[health.DeviceID]*health.Properties {
			return map[health.DeviceID]*health.Properties{"GPU-0": {Clique: "a.1"}}
		}
		if l, err := h.LabelsOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "has not answered yet") {
			t.Errorf("%+v, %v", l, err)
		}
		h.snapshots.Store(&health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}})
		if l, err := h.LabelsOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "source down: refused") {
			t.Errorf("%+v, %v", l, err)
		}
		h.snapshots.Store(snapshotOf(gpus(1, l4)))
		if l, err := h.LabelsOnce(t.Context()); err != nil || l.Labels["nvidia.com/gpu.clique"] != "a.1" || len(l.Warnings) != 0 {
			t.Errorf("%+v, %v", l, err)
		}
		down := snapshotOf(gpus(1, l4))
		down.Source.Status, down.Source.Err = health.SourceDown, "timeout"
		h.snapshots.Store(down)
		if l, err := h.LabelsOnce(t.Context()); err != nil || l.Labels["nvidia.com/gpu.count"] != "1" || len(l.Warnings) != 1 ||
			!strings.Contains(l.Warnings[0], "source down: timeout") {
			t.Errorf("%+v, %v", l, err)
		}
	})
}
