package chaos

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// model is the expected state, derived from the steps alone.
type model struct {
	gpu            [gpus]gpu
	source         string // up, dead, hung, blind
	clock          string // offset of the engine's clock in seconds
	logBlocked     bool   // the agent's standard error is not read
	detached       bool   // an operator detached the driver
	detachPending  bool   // the detach waits for a DCGM call that hangs
	detachAsked    bool   // it waits for the host engine's response to the detach
	engineDetached bool   // the host engine has detached the driver
	engineNotAsked bool   // the host engine was not asked to detach: no connection
	sessionClosing bool   // the hung call is the session's last
	attaching      bool   // the next connection attaches the driver
	kubeletFrozen  bool   // kubelet is frozen
	kubeletStopped bool   // kubelet is stopped
	diskFull       bool   // disk is full
	changesAtFull  int    // changed() when the disk became full
	configInvalid  bool   // the configuration file is invalid
	unmeasured     bool   // no GPU measured since the agent's start
	events         bool   // the agent follows the driver's events
}

type gpu struct {
	lost          bool
	lossMeasured  bool      // the agent has measured the loss
	lossAt        time.Time // when it did
	xid48         bool      // an XID 48 is a finding
	xid48Pending  bool      // an XID 48 that the agent cannot know yet
	released      bool      // not measured since the detach
	remapPending  bool      // row remapping pending; never with fatal, because its end is a reset
	mig           string
	migMeasured   string         // mig, as last measured
	counts        map[string]int // XIDs that the agent must have counted, by number
	pendingXIDs   map[string]int // XIDs that the agent cannot know yet
	owed          bool           // an XID counts by its event, and the source has not reported it yet
	changes       int            // times that pods lost or regained it
	changesBefore int            // changes before the agent's start
	failures      int            // changes to unhealthy since the agent's start
	trips         int            // times it became faulty, ever; a detach does not count
}

func newModel() *model {
	m := &model{source: "up", clock: "0"}
	for i := range m.gpu {
		m.gpu[i] = gpu{mig: "off", migMeasured: "off", counts: map[string]int{}, pendingXIDs: map[string]int{}}
	}
	return m
}

func (g gpu) faulty() bool { return g.lossMeasured || g.xid48 }

// withheld reports whether pods must not get the GPU.
func (g gpu) withheld() bool { return g.faulty() || g.released }

// change applies f to a GPU and counts the changes of its health and availability.
func (g *gpu) change(f func()) {
	faulty, withheld := g.faulty(), g.withheld()
	f()
	if !faulty && g.faulty() {
		g.trips++
	}
	if withheld != g.withheld() {
		g.changes++
		if g.withheld() {
			g.failures++
		}
	}
}

// hasPendingXIDs reports whether the agent has not read some XIDs.
func (m *model) hasPendingXIDs() bool {
	return slices.ContainsFunc(m.gpu[:], func(g gpu) bool { return len(g.pendingXIDs) > 0 })
}

// measuring reports whether the agent measures the GPUs.
func (m *model) measuring() bool { return m.source == "up" && !m.detached && !m.engineDetached }

// knowsXIDs reports whether the agent counts XIDs at once: it reads them, or their events arrive.
func (m *model) knowsXIDs() bool {
	return m.measuring() || m.events && !m.detached && !m.detachPending && !m.unmeasured
}

// present returns the number of GPUs that are not lost.
func (m *model) present() (n int) {
	for _, g := range m.gpu {
		if !g.lost {
			n++
		}
	}
	return n
}

// lostLately reports whether the agent may take the loss of a GPU for a part of an outage that begins now.
func (m *model) lostLately() bool {
	return slices.ContainsFunc(m.gpu[:], func(g gpu) bool { return g.lossMeasured && time.Since(g.lossAt) < judge.OutageDelay+5*time.Second })
}

// changeCount returns the number of changes of all GPUs.
func (m *model) changeCount() (n int) {
	for _, g := range m.gpu {
		n += g.changes
	}
	return n
}

// xid counts XIDs once the agent can know them.
func (m *model) xid(i int, code string, n int) {
	if m.knowsXIDs() {
		m.gpu[i].counts[code] += n
		m.gpu[i].owed = m.gpu[i].owed || !m.measuring()
	} else {
		m.gpu[i].pendingXIDs[code] += n
	}
}

// measure makes the agent measure the GPUs, if it can.
func (m *model) measure() {
	if !m.measuring() {
		return
	}
	m.unmeasured = false
	for i := range m.gpu {
		g := &m.gpu[i]
		for code, n := range g.pendingXIDs {
			g.counts[code] += n
		}
		clear(g.pendingXIDs)
		g.owed = false
		g.change(func() {
			g.measure()
			g.released = false
		})
	}
}

// measure makes the agent measure a GPU.
func (g *gpu) measure() {
	if g.lossMeasured && !g.lost {
		g.xid48 = false // the return of a lost GPU is a reset
	}
	if g.lost && !g.lossMeasured {
		g.lossAt = time.Now()
	}
	g.lossMeasured, g.migMeasured = g.lost, g.mig
	g.xid48, g.xid48Pending = g.xid48 || g.xid48Pending, false
}

// release withholds all measured GPUs from pods.
func (m *model) release() {
	for i := range m.gpu {
		g := &m.gpu[i]
		g.change(func() { g.released = !m.unmeasured })
	}
}

// devices returns the number of MIG devices of a layout.
func devices(layout string) int {
	return map[string]int{"off": 0, "sevenths": 7, "balanced": 4}[layout]
}

// counted returns a copy of the expected XID counts of a GPU.
func (m *model) counted(i int) map[string]int { return maps.Clone(m.gpu[i].counts) }
