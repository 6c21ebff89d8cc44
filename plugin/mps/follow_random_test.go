package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
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

func playRandomly(h *followerTest, r *rand.Rand) {
	devices := []health.DeviceID{gpuA, gpuB}
	shared := map[health.DeviceID]bool{gpuA: true, gpuB: true}
	ended := make(map[health.DeviceID]int) // the daemons that the test ended
	running := make(map[health.DeviceID]int)
	used := make(map[health.DeviceID]bool)
	free := make(map[health.DeviceID]bool) // no longer shared, and unused since: the daemon may end at any time
	h.want(devices...)
	for step := range 60 {
		id := devices[r.IntN(len(devices))]
		h.change(func() {
			d := h.daemons[id]
			if d == nil {
				return
			}
			switch r.IntN(9) {
			case 0:
				ended[id] = d.pid
				h.kill(id)
			case 1:
				ended[id] = d.pid
				h.start(id, d)
			case 2:
				d.hang = !d.hang
			case 3:
				d.delay = []time.Duration{0, time.Second, 5 * time.Second}[r.IntN(3)]
			case 4:
				d.refuse = []string{"", "set_", "get_"}[r.IntN(3)]
			case 5:
				d.missing = !d.missing
			case 6:
				d.servers[17] = &fakeServer{
					status: []string{serverActive, serverFault}[r.IntN(2)], threads: "25.0", memory: "20480M",
					clients: []int{18},
				}
			case 7:
				delete(d.servers, 17)
			}
		})
		switch r.IntN(8) {
		case 0:
			h.change(func() { h.down = !h.down })
		case 1:
			h.newAgent()
		case 2:
			h.stop()
			h.run()
		case 3:
			if shared[id] {
				h.hold(id, string(id)+"::mps4::1")
			}
		case 4:
			h.hold(id)
		case 5:
			shared[id] = !shared[id]
			h.wantShared(shared, devices)
		case 6:
			if err := os.Remove(h.root.DesiredFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
				h.Fatal(err)
			}
		case 7:
			h.change(func() { h.holdersErr = []string{"", "no kubelet"}[r.IntN(2)] })
		}
		h.change(func() {
			for _, id := range devices {
				if running[id] = 0; h.daemons[id] != nil {
					running[id] = h.daemons[id].pid
				}
				used[id] = h.holdersErr != "" || len(h.holders[id]) > 0
				free[id] = !shared[id] && (free[id] || !used[id])
			}
		})
		advance([]time.Duration{time.Second, 4 * time.Second, 50 * time.Second}[r.IntN(3)])

		state := h.f.State().Load()
		for _, id := range devices {
			d := h.daemon(id)
			if was := running[id]; used[id] && !free[id] && was != 0 && d.pid != was && ended[id] != was {
				h.Fatalf("step %d: %s: daemon %d was ended while it was in use", step, id, was)
			}
			if state == nil || state.Daemons[id] == nil {
				continue
			}
			switch s := state.Daemons[id]; {
			case !shared[id] && s.Cause != "":
				h.Fatalf("step %d: %s is not shared: %+v", step, id, s)
			case s.Ready && !s.Leaving && s.PID == d.pid && (d.threads != "25.0" || d.memory != "20480M"):
				h.Fatalf("step %d: %s is ready with the limits %s, %s", step, id, d.threads, d.memory)
			}
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
	for _, id := range devices {
		if shared[id] {
			h.wantState("in the end", id, true, "")
		}
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
