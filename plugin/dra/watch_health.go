package dra

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// service is the driver as the kubelet's helper calls it.
type service struct {
	*preparer
	sockets *sockets
}

// HandleError is called for errors in the background. A server that fails is started again; nothing ends the process.
func (s service) HandleError(_ context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		s.sockets.log.Debug(msg, zap.Error(err))
		return
	}
	select {
	case s.sockets.failed <- fmt.Errorf("%s: %w", msg, err):
	default: // one is enough
	}
}

const (
	kubeletForgets   = 30 * time.Second // the kubelet's default of DeviceHealth.HealthCheckTimeout
	maxHealthMessage = 1024             // bytes; the kubelet cuts the rest
)

// WatchHealthStatus sends the health of the published devices until ctx ends: changes at once, and everything again with a poll some
// time later. Without polls the kubelet soon counts the health as unknown, as it is.
//
//nolint:gocognit // redesigned by a pure comparison of the reports
func (s service) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	d := s.sockets.Driver
	var sent map[string]kubeletplugin.DeviceHealth
	var sentAll, lastPoll time.Time
	timeout := kubeletForgets
	wake := health.Wake(ctx, d.Snapshots, &d.names)
	for {
		snap, published := d.Snapshots.Load(), d.names.Load()
		if snap.Polled() && published != nil {
			if gap := snap.At.Sub(lastPoll); !lastPoll.IsZero() && gap > 0 { // polls may be rarer than every 10 s
				timeout = max(kubeletForgets, 3*gap)
			}
			lastPoll = snap.At
		}
		if now := time.Now(); published != nil && examined(snap, now, timeout) {
			all := deviceHealth(snap, published, d.Node, timeout)
			due := sent == nil || now.Sub(sentAll) >= d.timing.resend && snap.At.After(sentAll)
			var report kubeletplugin.DeviceHealthReport
			for _, h := range all {
				if last, ok := sent[h.DeviceName]; due || !ok || last.Health != h.Health || last.Message != h.Message {
					report.Devices = append(report.Devices, h)
				}
			}
			if len(report.Devices) > 0 {
				select {
				case <-ctx.Done():
					return nil
				case reports <- report:
				}
				if due {
					sentAll = now
				}
				sent = make(map[string]kubeletplugin.DeviceHealth, len(all))
				for _, h := range all {
					sent[h.DeviceName] = h
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		}
	}
}

// examined reports whether the devices of a snapshot were really looked at lately.
func examined(snap *health.Snapshot, now time.Time, maxAge time.Duration) bool {
	return snap.Polled() && snap.Source.Status == health.SourceUp && now.Sub(snap.At) < maxAge
}

// deviceHealth returns the health of the published devices of a snapshot. Degraded is healthy for Kubernetes, with a message.
func deviceHealth(snap *health.Snapshot, published *names, pool string, timeout time.Duration) (all []kubeletplugin.DeviceHealth) {
	byID := make(map[health.DeviceID]string, len(published.published))
	for name, id := range published.published {
		byID[id] = name
	}
	for i := range snap.Devices {
		state := &snap.Devices[i]
		name, ok := byID[state.Device.ID]
		if !ok {
			continue
		}
		d := kubeletplugin.DeviceHealth{
			PoolName: pool, DeviceName: name, LastUpdated: snap.At, HealthCheckTimeout: timeout, Message: healthMessage(state.Verdict.Findings),
		}
		switch state.Verdict.State {
		case health.Unhealthy:
			d.Health = kubeletplugin.HealthStatusUnhealthy
		case health.Healthy, health.Degraded:
			d.Health = kubeletplugin.HealthStatusHealthy
		default:
			d.Health = kubeletplugin.HealthStatusUnknown
		}
		all = append(all, d)
	}
	return all
}

// healthMessage returns the findings as a text: reason (cause); action. It has as many findings as fit, the worst first.
func healthMessage(findings []health.Finding) string {
	var b strings.Builder
	for _, f := range findings {
		text := fmt.Sprintf("%s (%s)", f.Reason, f.Cause)
		if advice := f.Advice(); advice != "" {
			text += "; " + advice
		}
		if b.Len() > 0 {
			text = ". " + text
		}
		if b.Len()+len(text) > maxHealthMessage {
			if b.Len() == 0 {
				b.WriteString(strings.ToValidUTF8(text[:maxHealthMessage], ""))
			}
			break
		}
		b.WriteString(text)
	}
	return b.String()
}
