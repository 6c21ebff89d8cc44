package chaos

import "maps"

// model is what must be, worked out from the steps alone.
type model struct {
	gpu    [gpus]gpu
	source string // up, dead, hung, blind
	frozen bool   // the kubelet
	absent bool   // the kubelet is stopped
	full   bool   // the disk
	atFull int    // changed since then
	badly  bool   // the configuration in the file is bad
	unseen bool   // the agent has not seen a GPU since its start
}

type gpu struct {
	lost    bool
	seen    bool // the loss, by the agent
	fatal   bool // an XID 48 stands
	remap   bool // a row waits to be remapped; not together with fatal, for which its end is a reset
	mig     string
	counts  map[string]int // XIDs that the agent must have counted, by number
	waiting map[string]int // those that it cannot know of yet
	changes int            // how often it became sick or well
	before  int            // changes that came before the agent's start
}

func newModel() *model {
	m := &model{source: "up"}
	for i := range m.gpu {
		m.gpu[i] = gpu{mig: "off", counts: map[string]int{}, waiting: map[string]int{}}
	}
	return m
}

func (g gpu) sick() bool { return g.seen || g.fatal }

// change changes a GPU and notes whether it became sick or well by that.
func (g *gpu) change(f func()) {
	was := g.sick()
	f()
	if was != g.sick() {
		g.changes++
	}
}

// changed counts the changes of all GPUs.
func (m *model) changed() (n int) {
	for _, g := range m.gpu {
		n += g.changes
	}
	return n
}

// xid counts XIDs as soon as the agent can know of them.
func (m *model) xid(i int, code string, n int) {
	if m.source == "up" {
		m.gpu[i].counts[code] += n
	} else {
		m.gpu[i].waiting[code] += n
	}
}

// look has the agent see what is so, if it can.
func (m *model) look() {
	if m.source != "up" {
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
			if g.seen && !g.lost {
				g.fatal = false // its return is a reset
			}
			g.seen = g.lost
		})
	}
}

// devices is how many MIG devices a layout has.
func devices(layout string) int {
	return map[string]int{"off": 0, "sevenths": 7, "balanced": 4}[layout]
}

// counted returns a copy of what must have been counted of a GPU.
func (m *model) counted(i int) map[string]int { return maps.Clone(m.gpu[i].counts) }
