package monitor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// fakeEvents is an event source that a test controls.
type fakeEvents struct {
	mu             sync.Mutex // guards the fields below
	to             health.EventReceiver
	runs, running  int
	mostRunning    int
	hang           chan struct{} // Run returns after it is closed only, as with a call to the driver that hangs
	lastXID        int           // reported when the context has ended
	besides        int           // runs of the Beside function
	besidesRunning int

	driver   health.RecoveryAction // that the driver asks for on GPU-0
	reads    int                   // of recovery actions
	readErr  error
	readHang chan struct{} // reads of GPU-0 return after it is closed
}

func (f *fakeEvents) set(change func(*fakeEvents)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeEvents) get(n *int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return *n
}

func (f *fakeEvents) Run(ctx context.Context, to health.EventReceiver) {
	f.set(func(f *fakeEvents) { f.runs++; f.running++; f.mostRunning = max(f.mostRunning, f.running); f.to = to })
	defer f.set(func(f *fakeEvents) { f.running-- })
	to.SetEvents(nil)
	<-ctx.Done()
	f.mu.Lock()
	hang, xid := f.hang, f.lastXID
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if xid != 0 {
		to.Receive(xidEvent("GPU-0", xid))
	}
}

func (f *fakeEvents) beside(ctx context.Context) {
	f.set(func(f *fakeEvents) { f.besides++; f.besidesRunning++ })
	<-ctx.Done()
	f.set(func(f *fakeEvents) { f.besidesRunning-- })
}

// hangEnd makes Run hang after its context has ended, until the function that it returns is called.
func (f *fakeEvents) hangEnd() (resume func()) {
	hang := make(chan struct{})
	f.set(func(f *fakeEvents) { f.hang = hang })
	return sync.OnceFunc(func() {
		f.set(func(f *fakeEvents) { f.hang = nil })
		close(hang)
		synctest.Wait()
	})
}

// xid reports an XID of GPU-0.
func (f *fakeEvents) xid(code int) { f.receive(xidEvent("GPU-0", code)) }

// action changes the recovery action of GPU-0 and reports that.
func (f *fakeEvents) action(a health.RecoveryAction) {
	f.set(func(f *fakeEvents) { f.driver = a })
	f.receive(health.Event{Kind: health.EventRecoveryAction, GPU: "GPU-0", GI: -1, CI: -1})
}

// readAction reads the recovery action from the driver. Other GPUs than GPU-0 need a reboot.
func (f *fakeEvents) readAction(gpu health.DeviceID) (health.RecoveryAction, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	if gpu != "GPU-0" {
		return health.RecoveryReboot, nil
	}
	action, err := f.driver, f.readErr
	if hang := f.readHang; hang != nil {
		f.mu.Unlock()
		<-hang
		f.mu.Lock()
	}
	return action, err
}

// hangReads makes reads of GPU-0 hang, with the action of their beginning, until the function that it returns is called.
func (f *fakeEvents) hangReads() (resume func()) {
	hang := make(chan struct{})
	f.set(func(f *fakeEvents) { f.readHang = hang })
	return sync.OnceFunc(func() {
		f.set(func(f *fakeEvents) { f.readHang = nil })
		close(hang)
		synctest.Wait()
	})
}

func (f *fakeEvents) receive(e health.Event) {
	f.mu.Lock()
	to := f.to
	f.mu.Unlock()
	to.Receive(e)
}

func xidEvent(gpu string, code int) health.Event {
	return health.Event{Kind: health.EventXID, GPU: gpu, GI: -1, CI: -1, XID: health.XID{Code: code, At: time.Now()}}
}

// runTestWithEvents runs a test with a monitor of a source with an event source.
func runTestWithEvents(t *testing.T, test func(t *testing.T, h *harness, f *fakeEvents)) {
	t.Helper()
	runTest(t, func(t *testing.T, h *harness) {
		f := new(fakeEvents)
		h.source.Store(h.withEvents(f))
		advance(2 * time.Second)
		test(t, h, f)
		h.stop()
		if f.running != 0 || f.mostRunning > 1 || f.besidesRunning != 0 {
			t.Errorf("%d event sources run after the end, at most %d at once, %d other functions", f.running, f.mostRunning, f.besidesRunning)
		}
	})
}

func (h *harness) withEvents(f *fakeEvents) *Source {
	src := h.fakeSource.source(health.SourceID{})
	src.Events = []health.EventSource{{Witness: health.WitnessNVML, Run: f.Run}, {Witness: health.WitnessKernelLog, Off: "not configured"}}
	src.RecoveryAction = f.readAction
	src.Beside = []func(context.Context){f.beside}
	return src
}

// wantEvents checks the states of the event sources.
func (h *harness) wantEvents(t *testing.T, when string, want ...string) {
	t.Helper()
	var got []string
	for _, e := range h.status().Events {
		text := e.Witness.String() + " " + e.Status.String()
		if e.Err != "" {
			text += ": " + e.Err
		}
		if e.Since.IsZero() {
			text += " since never"
		}
		got = append(got, text)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", when, got, want)
	}
}

// counts returns the XIDs of each device: number and count.
func (h *harness) counts() string {
	var all []string
	for _, d := range h.out.Load().Devices {
		if len(d.XIDs.Codes) > 0 {
			counts := make(map[int]uint64)
			for code, t := range d.XIDs.Codes {
				counts[code] = t.Total
			}
			all = append(all, fmt.Sprint(d.Device.ID, counts))
		}
	}
	return strings.Join(all, " ")
}

// An XID counts without a poll, whatever the source does. It counts once, although the record brings it again.
func TestEventCountsAtOnceAndOnce(t *testing.T) {
	for name, c := range map[string]struct {
		status health.SourceStatus
		fail   func(h *harness) (restore func())
	}{
		"source up": {health.SourceUp, func(*harness) func() { return func() {} }},
		"source stalled": {health.SourceStalled, func(h *harness) func() {
			resume := h.hangPolls()
			advance(30 * time.Second)
			return resume
		}},
		"source down": {health.SourceDown, func(h *harness) func() {
			h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("dead"), errors.New("refused") })
			advance(30 * time.Second)
			return func() {
				h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
				advance(maxBackoff)
			}
		}},
		"outage": {health.SourceDown, func(h *harness) func() {
			h.report()
			advance(2 * time.Second)
			return func() { h.reportGPU0(healthtest.Present()); advance(2 * time.Second) }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.reportGPU0(healthtest.Present())
				advance(2 * time.Second)
				restore := c.fail(h)
				before := h.out.Load()
				f.xid(79)
				synctest.Wait()
				h.wantCauses(t, "after the event", c.status, "xid-79")
				if s := h.out.Load(); h.counts() != "GPU-0map[79:1]" || s.Devices[0].Sample.Presence != before.Devices[0].Sample.Presence {
					t.Errorf("%s, %+v", h.counts(), s.Devices[0].Sample)
				}
				h.set(func(s *fakeSource) { s.xids = []health.XID{{Code: 79, At: time.Now()}} })
				restore()
				advance(5 * time.Second)
				h.wantCauses(t, "with the record", health.SourceUp, "xid-79")
				if h.counts() != "GPU-0map[79:1]" {
					t.Error(h.counts())
				}
			})
		})
	}
}

// The source may report an XID first.
func TestEventAfterRecord(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.reportXID(31)
		advance(time.Second)
		f.xid(31)
		synctest.Wait()
		if h.counts() != "GPU-0map[31:1]" {
			t.Error(h.counts())
		}
	})
}

// A driver reload clears the XIDs from before it only, although the poll that notices it is later.
func TestEventAfterDriverReload(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		f := new(fakeEvents)
		src := h.withEvents(f)
		var load atomic.Int32
		src.DriverLoad = func() string { return strconv.Itoa(int(load.Load()) + 1) }
		h.source.Store(src)
		advance(2 * time.Second)
		f.xid(95)
		advance(2 * time.Second)
		h.wantCauses(t, "before the reload", health.SourceUp, "xid-95")
		resume := h.hangPolls()
		advance(2 * time.Second)
		load.Add(1)
		f.xid(119)
		synctest.Wait()
		resume()
		advance(2 * time.Second)
		h.wantCauses(t, "after the reload", health.SourceUp, "xid-119")
	})
}

// A GPU that was reset during a detach is cured by the first reading after it, although events reported its fault shortly before
// and the source never did.
func TestResetDuringDetachWhileStalled(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.reportGPU0(healthtest.Present())
		advance(2 * time.Second)
		resume := h.hangPolls()
		advance(30 * time.Second)
		f.xid(95)
		f.action(health.RecoveryReset)
		advance(maxPause)
		h.wantCauses(t, "broken", health.SourceStalled, "xid-95,recovery-action")
		time.AfterFunc(time.Second, resume)
		h.detach(t, time.Hour)
		h.attach(t)
		h.wantCauses(t, "attached", health.SourceUp, "")
	})
}

func TestEventStorm(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		resume := h.hangPolls()
		advance(2 * time.Second)
		seq := h.out.Load().Seq
		const n = 20_000
		for range n {
			f.xid(31)
		}
		f.xid(43)
		advance(time.Second)
		if want := "GPU-0map[31:" + strconv.Itoa(n) + " 43:1]"; h.counts() != want {
			t.Fatalf("%s, want %s", h.counts(), want)
		}
		if published := h.out.Load().Seq - seq; published == 0 || published > 10 {
			t.Errorf("%d snapshots", published)
		}
		polls, logged := h.count(&h.polls), h.logs.FilterMessage("XID").Len()
		if logged > 6 {
			t.Errorf("%d log entries", logged)
		}
		resume()
		seq = h.out.Load().Seq
		for range 1000 { // for ten seconds
			f.xid(31)
			advance(10 * time.Millisecond)
		}
		if more := h.count(&h.polls) - polls; more < 20 || more > 60 {
			t.Errorf("%d polls in ten seconds", more)
		}
		if published := h.out.Load().Seq - seq; published > 300 {
			t.Errorf("%d snapshots in ten seconds", published)
		}
		advance(2 * time.Second)
		if more := h.logs.FilterMessage("XID").Len() - logged; more < 10 || more > 60 {
			t.Errorf("%d log entries in ten seconds", more)
		}
		if want := "GPU-0map[31:" + strconv.Itoa(n+1000) + " 43:1]"; h.counts() != want {
			t.Errorf("%s, want %s", h.counts(), want)
		}
		entries := h.logs.FilterMessage("XID").FilterField(zap.Int("xid", 31)).All()
		if last := entries[len(entries)-1].ContextMap()["count"]; last != uint64(n+1000) {
			t.Errorf("the last log entry counts %v", last)
		}
	})
}

// While polls hang nothing else logs the last XIDs of a storm.
func TestStormIsLoggedWhileStalled(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		defer h.hangPolls()()
		advance(2 * time.Second)
		for range 5 {
			f.xid(31)
			advance(200 * time.Millisecond)
		}
		advance(time.Minute)
		if logged, entries := h.loggedXIDs(); logged != 5 || entries > 3 {
			t.Errorf("%d XIDs in %d entries", logged, entries)
		}
	})
}

func TestXIDsAreLoggedAtEnd(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		for range 3 {
			f.xid(31)
			advance(100 * time.Millisecond)
		}
		if logged, _ := h.loggedXIDs(); logged >= 3 {
			t.Fatalf("%d XIDs logged at once", logged)
		}
		h.stop()
		if logged, _ := h.loggedXIDs(); logged != 3 {
			t.Errorf("%d XIDs logged, want 3", logged)
		}
	})
}

// loggedXIDs returns how many XIDs were logged, and in how many entries.
func (h *harness) loggedXIDs() (xids uint64, entries int) {
	for _, e := range h.logs.FilterMessage("XID").All() {
		xids, entries = xids+e.ContextMap()["new"].(uint64), entries+1
	}
	return xids, entries
}

// An event causes a poll soon, and one when the source has measured again.
func TestEventCausesPolls(t *testing.T) {
	for name, report := range map[string]func(f *fakeEvents){
		"XID":         func(f *fakeEvents) { f.xid(31) },
		"unavailable": func(f *fakeEvents) { f.receive(health.Event{Kind: health.EventUnavailable, GPU: "GPU-0"}) },
		"action":      func(f *fakeEvents) { f.action(health.RecoveryReset) },
		"driver":      func(f *fakeEvents) { f.receive(health.Event{Kind: health.EventDriver}) },
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.configure(func(c *judge.Config) { c.Interval = time.Hour })
				synctest.Wait()
				before := h.count(&h.polls)
				for _, p := range []struct {
					wait  time.Duration
					polls int
				}{{0, 0}, {eventPollDelay, 1}, {cacheAge - eventPollDelay - 1, 1}, {1, 2}, {10 * time.Minute, 2}} {
					if p.wait == 0 {
						report(f)
					}
					advance(p.wait)
					if n := h.count(&h.polls) - before; n != p.polls {
						t.Errorf("%d polls, want %d", n, p.polls)
					}
				}
			})
		})
	}
}

// A view sends an event before the poll that it causes takes the processors, and the source measures once a second.
func TestEventPollsSuitSource(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.configure(func(c *judge.Config) { c.Interval = time.Hour })
		synctest.Wait()
		before := h.count(&h.polls)
		f.xid(31)
		for _, p := range []struct {
			wait  time.Duration
			polls int
		}{{10 * time.Millisecond, 0}, {20 * time.Millisecond, 1}, {970 * time.Millisecond, 1}, {500 * time.Millisecond, 2}} {
			advance(p.wait)
			if n := h.count(&h.polls) - before; n != p.polls {
				t.Errorf("%d polls, want %d", n, p.polls)
			}
		}
	})
}

// An event of a GPU instance is of all its MIG devices, one of a compute instance is of one. An instance that the source does not
// list yet may be listed soon; later the XID is of the GPU.
func TestEventsOfInstances(t *testing.T) {
	mig0, mig1, other := healthtest.MIG0, healthtest.MIG0, healthtest.MIG1
	mig1.ID, mig1.CI = "MIG-0b", 1
	third := health.Device{ID: "MIG-3", Kind: health.KindMIG, Parent: "GPU-0", GI: 3, CI: 5}
	listed := []health.Device{healthtest.GPU0, mig0, mig1, other, third}
	for name, c := range map[string]struct {
		gpu     string
		gi, ci  int
		later   []health.Device // listed a moment after the event
		stalled bool
		at      time.Duration // when it counts
		want    string
	}{
		"GPU":                             {"gpu-0", -1, -1, nil, false, 0, "GPU-0"},
		"GPU by PCI bus ID":               {"0000:1b:00.0", -1, -1, nil, false, 0, "GPU-0"},
		"GPU instance":                    {"GPU-0", 1, -1, nil, false, 0, "MIG-0 MIG-0b"},
		"compute instance":                {"GPU-0", 1, 1, nil, false, 0, "MIG-0b"},
		"instance of one":                 {"GPU-0", 2, 0, nil, false, 0, "MIG-1"},
		"unknown GPU instance":            {"GPU-0", 9, 0, nil, false, 2 * time.Second, "GPU-0"},
		"unknown instance, source stalls": {"GPU-0", 9, -1, nil, true, instanceDelay, "GPU-0"},
		"unknown compute instance":        {"GPU-0", 1, 7, nil, false, 2 * time.Second, "MIG-0 MIG-0b"},
		"unknown first compute instance":  {"GPU-0", 3, 0, nil, false, 2 * time.Second, "MIG-3"},
		"new GPU instance": {
			"GPU-0", 9, -1,
			[]health.Device{{ID: "MIG-9", Kind: health.KindMIG, Parent: "GPU-0", GI: 9, CI: 3}},
			false, eventPollDelay, "MIG-9",
		},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.listDevices(listed)
				advance(2 * time.Second)
				if c.stalled {
					defer h.hangPolls()()
					advance(2 * time.Second)
				}
				e := xidEvent(c.gpu, 31)
				e.GI, e.CI = c.gi, c.ci
				f.receive(e)
				if c.later != nil {
					h.listDevices(slices.Concat(listed, c.later))
				}
				if c.at > 0 {
					synctest.Wait()
					if h.counts() != "" {
						t.Errorf("at first: %s", h.counts())
					}
				}
				advance(c.at)
				if devices, times := h.countedBy(31); devices != c.want || times != 1 {
					t.Errorf("counted by %q at %d times, want %q", devices, times, c.want)
				}
			})
		})
	}
}

// listDevices makes the source list present devices; GPU-0 is at a PCI address.
func (h *harness) listDevices(devices []health.Device) {
	h.set(func(s *fakeSource) {
		s.reading.Devices, s.reading.Samples = nil, nil
		for _, d := range devices {
			if d.ID == "GPU-0" {
				d.PCI = "00000000:1B:00.0"
			}
			s.reading.Devices = append(s.reading.Devices, d)
			s.reading.Samples = append(s.reading.Samples, health.Sample{Device: d.ID, Presence: health.Present})
		}
	})
}

// countedBy returns the devices that count an XID once, and at how many different times it was reported.
func (h *harness) countedBy(code int) (devices string, times int) {
	var ids []string
	at := make(map[time.Time]bool)
	for _, d := range h.out.Load().Devices {
		if d.XIDs.Codes[code].Total == 1 {
			ids = append(ids, string(d.Device.ID))
			at[d.XIDs.Newest().At] = true
		}
	}
	return strings.Join(ids, " "), len(at)
}

// An XID of a MIG instance that the source does not list is its GPU's as soon as a poll that began after the event lacks the instance. A
// poll that had begun before proves nothing.
func TestEventOfNewInstanceAwaitsOnePoll(t *testing.T) {
	for name, c := range map[string]struct {
		listed []health.Device // by the poll after the event
		want   string
	}{
		"listed":     {[]health.Device{{ID: "MIG-9", Kind: health.KindMIG, Parent: "GPU-0", GI: 9}}, "MIG-9map[31:1]"},
		"not listed": {nil, "GPU-0map[31:1]"},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				resume := h.hangPolls()
				defer resume()
				advance(time.Second) // the poll has begun
				e := xidEvent("GPU-0", 31)
				e.GI = 9
				f.receive(e)
				synctest.Wait()
				before := h.status().Polls
				resume()
				synctest.Wait()
				if n := h.status().Polls - before; n != 1 || h.counts() != "" {
					t.Fatalf("%d readings, counts %q", n, h.counts())
				}
				h.set(func(s *fakeSource) {
					for _, d := range c.listed {
						s.reading.Devices = append(s.reading.Devices, d)
						s.reading.Samples = append(s.reading.Samples, health.Sample{Device: d.ID, Presence: health.Present})
					}
				})
				advance(eventPollDelay)
				if n := h.status().Polls - before; n != 2 || h.counts() != c.want {
					t.Errorf("%d readings, counts %q, want %q", n, h.counts(), c.want)
				}
			})
		})
	}
}

// A storm of an instance that the source does not list counts, too, although it goes on.
func TestStormOfUnknownInstance(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		defer h.hangPolls()()
		for range 10 {
			e := xidEvent("GPU-0", 31)
			e.GI = 9
			f.receive(e)
			advance(time.Second)
		}
		if n := h.out.Load().Devices[0].XIDs.Codes[31].Total; n < 5 {
			t.Errorf("%d XIDs counted", n)
		}
	})
}

// Before the first inventory events are kept.
func TestEventsBeforeFirstInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(zap.NewNop())
		f := new(fakeEvents)
		h.source.Store(h.withEvents(f))
		h.set(func(s *fakeSource) { s.openErr = errors.New("no engine") })
		h.start(t)
		defer h.stop()
		for range 5000 {
			f.xid(31)
			f.xid(43)
		}
		f.xid(95)
		f.action(health.RecoveryReset)
		advance(10 * time.Minute)
		h.m.mu.Lock()
		if n := len(h.m.unjudged); n > maxQueued+4 {
			t.Errorf("%d events are kept", n)
		}
		h.m.mu.Unlock()
		if s := h.out.Load(); len(s.Devices) != 0 || s.Source.Status != health.SourceDown {
			t.Fatalf("%+v", s)
		}
		h.set(func(s *fakeSource) { s.openErr = nil })
		advance(maxBackoff)
		h.wantCauses(t, "with an inventory", health.SourceUp, "xid-95,recovery-action")
		if want := "GPU-0map[31:5000 43:5000 95:1]"; h.counts() != want {
			t.Errorf("%s, want %s", h.counts(), want)
		}
	})
}

// A GPU that the source does not list may be listed later. If it is not, its events are dropped.
func TestEventOfUnknownGPU(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		f.receive(xidEvent("GPU-1", 79))
		f.receive(xidEvent("0000:ff:00.0", 79))
		advance(5 * time.Second)
		f.receive(xidEvent("GPU-1", 31))
		advance(5 * time.Second)
		if n := h.logs.FilterLevelExact(zap.WarnLevel).Len(); n != 2 || h.counts() != "" {
			t.Errorf("%d warnings, want one for each GPU; counts %s", n, h.counts())
		}
		h.report(of(healthtest.GPU0, healthtest.Present()), of(healthtest.GPU1, healthtest.Present()))
		advance(2 * time.Second)
		h.wantCauses(t, "listed", health.SourceUp, "", "xid-79")
		if want := "GPU-1map[31:1 79:1]"; h.counts() != want {
			t.Errorf("%s, want %s", h.counts(), want)
		}
		advance(2 * gpuDelay)
		h.m.mu.Lock()
		defer h.m.mu.Unlock()
		if len(h.m.unjudged) != 0 {
			t.Errorf("%d events still wait", len(h.m.unjudged))
		}
	})
}

// The names of unknown GPUs are logged once, and a source of events that invents names fills neither the log nor the memory.
func TestEventsOfManyUnknownGPUs(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		for range 2 {
			for i := range 2 * maxUnknownGPUs {
				f.receive(xidEvent(fmt.Sprintf("GPU-unknown-%d", i), 79))
			}
			advance(5 * time.Second)
		}
		if n := h.logs.FilterMessageSnippet("of a GPU that the source does not list").Len(); n != maxUnknownGPUs {
			t.Errorf("%d warnings, want %d", n, maxUnknownGPUs)
		}
	})
}

func TestEventSourceStates(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		const kernelLog = "kernel-log off: not configured"
		h.wantEvents(t, "at first", "nvml up", kernelLog)
		since := h.status().Events[0].Since
		for range 3 {
			f.to.SetEvents(errors.New("no library"))
		}
		h.wantEvents(t, "down", "nvml down: no library", kernelLog)
		advance(time.Second)
		f.to.SetEvents(errors.New("no driver"))
		h.wantEvents(t, "down for another reason", "nvml down: no driver", kernelLog)
		if now := h.status().Events[0].Since; now.Equal(since) || time.Since(now) != time.Second {
			t.Errorf("since %v", now)
		}
		f.to.SetEvents(nil)
		h.wantEvents(t, "up", "nvml up", kernelLog)
		if down, up := h.logs.FilterMessage("events down").Len(), h.logs.FilterMessage("events up").Len(); down != 1 || up != 2 {
			t.Errorf("logged %d times down, %d times up", down, up)
		}
		since = h.status().Events[0].Since
		advance(time.Second)
		for range 3 {
			f.to.SetEvents(health.PartialEvents{Err: errors.New("1 of 8 GPUs")})
		}
		h.wantEvents(t, "without one GPU", "nvml up: 1 of 8 GPUs", kernelLog)
		if now := h.status().Events[0].Since; !now.Equal(since) || h.logs.FilterField(zap.String("cause", "1 of 8 GPUs")).Len() != 1 {
			t.Errorf("without one GPU: since %v, want %v; logs %v", now, since, h.logs.All())
		}
		f.to.SetEvents(nil)
		h.wantEvents(t, "with all GPUs", "nvml up", kernelLog)
		f.to.SetEvents(health.UnusedEvents{Err: errors.New("other GPUs")})
		h.wantEvents(t, "of another host", "nvml off: other GPUs", kernelLog)
		if h.logs.FilterMessage("events off").Len() != 1 || h.logs.FilterMessage("events down").Len() != 1 {
			t.Errorf("logs %v", h.logs.All())
		}
		old := f.to
		h.detach(t, time.Hour)
		old.SetEvents(nil)
		h.wantEvents(t, "detached", "nvml off: "+reasonDetached, kernelLog)
		h.attach(t)
		synctest.Wait()
		h.wantEvents(t, "attached", "nvml up", kernelLog)
		h.source.Store(h.fakeSource.source(health.SourceID{}))
		synctest.Wait()
		h.wantEvents(t, "another source")
	})
}

func TestDetachEndsEventSources(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		var running int
		done := make(chan struct{})
		go func() {
			defer close(done)
			for s, changed := h.out.Watch(); ; s, changed = h.out.Watch() {
				if s.Source.Status == health.SourceDetached {
					running = f.get(&f.running) + f.get(&f.besidesRunning)
					return
				}
				<-changed
			}
		}()
		resume := f.hangEnd()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := h.m.Detach(ctx, time.Hour); err == nil || !strings.Contains(err.Error(), "NVML") {
			t.Errorf("detach while an event source hangs: %v", err)
		}
		if s := h.status(); s.Status != health.SourceStalled || !h.verdict().Has(health.CauseReleased) {
			t.Errorf("source %+v", s)
		}
		resume()
		<-done
		if running != 0 {
			t.Errorf("%d functions use the driver when it is detached", running)
		}
		h.m.startCompanions(t.Context(), h.m.newWatchdog(time.Second, nil), h.source.Load())
		synctest.Wait()
		if f.get(&f.runs) != 1 {
			t.Error("an event source starts while the driver is detached")
		}
		h.attach(t)
		synctest.Wait()
		if f.get(&f.runs) != 2 || f.get(&f.besides) != 2 || f.get(&f.running) != 1 {
			t.Errorf("%d runs, %d of the other function, %d run now", f.runs, f.besides, f.running)
		}
	})
}

// An event source that hangs delays no poll: not after an attach, and not after a change of the source.
func TestHungEventSourceBlocksNoPoll(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, h *harness, f *fakeEvents){
		"attach": func(t *testing.T, h *harness, _ *fakeEvents) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, _ = h.m.Detach(ctx, time.Hour)
			h.attach(t)
		},
		"time limit": func(t *testing.T, h *harness, _ *fakeEvents) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, _ = h.m.Detach(ctx, time.Minute)
			advance(2 * time.Minute)
		},
		"source": func(_ *testing.T, h *harness, f *fakeEvents) {
			h.source.Store(h.withEvents(f))
			advance(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				resume := f.hangEnd()
				polls := h.count(&h.polls)
				change(t, h, f)
				advance(20 * time.Second)
				if s := h.status(); s.Status != health.SourceUp || h.count(&h.polls) == polls || h.verdict().State != health.Healthy {
					t.Errorf("source %+v, %d polls, %+v", s, h.count(&h.polls)-polls, h.verdict())
				}
				if s := h.status().Events[0]; s.Status != health.EventsDown || f.get(&f.runs) != 1 {
					t.Errorf("%+v, %d runs", s, f.runs)
				}
				resume()
				if s := h.status().Events[0]; s.Status != health.EventsUp || f.get(&f.runs) != 2 {
					t.Errorf("after the hang: %+v, %d runs", s, f.runs)
				}
			})
		})
	}
}

// A reload while a poll hangs leaves the event source running: XIDs still arrive.
func TestEventsDuringReloadWhileStalled(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		resume := h.hangPolls()
		advance(time.Minute)
		h.source.Store(h.withEvents(f))
		advance(time.Minute)
		f.xid(79)
		synctest.Wait()
		h.wantCauses(t, "while stalled", health.SourceStalled, "xid-79")
		resume()
		advance(5 * time.Second)
		if f.get(&f.runs) != 2 || f.get(&f.running) != 1 {
			t.Errorf("%d runs, %d run now", f.runs, f.running)
		}
	})
}

// An event that arrives when the process ends is in the last snapshot, which the state file saves.
func TestLastEventIsJudged(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		f.set(func(f *fakeEvents) { f.lastXID = 79 })
		h.stop()
		h.wantCauses(t, "at the end", health.SourceUp, "xid-79")
	})
}

func TestRunEndsWhileEventSourceHangs(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		f := new(fakeEvents)
		h.source.Store(h.withEvents(f))
		advance(2 * time.Second)
		defer f.hangEnd()()
		f.xid(79)
		begin := time.Now()
		h.stop()
		if took := time.Since(begin); took > 2*abandonAfter {
			t.Errorf("Run took %v to end", took)
		}
		h.wantCauses(t, "at the end", health.SourceUp, "xid-79")
	})
}

// After a restart the saved devices are an inventory, and events of them count before the first poll. They count for good.
func TestEventsBeforeFirstPollAfterRestart(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.XIDs(63)))
		advance(5 * time.Second)
		next := h.restart(t, "boot", time.Minute)
		f := new(fakeEvents)
		next.source.Store(next.withEvents(f))
		next.set(func(s *fakeSource) { s.openErr = errors.New("no engine") })
		next.start(t)
		defer next.stop()
		f.xid(95)
		synctest.Wait()
		if s := next.out.Load(); s.Polled() || len(s.Devices) != 1 || s.Devices[0].Verdict.State != health.Unhealthy {
			t.Fatalf("before the first poll: %+v", s.Devices)
		}
		next.set(func(s *fakeSource) { s.openErr = nil })
		advance(maxBackoff)
		if v := next.verdict(); v.State != health.Unhealthy || v.Cause() != "xid-95" || next.counts() != "GPU-0map[95:1]" {
			t.Errorf("%+v, XIDs %s", v, next.counts())
		}
	})
}

// The companions of a detach that is restored start with the attach.
func TestRestoredDetachStartsNoEventSource(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.detach(t, time.Hour)
		next := h.restart(t, "boot", time.Minute)
		f := new(fakeEvents)
		next.source.Store(next.withEvents(f))
		next.start(t)
		defer next.stop()
		advance(time.Minute)
		next.wantEvents(t, "detached", "nvml off: "+reasonDetached, "kernel-log off: not configured")
		if f.get(&f.runs) != 0 || f.get(&f.besides) != 0 {
			t.Error("the driver is in use")
		}
		next.attach(t)
		synctest.Wait()
		if f.get(&f.runs) != 1 || f.get(&f.besides) != 1 {
			t.Errorf("%d runs", f.runs)
		}
	})
}

// BenchmarkEventToSnapshot measures the time from an event of one of 8 GPUs with 7 MIG devices each to the stored snapshot.
func BenchmarkEventToSnapshot(b *testing.B) {
	h := newHarness(zap.NewNop())
	f := new(fakeEvents)
	h.reading = health.Reading{}
	for g := range 8 {
		gpu := health.Device{ID: health.DeviceID(fmt.Sprint("GPU-", g)), Index: g, GI: -1, CI: -1, PCI: fmt.Sprintf("00000000:%02X:00.0", g)}
		h.reading.Devices = append(h.reading.Devices, gpu)
		for i := range 7 {
			h.reading.Devices = append(h.reading.Devices, health.Device{
				ID: health.DeviceID(fmt.Sprint("MIG-", g, "-", i)), Kind: health.KindMIG, Parent: gpu.ID, Index: g, MIGIndex: i, GI: i, PCI: gpu.PCI,
			})
		}
	}
	for _, d := range h.reading.Devices {
		h.reading.Samples = append(h.reading.Samples, health.Sample{Device: d.ID, Presence: health.Present})
	}
	h.configure(func(c *judge.Config) { c.Interval = time.Hour })
	h.source.Store(h.withEvents(f))
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error)
	go func() { ended <- h.m.Run(ctx) }()
	await := func(condition func(s *health.Snapshot) bool) {
		for s, changed := h.out.Watch(); s == nil || !condition(s); s, changed = h.out.Watch() {
			<-changed
		}
	}
	await(func(s *health.Snapshot) bool {
		return s.Source.Status == health.SourceUp && s.Source.Events[0].Status == health.EventsUp
	})
	counted := func(n uint64) func(s *health.Snapshot) bool {
		return func(s *health.Snapshot) bool { return s.Devices[3].XIDs.Codes[31].Total >= n }
	}
	var n uint64
	for b.Loop() {
		b.StopTimer()
		time.Sleep(stormGap) //nolint:forbidigo // a pause, as between two events that are no storm
		b.StartTimer()
		n++
		f.receive(xidEvent("GPU-3", 31))
		await(counted(n))
	}
	cancel()
	if err := <-ended; err != nil {
		b.Error(err)
	}
}
