package monitor

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// machine is a source with a GPU of its own.
func machine(id health.DeviceID) *script {
	s := newScript()
	s.reading.Devices = []health.Device{{ID: id, GI: -1, CI: -1}}
	s.reading.Samples[0].Device = id
	return s
}

func (s *script) as(inventory string, invented bool) *Source {
	return &Source{SourceID: health.SourceID{Kind: inventory, Inventory: inventory, Simulated: invented}, Open: s.Open, StallAfter: 10 * time.Second}
}

// What another source has invented is not shown, and not given out, while this one is away. Devices that it may see too
// are kept: pods hold them.
func TestMonitorForgetsWhatIsInvented(t *testing.T) {
	for name, c := range map[string]struct {
		from, to               string
		fromInvents, toInvents bool
		forgets                bool
	}{
		"a simulation, then DCGM":      {"sim a", "dcgm ", true, false, true},
		"DCGM, then a simulation":      {"dcgm ", "sim a", false, true, true},
		"another simulation":           {"sim a", "sim b", true, true, true},
		"the same simulation":          {"sim a", "sim a", true, true, false},
		"a host engine instead":        {"dcgm ", "dcgm localhost:5555", false, false, false},
		"other fields of that engine":  {"dcgm x", "dcgm x", false, false, false},
		"the engine at another socket": {"dcgm localhost:5555", "dcgm unix:///run/e", false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				defer b.stop()
				b.source.Store(machine("GPU-a").as(c.from, c.fromInvents))
				pass(2 * time.Second)
				next := machine("GPU-a")
				if c.forgets {
					next = machine("GPU-b")
				}
				next.set(func(s *script) { s.openErr = errors.New("no libdcgm.so.4") })
				b.source.Store(next.as(c.to, c.toInvents))
				synctest.Wait()
				for _, wait := range []time.Duration{0, time.Hour} {
					pass(wait)
					s := b.out.Load()
					if (len(s.Devices) == 0) != c.forgets || s.Polled() == c.forgets || s.Source.Status != health.SourceDown || s.Source.Kind != c.to {
						t.Errorf("after %v: %+v", wait, s)
					}
					if c.forgets && s.Source.Versions != (health.Versions{}) {
						t.Errorf("after %v: versions of another source: %+v", wait, s.Source.Versions)
					}
				}
				next.set(func(s *script) { s.openErr = nil })
				pass(time.Minute)
				s := b.out.Load()
				if len(s.Devices) != 1 || s.Devices[0].Device.ID != next.reading.Devices[0].ID || s.Devices[0].Verdict.State != health.Healthy || !s.Polled() {
					t.Errorf("when it is up: %+v", s)
				}
			})
		})
	}
}

// Whatever sources follow each other, up, down and let go of: no device is shown that the source of now cannot have.
func TestSourcesInAnyOrder(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 33))
			b := monitor(t)
			defer b.stop()
			sources := []*Source{
				machine("GPU-real").as("dcgm ", false), machine("GPU-real").as("dcgm localhost:5555", false),
				machine("GPU-a").as("sim a", true), machine("GPU-b").as("sim b", true),
			}
			ids := []health.DeviceID{"GPU-real", "GPU-real", "GPU-a", "GPU-b"}
			b.source.Store(sources[2]) // which forgets the GPU that the bench begins with
			pass(time.Second)
			said, now, seen := "", 2, false // whether the real GPU was seen since a simulation
			for range 30 {
				i := r.IntN(len(sources))
				said += " " + sources[i].Inventory
				fails := r.IntN(2) == 0
				s := machine(ids[i])
				if fails {
					said += " (down)"
					s.openErr = errors.New("down")
				}
				seen = seen && i < 2 && now < 2
				now, seen = i, seen || !fails
				b.source.Store(s.as(sources[i].Inventory, sources[i].Simulated))
				if r.IntN(4) == 0 {
					said += " detach attach"
					pass(time.Second)
					let := make(chan struct{})
					go func() { defer close(let); _, _ = b.m.Detach(t.Context(), time.Hour) }()
					<-let
					_, _ = b.m.Attach(t.Context())
				}
				pass(time.Duration(r.IntN(5)) * time.Second)
				shown := b.out.Load().Devices
				if slices.ContainsFunc(shown, func(d health.DeviceState) bool { return d.Device.ID != ids[i] }) {
					t.Fatalf("seed %d,%s: %+v", seed, said, shown)
				}
				if !fails && len(shown) != 1 || seen && len(shown) == 0 && i < 2 {
					t.Fatalf("seed %d,%s: %d devices, and the GPU was seen: %v", seed, said, len(shown), seen)
				}
				for _, d := range shown {
					if !fails && d.Verdict.State != health.Healthy {
						t.Fatalf("seed %d,%s: %+v", seed, said, d.Verdict)
					}
				}
			}
		})
	}
}

// What happened since the last poll of a session that ends for another is not lost with it. The end of the process reads
// nothing more.
func TestLastWords(t *testing.T) {
	for _, how := range []string{"another source", "detach", "the end"} {
		synctest.Test(t, func(t *testing.T) {
			b := monitor(t)
			old, next := machine("GPU-a"), machine("GPU-a")
			b.source.Store(old.as("dcgm x", false))
			pass(1500 * time.Millisecond)
			polls := old.count(&old.polls)
			old.set(func(s *script) { s.xids = []health.XID{{Code: 48, At: time.Now()}} })
			switch how {
			case "another source":
				b.source.Store(next.as("dcgm y", false))
			case "detach":
				if _, err := b.m.Detach(t.Context(), time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			if how == "the end" {
				b.stop()
			} else {
				defer b.stop()
			}
			synctest.Wait()
			last := old.count(&old.polls) - polls
			told := slices.Contains(b.out.Load().Devices[0].Verdict.Causes(), "xid-48")
			if want := how != "the end"; told != want || last != map[bool]int{true: 1}[want] {
				t.Errorf("%s: %d polls more, the XID is told: %v", how, last, told)
			}
		})
	}
}
