package monitor

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// driverState is the agent's relation to the GPUs' driver.
type driverState uint8

const (
	attached  driverState = iota // sessions are open; no device is withheld
	withheld                     // sessions are open; devices are withheld while the agent asks who holds them
	detaching                    // devices are withheld; the session is being closed
	detached                     // devices are withheld; no session is open
	attaching                    // sessions are open; a device is withheld until a reading reports it
)

// detachment is the state machine of detach and attach. Its methods are pure: they return the next value.
// The Monitor owns the only one, under its mutex.
//
//	state                          event                                      next state
//	attached, attaching            withhold                                   withheld
//	withheld                       endWithholding                             attached (attaching if unread)
//	attached, withheld, attaching  detach                                     detaching
//	detaching, detached            detach: extends the time limit             unchanged
//	detaching                      sessionClosed                              detached
//	detaching                      refuse                                     attached (attaching if unread)
//	detaching with a session       attach, by an operator or the time limit   attached (attaching if unread)
//	detaching without, detached    attach, by an operator or the time limit   attaching
//	attached, withheld, attaching  attach: asks the host engine again         unchanged
//	attaching                      devicesRead, none is withheld              attached
//
// Any other event leaves the state unchanged.
type detachment struct {
	state driverState
	since time.Time     // when the devices were withheld
	until time.Time     // time limit: when the agent attaches the driver automatically
	term  time.Duration // from the latest detach to until

	unread        bool // a device was not read since an earlier detach and stays withheld if this one ends early
	engineUnasked bool // no host engine has been asked to detach: it may still use the driver
	engineAttach  bool // the next session asks the host engine to attach first; outlives attaching until a session gives a reading

	requests    int          // counts the events that end the session or allow the next one
	begun       bool         // a session was opened since the last request
	refusal     error        // why the last detach failed
	withholding *Withholding // withheld: who may end it
}

// detachRequested reports whether a detach is in progress or complete: no session may be opened.
func (d detachment) detachRequested() bool { return d.state == detaching || d.state == detached }

func (d detachment) withhold(w *Withholding, now time.Time, term time.Duration, engine bool) detachment {
	if d.state != attached && d.state != attaching {
		return d
	}
	d.unread = d.state == attaching
	d.state, d.withholding = withheld, w
	d.since, d.until, d.term, d.engineUnasked = now, now.Add(term), term, engine
	return d
}

func (d detachment) endWithholding(w *Withholding) detachment {
	if d.state == withheld && d.withholding == w {
		d = d.keepDriver()
	}
	return d
}

// keepDriver ends a detach whose session was not closed.
func (d detachment) keepDriver() detachment {
	d.state, d.withholding = attached, nil
	if d.unread {
		d.state = attaching
	}
	return d
}

func (d detachment) detach(now time.Time, term time.Duration, engine bool) detachment {
	switch d.state {
	case attached, attaching:
		d = d.withhold(nil, now, term, engine)
		fallthrough
	case withheld:
		d.state, d.withholding, d.engineUnasked = detaching, nil, engine
		d = d.request()
	}
	d.until, d.term = now.Add(term), term
	return d
}

func (d detachment) sessionClosed() detachment {
	if d.state == detaching {
		d.state = detached
	}
	return d
}

// refuse keeps the driver because the host engine did not detach. It may have detached in part, so it is asked to attach.
func (d detachment) refuse(err error) detachment {
	if d.state == detaching {
		d = d.keepDriver().request()
		d.engineAttach, d.refusal = true, err
	}
	return d
}

// attach returns to the driver. If the state is neither detaching nor detached, it only asks the host engine, if there is
// one to ask: an agent that was restarted does not know whether the engine detached.
func (d detachment) attach(session, engine bool) detachment {
	switch {
	case d.state == detaching && session && !d.unread:
		d = d.keepDriver()
	case d.detachRequested():
		d.state, d.engineAttach = attaching, true
	case engine:
		d.engineAttach = true
	default:
		return d
	}
	return d.request()
}

func (d detachment) request() detachment {
	d.requests++
	d.begun, d.refusal = false, nil
	return d
}

// sessionBegun records that a session is opened after a request. Earlier results of the source do not answer the request.
func (d detachment) sessionBegun(request int) detachment {
	d.begun = d.begun || d.requests == request
	return d
}

// devicesRead records a reading, after which some devices are still withheld, or none.
func (d detachment) devicesRead(someWithheld bool) detachment {
	if d.state == attaching && !someWithheld {
		d.state = attached
	}
	if d.state == attached && d.begun { // otherwise the reading is of a session before the request
		d.engineAttach = false
	}
	return d
}

// withholds returns what health.View withholds devices for.
func (d detachment) withholds() health.Detachment {
	switch d.state {
	case withheld, detaching, detached:
		return health.Detachment{Since: d.since, Until: d.until, For: d.term, Undecided: d.state == withheld, EngineUnasked: d.engineUnasked}
	case attaching:
		return health.Detachment{Over: true}
	case attached:
	}
	return health.Detachment{}
}

// saved returns the detachment from which a later process continues.
func (d detachment) saved() health.Detachment {
	if d.state == attached && d.engineAttach {
		return health.Detachment{Over: true}
	}
	return d.withholds()
}
