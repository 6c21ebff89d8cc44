package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// receiver records events as text, and the state of the events.
type receiver struct {
	mu  sync.Mutex // guards the fields
	all []string
	err error
	set int // calls of SetEvents
}

func (r *receiver) Receive(e health.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := e.Kind.String()
	if e.Kind == health.EventXID {
		text += fmt.Sprint(" ", e.XID.Code)
	}
	r.all = append(r.all, text)
}

func (r *receiver) SetEvents(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
	r.set++
}

func (r *receiver) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

// receive runs Events until the test ends or stop is called.
func receive(t *testing.T, s *Source) (r *receiver, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	r = new(receiver)
	ended := make(chan struct{})
	go func() { s.Events(ctx, r); close(ended) }()
	synctest.Wait()
	return r, func() { cancel(); <-ended }
}

func TestEventsReportChanges(t *testing.T) {
	for text, want := range map[string][]string{
		"{gpu: 3, xid: 79}":                                   {"xid 79"},
		"{gpu: 3, xid: 31, times: 3}":                         {"xid 31", "xid 31", "xid 31"},
		"{gpu: 3, xid: 95, recoveryAction: reset}":            {"xid 95", "recovery-action"},
		"{gpu: 3, recoveryAction: none}":                      nil, // as before
		"{gpu: 3, lost: true, doubleBitErrors: 1}":            {"gpu-unavailable", "double-bit-error"},
		"{gpu: 3, mig: balanced}":                             {"mig-configuration"},
		"{gpu: 3, temperature: 40, stale: true}":              nil,
		"{gpu: 3, xid: 79, source: empty}":                    {"xid 79"},
		"{gpu: 3, xid: 79, events: lossy}":                    {"xid 79"},
		"{events: lossy}|{gpu: 3, xid: 79}":                   nil,
		"{events: down}|{gpu: 3, xid: 79}":                    nil,
		"{events: down}|{events: up}|{gpu: 3, xid: 79}":       {"xid 79"},
		"{source: empty}|{gpu: 3, xid: 79, source: up}":       nil,
		"{source: stalled}|{gpu: 3, xid: 79}":                 {"xid 79"},
		"{source: down}|{gpu: 3, xid: 79}":                    {"xid 79"},
		"{source: blind}|{gpu: 3, xid: 79, lost: true}":       {"xid 79", "gpu-unavailable"},
		"{gpu: 3, recoveryAction: reset, source: checksDown}": {"recovery-action"},
	} {
		t.Run(text, func(t *testing.T) {
			simulate(t, profileConfig("h100-8"), func(t *testing.T, src *Source, _ health.Session) {
				r, stop := receive(t, src)
				defer stop()
				for e := range strings.SplitSeq(text, "|") {
					inject(t, src, e)
				}
				if got := r.take(); !slices.Equal(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
			})
		})
	}
}

// Every event source gets the events from after its start; the readings have all of them.
func TestEventsAndRecord(t *testing.T) {
	simulate(t, profileConfig("h100-8"), func(t *testing.T, src *Source, ses health.Session) {
		inject(t, src, "{gpu: 3, xid: 13}")
		first, stopFirst := receive(t, src)
		inject(t, src, "{gpu: 3, xid: 31}")
		second, stopSecond := receive(t, src)
		inject(t, src, "{gpu: 3, xid: 43}")
		stopFirst()
		inject(t, src, "{gpu: 3, xid: 45}")
		stopSecond()
		if got, want := first.take(), []string{"xid 31", "xid 43"}; !slices.Equal(got, want) {
			t.Errorf("first: %q, want %q", got, want)
		}
		if got, want := second.take(), []string{"xid 43", "xid 45"}; !slices.Equal(got, want) {
			t.Errorf("second: %q, want %q", got, want)
		}
		var codes []int
		for _, x := range gpuSample(t, poll(t, ses), 3).XIDs {
			codes = append(codes, x.Code)
		}
		if want := []int{13, 31, 43, 45}; !slices.Equal(codes, want) {
			t.Errorf("record: %v, want %v", codes, want)
		}
	})
}

func TestEventsFollowState(t *testing.T) {
	simulate(t, profileConfig("h100-8"), func(t *testing.T, src *Source, _ health.Session) {
		r, stop := receive(t, src)
		defer stop()
		for _, s := range []struct {
			event string
			want  error
		}{
			{"{source: stalled}", nil},
			{"{events: down}", errEventsDown},
			{"{source: empty}", errNoDriver},
			{"{events: up}", errNoDriver},
			{"{source: up}", nil},
			{"{events: lossy}", nil},
		} {
			inject(t, src, s.event)
			synctest.Wait()
			if r.err != s.want || r.set == 0 { //nolint:errorlint // the error itself
				t.Errorf("after %s: %v, want %v", s.event, r.err, s.want)
			}
		}
	})
}

// The scenario goes on while no session can be opened.
func TestEventsOfScenarioWhileDown(t *testing.T) {
	cfg := scenarioConfig("h100-8", 10*time.Second,
		event(t, time.Second, "{source: down, events: up}"), event(t, 5*time.Second, "{gpu: 3, xid: 79, recoveryAction: reset}"))
	simulate(t, cfg, func(t *testing.T, src *Source, ses health.Session) {
		r, stop := receive(t, src)
		defer stop()
		sleep(2 * time.Second)
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errDown) {
			t.Fatal(err)
		}
		_ = ses.Close()
		sleep(4 * time.Second)
		if got, want := r.take(), []string{"xid 79", "recovery-action"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		sleep(5 * time.Second)
		if got, want := r.take(), []string{"recovery-action"}; !slices.Equal(got, want) {
			t.Errorf("after the restart of the scenario: %q, want %q", got, want)
		}
	})
}
