package monitor

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// The saved state that is read only after the start counts as if it had been read before; what this process has seen is newer.
func TestRestoreLate(t *testing.T) {
	at := func(seconds int) time.Time { // since the start, in the bubble
		return time.Date(2000, 1, 1, 0, 0, seconds, 0, time.UTC)
	}
	xid := func(code, seconds int) health.Finding {
		return health.Finding{
			Cause: fmt.Sprintf("xid-%d", code), State: health.Unhealthy, Reason: "saved", Action: health.ActionRebootNode,
			Since: at(seconds), Last: at(seconds), Clears: health.ClearsGPUReset,
		}
	}
	row := func(x health.XID) health.XIDRow { return health.XIDRow{Code: x.Code, At: x.At.UnixMicro()} }
	device := func(d health.Device, rows []health.XID, findings ...health.Finding) health.DeviceState {
		v := health.Verdict{State: health.Healthy, Since: at(-100), Findings: findings}
		for _, f := range findings {
			v.State, v.Since = max(v.State, f.State), f.Since
		}
		s := health.DeviceState{Device: d, Memory: health.Memory{Findings: findings}, Verdict: v}
		for _, x := range rows {
			s.XIDs.Rows = append(s.XIDs.Rows, health.LedgerRow{XIDRow: row(x)})
		}
		return s
	}
	action := func(a health.RecoveryAction) health.Sample {
		return of(healthtest.GPU0, healthtest.Present(healthtest.Value(health.FieldRecoveryAction, float64(a))))
	}
	listed := func(xids ...health.XID) health.Sample {
		s := of(healthtest.GPU0, healthtest.Present())
		for _, x := range xids {
			s.Rows = append(s.Rows, row(x))
		}
		s.RowsWhole = true
		return s
	}
	condition := func(cause string, action health.Action) health.Finding {
		return health.Finding{
			Cause: cause, State: health.Unhealthy, Reason: "saved", Action: action, Since: at(-120), Last: at(-60),
			Clears: health.ClearsItself,
		}
	}
	known, missed := health.XID{Code: 48, At: at(-50)}, health.XID{Code: 95, At: at(-20)}
	for name, c := range map[string]struct {
		saved  statefile.Restored
		before func(h *harness) // the file is read
		load   string           // of the driver now
		causes []string
	}{
		"finding": {
			saved:  statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(79, -60))}},
			causes: []string{"xid-79"},
		},
		"driver reloaded": {
			saved: statefile.Restored{DriverLoad: "1", Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(79, -60))}}, load: "2",
			causes: []string{""},
		},
		"driver not reloaded": {
			saved: statefile.Restored{DriverLoad: "1", Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(79, -60))}}, load: "1",
			causes: []string{"xid-79"},
		},
		"newer finding of another cause": {
			saved:  statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(79, -60))}},
			before: func(h *harness) { h.reportXID(95) },
			causes: []string{"xid-79,xid-95"},
		},
		"newer finding of the same cause": {
			saved:  statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(95, -60))}},
			before: func(h *harness) { h.reportXID(95) },
			causes: []string{"xid-95"},
		},
		"reset since the start": {
			saved: statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(79, -60))}},
			before: func(h *harness) {
				h.report(action(health.RecoveryReset))
				advance(time.Minute)
				h.report(action(health.RecoveryNone))
			},
			causes: []string{""},
		},
		"XID after the return of a GPU that was lost before the start": {
			saved: statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil,
				condition(health.CauseLost, health.ActionRebootNode), xid(48, -60))}},
			before: func(h *harness) { h.reportXID(95) },
			causes: []string{"xid-95"},
		},
		"XID after a reset that the driver asked for before the start": {
			saved: statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil,
				condition(health.CauseRecoveryAction, health.ActionResetGPU), xid(48, -60))}},
			before: func(h *harness) {
				h.report(action(health.RecoveryNone))
				advance(time.Minute)
				h.reportXID(95)
			},
			causes: []string{"xid-95"},
		},
		"XID while no agent ran": {
			saved:  statefile.Restored{History: true, Devices: []health.DeviceState{device(healthtest.GPU0, []health.XID{known})}},
			before: func(h *harness) { h.report(listed(known, missed)) },
			causes: []string{"xid-95"},
		},
		"XID while no agent ran, without history": {
			saved:  statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, []health.XID{known})}},
			before: func(h *harness) { h.report(listed(known, missed)) },
			causes: []string{""},
		},
		"XID of a MIG device from before the one that was made since the start": {
			saved: statefile.Restored{History: true},
			before: func(h *harness) {
				h.report(listed())
				advance(time.Minute)
				mig := listed(missed)
				mig.Device = "MIG-0"
				h.set(func(s *fakeSource) {
					s.reading.Devices = []health.Device{healthtest.GPU0, {ID: "MIG-0", Parent: healthtest.GPU0.ID, Kind: health.KindMIG}}
					s.reading.Samples = []health.Sample{of(healthtest.GPU0, healthtest.Present()), mig}
				})
			},
			causes: []string{"", ""},
		},
		"device without saved state": {
			saved:  statefile.Restored{History: true},
			before: func(h *harness) { h.report(listed(missed)) },
			causes: []string{"xid-95"},
		},
		"GPU missing since": {
			saved:  statefile.Restored{Missed: true, Devices: []health.DeviceState{device(healthtest.GPU1, nil, xid(79, -60))}},
			causes: []string{"", "xid-79,missing"},
		},
		"GPU missing since, driver reloaded": {
			saved:  statefile.Restored{Missed: true, DriverLoad: "1", Devices: []health.DeviceState{device(healthtest.GPU1, nil, xid(79, -60))}},
			load:   "2",
			causes: []string{"", "missing"},
		},
		"GPU of another boot": {
			saved: statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU1, nil, xid(79, -60))}}, causes: []string{""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(zap.NewNop())
				src := *h.source.Load()
				src.DriverLoad = func() string { return c.load }
				h.source.Store(&src)
				h.m.AwaitRestore()
				h.start(t)
				defer h.stop()
				advance(30 * time.Second)
				if c.before != nil {
					c.before(h)
					advance(time.Minute)
				}
				h.m.RestoreLate(c.saved)
				advance(time.Minute)
				h.wantCauses(t, "restored", health.SourceUp, c.causes...)
				h.m.RestoreLate(statefile.Restored{Devices: []health.DeviceState{device(healthtest.GPU0, nil, xid(31, -60))}})
				advance(time.Minute)
				h.wantCauses(t, "restored once", health.SourceUp, c.causes...)
				if d := h.out.Load().Devices[0]; slices.ContainsFunc(d.Verdict.Findings,
					func(f health.Finding) bool { return f.Reason == "saved" && !f.Since.Before(at(0)) }) {
					t.Errorf("%+v", d.Verdict)
				}
			})
		})
	}
}

// If the source is down until the state is read, its first reading tells what is missing.
func TestRestoreLateBeforeFirstReading(t *testing.T) {
	for missed, causes := range map[bool][]string{true: {"", "missing"}, false: {""}} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(zap.NewNop())
			h.set(func(s *fakeSource) { s.openErr = errors.New("down") })
			h.m.AwaitRestore()
			h.start(t)
			defer h.stop()
			advance(30 * time.Second)
			h.m.RestoreLate(statefile.Restored{Missed: missed, Devices: []health.DeviceState{{Device: healthtest.GPU1}}})
			advance(time.Minute)
			h.wantCauses(t, "before the first reading", health.SourceDown, "")
			h.set(func(s *fakeSource) { s.openErr = nil })
			advance(time.Minute)
			h.wantCauses(t, "first reading", health.SourceUp, causes...)
		})
	}
}

// One reading tells that a GPU of another boot is not here any more.
func TestRestoreLateAfterFirstReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(zap.NewNop())
		h.m.AwaitRestore()
		h.start(t)
		defer h.stop()
		synctest.Wait()
		if n := h.status().Polls; n != 1 {
			t.Fatalf("%d polls", n)
		}
		h.m.RestoreLate(statefile.Restored{Devices: []health.DeviceState{{Device: healthtest.GPU1}}})
		advance(time.Minute)
		h.wantCauses(t, "restored", health.SourceUp, "")
	})
}

// runAwaitingRestore runs a test of a monitor of a host engine that has waited for its state for a minute.
func runAwaitingRestore(t *testing.T, test func(*testing.T, *harness)) {
	runTest(t, func(t *testing.T, h *harness) {
		h.stop()
		next := newHarness(zap.NewNop())
		next.useHostEngine()
		next.m.AwaitRestore()
		next.start(t)
		defer next.stop()
		advance(time.Minute)
		test(t, next)
	})
}

// A detach of before the start is in force again.
func TestRestoreLateDetaches(t *testing.T) {
	runAwaitingRestore(t, func(t *testing.T, h *harness) {
		now := time.Now()
		h.m.RestoreLate(statefile.Restored{Detachment: health.Detachment{
			Since: now.Add(-time.Minute), Until: now.Add(9 * time.Minute),
			For: 10 * time.Minute,
		}})
		advance(time.Minute)
		h.wantCauses(t, "restored", health.SourceDetached, health.CauseReleased)
		if d := h.status().Detachment; !d.Until.Equal(now.Add(9 * time.Minute)) {
			t.Errorf("%+v", d)
		}
		advance(10 * time.Minute)
		h.wantCauses(t, "time limit", health.SourceUp, "")
	})
}

// A detach from before the start that is over may have left the host engine detached.
func TestRestoreLateAttachesEngine(t *testing.T) {
	for _, d := range []health.Detachment{{}, {Over: true}} {
		runAwaitingRestore(t, func(t *testing.T, h *harness) {
			h.m.RestoreLate(statefile.Restored{Detachment: d})
			advance(time.Minute)
			if n := h.count(&h.attaches); (n == 1) != d.Over {
				t.Errorf("%+v: %d attaches", d, n)
			}
			h.wantCauses(t, "attached", health.SourceUp, "")
		})
	}
}
