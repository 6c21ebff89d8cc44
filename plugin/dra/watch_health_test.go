package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestHealthMessage(t *testing.T) {
	t.Parallel()
	finding := func(cause, reason string) health.Finding { return health.Finding{Cause: cause, Reason: reason} }
	long := strings.Repeat("x", 600)
	for name, c := range map[string]struct {
		findings []health.Finding
		parts    []string
		lacks    string
	}{
		"none": {nil, nil, "("},
		"one": {
			[]health.Finding{{Cause: "xid-79", Reason: "fallen off the bus", Action: health.ActionRebootNode}},
			[]string{"fallen off the bus (xid-79); ", health.ActionRebootNode.Advice()},
			"",
		},
		"several":         {[]health.Finding{finding("a", "first"), finding("b", "second")}, []string{"first (a)", "second (b)"}, ""},
		"as many as fit":  {[]health.Finding{finding("a", long), finding("b", long)}, []string{"(a)"}, "(b)"},
		"one that is cut": {[]health.Finding{finding("a", strings.Repeat("é", 1000))}, []string{"éé"}, "\uFFFD"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := healthMessage(c.findings)
			if len(got) > maxHealthMessage || c.lacks != "" && strings.Contains(got, c.lacks) {
				t.Errorf("%d bytes: %s", len(got), got)
			}
			for _, part := range c.parts {
				if !strings.Contains(got, part) {
					t.Errorf("%q lacks %q", got, part)
				}
			}
		})
	}
}

// Changes are sent at once and everything again with later polls, but nothing while the source is away.
func TestWatchHealthStatus(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &Driver{timing: defaultTiming()}
		d.Snapshots, d.Node = &health.Latest[health.Snapshot]{}, "node1"
		d.names.Store(&names{published: map[string]health.DeviceID{"gpu-0": "GPU-0", "gpu-1": "GPU-1"}})
		states := []health.State{health.Healthy, health.Degraded, health.Unhealthy}
		poll := func(status health.SourceStatus, at time.Time) {
			s := &health.Snapshot{At: at, Source: health.Source{Status: status}}
			for i, id := range []health.DeviceID{"GPU-0", "GPU-1", "GPU-2"} {
				s.Devices = append(s.Devices, health.DeviceState{Device: health.Device{ID: id}, Verdict: health.Verdict{State: states[i]}})
			}
			d.Snapshots.Store(s)
		}
		ctx, cancel := context.WithCancel(t.Context())
		reports, done := make(chan kubeletplugin.DeviceHealthReport, 100), make(chan error, 1)
		svc := service{sockets: newSockets(d, instance{}, zap.NewNop())}
		go func() { done <- svc.WatchHealthStatus(ctx, reports) }()
		// expect waits for what is sent now.
		expect := func(what string, want ...kubeletplugin.HealthStatus) {
			t.Helper()
			synctest.Wait()
			if len(want) == 0 {
				if len(reports) > 0 {
					t.Fatalf("%s: sent %+v", what, <-reports)
				}
				return
			}
			if len(reports) != 1 {
				t.Fatalf("%s: %d reports, want one", what, len(reports))
			}
			got := (<-reports).Devices
			if len(got) != len(want) {
				t.Fatalf("%s: %+v, want %v", what, got, want)
			}
			for i := range got {
				if got[i].Health != want[i] || got[i].PoolName != "node1" || got[i].HealthCheckTimeout < kubeletForgets {
					t.Errorf("%s: %+v, want %v", what, got[i], want[i])
				}
			}
		}
		const healthy, unhealthy, unknown = kubeletplugin.HealthStatusHealthy, kubeletplugin.HealthStatusUnhealthy,
			kubeletplugin.HealthStatusUnknown
		expect("before the first poll")
		poll(health.SourceUp, time.Now())
		expect("at first", healthy, healthy)
		<-time.After(time.Second)
		poll(health.SourceUp, time.Now())
		expect("nothing new")
		states[0] = health.Unhealthy
		poll(health.SourceUp, time.Now())
		expect("a change", unhealthy)
		last := time.Now()
		<-time.After(time.Minute)
		expect("without polls")
		poll(health.SourceUp, last)
		expect("without a new poll")
		poll(health.SourceDown, time.Now())
		expect("source down")
		states[0] = health.Unknown
		poll(health.SourceUp, time.Now())
		expect("everything again", unknown, healthy)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A device is healthy for the kubelet for as long as the polls are apart, and 30 s at least. A change is sent at once, and what has not
// changed again only with a later poll.
func TestWatchHealthStatusTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &Driver{timing: defaultTiming()}
		d.Snapshots, d.Node = &health.Latest[health.Snapshot]{}, "node1"
		d.names.Store(&names{published: map[string]health.DeviceID{"gpu-0": "GPU-0", "gpu-1": "GPU-1"}})
		ctx, cancel := context.WithCancel(t.Context())
		reports, done := make(chan kubeletplugin.DeviceHealthReport, 100), make(chan error, 1)
		svc := service{sockets: newSockets(d, instance{}, zap.NewNop())}
		go func() { done <- svc.WatchHealthStatus(ctx, reports) }()
		poll := func(reason string) (sent []string) {
			s := &health.Snapshot{At: time.Now(), Source: health.Source{Status: health.SourceUp}}
			for i, id := range []health.DeviceID{"GPU-0", "GPU-1"} {
				v := health.Verdict{State: health.Degraded}
				if i == 1 {
					v.Findings = []health.Finding{{Cause: "c", Reason: reason}}
				}
				s.Devices = append(s.Devices, health.DeviceState{Device: health.Device{ID: id}, Verdict: v})
			}
			d.Snapshots.Store(s)
			synctest.Wait()
			for len(reports) > 0 {
				for _, h := range (<-reports).Devices {
					sent = append(sent, fmt.Sprint(h.DeviceName, " ", h.HealthCheckTimeout))
					if !h.LastUpdated.Equal(s.At) {
						t.Errorf("%s of %v, want %v", h.DeviceName, h.LastUpdated, s.At)
					}
				}
			}
			return sent
		}
		want := func(got []string, want ...string) {
			t.Helper()
			if !slices.Equal(got, want) {
				t.Errorf("sent %q, want %q", got, want)
			}
		}
		after := func(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // synctest's time
		want(poll("a"), "gpu-0 30s", "gpu-1 30s")
		after(5 * time.Second)
		want(poll("a"))
		want(poll("b"), "gpu-1 30s")
		after(5*time.Second - time.Nanosecond)
		want(poll("b")) // since all were sent
		after(time.Nanosecond)
		want(poll("b"), "gpu-0 30s", "gpu-1 30s")
		after(time.Minute)
		want(poll("b"), "gpu-0 3m0s", "gpu-1 3m0s")
		after(11 * time.Second)
		want(poll("b"), "gpu-0 33s", "gpu-1 33s")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// An error of the kubelet's helper in the background ends its servers, once, unless the helper recovers by itself.
func TestHandleError(t *testing.T) {
	svc := service{sockets: newSockets(&Driver{timing: defaultTiming()}, instance{}, zap.NewNop())}
	svc.HandleError(t.Context(), fmt.Errorf("publishing: %w", kubeletplugin.ErrRecoverable), "x")
	if len(svc.sockets.failed) != 0 {
		t.Error("ended by an error that the helper recovers from")
	}
	for range 2 {
		svc.HandleError(t.Context(), errors.New("closed"), "server failed")
	}
	if err := <-svc.sockets.failed; err == nil || err.Error() != "server failed: closed" || len(svc.sockets.failed) != 0 {
		t.Errorf("%v, and %d more", err, len(svc.sockets.failed))
	}
}
