package chaos

import (
	"maps"
	"slices"
)

// model is what must be, worked out from the steps alone.
type model struct {
	gpu       [gpus]gpu
	source    string // up, dead, hung, blind
	clock     string // how far that of the engine is ahead, in seconds
	blocked   bool   // nobody reads the agent's standard error
	away      bool   // an operator has had the driver let go of
	stuck     bool   // it is not let go of yet: DCGM is in a call that hangs
	gone      bool   // a host engine has let go of it
	unasked   bool   // it was not asked to: there was no connection
	closing   bool   // the call that hangs is the session's last
	attaching bool   // it is told to take it back at the next connection
	frozen    bool   // the kubelet
	absent    bool   // the kubelet is stopped
	full      bool   // the disk
	atFull    int    // changed since then
	badly     bool   // the configuration in the file is bad
	unseen    bool   // the agent has not seen a GPU since its start
}

type gpu struct {
	lost     bool
	seen     bool // the loss, by the agent
	fatal    bool // an XID 48 stands
	dying    bool // an XID 48 has come that the agent cannot know of yet
	released bool // it was not seen since the driver was let go of
	remap    bool // a row waits to be remapped; not together with fatal, for which its end is a reset
	mig      string
	shown    string         // mig, as the agent knows it
	counts   map[string]int // XIDs that the agent must have counted, by number
	waiting  map[string]int // those that it cannot know of yet
	changes  int            // how often pods may not have it any more, or again
	before   int            // changes that came before the agent's start
	falls    int            // of the changes since then, those for the worse
	trips    int            // how often it broke, ever: that it was let go of is no such thing
}

func newModel() *model {
	m := &model{source: "up", clock: "0"}
	for i := range m.gpu {
		m.gpu[i] = gpu{mig: "off", shown: "off", counts: map[string]int{}, waiting: map[string]int{}}
	}
	return m
}

func (g gpu) sick() bool { return g.seen || g.fatal }

// withheld: no pod may get it.
func (g gpu) withheld() bool { return g.sick() || g.released }

// change changes a GPU and notes whether it became sick or well by that, and whether pods may have it.
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

// waits: there are XIDs that the agent has not read.
func (m *model) waits() bool {
	return slices.ContainsFunc(m.gpu[:], func(g gpu) bool { return len(g.waiting) > 0 })
}

// measured: the agent sees what is so.
func (m *model) measured() bool { return m.source == "up" && !m.away && !m.gone }

// changed counts the changes of all GPUs.
func (m *model) changed() (n int) {
	for _, g := range m.gpu {
		n += g.changes
	}
	return n
}

// xid counts XIDs as soon as the agent can know of them.
func (m *model) xid(i int, code string, n int) {
	if m.measured() {
		m.gpu[i].counts[code] += n
	} else {
		m.gpu[i].waiting[code] += n
	}
}

// look has the agent see what is so, if it can.
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

// see has the agent see a GPU.
func (g *gpu) see() {
	if g.seen && !g.lost {
		g.fatal = false // its return is a reset
	}
	g.seen, g.shown = g.lost, g.mig
	g.fatal, g.dying = g.fatal || g.dying, false
}

// release has the agent keep all GPUs from pods that it knows.
func (m *model) release() {
	for i := range m.gpu {
		g := &m.gpu[i]
		g.change(func() { g.released = !m.unseen })
	}
}

// devices is how many MIG devices a layout has.
func devices(layout string) int {
	return map[string]int{"off": 0, "sevenths": 7, "balanced": 4}[layout]
}

// counted returns a copy of what must have been counted of a GPU.
func (m *model) counted(i int) map[string]int { return maps.Clone(m.gpu[i].counts) }
