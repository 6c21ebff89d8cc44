package mps

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The verdict about a daemon by all that it depends on. The daemon of each case has worked before, unless the case says otherwise.
func TestJudge(t *testing.T) {
	now, started := time.Unix(1000, 0), time.Unix(900, 0)
	const limit = startLimit
	servers := []health.MPSServer{{PID: 7, Status: serverActive, Clients: []int{8}}}
	fault := []health.MPSServer{{PID: 7, Status: serverActive}, {PID: 9, Status: serverFault}}
	working := func() *evidence {
		s := spec(gpuA)
		return &evidence{
			now: now, wanted: started, status: &DaemonStatus{Device: gpuA, PID: 5, Started: started, Restarts: 2, MultiUser: true}, pid: 5, spec: s,
			last:  &examination{spec: s, pid: 5, percent: 25, pinned: 20 << 30, servers: servers},
			ready: true, before: health.MPSDaemon{Ready: true, PID: 5},
		}
	}
	fresh := func(e *evidence) { e.ready, e.last, e.before = false, nil, health.MPSDaemon{Reason: "not examined"} }
	down := func(e *evidence) { e.pid, e.status.PID = 0, 0 }
	unexamined := func(e *evidence) { e.last = nil }
	for name, c := range map[string]struct {
		change func(e *evidence)
		ready  bool
		cause  string
		action health.Action
		reason string // a part; empty for none
	}{
		"works": {change: func(*evidence) {}, ready: true},
		"recovers": {change: func(e *evidence) {
			e.before = health.MPSDaemon{Cause: health.CauseMPSHung, Action: health.ActionEndMPSClients, Reason: "x"}
		}, ready: true},
		"foreign": {
			change: func(e *evidence) { down(e); e.status.Foreign, e.status.Error = true, "process 3" },
			cause:  health.CauseMPSForeign, action: health.ActionEndForeignMPS, reason: "process 3",
		},
		"foreign, and mps-daemon does not respond": {
			change: func(e *evidence) { down(e); e.status.Foreign, e.supervisor = true, errors.New("connection refused") },
			cause:  health.CauseMPSDown, action: health.ActionCheckMPSDaemon, reason: "mps-daemon cannot be reached: connection refused",
		},
		"foreign at the start": {
			change: func(e *evidence) {
				down(e)
				fresh(e)
				e.wanted, e.status.Foreign, e.status.Error = now, true, "process 3"
			},
			cause: health.CauseMPSForeign, action: health.ActionEndForeignMPS, reason: "process 3",
		},
		"down": {
			change: func(e *evidence) { down(e); e.status.Error = "exit status 1" }, cause: health.CauseMPSDown,
			action: health.ActionCheckMPSDaemon, reason: "does not run: exit status 1",
		},
		"down, without a reason": {
			change: down, cause: health.CauseMPSDown, action: health.ActionCheckMPSDaemon,
			reason: "mps-daemon is starting it",
		},
		"not at mps-daemon": {
			change: func(e *evidence) { e.pid, e.status = 0, nil }, cause: health.CauseMPSDown,
			action: health.ActionCheckMPSDaemon, reason: "has not started it yet",
		},
		"refused file": {
			change: func(e *evidence) { e.pid, e.status, e.refusal = 0, nil, "version" }, cause: health.CauseMPSDown,
			action: health.ActionCheckMPSDaemon, reason: "does not run: version",
		},
		"starting": {change: func(e *evidence) { down(e); fresh(e); e.wanted = now.Add(time.Nanosecond - limit) }, reason: "does not run"},
		"has not started": {
			change: func(e *evidence) { down(e); fresh(e); e.wanted = now.Add(-limit) }, cause: health.CauseMPSDown,
			action: health.ActionCheckMPSDaemon, reason: "does not run",
		},
		"no socket once": {change: func(e *evidence) { e.noDaemon, e.failure = 1, errNoDaemon }, ready: true},
		"no socket": {
			change: func(e *evidence) { e.noDaemon, e.failure = missingAfter, errNoDaemon }, cause: health.CauseMPSDown,
			action: health.ActionCheckMPSDaemon, reason: errNoDaemon.Error(),
		},
		"no socket once, and mps-daemon does not respond": {
			change: func(e *evidence) { e.noDaemon, e.failure, e.supervisor = 1, errNoDaemon, errors.New("gone") },
			cause:  health.CauseMPSDown, action: health.ActionCheckMPSDaemon, reason: errNoDaemon.Error(),
		},
		"mps-daemon does not respond": {change: func(e *evidence) { e.supervisor = errors.New("gone") }, ready: true},
		"no answer once":              {change: func(e *evidence) { e.noAnswer, e.failure = 1, errNoAnswer }, ready: true},
		"no answer": {
			change: func(e *evidence) { e.noAnswer, e.failure = hungAfter, errNoAnswer }, cause: health.CauseMPSHung,
			action: health.ActionEndMPSClients, reason: "does not answer within 10s",
		},
		"refused once": {change: func(e *evidence) { e.refused, e.failure = 1, errRefused }, ready: true},
		"refused": {
			change: func(e *evidence) { e.refused, e.failure = refusedAfter, fmt.Errorf("%w: x", errRefused) },
			cause:  health.CauseMPSNotReady, action: health.ActionCheckMPSDaemon, reason: "refuses the command: x",
		},
		"changed limits": {change: func(e *evidence) { e.spec.ThreadPercentage = 50 }, reason: "limits of a share have changed"},
		"changed limits of a faulty one": {
			change: func(e *evidence) {
				e.spec.ThreadPercentage = 50
				e.before = health.MPSDaemon{Cause: health.CauseMPSFault, Action: health.ActionEndMPSClients}
			},
			cause: health.CauseMPSFault, action: health.ActionEndMPSClients, reason: "limits of a share have changed",
		},
		"restarted": {
			change: func(e *evidence) { e.last.pid = 4 }, cause: health.CauseMPSDown, action: health.ActionCheckMPSDaemon,
			reason: "was restarted",
		},
		"restarted after a hang": {
			change: func(e *evidence) { e.last.pid, e.before.Cause = 4, health.CauseMPSHung },
			cause:  health.CauseMPSHung, action: health.ActionCheckMPSDaemon, reason: "was restarted",
		},
		"no program": {
			change: func(e *evidence) { fresh(e); e.failure = fmt.Errorf("%w: x", errProgram) }, cause: health.CauseMPSNotReady,
			action: health.ActionCheckMPSDaemon, reason: "cannot run the control program: x",
		},
		"no program yet": {
			change: func(e *evidence) { fresh(e); e.wanted, e.failure = now, errProgram },
			reason: "cannot run the control program",
		},
		"not examined": {change: func(e *evidence) { fresh(e); unexamined(e) }, reason: "is starting; its limits are not set yet"},
		"not examined after a finding": {
			change: func(e *evidence) { fresh(e); e.before.Cause = health.CauseMPSDown },
			cause:  health.CauseMPSDown, action: health.ActionCheckMPSDaemon, reason: "is starting",
		},
		"not asked": {change: func(e *evidence) { e.failure = errProgram; e.last.files = errors.New("x") }, ready: true},
		"files missing": {
			change: func(e *evidence) { e.last.files, e.shm = errors.New("no pipe"), "y" }, cause: health.CauseMPSNotReady,
			action: health.ActionCheckMPSDaemon, reason: "cannot mount what the MPS daemon shares with them: no pipe",
		},
		"other shm": {
			change: func(e *evidence) { e.shm, e.last.servers = "not mounted", fault }, cause: health.CauseMPSNotReady,
			action: health.ActionCheckMPSDaemon, reason: "do not share /dev/shm: not mounted",
		},
		"fault": {
			change: func(e *evidence) { e.last.servers, e.last.limits = fault, errLimit }, cause: health.CauseMPSFault,
			action: health.ActionEndMPSClients, reason: "fatal fault",
		},
		"unknown status": {change: func(e *evidence) { e.last.servers = []health.MPSServer{{PID: 7}} }, ready: true},
		"fault may last": {
			change: func(e *evidence) { e.last.servers, e.before.Cause = []health.MPSServer{{PID: 7}}, health.CauseMPSFault },
			cause:  health.CauseMPSFault, action: health.ActionEndMPSClients, reason: "fatal fault",
		},
		"fault has ended": {change: func(e *evidence) { e.before.Cause = health.CauseMPSFault }, ready: true},
		"limits": {
			change: func(e *evidence) { e.last.limits = errLimit }, cause: health.CauseMPSLimits,
			action: health.ActionCheckMPSDaemon, reason: errLimit.Error(),
		},
		"late, never ready": {
			change: func(e *evidence) { e.ready, e.last.files = false, errors.New("no pipe") }, cause: health.CauseMPSNotReady,
			action: health.ActionCheckMPSDaemon, reason: "no pipe",
		},
		"not yet ready": {change: func(e *evidence) { e.ready, e.wanted, e.last.files = false, now, errors.New("no pipe") }, reason: "no pipe"},
		"limits at the start": {
			change: func(e *evidence) { e.ready, e.wanted, e.last.limits = false, now, errLimit },
			cause:  health.CauseMPSLimits, action: health.ActionCheckMPSDaemon, reason: errLimit.Error(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := working()
			e.before.Leaving = true
			c.change(e)
			d := e.judge()
			if d.Ready != c.ready || d.Cause != c.cause || d.Action != c.action || d.Leaving || d.PID != e.pid {
				t.Errorf("%+v", d)
			}
			if (d.Reason == "") != (c.reason == "") || !strings.Contains(d.Reason, c.reason) {
				t.Errorf("reason %q, want %q", d.Reason, c.reason)
			}
			measured := e.last != nil && e.last.pid == e.pid && e.last.spec == e.spec // what an earlier daemon had is not this one's
			if (d.ThreadPercentage == 25 && d.PinnedMemory == 20<<30 && len(d.Servers) > 0) != measured ||
				!measured && d.ThreadPercentage+float64(d.PinnedMemory) > 0 {
				t.Errorf("measured %v: %+v", measured, d)
			}
			if s := e.status; s != nil && (d.Restarts != 2 || !d.MultiUser || !d.Started.Equal(started)) {
				t.Errorf("%+v", d)
			}
		})
	}
	// What was measured of a daemon stays while its new limits are set.
	e := working()
	e.before.Servers, e.before.ThreadPercentage, e.before.PinnedMemory, e.spec.ThreadPercentage = servers, 25, 20<<30, 50
	if d := e.judge(); len(d.Servers) != 1 || d.ThreadPercentage != 25 || d.PinnedMemory != 20<<30 {
		t.Errorf("%+v", d)
	}
	e.last.pid = 4
	if d := e.judge(); d.Servers != nil || d.ThreadPercentage != 0 || d.PinnedMemory != 0 {
		t.Errorf("of an earlier daemon: %+v", d)
	}
	e.pid, e.last = 0, nil
	if d := e.judge(); d.Servers != nil || d.ThreadPercentage != 0 || d.PinnedMemory != 0 {
		t.Errorf("of none: %+v", d)
	}
}
