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
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
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
func (s service) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	d := s.sockets.Driver
	sent := sentHealth{node: d.Node, resend: d.timing.resend, timeout: kubeletForgets}
	wake := health.Wake(ctx, d.Snapshots, &d.names)
	for {
		if devices := sent.next(d.Snapshots.Load(), d.names.Load(), time.Now()); len(devices) > 0 {
			select {
			case <-ctx.Done():
				return nil
			case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
			}
		}
		if !wait.For(ctx, wake) {
			return nil
		}
	}
}

// sentHealth is what a stream of WatchHealthStatus has sent.
type sentHealth struct {
	node     string
	resend   time.Duration // after which everything is sent again
	timeout  time.Duration // after which the kubelet counts a health as unknown
	lastPoll time.Time
	devices  map[string]kubeletplugin.DeviceHealth // by name; nil before the first report
	sentAll  time.Time
}

// next returns the devices to send now: those that differ from what was sent, or all.
func (s *sentHealth) next(snap *health.Snapshot, published *names, now time.Time) (devices []kubeletplugin.DeviceHealth) {
	if !snap.Polled() || published == nil {
		return nil
	}
	if gap := snap.At.Sub(s.lastPoll); !s.lastPoll.IsZero() && gap > 0 { // polls may be rarer than every 10 s
		s.timeout = max(kubeletForgets, 3*gap)
	}
	s.lastPoll = snap.At
	if !examined(snap, now, s.timeout) {
		return nil
	}
	due := s.devices == nil || now.Sub(s.sentAll) >= s.resend && snap.At.After(s.sentAll)
	sent := make(map[string]kubeletplugin.DeviceHealth)
	for _, h := range deviceHealth(snap, published, s.node, s.timeout) {
		if last, ok := s.devices[h.DeviceName]; due || !ok || last.Health != h.Health || last.Message != h.Message {
			devices = append(devices, h)
		}
		sent[h.DeviceName] = h
	}
	if len(devices) > 0 {
		s.devices = sent
		if due {
			s.sentAll = now
		}
	}
	return devices
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
