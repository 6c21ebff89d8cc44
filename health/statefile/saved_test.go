package statefile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

type samples = map[health.DeviceID]health.Sample

func judged(before []health.DeviceState, seconds int, s samples, devices ...health.Device) []health.DeviceState {
	return healthtest.Judge(judge.DefaultConfig(), before, seconds, nil, s, devices...)
}

// gpu0 returns the sample of GPU-0 for judge.
func gpu0(edit ...func(*health.Sample)) samples {
	return samples{"GPU-0": healthtest.Present(edit...)}
}

// xidAt adds an XID to a sample.
func xidAt(code, seconds int) func(*health.Sample) {
	return func(s *health.Sample) { s.XIDs = append(s.XIDs, health.XID{Code: code, At: healthtest.At(seconds)}) }
}

// mig0 returns a sample of MIG-0 with an XID 48, for judge.
func mig0() samples {
	return samples{"MIG-0": {Presence: health.Present, XIDs: []health.XID{{Code: 48, At: healthtest.At(0)}}}}
}

// faultyDevices returns devices with every kind of finding.
func faultyDevices(t *testing.T) []health.DeviceState {
	t.Helper()
	all := []health.Device{healthtest.GPU0, healthtest.MIG0, healthtest.GPU1}
	devices := judged(nil, 0, samples{"GPU-1": healthtest.Blank(health.Lost)}, all...)
	s := gpu0(healthtest.XIDs(48, 999), healthtest.Value(health.FieldRemapFailed, 1), healthtest.Value(health.FieldGPUTemp, 99))
	s["MIG-0"] = health.Sample{Presence: health.Present, XIDs: []health.XID{{Code: 171, At: healthtest.At(1)}}}
	return judged(devices, 1, s, all...)
}

// roundTrip writes and reads the state.
func roundTrip(t *testing.T, s Saved) (read Saved) {
	t.Helper()
	text, err := json.Marshal(s)
	must(t, err)
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return read
}

// restart saves devices of DCGM in one boot and restores them at 100 s.
func restart(t *testing.T, devices []health.DeviceState, bootID string) Restored {
	t.Helper()
	s := &health.Snapshot{At: healthtest.At(0), Source: health.Source{Kind: "dcgm"}, Devices: devices}
	return roundTrip(t, FromSnapshot(s, "boot")).Restore(bootID, health.SourceID{Kind: "dcgm"}, healthtest.At(100))
}

func TestRestartWithinBoot(t *testing.T) {
	before := faultyDevices(t)
	r := restart(t, before, "boot")
	if !r.Missed || len(r.Devices) != len(before) {
		t.Fatalf("%+v", r)
	}
	// GPU-1 has only a trip.
	healthtest.WantStates(t, r.Devices, map[health.DeviceID]health.State{
		"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy,
		"GPU-1": health.Unknown,
	})
	for i, d := range r.Devices {
		want := before[i].Verdict
		causes := want.Causes()
		if d.Device.Kind == health.KindMIG { // without the parent's findings
			causes = []string{"xid-171"}
		}
		if d.Device.ID != before[i].Device.ID || !slices.Equal(d.Verdict.Causes(), causes) || !d.Verdict.Since.Equal(want.Since) ||
			len(d.Memory.Trips) != len(before[i].Memory.Trips) {
			t.Errorf("%s: %+v, want %+v", d.Device.ID, d.Verdict, want)
		}
	}

	// Conditions clear again only after recoverAfter; the XID needs a reset.
	all := []health.Device{healthtest.GPU0, healthtest.MIG0, healthtest.GPU1}
	devices := judged(r.Devices, 101, nil, all...)
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{
		"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy,
		"GPU-1": health.Healthy,
	})
	devices = judged(devices, 160, nil, all...)
	if got := devices[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-48"}) {
		t.Errorf("GPU-0 has %v", got)
	}
}

func TestRestoreForInventory(t *testing.T) {
	engine := health.SourceID{Kind: "dcgm", Inventory: "dcgm "}
	sim := health.SourceID{Kind: "sim", Inventory: "sim a", Simulated: true}
	for name, c := range map[string]struct {
		before, now     health.SourceID
		boot            string
		devices         int
		missed, history bool
		detached        bool
	}{
		"same":                   {engine, engine, "boot", 3, true, true, true},
		"another address":        {engine, health.SourceID{Kind: "dcgm", Inventory: "dcgm localhost"}, "boot", 3, false, false, true},
		"another boot":           {engine, engine, "later", 1, false, false, false}, // a GPU may have been removed while the node was off
		"unknown boot":           {engine, engine, "", 3, true, true, true},
		"same simulation":        {sim, sim, "boot", 3, true, true, true},
		"another simulation":     {sim, health.SourceID{Kind: "sim", Inventory: "sim b", Simulated: true}, "boot", 0, false, false, false},
		"another kind of source": {engine, sim, "boot", 0, false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := fullSnapshot(t)
			s.Source.Kind, s.Source.Inventory, s.Source.DriverLoad = c.before.Kind, c.before.Inventory, "7"
			r := roundTrip(t, FromSnapshot(s, "boot")).Restore(c.boot, c.now, healthtest.At(100))
			if len(r.Devices) != c.devices || r.Missed != c.missed || r.History != c.history || r.Detachment.InForce() != c.detached {
				t.Errorf("%+v", r)
			}
			if (r.DriverLoad == "7") != c.detached { // both are of the boot
				t.Errorf("driver load %q", r.DriverLoad)
			}
			if len(r.Devices) > 0 && (len(r.Devices[0].XIDs.Rows) > 0) != c.history {
				t.Errorf("rows %+v", r.Devices[0].XIDs.Rows)
			}
		})
	}
}

// A device that has only rows of XIDs is saved with its description.
func TestSavedRows(t *testing.T) {
	s := &health.Snapshot{
		At: healthtest.Epoch, Source: health.Source{Kind: "dcgm", Inventory: "dcgm "},
		Devices: judged(nil, 0, nil, healthtest.GPU0, healthtest.GPU1),
	}
	if saved := FromSnapshot(s, "boot"); len(saved.Devices) != 0 {
		t.Errorf("%+v", saved.Devices)
	}
	d := &s.Devices[1]
	d.Device.NUMA, d.Device.Texts = []int{1}, map[health.Field]string{7: "serial"}
	d.Device.Reserved, d.Device.ComputeCapability = 551<<20, health.ComputeCapability{Major: 8, Minor: 9}
	year40000 := time.Date(40000, 1, 1, 0, 0, 0, 0, time.UTC)
	d.XIDs.Rows = []health.LedgerRow{row(13, healthtest.At(1)), row(31, healthtest.At(2)), row(43, year40000)}
	d.XIDs.Rows[1].Predecessor = true
	r := roundTrip(t, FromSnapshot(s, "boot")).Restore("boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm "}, healthtest.At(100))
	if len(r.Devices) != 1 || !reflect.DeepEqual(r.Devices[0].Device, d.Device) || !slices.Equal(r.Devices[0].XIDs.Rows, d.XIDs.Rows) {
		t.Fatalf("%+v, want %+v", r.Devices, d)
	}
}

// Only findings that the GPU stores in its InfoROM outlive a boot, and no trips do.
func TestFindingsThatOutliveBoot(t *testing.T) {
	for cause, want := range map[string]bool{
		health.CauseRemapFailed: true, health.CauseUnrepairable: true, health.CauseRetiredPages: true,
		"xid-95": false, health.CauseLost: false, health.CauseRemapPending: false, health.CauseRetiredPending: false, health.CauseDBE: false,
		health.CauseTemperature: false, health.CauseClocks: false, health.CauseRecoveryAction: false, health.CauseNotMeasured: false,
		health.CauseMissing: false, health.CauseDetached: false, health.CauseFlapping: false, "dcgm-row-remap-failure": false,
	} {
		f := health.Finding{Cause: cause, State: health.Unhealthy, Since: healthtest.At(1), Last: healthtest.At(1), Clears: health.ClearsReboot}
		r := restart(t, []health.DeviceState{{
			Device: healthtest.GPU0, Memory: health.Memory{Findings: []health.Finding{f}, Trips: []time.Time{healthtest.At(1)}},
			Verdict: health.Verdict{State: health.Unhealthy},
		}}, "later")
		if (len(r.Devices) == 1) != want || want && len(r.Devices[0].Memory.Trips) > 0 {
			t.Errorf("%s after a boot: %+v", cause, r.Devices)
		}
	}
}

// Restored times are on the monotonic clock, so that a later step of the wall clock does not change them. A time that is ahead
// becomes now: a finding recorded while the clock was ahead still expires.
func TestRestoredTimesAreMonotonic(t *testing.T) {
	now := time.Now()
	for name, wall := range map[string]time.Time{"past": now.Add(-time.Hour).Round(0), "ahead": now.Add(time.Hour).Round(0)} {
		d := health.DeviceState{
			Verdict: health.Verdict{Since: wall, Findings: []health.Finding{{Cause: health.CauseCordoned, Since: wall, Last: wall}}},
			Memory: health.Memory{
				Trips: []time.Time{wall}, PendingXIDs: []health.XID{{Code: 48, At: wall}},
				Findings: []health.Finding{{Cause: "xid-999", Since: wall, Last: wall, Reset: wall}},
			},
		}
		d = judge.Restored(d, now)
		m, f, cordon := d.Memory, d.Memory.Findings[0], d.Verdict.Decisions()[0]
		for _, got := range []time.Time{
			d.Verdict.Since, m.Trips[0], m.PendingXIDs[0].At, f.Since, f.Last, f.Reset, cordon.Since, cordon.Last,
		} {
			want := wall
			if wall.After(now) {
				want = now
			}
			if !got.Equal(want) || !strings.Contains(got.String(), " m=") {
				t.Errorf("%s: %v", name, got)
			}
		}
	}
	if got := judge.Restored(health.DeviceState{}, now); !got.Verdict.Since.IsZero() {
		t.Errorf("%+v", got)
	}
}

func TestRestoreDetachment(t *testing.T) {
	for name, c := range map[string]struct {
		until, limit    time.Duration
		over, undecided bool
		left            time.Duration // 0: it is over
	}{
		"in force":                         {5 * time.Minute, 10 * time.Minute, false, false, 5 * time.Minute},
		"time limit reached":               {-time.Second, 10 * time.Minute, false, false, 0},
		"time limit reached now":           {0, 10 * time.Minute, false, false, 0},
		"the clock was set back by a year": {365 * 24 * time.Hour, 10 * time.Minute, false, false, 10 * time.Minute},
		"attach was requested":             {5 * time.Minute, 10 * time.Minute, true, false, 0},
		"no time limit":                    {5 * time.Minute, 0, false, false, 0},
		"undecided":                        {5 * time.Minute, 10 * time.Minute, false, true, undecidedLimit},
		"undecided, nearly over":           {time.Second, 10 * time.Minute, false, true, time.Second},
	} {
		now := time.Now()
		d := health.Detachment{Since: now.Add(c.until - c.limit), Until: now.Add(c.until), For: c.limit, Over: c.over, Undecided: c.undecided}
		if r := (Saved{BootID: "boot", Source: "dcgm", Detachment: d}).Restore("boot", health.SourceID{Kind: "dcgm"},
			now).Detachment; r.InForce() != (c.left > 0) {
			t.Errorf("%s: restored %+v", name, r)
		}
		d = restoreDetachment(d, now)
		if d.InForce() != (c.left > 0) || d.Over != (c.left == 0) || d.InForce() && d.Until.Sub(now) != c.left || d.Since.After(now) {
			t.Errorf("%s: %+v", name, d)
		}
	}
	if d := restoreDetachment(health.Detachment{}, time.Now()); d != (health.Detachment{}) {
		t.Errorf("no detach: %+v", d)
	}
}

// A device is saved if something of it must outlive a restart, its GPU with a MIG device, and every device during a detach.
func TestSavedDevices(t *testing.T) {
	mig1 := healthtest.MIG1
	mig1.Parent = healthtest.GPU1.ID
	devices := judged(nil, 0, mig0(), healthtest.GPU0, healthtest.MIG0, healthtest.GPU1, mig1)
	for name, c := range map[string]struct {
		detachment health.Detachment
		want       []health.DeviceID
	}{
		"attached": {health.Detachment{}, []health.DeviceID{"GPU-0", "MIG-0"}},
		"detached": {
			health.Detachment{Since: healthtest.At(0), Until: healthtest.At(9), For: time.Second},
			[]health.DeviceID{"GPU-0", "GPU-1", "MIG-0", "MIG-1"},
		},
		"attach": {health.Detachment{Over: true}, []health.DeviceID{"GPU-0", "MIG-0"}},
	} {
		s := FromSnapshot(&health.Snapshot{Devices: devices, Source: health.Source{Kind: "dcgm", Detachment: c.detachment}}, "boot")
		var got []health.DeviceID
		for _, d := range s.Devices {
			got = append(got, d.Device.ID)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// What is compared of a device that nothing happens to does not change, so that the file is written for changes only.
func TestStableIgnoresPolls(t *testing.T) {
	never := judge.DefaultConfig()
	never.Recovery = judge.RecoverNever
	present, lost := healthtest.Present(), healthtest.Blank(health.Lost)
	for name, c := range map[string]struct {
		config judge.Config
		story  []health.Sample
	}{
		"returned, recovery never":         {never, []health.Sample{lost}},
		"action withdrawn, recovery never": {never, []health.Sample{healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 2))}},
		"flapping":                         {judge.DefaultConfig(), []health.Sample{lost, present, lost, present, lost}},
	} {
		t.Run(name, func(t *testing.T) {
			var devices []health.DeviceState
			poll := func(s int, sample health.Sample) string {
				devices = healthtest.Judge(c.config, devices, s, nil, samples{"GPU-0": sample}, healthtest.GPU0)
				text, err := json.Marshal(FromSnapshot(&health.Snapshot{At: healthtest.At(s), Devices: devices}, "b").stable())
				must(t, err)
				return string(text)
			}
			for s, sample := range c.story {
				poll(s, sample)
			}
			before := poll(10, present)
			if devices[0].Verdict.State != health.Unhealthy {
				t.Errorf("causes %v", devices[0].Verdict.Causes())
			}
			for s := 11; s < 40; s++ {
				if after := poll(s, present); after != before {
					t.Fatalf("at %d s: %s, before %s", s, after, before)
				}
			}
		})
	}
}

// TestSections checks that sections are written when they change, outlive a change of the source, and end with the boot.
func TestSections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		want := func(boot string, sections map[string]string) {
			t.Helper()
			c, err := Read(dir)
			must(t, err)
			for name, text := range sections {
				if got := string(c.Node.Section(name, boot)); got != text {
					t.Errorf("section %s in %s: %q, want %q", name, boot, got, text)
				}
			}
		}
		idle, other := new(health.Latest[[]byte]), new(health.Latest[[]byte])
		h := newHarness(dir)
		h.AddSection("idle", idle)
		h.AddSection("other", other)
		h.start(t)
		h.store(snapshotOf(t, "dcgm"))
		want("boot", map[string]string{"idle": "", "other": ""})
		idle.Store(new([]byte(`{"a": 1}`)))
		synctest.Wait() // without a newer snapshot
		want("boot", map[string]string{"idle": `{"a":1}`, "other": ""})
		want("next boot", map[string]string{"idle": ""})
		want("", map[string]string{"idle": `{"a":1}`})

		written := h.Status().Written
		advance(time.Second)
		h.store(snapshotOf(t, "dcgm"))
		if !h.Status().Written.Equal(written) {
			t.Error("written without a change")
		}
		other.Store(new([]byte(`2`)))
		h.store(snapshotOf(t, "sim"))
		want("boot", map[string]string{"idle": `{"a":1}`, "other": `2`})
		idle.Store(new([]byte(`3`)))
		h.stop() // saves once more

		h = loadAndStart(t, dir)
		h.store(snapshotOf(t, "sim"))
		want("boot", map[string]string{"idle": `3`, "other": `2`})
		wantDevices(t, dir, map[string]int{"sim": 3, "dcgm": 3})
		h.stop()

		h = newHarness(dir)
		h.bootID = "next boot"
		_, err := h.Load()
		must(t, err)
		h.AddSection("other", other)
		h.start(t)
		h.store(snapshotOf(t, "sim"))
		want("next boot", map[string]string{"idle": "", "other": "2"})
		h.stop()
	})
}

// A section is lacking only if the directory is known, and waiting for one ends with its write, or with an error.
func TestLacksSection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		start := func(dir, boot string) (*harness, *health.Latest[[]byte]) {
			h, text := newHarness(dir), new(health.Latest[[]byte])
			h.bootID = boot
			h.AddSection("note", text)
			_, err := h.Load()
			must(t, err)
			if h.LacksSection("note") {
				t.Error("lacking before the directory is known")
			}
			h.start(t)
			h.store(snapshotOf(t, "sim"))
			return h, text
		}
		h, text := start(dir, "boot")
		if !h.LacksSection("note") {
			t.Error("not lacking")
		}
		text.Store(new([]byte("true")))
		must(t, h.WaitSection(t.Context(), "note"))
		if c, err := Read(dir); err != nil || string(c.Node.Section("note", "boot")) != "true" || h.LacksSection("note") {
			t.Errorf("%+v, %v", c, err)
		}
		h.stop()
		for _, c := range []struct {
			boot  string
			lacks bool
		}{{"boot", false}, {"next boot", true}, {"", false}} {
			h, _ := start(dir, c.boot)
			if h.LacksSection("note") != c.lacks {
				t.Errorf("%q: lacking %v", c.boot, !c.lacks)
			}
			h.stop()
		}

		h, text = start("", "boot")
		text.Store(new([]byte("true")))
		must(t, h.WaitSection(t.Context(), "note"))
		if h.LacksSection("note") {
			t.Error("lacking without a directory")
		}
		h.stop()

		dir = filepath.Join(t.TempDir(), "dir")
		h, text = start(dir, "boot")
		must(t, os.RemoveAll(dir))
		must(t, os.WriteFile(dir, nil, 0o600))
		text.Store(new([]byte("true")))
		if err := h.WaitSection(t.Context(), "note"); err == nil || h.LacksSection("note") {
			t.Errorf("%v", err)
		}
		h.stop()
	})
}

// The next process examines the MPS daemons again.
func TestSavedWithoutMPS(t *testing.T) {
	devices := judged(nil, 0, gpu0(), healthtest.GPU0)
	down := health.MPSState{Daemons: map[health.DeviceID]*health.MPSDaemon{"GPU-0": {Cause: health.CauseMPSDown}}}
	devices = judge.View(judge.DefaultConfig(), devices, judge.ViewContext{MPS: down}, healthtest.At(1))
	if !devices[0].Verdict.Has(health.CauseMPSDown) {
		t.Fatalf("%+v", devices)
	}
	if r := restart(t, devices, "boot"); len(r.Devices) != 0 {
		t.Errorf("%+v", r.Devices)
	}
}
