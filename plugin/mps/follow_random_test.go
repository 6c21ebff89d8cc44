package mps

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// For random sequences of faults, changes of the configuration, and restarts of the agent:
//   - a daemon is ready only while it runs and has its limits, but for the time that it takes to notice;
//   - the follower ends no daemon whose device a container holds, or may hold, or that has clients;
//   - a device that is not shared has no finding;
//   - all shared devices are ready when everything works again.
func TestFollowerRandomSequences(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			runFollower(t, func(h *followerTest) { playRandomly(h, rand.New(rand.NewPCG(seed, 7))) })
		})
	}
}

// randomPlay is what the test did, by device.
type randomPlay struct {
	*followerTest
	*rand.Rand
	devices []health.DeviceID
	shared  map[health.DeviceID]bool
	ended   map[health.DeviceID]int // the daemons that the test ended
	running map[health.DeviceID]int
	used    map[health.DeviceID]bool
	free    map[health.DeviceID]bool // no longer shared, and unused since: the daemon may end at any time
}

func playRandomly(h *followerTest, r *rand.Rand) {
	p := &randomPlay{
		followerTest: h, Rand: r, devices: []health.DeviceID{gpuA, gpuB}, shared: map[health.DeviceID]bool{gpuA: true, gpuB: true},
		ended: make(map[health.DeviceID]int), running: make(map[health.DeviceID]int), used: make(map[health.DeviceID]bool),
		free: make(map[health.DeviceID]bool),
	}
	h.want(p.devices...)
	for step := range 60 {
		id := p.devices[r.IntN(len(p.devices))]
		h.change(func() { p.changeDaemon(id) })
		p.changeNode(id)
		h.change(p.note)
		advance([]time.Duration{time.Second, 4 * time.Second, 50 * time.Second}[r.IntN(3)])
		state := h.f.State().Load()
		for _, id := range p.devices {
			p.check(step, id, state)
		}
	}
	h.change(func() {
		h.down, h.holdersErr = false, ""
		for _, d := range h.daemons {
			d.hang, d.delay, d.refuse, d.missing = false, 0, "", false
			clear(d.servers)
		}
	})
	advance(2 * time.Minute)
	for _, id := range p.devices {
		if p.shared[id] {
			h.wantState("in the end", id, true, "")
		}
	}
}

// changeDaemon has something happen to the daemon of a device.
func (p *randomPlay) changeDaemon(id health.DeviceID) {
	d := p.daemons[id]
	if d == nil {
		return
	}
	switch p.IntN(9) {
	case 0:
		p.ended[id] = d.pid
		p.kill(id)
	case 1:
		p.ended[id] = d.pid
		p.start(id, d)
	case 2:
		d.hang = !d.hang
	case 3:
		d.delay = []time.Duration{0, time.Second, 5 * time.Second}[p.IntN(3)]
	case 4:
		d.refuse = []string{"", "set_", "get_"}[p.IntN(3)]
	case 5:
		d.missing = !d.missing
	case 6:
		d.servers[17] = &fakeServer{
			status: []string{serverActive, serverFault}[p.IntN(2)], threads: "25.0", memory: "20480M",
			clients: []int{18},
		}
	case 7:
		delete(d.servers, 17)
	}
}

// changeNode has something happen to the agent, the containers, the configuration or mps-daemon.
func (p *randomPlay) changeNode(id health.DeviceID) {
	switch p.IntN(8) {
	case 0:
		p.change(func() { p.down = !p.down })
	case 1:
		p.newAgent()
	case 2:
		p.stop()
		p.run()
	case 3:
		if p.shared[id] {
			p.hold(id, string(id)+"::mps4::1")
		}
	case 4:
		p.hold(id)
	case 5:
		p.shared[id] = !p.shared[id]
		p.wantShared(p.shared, p.devices)
	case 6:
		p.change(p.restartSupervisor)
	case 7:
		p.change(func() { p.holdersErr = []string{"", "no kubelet"}[p.IntN(2)] })
	}
}

// restartSupervisor ends mps-daemon with all daemons, and starts it again.
func (p *randomPlay) restartSupervisor() {
	for id, d := range p.daemons {
		p.ended[id] = d.pid
		d.pid = 0
	}
	clear(p.daemons)
	p.told = nil
}

// note records which daemons run and which devices are used, for check.
func (p *randomPlay) note() {
	for _, id := range p.devices {
		if p.running[id] = 0; p.daemons[id] != nil {
			p.running[id] = p.daemons[id].pid
		}
		p.used[id] = p.holdersErr != "" || len(p.holders[id]) > 0
		p.free[id] = !p.shared[id] && (p.free[id] || !p.used[id])
	}
}

func (p *randomPlay) check(step int, id health.DeviceID, state *health.MPSState) {
	d := p.daemon(id)
	if was := p.running[id]; p.used[id] && !p.free[id] && was != 0 && d.pid != was && p.ended[id] != was {
		p.Fatalf("step %d: %s: daemon %d was ended while it was in use", step, id, was)
	}
	if state == nil || state.Daemons[id] == nil {
		return
	}
	switch s := state.Daemons[id]; {
	case !p.shared[id] && s.Cause != "":
		p.Fatalf("step %d: %s is not shared: %+v", step, id, s)
	case s.Ready && !s.Leaving && s.PID == d.pid && (d.threads != "25.0" || d.memory != "20480M"):
		p.Fatalf("step %d: %s is ready with the limits %s, %s", step, id, d.threads, d.memory)
	}
}

func (h *followerTest) wantShared(shared map[health.DeviceID]bool, devices []health.DeviceID) {
	var ids []health.DeviceID
	for _, id := range devices {
		if shared[id] {
			ids = append(ids, id)
		}
	}
	h.want(ids...)
}
