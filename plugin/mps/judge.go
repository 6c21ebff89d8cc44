package mps

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	startLimit    = 30 * time.Second // for a daemon that has never been ready
	hungAfter     = 2                // examinations in a row without an answer
	refusedAfter  = 2                // examinations in a row that the daemon refused
	missingAfter  = 2                // examinations in a row that found no daemon, although mps-daemon reports its process
	supervisorOut = 3 * time.Second  // without a response mps-daemon counts as unreachable
)

// evidence is all that the verdict about a daemon depends on.
type evidence struct {
	now    time.Time
	wanted time.Time // since when the daemon has to run

	supervisor error         // why mps-daemon does not respond; nil if it does
	refusal    string        // why mps-daemon does not do what it is told
	shm        string        // why containers do not share /dev/shm with the daemons; empty if they do
	status     *DaemonStatus // the latest; nil if mps-daemon does not have the daemon
	pid        int           // of the daemon; 0 if it does not run

	spec     Spec
	last     *examination // the latest complete one; nil if there is none
	noAnswer int          // examinations in a row that failed with errNoAnswer
	refused  int          // with errRefused
	noDaemon int          // with errNoDaemon
	failure  error        // of the latest examination; nil if it was complete

	before health.MPSDaemon
	ready  bool // it has been ready in this process
}

// judge returns the state of a daemon. An unknown value changes nothing: a problem ends when the daemon is seen to work.
func (e *evidence) judge() health.MPSDaemon {
	d := e.before
	d.PID, d.Leaving = e.pid, false
	if s := e.status; s != nil {
		d.Started, d.Restarts, d.MultiUser = s.Started, s.Restarts, s.MultiUser
	}
	current := e.last != nil && e.last.pid == e.pid && e.last.spec == e.spec
	if current {
		d.Servers, d.ThreadPercentage, d.PinnedMemory = e.last.servers, e.last.percent, e.last.pinned
	}
	if e.pid == 0 || e.last != nil && e.last.pid != e.pid {
		d.Servers, d.ThreadPercentage, d.PinnedMemory = nil, 0, 0
	}
	set := func(cause string, action health.Action, format string, args ...any) {
		d.Ready, d.Cause, d.Action, d.Reason = false, cause, action, fmt.Sprintf(format, args...)
	}
	switch {
	case e.pid == 0 && e.supervisor == nil && e.status != nil && e.status.Foreign:
		set(health.CauseMPSForeign, health.ActionEndForeignMPS, "%s", e.status.Error)
	case e.pid == 0:
		set(health.CauseMPSDown, health.ActionCheckMPSDaemon, "the MPS daemon does not run: %s", e.whyDown())
	case e.noDaemon >= missingAfter || e.noDaemon > 0 && e.supervisor != nil:
		set(health.CauseMPSDown, health.ActionCheckMPSDaemon, "%v", errNoDaemon)
	case e.noAnswer >= hungAfter:
		set(health.CauseMPSHung, health.ActionEndMPSClients, "the MPS daemon does not answer within %v", controlTimeout)
	case e.refused >= refusedAfter:
		set(health.CauseMPSNotReady, health.ActionCheckMPSDaemon, "%v", e.failure)
	case !current && e.last != nil && e.last.pid == e.pid:
		set(e.before.Cause, e.before.Action, "the limits of a share have changed and are not set yet")
	case !current && e.ready:
		set(cmp.Or(e.before.Cause, health.CauseMPSDown), health.ActionCheckMPSDaemon, "the MPS daemon was restarted; its limits are not set yet")
	case !current && errors.Is(e.failure, errProgram):
		set(health.CauseMPSNotReady, health.ActionCheckMPSDaemon, "%v", e.failure)
	case !current:
		set(e.before.Cause, health.ActionCheckMPSDaemon, "the MPS daemon is starting; its limits are not set yet")
	case e.failure != nil: // once, or the daemon was not asked
	case e.last.files != nil:
		set(health.CauseMPSNotReady, health.ActionCheckMPSDaemon, "containers cannot mount what the MPS daemon shares with them: %v",
			e.last.files)
	case e.shm != "":
		set(health.CauseMPSNotReady, health.ActionCheckMPSDaemon, "the MPS daemon and containers do not share /dev/shm: %s", e.shm)
	case e.hasFault():
		set(health.CauseMPSFault, health.ActionEndMPSClients,
			"a client had a fatal fault; the MPS server accepts no client until those affected have exited")
	case e.last.limits != nil:
		set(health.CauseMPSLimits, health.ActionCheckMPSDaemon, "%v", e.last.limits)
	default:
		d.Ready, d.Cause, d.Action, d.Reason = true, "", "", ""
	}
	if d.Cause == "" {
		d.Action = ""
	} else if e.starting() && (d.Cause == health.CauseMPSDown || d.Cause == health.CauseMPSNotReady) {
		d.Cause, d.Action = "", ""
	}
	return d
}

// starting reports whether a daemon that was never ready, and has no finding, is still given time.
func (e *evidence) starting() bool {
	return !e.ready && e.before.Cause == "" && e.now.Sub(e.wanted) < startLimit
}

func (e *evidence) whyDown() string {
	switch {
	case e.supervisor != nil:
		return "mps-daemon cannot be reached: " + e.supervisor.Error()
	case e.status != nil:
		return cmp.Or(e.status.Error, "mps-daemon is starting it")
	}
	return cmp.Or(e.refusal, "mps-daemon has not started it yet")
}

// hasFault reports whether a server has a fault. A fault lasts while the status of a server is unknown.
func (e *evidence) hasFault() bool {
	for _, s := range e.last.servers {
		if s.Status == serverFault || s.Status == "" && e.before.Cause == health.CauseMPSFault {
			return true
		}
	}
	return false
}
