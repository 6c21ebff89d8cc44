package chaos

import (
	"maps"
	"slices"
)

// model is the expected state, derived from the steps alone.
type model struct {
	gpu       [gpus]gpu
	source    string // up, dead, hung, blind
	clock     string // offset of the engine's clock in seconds
	blocked   bool   // the agent's standard error is not read
	away      bool   // an operator detached the driver
	stuck     bool   // the detach waits for a DCGM call that hangs
	gone      bool   // the host engine has detached the driver
	unasked   bool   // the host engine was not asked to detach: no connection
	closing   bool   // the hung call is the session's last
	attaching bool   // the next connection attaches the driver
	frozen    bool   // kubelet is frozen
	absent    bool   // kubelet is stopped
	full      bool   // disk is full
	atFull    int    // changed() when the disk became full
	badly     bool   // the configuration file is invalid
	unseen    bool   // no GPU measured since the agent's start
}

type gpu struct {
	lost     bool
	seen     bool // the agent has measured the loss
	fatal    bool // an XID 48 is a finding
	dying    bool // an XID 48 that the agent cannot know yet
	released bool // not measured since the detach
	remap    bool // row remapping pending; never with fatal, because its end is a reset
	mig      string
	shown    string         // mig, as last measured
	counts   map[string]int // XIDs that the agent must have counted, by number
	waiting  map[string]int // XIDs that the agent cannot know yet
	changes  int            // times that pods lost or regained it
	before   int            // changes before the agent's start
	falls    int            // changes to unhealthy since the agent's start
	trips    int            // times it became faulty, ever; a detach does not count
}

func newModel() *model {
	m := &model{source: "up", clock: "0"}
	for i := range m.gpu {
		m.gpu[i] = gpu{mig: "off", shown: "off", counts: map[string]int{}, waiting: map[string]int{}}
	}
	return m
}

func (g gpu) sick() bool { return g.seen || g.fatal }

// withheld reports whether pods must not get the GPU.
func (g gpu) withheld() bool { return g.sick() || g.released }

// change applies f to a GPU and counts the changes of its health and availability.
func (g *gpu) change(f func()) {
	sick, withheld := g.sick(), g.withheld()
	f()
	if !sick && g.sick() {
		g.trips++
	}
	if withheld != g.withheld() {
		g.changes++
		if g.withheld() {
			g.falls++
		}
	}
}

// waits reports whether the agent has not read some XIDs.
func (m *model) waits() bool {
	return slices.ContainsFunc(m.gpu[:], func(g gpu) bool { return len(g.waiting) > 0 })
}

// measured reports whether the agent measures the GPUs.
func (m *model) measured() bool { return m.source == "up" && !m.away && !m.gone }

// changed returns the number of changes of all GPUs.
func (m *model) changed() (n int) {
	for _, g := range m.gpu {
		n += g.changes
	}
	return n
}

// xid counts XIDs once the agent can know them.
func (m *model) xid(i int, code string, n int) {
	if m.measured() {
		m.gpu[i].counts[code] += n
	} else {
		m.gpu[i].waiting[code] += n
	}
}

// look makes the agent measure the GPUs, if it can.
func (m *model) look() {
	if !m.measured() {
		return
	}
	m.unseen = false
	for i := range m.gpu {
		g := &m.gpu[i]
		for code, n := range g.waiting {
			g.counts[code] += n
		}
		clear(g.waiting)
		g.change(func() {
			g.see()
			g.released = false
		})
	}
}

// see makes the agent measure a GPU.
func (g *gpu) see() {
	if g.seen && !g.lost {
		g.fatal = false // the return of a lost GPU is a reset
	}
	g.seen, g.shown = g.lost, g.mig
	g.fatal, g.dying = g.fatal || g.dying, false
}

// release withholds all measured GPUs from pods.
func (m *model) release() {
	for i := range m.gpu {
		g := &m.gpu[i]
		g.change(func() { g.released = !m.unseen })
	}
}

// devices returns the number of MIG devices of a layout.
func devices(layout string) int {
	return map[string]int{"off": 0, "sevenths": 7, "balanced": 4}[layout]
}

// counted returns a copy of the expected XID counts of a GPU.
func (m *model) counted(i int) map[string]int { return maps.Clone(m.gpu[i].counts) }
