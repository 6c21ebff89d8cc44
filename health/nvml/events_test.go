//go:build cgo && linux

package nvml

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml/internal/script"
)

// The bits of nvml.h.
const (
	bitDBE, bitXID, bitMIG, bitUnavailable, bitAction = 0x2, 0x8, 0x100, 0x4000, 0x8000
)

// testTiming is short. A test waits for conditions, so that it only bounds how long one takes.
var testTiming = eventTiming{
	wait: 20 * time.Millisecond, callLimit: 200 * time.Millisecond, retry: 50 * time.Millisecond, minPause: 10 * time.Millisecond,
	maxPause: 100 * time.Millisecond,
}

// eventFixture is a running event source and what it has reported.
type eventFixture struct {
	t   testing.TB
	lib script.Library

	mu      sync.Mutex // guards the fields below
	changed *sync.Cond
	events  []health.Event
	states  []string // "" is up
	partial bool     // the last state says that only some GPUs report events
	unused  bool     // the last state says that the GPUs are of another host
	listed  []string // the GPUs of the source
	stop    func()
}

func (f *eventFixture) Receive(e health.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, e)
	f.changed.Broadcast()
}

func (f *eventFixture) SetEvents(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := ""
	if err != nil {
		state = err.Error()
	}
	f.states = append(f.states, state)
	_, f.partial = errors.AsType[health.PartialEvents](err)
	_, f.unused = errors.AsType[health.UnusedEvents](err)
	f.changed.Broadcast()
}

// list sets the GPUs of the source.
func (f *eventFixture) list(uuids ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listed = uuids
}

// startEvents runs an event source on a library that the commands have prepared.
func startEvents(t testing.TB, timing eventTiming, commands ...string) *eventFixture {
	t.Helper()
	f := &eventFixture{t: t, lib: newLibrary(t)}
	f.start(timing, nil, commands...)
	return f
}

// startListedEvents runs an event source beside a source that lists GPUs.
func startListedEvents(t testing.TB, uuids ...string) *eventFixture {
	t.Helper()
	f := &eventFixture{t: t, lib: newLibrary(t), listed: uuids}
	f.start(testTiming, func() []string {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.listed
	})
	return f
}

func (f *eventFixture) start(timing eventTiming, listed func() []string, commands ...string) {
	f.changed = sync.NewCond(&f.mu)
	for _, c := range commands {
		f.lib.Do("%s", c)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		timing.events(zap.NewNop(), listed)(ctx, f)
	}()
	f.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	f.t.Cleanup(func() {
		f.lib.Do("release")
		f.stop()
	})
}

// wait waits until ok is true of what was reported.
func (f *eventFixture) wait(what string, ok func() bool) {
	f.t.Helper()
	timedOut := false
	timer := time.AfterFunc(20*time.Second, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		timedOut = true
		f.changed.Broadcast()
	})
	defer timer.Stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	for !ok() {
		if timedOut {
			f.t.Fatalf("no %s; states %q, events %s", what, f.states, describe(f.events))
		}
		f.changed.Wait()
	}
}

// waitState waits until the state contains a text; "" is up.
func (f *eventFixture) waitState(text string) {
	f.t.Helper()
	f.wait(fmt.Sprintf("state %q", text), func() bool {
		if len(f.states) == 0 {
			return false
		}
		last := f.states[len(f.states)-1]
		return (text == "") == (last == "") && strings.Contains(last, text)
	})
}

// waits returns when n calls have waited for events, which lasts at least n-1 times eventTiming.wait without events.
func (f *eventFixture) waits(n int) {
	f.t.Helper()
	f.lib.Do("await calls nvmlEventSetWait_v2 %d", f.lib.Number("calls nvmlEventSetWait_v2")+n)
}

// waitEvents waits until the events since the last call are those, and returns them.
func (f *eventFixture) waitEvents(want ...string) []health.Event {
	f.t.Helper()
	f.wait(fmt.Sprintf("%d events", len(want)), func() bool { return len(f.events) >= len(want) })
	f.mu.Lock()
	defer f.mu.Unlock()
	got := f.events
	f.events = nil
	if describe(got) != strings.Join(want, "\n") {
		f.t.Errorf("events\n%s\nwant\n%s", describe(got), strings.Join(want, "\n"))
	}
	return got
}

// describe writes an event as "GPU kind code gi:ci", with the GPU's number.
func describe(events []health.Event) string {
	lines := make([]string, 0, len(events))
	for _, e := range events {
		line := strings.TrimSuffix(strings.TrimLeft(strings.TrimPrefix(e.GPU, "GPU-"), "0"), "-0000-0000-0000-000000000000") + " " +
			e.Kind.String()
		if e.Kind == health.EventXID {
			line += fmt.Sprintf(" %d", e.XID.Code)
		}
		if e.GI != -1 || e.CI != -1 {
			line += fmt.Sprintf(" %d:%d", e.GI, e.CI)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func TestEventsKinds(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	before := time.Now()
	f.lib.Do("event 1 %d 79 -1 -1", bitXID)
	f.lib.Do("event 2 %d 43 3 0", bitXID)
	f.lib.Do("event 3 %d %d -1 -1", bitXID, uint64(1)<<40) // as 999
	f.lib.Do("event 4 %d 0 -1 -1", bitMIG)
	f.lib.Do("event 5 %d 0 -1 -1", bitDBE)
	f.lib.Do("event 6 %d 0 -1 -1", bitUnavailable)
	f.lib.Do("event 7 1 0 -1 -1") // single-bit errors are not registered
	f.lib.Do("event 7 %d 0 -1 -1", bitAction)
	got := f.waitEvents("1 xid 79", "2 xid 43 3:0", "3 xid 999", "4 mig-configuration", "5 double-bit-error", "6 gpu-unavailable",
		"7 recovery-action")
	for _, e := range got[:3] {
		if e.XID.Witness != health.WitnessNVML || e.XID.At.Before(before) || e.XID.At.After(time.Now()) {
			t.Errorf("XID %d from %v at %v", e.XID.Code, e.XID.Witness, e.XID.At)
		}
	}
}

// TestEventsUnsupportedType checks that a GPU that lacks types reports the others: one unsupported bit refuses the whole mask.
func TestEventsUnsupportedType(t *testing.T) {
	f := startEvents(t, testTiming, "supports 1 0x1ff")
	f.waitState("")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
}

// TestEventsStorm checks that every event of a storm arrives once and in order.
func TestEventsStorm(t *testing.T) {
	const times = 10000
	f := startEvents(t, testTiming)
	f.waitState("")
	for gpu := range 8 {
		f.lib.Do("event %d %d 31 -1 -1 %d", gpu+0, bitXID, times)
		f.lib.Do("event %d %d 43 -1 -1 1", gpu, bitXID)
	}
	f.wait("end of the storm", func() bool { return len(f.events) >= 8*(times+1) })
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.events) != 8*(times+1) {
		t.Errorf("%d events, want %d", len(f.events), 8*(times+1))
	}
	for i, e := range f.events {
		want := 31
		if i%(times+1) == times {
			want = 43
		}
		if e.XID.Code != want || !strings.HasPrefix(e.GPU, fmt.Sprintf("GPU-%08d", i/(times+1))) {
			t.Fatalf("event %d is XID %d of %s, want %d of GPU %d", i, e.XID.Code, e.GPU, want, i/(times+1))
		}
	}
}

// TestEventsGPULost checks that a lost GPU costs neither the events of the others nor a loop without a pause, and that its events
// arrive again once it is back.
func TestEventsGPULost(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	f.lib.Do("lost 3")
	f.waitState("1 of 8 GPUs report no events: GPU-00000003-0000-0000-0000-000000000000: ")
	f.waitEvents("3 gpu-unavailable")
	f.lib.Do("lost 5")
	f.waitState("2 of 8 GPUs")
	f.waitEvents("5 gpu-unavailable")
	f.lib.Do("event 4 %d 31 -1 -1", bitXID)
	f.waitEvents("4 xid 31")
	waits := f.lib.Number("calls nvmlEventSetWait_v2")
	f.lib.Do("await calls nvmlDeviceGetCount_v2 %d", f.lib.Number("calls nvmlDeviceGetCount_v2")+3) // three retries
	if n := f.lib.Number("calls nvmlEventSetWait_v2") - waits; n > 100 {
		t.Errorf("%d calls of Wait in three retries", n)
	}
	f.lib.Do("back 3")
	f.lib.Do("back 5")
	f.waitState("")
	f.lib.Do("event 3 %d 43 -1 -1", bitXID)
	f.lib.Do("event 5 %d 45 -1 -1", bitXID)
	f.waitEvents("3 xid 43", "5 xid 45")
}

// TestEventsGPULostAgain checks that a GPU that is lost again, long after the first loss, does not count as a GPU that the driver does not
// identify.
func TestEventsGPULostAgain(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	for range 2 {
		f.lib.Do("lost 3")
		f.waitState("1 of 8 GPUs")
		f.lib.Do("back 3")
		f.waitState("")
		f.waits(2 * int(testTiming.maxPause/testTiming.wait))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.Contains(f.states, errLost.Error()) {
		t.Errorf("states %q", f.states)
	}
}

// TestEventsOfReplacedSet checks that no event is lost that a set has when another replaces it.
func TestEventsOfReplacedSet(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	f.mu.Lock() // the receiver blocks until the GPUs have changed
	for _, code := range []int{31, 32, 33} {
		f.lib.Do("event 1 %d %d -1 -1", bitXID, code)
	}
	f.lib.Do("system 2 2")
	f.waits(5) // it is time to look for system events
	f.mu.Unlock()
	f.waitEvents("1 xid 31", " driver-binding", "1 xid 32", "1 xid 33")
}

// TestEventsAllGPUsLost checks that the event source is up while any GPU reports events, and only then.
func TestEventsAllGPUsLost(t *testing.T) {
	f := startEvents(t, testTiming, "gpus 2", "lost 0")
	for _, step := range []struct {
		command, state string
		partial        bool
	}{{"lost 0", "1 of 2 GPUs", true}, {"lost 1", "2 of 2 GPUs", false}, {"back 0", "1 of 2 GPUs", true}} {
		f.lib.Do("%s", step.command)
		f.waitState(step.state)
		f.mu.Lock()
		if f.partial != step.partial {
			t.Errorf("%s: partial is %v", step.command, f.partial)
		}
		f.mu.Unlock()
	}
}

// TestEventsLostUnidentified checks the pauses if Wait reports a lost GPU and each GPU answers.
func TestEventsLostUnidentified(t *testing.T) {
	timing := testTiming
	timing.minPause = 20 * time.Millisecond
	f := startEvents(t, timing)
	f.waitState("")
	f.lib.Do("fail waiting -1 %d -1", nvml.ERROR_GPU_IS_LOST)
	f.waitState(errLost.Error())
	started := time.Now() // before the count, so that the test is not faster than the pauses
	sets := f.lib.Number("calls nvmlEventSetCreate")
	f.lib.Do("await calls nvmlEventSetCreate %d", sets+12*9) // of each set, and of the eight that try the GPUs
	// A set may fail before all GPUs are registered. Seven of the sets may be smaller than all before, and follow at once.
	if lasted := time.Since(started); lasted < 3*timing.minPause {
		t.Errorf("twelve sets in %v", lasted)
	}
	f.lib.Do("release")
	f.waitState("")
	f.lib.Do("event 4 %d 31 -1 -1", bitXID)
	f.waitEvents("4 xid 31")
}

// TestEventsRegistrationFails checks that each way in which the registration of one GPU fails leaves that GPU out and no other, and
// that the GPU is tried again. Events of the others are not recorded before the state names that GPU only.
func TestEventsRegistrationFails(t *testing.T) {
	const gpu2 = "GPU-00000002-0000-0000-0000-000000000000"
	for _, tt := range []struct{ name, command, reason string }{
		{"lost", "lost 2", "GPU with NVML's index 2: nvmlDeviceGetHandleByIndex_v2: "},
		{"no XIDs", "supports 2 0x1f7", gpu2 + ": it reports no XIDs (supported types of events: 0x1f7)"},
		{"unread UUID", fmt.Sprintf("fail nvmlDeviceGetUUID 2 %d -1", nvml.ERROR_UNKNOWN), "GPU with NVML's index 2: nvmlDeviceGetUUID: "},
		{
			"unread types", fmt.Sprintf("fail nvmlDeviceGetSupportedEventTypes 2 %d -1", nvml.ERROR_UNKNOWN),
			gpu2 + ": nvmlDeviceGetSupportedEventTypes: ",
		},
		{"refused", fmt.Sprintf("fail nvmlDeviceRegisterEvents 2 %d -1", nvml.ERROR_NOT_SUPPORTED), gpu2 + ": nvmlDeviceRegisterEvents: "},
		{"unknown", fmt.Sprintf("fail nvmlDeviceRegisterEvents 2 %d -1", nvml.ERROR_UNKNOWN), gpu2 + ": nvmlDeviceRegisterEvents: "},
		{"hanging handle", "hang nvmlDeviceGetHandleByIndex_v2 2", "GPU with NVML's index 2: a call to the driver has not returned in 200ms"},
		{"hanging registration", "hang nvmlDeviceRegisterEvents 2", "GPU with NVML's index 2: a call to the driver has not returned in 200ms"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := startEvents(t, testTiming, tt.command)
			f.waitState("1 of 8 GPUs report no events: " + tt.reason)
			f.lib.Do("event 1 %d 31 -1 -1", bitXID)
			f.lib.Do("event 7 %d 43 -1 -1", bitXID)
			f.waitEvents("1 xid 31", "7 xid 43")
			f.lib.Do("back 2")
			f.lib.Do("supports 2 0xffff")
			f.lib.Do("release")
			f.waitState("")
			f.lib.Do("event 2 %d 45 -1 -1", bitXID)
			f.waitEvents("2 xid 45")
		})
	}
}

// TestEventsSpoiledSet checks that an UNKNOWN that makes the set unusable costs one set and no events: the first registration of a
// GPU is with a set of its own, the second with the set of all.
func TestEventsSpoiledSet(t *testing.T) {
	timing := testTiming
	timing.retry = time.Hour
	f := startEvents(t, timing, "fail nvmlDeviceRegisterEvents 2 0 1", fmt.Sprintf("fail nvmlDeviceRegisterEvents 2 %d 1", nvml.ERROR_UNKNOWN))
	f.waitState("1 of 8 GPUs report no events: GPU-00000002")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
}

// TestEventsSpoilingGPUIsTriedAgain checks that a GPU that made a set unusable is left out until the next retry only.
func TestEventsSpoilingGPUIsTriedAgain(t *testing.T) {
	unknown := fmt.Sprintf("fail nvmlDeviceRegisterEvents 2 %d 1", nvml.ERROR_UNKNOWN)
	f := startEvents(t, testTiming, "fail nvmlDeviceRegisterEvents 2 0 1", unknown)
	f.wait("state without GPU 2", func() bool {
		return slices.ContainsFunc(f.states, func(s string) bool { return strings.HasPrefix(s, "1 of 8 GPUs report no events: GPU-00000002") })
	})
	f.waitState("")
	f.lib.Do("event 2 %d 45 -1 -1", bitXID)
	f.waitEvents("2 xid 45")
}

// TestEventsHangingRegistrationOutlivesSet checks that a GPU whose registration hung reports events although its set was replaced
// meanwhile.
func TestEventsHangingRegistrationOutlivesSet(t *testing.T) {
	timing := testTiming
	timing.retry = time.Hour
	f := startEvents(t, timing, "hang nvmlDeviceRegisterEvents 2")
	f.waitState("1 of 8 GPUs report no events: GPU with NVML's index 2: a call") // the others are registered
	f.lib.Do("lost 5")
	f.waitState("2 of 8 GPUs")
	f.lib.Do("release")
	f.waitState("1 of 8 GPUs")
	f.lib.Do("event 2 %d 45 -1 -1", bitXID)
	f.waitEvents("5 gpu-unavailable", "2 xid 45")
}

// TestEventsWithoutDriver checks that the agent may start before the driver, and survives its unload. The library is loaded for all
// tests: see TestLibraryMissing.
func TestEventsWithoutDriver(t *testing.T) {
	timing := testTiming
	timing.callLimit = time.Hour // a slow call would be another transition
	f := startEvents(t, timing, "unload")
	f.waitState("nvmlInit_v2: Driver Not Loaded")
	f.lib.Do("await calls nvmlInit_v2 5")
	f.lib.Do("load")
	f.waitState("")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
	f.lib.Do("unload")
	f.waitState("nvmlInit_v2: Driver Not Loaded")
	f.lib.Do("load") // with other handles
	f.waitState("")
	f.lib.Do("event 1 %d 32 -1 -1", bitXID)
	f.waitEvents("1 xid 32")
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.states) > 5 { // one for each transition, not for each attempt: down, up, Wait fails, Init fails, up
		t.Errorf("states %q", f.states)
	}
}

// TestEventsHotPlug checks that GPUs that the driver adds report events, whether or not a system event announces them.
func TestEventsHotPlug(t *testing.T) {
	for _, missing := range []string{"", "nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents"} {
		systemEvents := missing == ""
		t.Run("without "+missing, func(t *testing.T) {
			timing := testTiming
			commands := []string{"gpus 2"}
			if systemEvents {
				timing.retry = time.Hour
			} else {
				commands = append(commands, fmt.Sprintf("fail %s -1 %d -1", missing, nvml.ERROR_FUNCTION_NOT_FOUND))
			}
			f := startEvents(t, timing, commands...)
			f.waitState("")
			inits := f.lib.Number("calls nvmlInit_v2")
			f.lib.Do("present 2")
			if systemEvents {
				f.lib.Do("system 2 2")
				f.waitEvents(" driver-binding")
			}
			f.lib.Do("await calls nvmlInit_v2 %d", inits+1)
			arrived := func() bool {
				f.mu.Lock()
				defer f.mu.Unlock()
				return slices.ContainsFunc(f.events, func(e health.Event) bool { return strings.HasPrefix(e.GPU, "GPU-00000002") })
			}
			for attempt := 0; !arrived(); attempt++ { // until it is registered
				if attempt == 100 {
					t.Fatalf("no event of the new GPU; states %q", f.states)
				}
				f.lib.Do("event 2 %d 31 -1 -1", bitXID)
				f.lib.Do("await calls nvmlEventSetWait_v2 %d", f.lib.Number("calls nvmlEventSetWait_v2")+2)
			}
		})
	}
}

// TestEventsPauseAfterLongSession checks that the pause before another attempt grows with each failure, and starts anew after a session
// that lasted.
func TestEventsPauseAfterLongSession(t *testing.T) {
	timing := testTiming
	timing.callLimit = time.Hour // a slow call would be another transition
	timing.minPause, timing.maxPause = time.Millisecond, 500*time.Millisecond
	f := startEvents(t, timing, "unload")
	attempts := func(n int) (took time.Duration) {
		begin := time.Now()
		f.lib.Do("await calls nvmlInit_v2 %d", f.lib.Number("calls nvmlInit_v2")+n)
		return time.Since(begin)
	}
	if took := attempts(10); took < timing.maxPause/2 {
		t.Errorf("ten attempts within %v", took)
	}
	f.lib.Do("load")
	f.waitState("")
	f.waits(2 * int(timing.maxPause/timing.wait))
	f.lib.Do("unload")
	f.waitState("nvmlInit_v2: Driver Not Loaded")
	if took := attempts(5); took >= 2*timing.maxPause { // without the new start, four pauses of half the maximum or more, and a part
		t.Errorf("five attempts after a long session in %v", took)
	}
}

// TestEventsSessionFails checks that the state shows a call that fails for all GPUs, and that the call is repeated.
func TestEventsSessionFails(t *testing.T) {
	for _, call := range []string{"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlEventSetCreate"} {
		t.Run(call, func(t *testing.T) {
			f := startEvents(t, testTiming, fmt.Sprintf("fail %s -1 %d -1", call, nvml.ERROR_NO_PERMISSION))
			f.waitState(call + ": ")
			f.lib.Do("release")
			f.waitState("")
			f.lib.Do("event 1 %d 31 -1 -1", bitXID)
			f.waitEvents("1 xid 31")
		})
	}
}

// TestEventsLostUnidentifiedAgain checks that the pauses between such sets grow, and are short again after a set that lasted.
func TestEventsLostUnidentifiedAgain(t *testing.T) {
	timing := testTiming
	timing.callLimit = time.Hour // a slow call would be another transition
	timing.minPause, timing.maxPause = time.Millisecond, time.Second
	f := startEvents(t, timing)
	f.waitState("")
	sets := func(n int) (took time.Duration) {
		f.lib.Do("fail waiting -1 %d -1", nvml.ERROR_GPU_IS_LOST)
		f.waitState(errLost.Error())
		begin := time.Now()
		f.lib.Do("await calls nvmlEventSetCreate %d", f.lib.Number("calls nvmlEventSetCreate")+9*n) // see TestEventsLostUnidentified
		return time.Since(begin)
	}
	if took := sets(18); took < timing.maxPause/2 {
		t.Errorf("18 sets in %v", took)
	}
	f.lib.Do("release")
	f.waitState("")
	f.waits(2 * int(timing.maxPause/timing.wait))
	if took := sets(4); took >= timing.maxPause { // otherwise at least two pauses of half the maximum or more
		t.Errorf("four sets in %v after one that lasted", took)
	}
}

// TestEventsLostUnidentifiedStays checks that GPUs which are registered with such a set do not report events for all that is known.
func TestEventsLostUnidentifiedStays(t *testing.T) {
	timing := testTiming
	timing.wait, timing.callLimit, timing.maxPause = time.Hour, time.Hour, time.Second // no set lasts
	f := startEvents(t, timing)
	f.waitState("")
	f.lib.Do("fail waiting -1 %d -1", nvml.ERROR_GPU_IS_LOST)
	f.waitState(errLost.Error())
	f.lib.Do("await calls nvmlEventSetCreate %d", f.lib.Number("calls nvmlEventSetCreate")+9*6) // see TestEventsLostUnidentified
	f.stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.states) != 2 {
		t.Errorf("states %q", f.states)
	}
}

// TestEventsLostUnidentifiedIsNoHang checks that the pause after such a set does not count as a call that hangs.
func TestEventsLostUnidentifiedIsNoHang(t *testing.T) {
	timing := testTiming
	timing.callLimit, timing.minPause, timing.maxPause = 2*time.Second, 4200*time.Millisecond, 4200*time.Millisecond
	f := startEvents(t, timing)
	f.waitState("")
	f.lib.Do("fail waiting -1 %d -1", nvml.ERROR_GPU_IS_LOST)
	f.waitState(errLost.Error())
	f.lib.Do("release")
	f.lib.Do("await calls nvmlEventSetCreate %d", f.lib.Number("calls nvmlEventSetCreate")+1) // after the pause
	f.waitState("")
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.ContainsFunc(f.states, func(s string) bool { return strings.Contains(s, "has not returned") }) {
		t.Errorf("states %q", f.states)
	}
}

// TestEventsRetryIsRare checks that the GPUs are counted, and those left out are tried, once in eventTiming.retry, and not after each wait.
func TestEventsRetryIsRare(t *testing.T) {
	timing := testTiming
	timing.retry = 5 * timing.wait
	f := startEvents(t, timing)
	f.waitState("")
	begin, counts := time.Now(), f.lib.Number("calls nvmlDeviceGetCount_v2")
	f.waits(40)
	counts = f.lib.Number("calls nvmlDeviceGetCount_v2") - counts
	if most := int(time.Since(begin)/timing.retry) + 1; counts == 0 || counts > most {
		t.Errorf("%d counts, want at most %d", counts, most)
	}
}

// TestEventsWithoutDescriptors checks that the state shows that no wait can begin, and that it begins later.
func TestEventsWithoutDescriptors(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	allow := func(current uint64) {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: current, Max: limit.Max}); err != nil {
			t.Error(err)
		}
	}
	allow(0)
	t.Cleanup(func() { allow(limit.Cur) })
	f := startEvents(t, testTiming)
	f.waitState(unix.EMFILE.Error())
	allow(limit.Cur)
	f.waitState("")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
}

func TestEventsNoGPU(t *testing.T) {
	f := startEvents(t, testTiming, "gpus 0")
	f.waitState(errNoGPU.Error())
	f.lib.Do("gpus 1")
	f.waitState("")
}

// TestEventsWaitHangs checks that the state shows a waiting call that does not return, and its end.
func TestEventsWaitHangs(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	f.lib.Do("hang nvmlEventSetWait_v2 -1")
	f.waitState("has not returned in 200ms")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.lib.Do("release")
	f.waitState("")
	f.waitEvents("1 xid 31")
}

// TestEventsWaitFails checks that the state shows why the waiting call fails, and that the driver is initialized again.
func TestEventsWaitFails(t *testing.T) {
	f := startEvents(t, testTiming)
	f.waitState("")
	inits := f.lib.Number("calls nvmlInit_v2")
	f.lib.Do("fail nvmlEventSetWait_v2 -1 %d -1", nvml.ERROR_NO_PERMISSION)
	f.waitState("nvmlEventSetWait_v2: ")
	f.lib.Do("await calls nvmlInit_v2 %d", inits+1)
	f.lib.Do("release")
	f.waitState("")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
}

// A call that waits as it should does not count as hanging, and no loop is without a pause.
func TestDefaultTiming(t *testing.T) {
	d := defaultTiming
	if d.wait <= 0 || d.callLimit <= d.wait || d.retry <= d.wait || d.minPause <= 0 || d.maxPause <= d.minPause {
		t.Errorf("%+v", d)
	}
}

// TestEventsEnd checks that Run returns only when no call is left, so that the driver's files are closed.
func TestEventsEnd(t *testing.T) {
	f := startEvents(t, testTiming, "hang nvmlDeviceRegisterEvents 2")
	f.waitState("has not returned")
	ended := make(chan struct{})
	go func() {
		f.stop()
		close(ended)
	}()
	f.lib.Do("await0 calls never") // the library is free
	f.lib.Do("await hanging 1")
	select {
	case <-ended:
		t.Error("Run returned while a call was in the driver")
	case <-time.After(5 * testTiming.wait):
	}
	f.lib.Do("release")
	<-ended
	if sets, inits := f.lib.Number("sets"), f.lib.Number("inits"); sets != 0 || inits != 0 {
		t.Errorf("%d sets of events and %d Inits are left", sets, inits)
	}
}

// TestEventsEndWithinOneWait checks that no wait begins once Run is to end.
func TestEventsEndWithinOneWait(t *testing.T) {
	timing := testTiming
	timing.wait, timing.retry = 2*time.Second, time.Hour
	f := startEvents(t, timing)
	f.waitState("")
	waits := f.lib.Number("calls nvmlEventSetWait_v2") + 1
	f.lib.Do("await calls nvmlEventSetWait_v2 %d", waits) // it has just begun
	f.stop()
	if n := f.lib.Number("calls nvmlEventSetWait_v2"); n != waits {
		t.Errorf("%d waits began after the end was requested", n-waits)
	}
}

// TestEventsReceiverBlocks checks that no event is lost while the receiver blocks for longer than the pipe holds events.
func TestEventsReceiverBlocks(t *testing.T) {
	const times = 10000
	f := startEvents(t, testTiming)
	f.waitState("")
	waits := f.lib.Number("calls nvmlEventSetWait_v2")
	f.mu.Lock()
	f.lib.Do("event 1 %d 31 -1 -1 %d", bitXID, times)
	f.lib.Do("await calls nvmlEventSetWait_v2 %d", waits+1600) // nearly as many as a pipe holds
	f.mu.Unlock()
	f.wait("end of the storm", func() bool { return len(f.events) == times })
}

func TestEventsWithoutLibrary(t *testing.T) {
	dir := t.TempDir()
	for events, want := range map[string]string{"auto": "unused: true", "nvml": "unused: false"} {
		t.Setenv("GNA_TEST_EVENTS", events)
		out, code := runChild(t, dir)
		if code != 0 || !strings.Contains(out, "events: cannot load libnvidia-ml.so.1") || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d and %s", events, code, out)
		}
	}
}

// TestEventsBesideHostEngine checks that the driver's files are open only while the driver lists a GPU of the source.
func TestEventsBesideHostEngine(t *testing.T) {
	const gpu1, other = "GPU-00000001-0000-0000-0000-000000000000", "GPU-0000abcd-0000-0000-0000-000000000000"
	f := startListedEvents(t) // the host engine is away: the events wait for the GPUs that it will list
	f.waitState("")
	f.lib.Do("event 1 %d 31 -1 -1", bitXID)
	f.waitEvents("1 xid 31")
	f.list(other)
	f.wait("state of another host", func() bool { return f.unused })
	f.lib.Do("await0 inits")
	f.lib.Do("await0 sets")
	inits := f.lib.Number("calls nvmlInit_v2")
	f.list(other, gpu1)
	f.waitState("")
	f.lib.Do("event 1 %d 32 -1 -1", bitXID)
	f.waitEvents("1 xid 32")
	if n := f.lib.Number("calls nvmlInit_v2"); n != inits+1 {
		t.Errorf("%d calls of Init while the source lists another host's GPUs", n-inits-1)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.states) != 3 {
		t.Errorf("states %q, want up, unused, up", f.states)
	}
}

// TestEventsBesideHostEngineUnreadGPU checks that a GPU whose UUID cannot be read may be one of the source.
func TestEventsBesideHostEngineUnreadGPU(t *testing.T) {
	f := &eventFixture{t: t, lib: newLibrary(t)}
	listed := func() []string { return []string{"GPU-00000001-0000-0000-0000-000000000000"} }
	f.start(testTiming, listed, fmt.Sprintf("fail nvmlDeviceGetUUID 1 %d 5", nvml.ERROR_UNKNOWN))
	f.waitState("")
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.states {
		if strings.Contains(s, errOthers.Error()) {
			t.Errorf("states %q", f.states)
		}
	}
}

// printState prints the first state, and ends the event source.
type printState struct{ end func() }

func (printState) Receive(health.Event) {}
func (p printState) SetEvents(err error) {
	_, unused := errors.AsType[health.UnusedEvents](err)
	fmt.Printf("events: %v, unused: %v\n", err, unused)
	p.end()
}

func childEvents() int {
	ctx, cancel := context.WithCancel(context.Background())
	listed := func() []string { return nil }
	if os.Getenv("GNA_TEST_EVENTS") == "nvml" {
		listed = nil
	}
	Events(zap.NewNop(), listed)(ctx, printState{cancel})
	if !errors.Is(ctx.Err(), context.Canceled) {
		return 1
	}
	return 0
}

// BenchmarkEvent measures the time from an event in the driver's queue to Receive.
func BenchmarkEvent(b *testing.B) {
	f := startEvents(b, defaultTiming)
	f.waitState("")
	for b.Loop() {
		f.lib.Do("event 1 %d 31 -1 -1", bitXID)
		f.wait("event", func() bool { return len(f.events) == 1 })
		f.mu.Lock()
		f.events = f.events[:0]
		f.mu.Unlock()
	}
}
