package monitor

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// detachment is what operators want of the driver, and what the agent has done about it. Its methods are pure: they return the next value.
// The Monitor owns the only one, under its mutex.
//
//	attached   no detach is wanted; sessions are open
//	withheld   a detach is Undecided; sessions are open; devices are withheld while the agent asks who holds them
//	detaching  a detach is wanted; devices are withheld; the session is being closed
//	detached   Run has followed that request; devices are withheld; no session is open
//	attaching  no detach is wanted; sessions are open; the driver was released, and a device is withheld until a reading reports it
//
//	state                          event                                      next state
//	attached, attaching            withhold                                   withheld
//	withheld                       endWithholding                             attached (attaching if unread)
//	attached, withheld, attaching  detach                                     detaching
//	detaching, detached            detach: extends the time limit             unchanged
//	detaching                      Run follows                                detached
//	detaching                      refuse                                     attached (attaching if unread)
//	detaching with a session       attach, by an operator or the time limit   attached (attaching if unread)
//	detaching without, detached    attach, by an operator or the time limit   attaching
//	attached, withheld, attaching  attach: asks the host engine again         unchanged
//	attaching                      devicesRead, none is withheld              attached
//
// Any other event leaves the state unchanged.
type detachment struct {
	health.Detachment // what is wanted; never Over

	requests int         // counts the events that end the session or allow the next one
	followed int         // the latest request that Run has followed: it has begun a session, or released the driver
	engine   engineState // what the agent knows of the host engine, if there is one
	refusal  error       // why the last detach failed
}

// engineState is whether a session has to ask the host engine to attach first.
type engineState uint8

const (
	engineAttached engineState = iota
	engineUnknown              // it is asked, but the source is used also if it refuses
	engineReleased             // it is asked: the driver was released, and a device was not read since
)

// detachRequested reports whether a detach is in progress or complete: no session may be opened.
func (d detachment) detachRequested() bool { return d.InForce() && !d.Undecided }

// detached reports whether a detach is complete.
func (d detachment) detached() bool { return d.detachRequested() && d.followed == d.requests }

func (d detachment) withhold(now time.Time, term time.Duration, engine bool) detachment {
	if !d.InForce() {
		d.Detachment = health.Detachment{Since: now, Until: now.Add(term), For: term, Undecided: true, EngineUnasked: engine}
	}
	return d
}

func (d detachment) endWithholding(wanted health.Detachment) detachment {
	if d.Undecided && d.Detachment == wanted {
		d.Detachment = health.Detachment{}
	}
	return d
}

func (d detachment) detach(now time.Time, term time.Duration, engine bool) detachment {
	if !d.detachRequested() {
		d = d.withhold(now, term, engine).request()
		d.Undecided, d.EngineUnasked = false, engine
	}
	d.Until, d.For = now.Add(term), term
	return d
}

// refuse keeps the driver because the host engine did not detach. It may have detached in part, so it is asked to attach.
func (d detachment) refuse(err error) detachment {
	if d.detachRequested() && !d.detached() {
		d = d.request()
		d.Detachment, d.engine, d.refusal = health.Detachment{}, max(d.engine, engineUnknown), err
	}
	return d
}

// attach returns to the driver. Without a detach it only asks the host engine, if there is one to ask: an agent that was restarted does not
// know whether the engine detached.
func (d detachment) attach(session, engine bool) detachment {
	switch {
	case d.detachRequested():
		if d.detached() || !session {
			d.engine = engineReleased
		}
		d.Detachment = health.Detachment{}
	case engine:
		d.engine = max(d.engine, engineUnknown)
	default:
		return d
	}
	return d.request()
}

func (d detachment) request() detachment {
	d.requests++
	d.refusal = nil
	return d
}

// devicesRead records a reading, after which some GPUs are still unread, or none. A reading of a session before the request does not count.
func (d detachment) devicesRead(someUnread bool) detachment {
	if d.followed == d.requests && !someUnread {
		d.engine = engineAttached
	}
	return d
}

// saved returns the detachment from which a later process continues.
func (d detachment) saved() health.Detachment {
	if !d.InForce() && d.engine != engineAttached {
		return health.Detachment{Over: true}
	}
	return d.Detachment
}
