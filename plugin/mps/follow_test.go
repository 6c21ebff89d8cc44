package mps

import (
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

func TestFollowerSetsLimits(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		for _, id := range []health.DeviceID{gpuA, gpuB} {
			d := h.daemon(id)
			want := []string{"set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 20480M"}
			if slices.Sort(d.log); !slices.Equal(d.log, want) {
				t.Errorf("%s: commands %q, want %q", id, d.log, want)
			}
			if s := h.state(id); s.PID != d.pid || s.ThreadPercentage != 25 || s.PinnedMemory != 20<<30 {
				t.Errorf("%+v", s)
			}
		}
		if h.f.Err() != "" {
			t.Error(h.f.Err())
		}
		for _, test := range []struct {
			servers map[int]*fakeServer
			most    int
		}{
			{nil, 13},
			{map[int]*fakeServer{7: {status: serverActive, clients: []int{8}}}, 18}, // lists all twice
		} {
			h.change(func() { h.daemons[gpuA].servers = test.servers })
			advance(10 * time.Second)
			calls := len(h.daemon(gpuA).calls)
			advance(time.Minute)
			if n := len(h.daemon(gpuA).calls) - calls; n > test.most {
				t.Errorf("%d commands in a minute in which nothing happened, want about one in %v", n, examineInterval)
			}
		}
	})
}

// A daemon that takes long is ready only when its limits hold, and is no finding meanwhile.
func TestFollowerWaitsForSlowDaemon(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.change(func() { h.daemons[gpuA] = &fakeDaemon{delay: 5 * time.Second} })
		h.want(gpuA)
		for range 60 {
			advance(time.Second)
			if d := h.daemon(gpuA); h.state(gpuA).Ready {
				if d.memory != "20480M" || d.threads != "25.0" {
					t.Errorf("ready with the limits %s and %s", d.memory, d.threads)
				}
				return
			}
			h.wantState("while it starts", gpuA, false, "")
		}
		t.Error("not ready within a minute")
	})
}

// After its restart the agent changes nothing at daemons that have their limits.
func TestFollowerAdoptsDaemons(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20G", clients: []int{8}})
		h.serve(gpuA, 9, fakeServer{status: serverActive, threads: "100.0"}) // started before the limits were set
		before := h.daemon(gpuA)
		h.newAgent()
		advance(5 * time.Second)
		h.wantState("after the restart", gpuA, true, "")
		d := h.daemon(gpuA)
		if got := d.log[len(before.log):]; d.pid != before.pid || !slices.Equal(got,
			[]string{"set_active_thread_percentage 9 25", "set_device_pinned_mem_limit 9 0 20480M"}) {
			t.Errorf("daemon %d, then %d; commands %q", before.pid, d.pid, got)
		}
		if s := h.state(gpuA); s.ClientCount() != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// A release without commands about servers has the defaults only. They do not reach a server that runs when they change.
func TestFollowerCannotLimitServers(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "100.0", clients: []int{8}})
		h.change(func() { h.daemons[gpuA].refuse, h.daemons[gpuA].refusal = "set_active_thread", "Unknown command" })
		h.newAgent()
		advance(5 * time.Second)
		h.wantState("adopted", gpuA, true, "")
		other := spec(gpuA)
		other.ThreadPercentage = 50
		h.desired.Store(&Desired{Root: h.root, Control: "control", Daemons: []Spec{other}})
		advance(20 * time.Second)
		h.wantState("changed", gpuA, false, health.CauseMPSLimits)
	})
}

func TestFollowerChangesLimits(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M"})
		s := spec(gpuA)
		s.ThreadPercentage, s.PinnedMemory = 50, 0
		h.desired.Store(&Desired{Root: h.root, Control: "control", Daemons: []Spec{s}})
		synctest.Wait()
		advance(time.Second)
		h.wantState("after the change", gpuA, true, "")
		d := h.daemon(gpuA)
		if d.threads != "50.0" || d.memory != "1048576M" || d.servers[7].threads != "50.0" || d.servers[7].memory != "1048576M" {
			t.Errorf("%+v %+v", d, d.servers[7])
		}
		if got := h.state(gpuA); got.PinnedMemory != 0 || got.ThreadPercentage != 50 {
			t.Errorf("%+v", got)
		}
		advance(3 * limitsInterval)
		if now := h.daemon(gpuA); len(now.log) != len(d.log) {
			t.Errorf("set again: %q", now.log[len(d.log):])
		}
		h.change(func() { h.daemons[gpuA].threads = "100.0" }) // by somebody else
		advance(2 * limitsInterval)
		if now := h.daemon(gpuA); now.threads != "50.0" || now.servers[7].threads != "50.0" {
			t.Errorf("%+v", now)
		}
		s.ThreadPercentage = 1
		h.desired.Store(&Desired{Root: h.root, Control: "control", Daemons: []Spec{s}})
		advance(2 * time.Second)
		h.wantState("one percent", gpuA, true, "")
		if now := h.daemon(gpuA); now.threads != "1.0" {
			t.Errorf("%+v", now)
		}
	})
}

// The death of a daemon makes its device unhealthy at once, and no other. It is ready again when its successor has the limits.
func TestFollowerDaemonDies(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.change(func() { h.kill(gpuA); h.daemons[gpuA].dead = true })
		advance(1100 * time.Millisecond)
		h.wantState("dead", gpuA, false, health.CauseMPSDown)
		h.wantState("the other", gpuB, true, "")
		if s := h.state(gpuA); s.PID != 0 || !strings.Contains(s.Reason, "signal: killed") {
			t.Errorf("%+v", s)
		}
		h.change(func() { h.daemons[gpuA].dead, h.daemons[gpuA].refuse = false, "set_default_device" })
		advance(10 * time.Second)
		h.wantState("without limits", gpuA, false, health.CauseMPSLimits)
		h.change(func() { h.daemons[gpuA].refuse = "" })
		advance(10 * time.Second)
		h.wantState("with limits", gpuA, true, "")
		if s := h.state(gpuA); s.Restarts != 1 || s.PID != h.daemon(gpuA).pid {
			t.Errorf("%+v", s)
		}

		// A restart that is over before the next status is noticed too.
		h.change(func() { h.start(gpuA, h.daemons[gpuA]); h.daemons[gpuA].delay = 4 * time.Second })
		advance(1100 * time.Millisecond)
		h.wantState("restarted", gpuA, false, health.CauseMPSDown)
		advance(30 * time.Second)
		h.wantState("restarted with limits", gpuA, true, "")
	})
}

func TestFollowerDaemonHangs(t *testing.T) {
	for _, test := range []struct {
		name     string
		prepare  func(h *followerTest)
		restarts int
	}{
		{"unused", func(*followerTest) {}, 1},
		{"held", func(h *followerTest) { h.hold(gpuA, string(gpuA)+"::mps4::3") }, 0},
		{"held by a claim", func(h *followerTest) { h.holdClaim(gpuA) }, 0},
		{"claim that waits for the daemon", func(h *followerTest) {
			h.change(func() {
				h.claims.List = []offer.Claim{{UID: "a", Namespace: "a", Name: "mps", Parts: []offer.Part{{Device: gpuA, MPS: true}}}}
			})
		}, 1},
		{"holders unknown", func(h *followerTest) { h.change(func() { h.holdersErr = "no kubelet" }) }, 0},
		{"clients outside of containers", func(h *followerTest) {
			h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M", clients: []int{8}})
			advance(10 * time.Second)
		}, 0},
		{"clients outside of containers that have exited", func(h *followerTest) {
			h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M", clients: []int{8}})
			advance(10 * time.Second)
			h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M"})
			advance(40 * time.Second)
		}, 1},
		{"container that has ended", func(h *followerTest) {
			h.hold(gpuA, string(gpuA)+"::mps4::3")
			h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M", clients: []int{8}})
			time.AfterFunc(2*time.Minute, func() { h.hold(gpuA) })
		}, 1},
		{"container with a claim that has ended", func(h *followerTest) {
			h.holdClaim(gpuA)
			h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M", clients: []int{8}})
			time.AfterFunc(2*time.Minute, func() { h.hold(gpuA) })
		}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.ready(gpuA, gpuB)
				test.prepare(h)
				h.change(func() { h.daemons[gpuA].delay = controlTimeout - time.Second }) // slow, but not hung
				advance(time.Minute)
				h.wantState("slow", gpuA, true, "")
				h.change(func() { h.daemons[gpuA].hang = true })
				advance(45 * time.Second)
				h.wantState("hung", gpuA, false, health.CauseMPSHung)
				h.wantState("the other", gpuB, true, "")
				advance(time.Minute)
				h.change(func() {
					if len(h.restarts) != test.restarts {
						t.Errorf("%d restarts, want %d", len(h.restarts), test.restarts)
					}
					h.daemons[gpuA].hang, h.daemons[gpuA].delay = false, 0
				})
				advance(20 * time.Second)
				h.wantState("answers again", gpuA, true, "")
			})
		})
	}
}

// A daemon that hangs at any command hangs.
func TestFollowerDaemonHangsAtCommand(t *testing.T) {
	for _, command := range []string{
		"get_default_active_thread_percentage", "set_default_active_thread_percentage", "get_default_device_pinned_mem_limit",
		"set_default_device_pinned_mem_limit", "get_server_list", "get_server_status", "get_client_list", "get_active_thread_percentage",
		"set_active_thread_percentage", "get_device_pinned_mem_limit", "set_device_pinned_mem_limit",
	} {
		t.Run(command, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.ready(gpuA)
				h.hold(gpuA, string(gpuA)+"::0") // so that it is not restarted
				h.change(func() {
					d := h.daemons[gpuA]
					h.start(gpuA, d)
					d.servers[7], d.silent = &fakeServer{status: serverActive, threads: "100.0", clients: []int{8}}, command
				})
				advance(time.Minute)
				h.wantState("hangs", gpuA, false, health.CauseMPSHung)
				h.change(func() { h.daemons[gpuA].silent = "" })
				advance(30 * time.Second)
				h.wantState("answers", gpuA, true, "")
				if s := h.state(gpuA); s.ClientCount() != 1 || len(h.daemon(gpuA).servers) != 1 || h.daemon(gpuA).servers[7].threads != "25.0" {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// A daemon of somebody else keeps the shares from new pods until it has ended, also if it is there first. It gets no command.
func TestFollowerForeignDaemon(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.change(func() { h.daemons[gpuA] = &fakeDaemon{dead: true, foreign: true} })
		h.want(gpuA, gpuB)
		advance(2 * time.Second)
		h.wantState("there first", gpuA, false, health.CauseMPSForeign)
		h.wantState("the other", gpuB, true, "")
		if s := h.state(gpuA); s.Action != health.ActionEndForeignMPS || s.PID != 0 || len(h.daemon(gpuA).calls) != 0 {
			t.Errorf("%+v, commands %q", s, h.daemon(gpuA).calls)
		}
		h.change(func() { h.down = true })
		advance(time.Minute)
		h.wantState("mps-daemon down", gpuA, false, health.CauseMPSDown)
		h.change(func() { h.down = false; h.daemons[gpuA].dead, h.daemons[gpuA].foreign = false, false })
		advance(10 * time.Second)
		h.wantState("ended", gpuA, true, "")
	})
}

func TestFollowerFault(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.serve(gpuA, 7, fakeServer{status: serverFault, clients: []int{8}})
		advance(6 * time.Second)
		h.wantState("fault", gpuA, false, health.CauseMPSFault)
		h.wantState("the other", gpuB, true, "")
		h.serve(gpuA, 7, fakeServer{status: "gibberish"})
		advance(6 * time.Second)
		h.wantState("unknown status", gpuA, false, health.CauseMPSFault)
		h.serve(gpuA, 7, fakeServer{status: serverActive})
		advance(6 * time.Second)
		h.wantState("active again", gpuA, true, "")
		h.serve(gpuA, 7, fakeServer{status: "gibberish"})
		advance(6 * time.Second)
		h.wantState("unknown status", gpuA, true, "")
	})
}

func TestFollowerLimits(t *testing.T) {
	for _, test := range []struct {
		name   string
		node   func(n *fakeNode)
		daemon fakeDaemon
		cause  string
	}{
		{"not reported", func(n *fakeNode) { n.oldReleases = true }, fakeDaemon{}, ""},
		{"rounded", nil, fakeDaemon{answer: map[string]string{"get_default_device_pinned_mem_limit 0": "20G"}}, ""},
		{"other memory", nil, fakeDaemon{answer: map[string]string{"get_default_device_pinned_mem_limit 0": "79G"}}, health.CauseMPSLimits},
		{"other percentage", nil, fakeDaemon{answer: map[string]string{"get_default_active_thread_percentage": "100.0"}}, health.CauseMPSLimits},
		{"text", nil, fakeDaemon{answer: map[string]string{"get_default_active_thread_percentage": "a quarter"}}, ""},
		{"memory refused", nil, fakeDaemon{refuse: "set_default_device_pinned"}, health.CauseMPSLimits},
		{"percentage refused", nil, fakeDaemon{refuse: "set_default_active_thread"}, health.CauseMPSLimits},
		{"no server list", nil, fakeDaemon{refuse: "get_server", refusal: "Unknown command"}, ""},
		{"server list refused", nil, fakeDaemon{refuse: "get_server_list"}, health.CauseMPSNotReady},
	} {
		t.Run(test.name, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.change(func() {
					h.daemons[gpuA] = &test.daemon
					if test.node != nil {
						test.node(h.fakeNode)
					}
				})
				h.want(gpuA)
				advance(time.Minute)
				h.wantState("started", gpuA, test.cause == "", test.cause)
				reason := map[string]string{
					"other memory":     "the pinned memory limit was set to 20480 MiB, but the daemon reports 80896 MiB",
					"other percentage": "the active thread percentage was set to 25, but the daemon reports 100",
				}[test.name]
				if d := h.state(gpuA); !strings.HasSuffix(d.Reason, reason) {
					t.Errorf("reason %q, want %q", d.Reason, reason)
				}
				h.change(func() { d := h.daemons[gpuA]; d.refuse, d.answer = "", nil })
				advance(20 * time.Second)
				h.wantState("repaired", gpuA, true, "")
			})
		})
	}
}

// The servers get their limits also from a daemon that does not report those it was given for later servers.
func TestFollowerLimitsServersDespiteDefaults(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.serve(gpuA, 7, fakeServer{status: serverActive, threads: "25.0", memory: "20480M"})
		advance(2 * limitsInterval)
		h.wantState("all limits", gpuA, true, "")
		h.change(func() { // by somebody else
			d := h.daemons[gpuA]
			d.answer, d.servers[7].memory = map[string]string{"get_default_device_pinned_mem_limit 0": "79G"}, "79G"
		})
		advance(2 * limitsInterval)
		h.wantState("other defaults", gpuA, false, health.CauseMPSLimits)
		if s := h.daemon(gpuA).servers[7]; s.memory != "20480M" {
			t.Errorf("the server has the limit %s", s.memory)
		}
	})
}

// Without mps-daemon, daemons that answer stay ready, and one that does not is down.
func TestFollowerWithoutSupervisor(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.change(func() { h.down = true })
		advance(time.Minute)
		h.wantState("mps-daemon down", gpuA, true, "")
		if !strings.Contains(h.f.Err(), "mps-daemon cannot be reached") {
			t.Errorf("Err: %q", h.f.Err())
		}
		h.change(func() { h.kill(gpuA) })
		advance(6 * time.Second)
		h.wantState("daemon dead", gpuA, false, health.CauseMPSDown)
		h.wantState("the other", gpuB, true, "")
		h.change(func() { h.down = false })
		advance(10 * time.Second)
		h.wantState("mps-daemon back", gpuA, true, "")
		if h.f.Err() != "" {
			t.Error(h.f.Err())
		}
	})
	// All end together, as with the container of mps-daemon.
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.change(func() { h.down = true; h.kill(gpuA) })
		advance(2 * time.Second)
		h.wantState("all dead", gpuA, false, health.CauseMPSDown)
	})
	runFollower(t, func(h *followerTest) {
		h.change(func() { h.down = true })
		h.want(gpuA)
		advance(20 * time.Second)
		h.wantState("starting", gpuA, false, "")
		advance(15 * time.Second)
		h.wantState("never there", gpuA, false, health.CauseMPSDown)
		h.change(func() { h.down = false })
		advance(10 * time.Second)
		h.wantState("there", gpuA, true, "")
	})
	// A device can leave although mps-daemon never was there: no daemon uses it.
	runFollower(t, func(h *followerTest) {
		h.change(func() { h.down = true })
		h.want(gpuA)
		advance(time.Minute)
		h.want()
		advance(time.Minute)
		if s := h.f.State().Load().Daemons; len(s) != 0 {
			t.Errorf("left: %+v", s)
		}
	})
}

func TestFollowerFilesMissing(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.change(func() { h.shm = "not mounted" })
		advance(6 * time.Second)
		h.wantState("shm is another", gpuA, false, health.CauseMPSNotReady)
		h.change(func() { h.shm = "" })
		advance(6 * time.Second)
		h.wantState("shm is right", gpuA, true, "")
		if err := os.RemoveAll(h.root.PipeDir(gpuA)); err != nil {
			t.Fatal(err)
		}
		h.hold(gpuA, string(gpuA)+"::0")
		advance(2 * time.Minute)
		h.wantState("no pipe directory", gpuA, false, health.CauseMPSNotReady)
		h.hold(gpuA)
		advance(20 * time.Second)
		h.wantState("restarted", gpuA, true, "")
		h.change(func() { clear(h.daemons); h.told = nil })
		advance(7 * time.Second)
		h.wantState("mps-daemon has restarted", gpuA, true, "")
	})
}

// The daemon of a device that leaves MPS runs until nobody uses it, and the device has its state until then.
func TestFollowerLeaving(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.hold(gpuA, string(gpuA)+"::mps4::3")
		h.hold(gpuB, string(gpuB)) // not a share
		h.serve(gpuA, 7, fakeServer{status: serverActive, clients: []int{8}})
		h.want(gpuB)
		advance(time.Minute)
		if s := h.state(gpuA); !s.Leaving || s.Cause != "" || h.daemon(gpuA).pid == 0 {
			t.Errorf("held: %+v", s)
		}
		h.newAgent()
		advance(time.Minute)
		if s := h.state(gpuA); !s.Leaving || !s.Ready || h.daemon(gpuA).pid == 0 {
			t.Errorf("held, agent restarted: %+v", s)
		}
		h.change(func() { h.daemons[gpuA].hang = true }) // no finding
		advance(time.Minute)
		if s := h.state(gpuA); !s.Leaving || s.Cause != "" {
			t.Errorf("hung: %+v", s)
		}
		h.change(func() { h.daemons[gpuA].hang = false })
		h.change(func() { h.holdersErr = "no kubelet" })
		h.hold(gpuA)
		advance(time.Minute)
		if h.daemon(gpuA).pid == 0 {
			t.Error("ended while the holders were unknown")
		}
		h.change(func() { h.holdersErr = "" })
		advance(time.Minute)
		if h.daemon(gpuA).pid == 0 {
			t.Error("ended while a client was connected")
		}
		h.change(func() { h.stubborn, h.settling = true, true })
		h.serve(gpuA, 7, fakeServer{status: serverActive})
		advance(time.Minute)
		if len(h.told.Daemons) != 2 {
			t.Errorf("released before the kubelet has read its pods: %+v", h.told)
		}
		h.change(func() { h.settling = false })
		advance(time.Minute)
		if len(h.told.Daemons) != 1 {
			t.Errorf("%+v", h.told)
		}
		if s := h.state(gpuA); !s.Leaving {
			t.Errorf("being stopped: %+v", s)
		}
		h.change(func() { h.stubborn = false })
		advance(3 * time.Second)
		if s := h.f.State().Load().Daemons; s[gpuA] != nil || s[gpuB] == nil || !s[gpuB].Ready {
			t.Errorf("left: %+v", s)
		}
		h.want()
		advance(20 * time.Second)
		if s := h.f.State().Load().Daemons; len(s) != 0 || h.daemon(gpuB).pid != 0 {
			t.Errorf("all left: %+v", s)
		}
	})
}

// The kubelet may list a container a moment after its share was allocated.
func TestFollowerLeavingAwaitsKubelet(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.want()
		advance(time.Second)
		h.f.poke() // the daemon has no client
		advance(holdersSettle - 2*time.Second)
		h.hold(gpuA, string(gpuA)+"::mps4::3")
		advance(time.Minute)
		if s := h.state(gpuA); h.daemon(gpuA).pid == 0 || !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

// One answer that does not come is no finding.
func TestFollowerOneAnswerMissing(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.change(func() { h.daemons[gpuA].hang = true })
		advance(examineInterval + controlTimeout/2)
		h.change(func() { h.daemons[gpuA].hang = false })
		for range 30 {
			advance(time.Second)
			h.wantState("after a missing answer", gpuA, true, "")
		}
	})
}

// A limit that an earlier agent has set, and that the daemon cannot report, is removed when the configuration has none any more.
func TestFollowerRemovesLimitOfEarlierAgent(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.change(func() { h.oldReleases = true })
		h.ready(gpuA)
		h.stop()
		s := spec(gpuA)
		s.PinnedMemory = 0
		h.desired.Store(&Desired{Root: h.root, Control: "control", Daemons: []Spec{s}})
		h.newAgent()
		advance(10 * time.Second)
		h.wantState("without a limit", gpuA, true, "")
		if d := h.daemon(gpuA); d.memory != "1048576M" {
			t.Errorf("the limit is %s", d.memory)
		}
	})
}

// The daemons of an agent that has ended leave only when nobody uses them, also if mps-daemon does not respond at first, or has forgotten
// them.
func TestFollowerTakesOver(t *testing.T) {
	for name, c := range map[string]struct {
		begin, later func(h *followerTest)
		kept         bool // the daemon that nobody wants but a container holds
	}{
		"at once":           {func(*followerTest) {}, func(*followerTest) {}, true},
		"after a hang":      {func(h *followerTest) { h.down = true }, func(h *followerTest) { h.down = false }, true},
		"mps-daemon is new": {func(h *followerTest) { clear(h.daemons); h.told = nil }, func(*followerTest) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.ready(gpuA, gpuB)
				h.hold(gpuB, string(gpuB)+"::mps4::3")
				pid := h.daemon(gpuB).pid
				h.stop()
				h.want(gpuA)
				h.change(func() { c.begin(h) })
				h.newAgent()
				advance(30 * time.Second)
				h.change(func() { c.later(h) })
				advance(30 * time.Second)
				h.wantState(name, gpuA, true, "")
				if s := h.state(gpuB); !s.Leaving || s.Cause != "" || c.kept && (s.PID != pid || s.PinnedMemory != 20<<30) {
					t.Errorf("%+v, daemon %d", s, h.daemon(gpuB).pid)
				}
				h.hold(gpuB)
				advance(30 * time.Second)
				h.change(func() {
					if h.daemons[gpuB] != nil || len(h.told.Daemons) != 1 || h.f.State().Load().Daemons[gpuB] != nil {
						t.Errorf("unused: %+v, told %+v", h.daemons[gpuB], h.told)
					}
				})
			})
		})
	}
}

// A new mps-daemon starts none for a device that has left, of which only the directory is there: pods may have the whole device.
func TestFollowerStartsNoneThatLeft(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.stop()
		h.want(gpuA)
		h.change(func() { clear(h.daemons); h.told = nil })
		h.hold(gpuB, string(gpuB)) // the whole device
		h.newAgent()
		for range 200 {
			advance(100 * time.Millisecond)
			if h.daemon(gpuB).pid != 0 {
				t.Fatal("a daemon was started")
			}
		}
		h.wantState("desired", gpuA, true, "")
		h.change(func() {
			if h.f.State().Load().Daemons[gpuB] != nil {
				t.Error("it has not left")
			}
		})
	})
}

// A device has left when mps-daemon has done what it was told: it may have to set back a compute mode first.
func TestFollowerAwaitsNewSupervisor(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.stop()
		h.want()
		h.change(func() { clear(h.daemons); h.told, h.slow, h.follows = nil, true, 0 })
		h.newAgent()
		advance(time.Minute)
		h.change(func() {
			if h.follows < 50 || h.f.State().Load().Daemons[gpuA] == nil {
				t.Errorf("told %d times, state %+v", h.follows, h.f.State().Load().Daemons)
			}
			h.slow = false
		})
		advance(5 * time.Second)
		h.change(func() {
			if len(h.f.State().Load().Daemons) > 0 {
				t.Errorf("left: %+v", h.f.State().Load().Daemons)
			}
		})
	})
}

// What a detach has stopped starts again only if it is desired.
func TestFollowerStartsNoneThatWasStopped(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA, gpuB)
		h.hold(gpuB, string(gpuB)+"::mps4::3")
		h.want(gpuA)
		advance(2 * time.Second)
		h.stop()
		h.f.Stop(h.Context())
		h.run()
		for range 100 {
			advance(100 * time.Millisecond)
			if h.daemon(gpuB).pid != 0 {
				t.Fatal("a daemon was started")
			}
		}
		h.wantState("desired", gpuA, true, "")
	})
}

// A device that left while mps-daemon did not respond is not forgotten: mps-daemon may still run its daemon.
func TestFollowerTellsLate(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.change(func() { h.down = true; h.daemons[gpuA].missing = true })
		h.want()
		advance(time.Minute)
		if s := h.f.State().Load().Daemons; len(s) != 0 {
			t.Errorf("left: %+v", s)
		}
		h.change(func() { h.down = false })
		advance(5 * time.Second)
		if d := h.daemon(gpuA); d.pid != 0 {
			t.Errorf("daemon %d runs, and no agent follows it", d.pid)
		}
		h.ready(gpuA)
		h.change(func() { h.down = true; h.daemons[gpuA].missing = true })
		h.want()
		h.newAgent()
		advance(time.Minute)
		h.change(func() { h.down = false; h.daemons[gpuA].missing = false })
		advance(time.Minute)
		if d := h.daemon(gpuA); d.pid != 0 {
			t.Errorf("daemon %d of an earlier agent runs, and no agent follows it", d.pid)
		}
		// mps-daemon restarts before it has set back the compute mode of the last device.
		h.ready(gpuA)
		h.change(func() { h.stubborn = true })
		h.want()
		advance(time.Minute)
		h.change(func() { h.down, h.daemons[gpuA].missing = true, true })
		advance(time.Minute)
		h.change(func() { h.down, h.stubborn, h.told = false, false, nil; clear(h.daemons) })
		advance(5 * time.Second)
		if h.told == nil || len(h.told.Daemons) > 0 {
			t.Errorf("a new mps-daemon was told %+v", h.told)
		}
		calls := 0
		h.change(func() { calls = h.follows })
		advance(time.Hour)
		h.change(func() {
			if h.follows != calls {
				t.Errorf("told %d times after everything has left", h.follows-calls)
			}
		})
	})
}

// A device that is shared again keeps its daemon.
func TestFollowerLeavingEnds(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.hold(gpuA, string(gpuA)+"::mps4::3")
		pid := h.daemon(gpuA).pid
		h.want()
		advance(20 * time.Second)
		h.want(gpuA)
		advance(2 * time.Second)
		if s := h.state(gpuA); s.Leaving || !s.Ready || s.PID != pid {
			t.Errorf("%+v", s)
		}
	})
}

func TestFollowerStops(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.f.Stop(h.Context()) // nothing was ever desired
		if h.told != nil {
			t.Errorf("told %+v", h.told)
		}
		h.ready(gpuA, gpuB)
		h.stop()
		if h.daemon(gpuA).pid == 0 {
			t.Error("the end of Run stopped a daemon")
		}
		start := time.Now()
		h.f.Stop(h.Context())
		if h.daemon(gpuA).pid != 0 || h.daemon(gpuB).pid != 0 || time.Since(start) > 5*time.Second {
			t.Errorf("daemons %d and %d run after %v", h.daemon(gpuA).pid, h.daemon(gpuB).pid, time.Since(start))
		}
		h.wantState("stopped", gpuA, false, "")
		h.f.Stop(h.Context()) // as an agent that finds a detach in force
		h.run()
		advance(5 * time.Second)
		h.wantState("attached", gpuA, true, "")
		h.wantState("attached", gpuB, true, "")

		// The last daemon is still ending.
		h.change(func() { h.stubborn = true })
		h.want()
		advance(time.Minute)
		if len(h.told.Daemons) != 0 || h.daemon(gpuA).pid == 0 {
			t.Fatalf("%+v", h.told)
		}
		h.stop()
		time.AfterFunc(20*time.Second, func() { h.change(func() { h.stubborn = false }) })
		h.f.Stop(h.Context())
		if h.daemon(gpuA).pid != 0 {
			t.Error("returned while a daemon was ending")
		}
		h.run()
		h.ready(gpuA, gpuB)

		// mps-daemon hangs, or does not stop them.
		h.stop()
		h.change(func() { h.stubborn = true })
		start = time.Now()
		h.f.Stop(h.Context())
		if took := time.Since(start); took < stopLimit || took > stopLimit+5*time.Second {
			t.Errorf("returned after %v", took)
		}
		h.change(func() { h.down = true })
		start = time.Now()
		h.f.Stop(h.Context())
		if took := time.Since(start); took > 2*stopUnreachable {
			t.Errorf("returned after %v", took)
		}
		if !h.told.Stopped || len(h.told.Daemons) != 2 {
			t.Errorf("%+v", h.told)
		}

		// mps-daemon has restarted: it may have compute modes to set back.
		h.change(func() { h.down, h.stubborn, h.told = false, false, nil })
		h.f.Stop(h.Context())
		if !h.told.Stopped || !h.told.has(gpuA) || !h.told.has(gpuB) {
			t.Errorf("%+v", h.told)
		}
	})
}

// A new session of the same source interrupts nothing.
func TestFollowerRunAgain(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		for range 5 {
			h.stop()
			h.run()
			for range 40 {
				advance(100 * time.Millisecond)
				h.wantState("new session", gpuA, true, "")
			}
		}
		if d := h.daemon(gpuA); len(d.log) != 2 {
			t.Errorf("%q", d.log)
		}
	})
}

// Without MPS nothing is asked, and nothing ticks.
func TestFollowerIdle(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.f.call = nil // would panic
		advance(time.Hour)
		h.want()
		advance(time.Hour)
		if h.f.State().Load() != nil {
			t.Errorf("%+v", h.f.State().Load())
		}
	})
}

func TestTerminateClient(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		if err := h.f.TerminateClient(h.Context(), gpuA, 8); !errors.Is(err, ErrNotServed) {
			t.Error(err)
		}
		h.ready(gpuA)
		if err := h.f.TerminateClient(h.Context(), gpuA, 8); !errors.Is(err, ErrNoClient) {
			t.Error(err)
		}
		h.serve(gpuA, 7, fakeServer{status: serverActive, clients: []int{8, 9}})
		if err := h.f.TerminateClient(h.Context(), gpuA, 10); !errors.Is(err, ErrNoClient) || !strings.Contains(err.Error(), "8, 9") {
			t.Error(err)
		}
		if err := h.f.TerminateClient(h.Context(), gpuA, 8); err != nil {
			t.Error(err)
		}
		advance(time.Millisecond)
		if s := h.state(gpuA); !reflect.DeepEqual(s.Servers[0].Clients, []int{9}) {
			t.Errorf("%+v", s)
		}
	})
}
