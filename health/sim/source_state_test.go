package sim

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// TestSourceBlind checks that a blind source keeps its XIDs, and that after blindAfter the session and Open fail.
func TestSourceBlind(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		expectBlind := func() {
			t.Helper()
			for _, s := range poll(t, ses).Samples {
				if s.Presence != health.PresenceUnknown || len(s.Values) != 0 || len(s.XIDs) != 0 || s.Checked {
					t.Errorf("sample %+v; want presence unknown", s)
				}
			}
		}
		inject(t, src, `{source: blind}`, `{gpu: 1, xid: 48, lost: true}`)
		expectBlind()
		sleep(blindAfter - time.Nanosecond)
		expectBlind()
		inject(t, src, `{source: up}`)
		if s := gpuSample(t, poll(t, ses), 1); s.Presence != health.Lost || len(s.XIDs) != 1 {
			t.Errorf("up again: %+v", s)
		}

		inject(t, src, `{source: blind}`)
		sleep(time.Minute) // without a poll
		expectBlind()
		sleep(blindAfter)
		expectPollFails(t, ses, errBlind)
		expectOpenFails(t, src, errBlind)
		inject(t, src, `{gpu: 1, xid: 31}`, `{source: up}`)
		expectPollFails(t, ses, errBlind)
		ses = open(t, src)
		if s := gpuSample(t, poll(t, ses), 1); s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 31 {
			t.Errorf("new session: %+v", s)
		}
	})
}

// TestSourceChecksDown checks that only the health checks fail.
func TestSourceChecksDown(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		expect := func(checks health.ChecksStatus, incidents, node int) {
			t.Helper()
			r := poll(t, ses)
			s := gpuSample(t, r, 1)
			if r.Checks.Status != checks || (r.Checks.Err != "") != (checks == health.ChecksDown) || s.Checked != (checks == health.ChecksUp) {
				t.Errorf("checks %+v, checked %v; want %v", r.Checks, s.Checked, checks)
			}
			if len(s.Incidents) != incidents || len(r.Incidents) != node || s.Presence != health.Present || len(s.Values) == 0 {
				t.Errorf("%+v, %+v", s, r.Incidents)
			}
		}
		inject(t, src, `{gpu: 1, incident: DCGM_FR_NVLINK_DOWN}`, `{gpu: 2, incident: DCGM_FR_IMEX_UNHEALTHY}`)
		expect(health.ChecksUp, 1, 1)
		inject(t, src, `{source: checksDown}`)
		expect(health.ChecksDown, 0, 0)
		inject(t, src, `{source: up}`)
		expect(health.ChecksUp, 1, 1)
	})
}

// TestSourceEmpty checks that a source without a driver lists no GPU without an error, keeps the XIDs from before, and
// loses those reported meanwhile.
func TestSourceEmpty(t *testing.T) {
	simulate(t, profileConfig("h100-8-mig"), func(t *testing.T, src *Source, ses health.Session) {
		before := poll(t, ses)
		inject(t, src, `{gpu: 3, xid: 95, source: empty}`, `{gpu: 4, xid: 79, lost: true}`)
		for _, s := range []health.Session{ses, open(t, src)} {
			if !woken(ses) && s == ses {
				t.Error("no wake")
			}
			r := poll(t, s)
			if len(r.Devices) != 0 || len(r.Samples) != 0 || r.Versions.Driver != "" {
				t.Errorf("reading %+v; want no devices", r)
			}
			sleep(time.Hour) // unlike while blind, the session stays usable
		}
		inject(t, src, `{source: up}`)
		r := poll(t, ses)
		if len(r.Devices) != len(before.Devices) {
			t.Errorf("%d devices; want %d", len(r.Devices), len(before.Devices))
		}
		if s := gpuSample(t, r, 3); len(s.XIDs) != 1 || s.XIDs[0].Code != 95 {
			t.Errorf("GPU 3: %+v; want XID 95 from before", s)
		}
		if s := gpuSample(t, r, 4); s.Presence != health.Lost || len(s.XIDs) != 0 {
			t.Errorf("GPU 4: %+v; want lost without XIDs", s)
		}
		inject(t, src, `{gpu: 4, lost: false}`)
		if s := gpuSample(t, poll(t, ses), 4); len(s.Incidents) != 0 || s.Values[health.FieldXID] != 0 {
			t.Errorf("GPU 4: %+v; want no trace of XID 79", s)
		}
	})
}

// TestSourceLost checks that all GPUs are lost together, and report their XIDs.
func TestSourceLost(t *testing.T) {
	simulate(t, profileConfig("h100-8-mig"), func(t *testing.T, src *Source, ses health.Session) {
		before := poll(t, ses)
		inject(t, src, `{source: lost}`, `{gpu: 3, xid: 79}`, `{gpu: 4, stale: true}`)
		r := poll(t, ses)
		for _, s := range r.Samples {
			if s.Presence != health.Lost || len(s.Values) != 0 || s.Checked || s.Stale {
				t.Errorf("sample %+v; want lost", s)
			}
		}
		if s := gpuSample(t, r, 3); len(s.XIDs) != 1 || len(r.Samples) != len(before.Samples) {
			t.Errorf("%d samples; GPU 3: %+v", len(r.Samples), s)
		}
		if _, err := src.ListProcesses(t.Context(), r.Devices); err == nil {
			t.Error("processes without a driver")
		}
		inject(t, src, `{source: up}`)
		for _, s := range poll(t, ses).Samples {
			if s.Presence != health.Present {
				t.Errorf("up again: %+v", s)
			}
		}
	})
}

// TestStale checks that a stale GPU and its MIG devices have no values, and that its XIDs are delivered.
func TestStale(t *testing.T) {
	cfg := scenarioConfig("h100-8-mig", 0,
		event(t, 0, `{gpu: 6, stale: true, xid: 48, temperature: 97}`),
		event(t, 10*time.Second, `{gpu: 6, stale: false}`),
	)
	simulate(t, cfg, func(t *testing.T, _ *Source, ses health.Session) {
		for _, stale := range []bool{true, false} {
			r := poll(t, ses)
			devices := 0
			for i, d := range r.Devices {
				s := r.Samples[i]
				if s.Presence != health.Present || s.Stale != (stale && d.Index == 6) || s.Stale == (len(s.Values) > 0) ||
					s.Checked != (!s.Stale && d.Kind == health.KindGPU) || s.Stale && len(s.Incidents) > 0 {
					t.Errorf("stale %t: %s of GPU %d: %+v", stale, d.ID, d.Index, s)
				}
				if s.Stale {
					devices++
				}
			}
			if stale != (devices == 5) {
				t.Errorf("%d devices are stale; want the GPU and its 4 MIG devices: %t", devices, stale)
			}
			if s := gpuSample(t, r, 6); stale != (len(s.XIDs) == 1) {
				t.Errorf("stale %t: XIDs %v", stale, s.XIDs)
			}
			sleep(10 * time.Second)
		}
	})
}

// TestStaleAllGPUsIsBlind checks that no GPU is stale if none on the bus has values.
func TestStaleAllGPUsIsBlind(t *testing.T) {
	simulate(t, profileConfig("l4-1"), func(t *testing.T, src *Source, ses health.Session) {
		inject(t, src, `{gpu: 0, stale: true}`)
		if s := gpuSample(t, poll(t, ses), 0); s.Stale || s.Presence != health.PresenceUnknown {
			t.Errorf("%+v; want presence unknown", s)
		}
		sleep(blindAfter)
		expectPollFails(t, ses, errBlind)
		inject(t, src, `{gpu: 0, lost: true}`)
		if s := gpuSample(t, poll(t, open(t, src)), 0); s.Presence != health.Lost || s.Stale {
			t.Errorf("%+v; want lost", s)
		}
	})
}

func TestSourceDown(t *testing.T) {
	cfg := scenarioConfig("h100-8", 0, event(t, 5*time.Second, `{source: down}`), event(t, 10*time.Second, `{source: up}`))
	simulate(t, cfg, func(t *testing.T, src *Source, ses health.Session) {
		poll(t, ses)
		<-ses.Wake()
		expectPollFails(t, ses, errDown)
		expectOpenFails(t, src, errDown)
		sleep(5 * time.Second)
		// The session of before the outage stays dead.
		expectPollFails(t, ses, errDown)
		poll(t, open(t, src))
	})
}

func TestSourceStalled(t *testing.T) {
	for _, tt := range []struct {
		after string // the state that ends the stall
		want  error
	}{{"up", nil}, {"down", errDown}} {
		cfg := scenarioConfig("h100-8", 0, event(t, 5*time.Second, `{source: stalled}`), event(t, 65*time.Second, `{source: `+tt.after+`}`))
		simulate(t, cfg, func(t *testing.T, src *Source, ses health.Session) {
			start := time.Now()
			<-ses.Wake()

			// The context ends the first calls, the change of state the others.
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := ses.Poll(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 15*time.Second {
				t.Errorf("Poll ended after %v with %v; want the deadline after 15 s", time.Since(start), err)
			}
			ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if again, err := src.Open(ctx); !errors.Is(err, context.DeadlineExceeded) || again != nil || time.Since(start) != 25*time.Second {
				t.Errorf("Open ended after %v with %v, %v; want the deadline after 25 s", time.Since(start), again, err)
			}
			opened := make(chan error)
			go func() {
				again, err := src.Open(t.Context())
				if err == nil {
					_ = again.Close()
				}
				opened <- err
			}()
			if _, err := ses.Poll(t.Context()); !errors.Is(err, tt.want) || time.Since(start) != 65*time.Second {
				t.Errorf("Poll ended after %v with %v; want %v after 65 s", time.Since(start), err, tt.want)
			}
			if err := <-opened; !errors.Is(err, tt.want) || time.Since(start) != 65*time.Second {
				t.Errorf("Open ended after %v with %v; want %v after 65 s", time.Since(start), err, tt.want)
			}
		})
	}
}

func TestCloseEndsAStalledPoll(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		inject(t, src, `{source: stalled}`)
		polled := make(chan error)
		go func() {
			_, err := ses.Poll(t.Context())
			polled <- err
		}()
		synctest.Wait()
		for range 2 {
			if err := ses.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := <-polled; !errors.Is(err, errClosed) {
			t.Errorf("stalled Poll: %v; want %v", err, errClosed)
		}
		expectPollFails(t, ses, errClosed)
		if len(src.sessions) != 0 {
			t.Errorf("%d sessions are left", len(src.sessions))
		}
	})
}
