package health

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
)

// MonitorSource is where a Monitor gets its sessions.
type MonitorSource struct {
	Open       Opener
	StallAfter time.Duration // a call that takes longer is shown as a stalled source
}

const (
	// The pause between two attempts to open a session grows from the one to the other.
	minBackoff = time.Second
	maxBackoff = 30 * time.Second

	// abandonAfter is how long a call that hangs is waited for when the process ends.
	abandonAfter = time.Second
)

var errAbandoned = errors.New("abandoned a call that hangs: the process ends")

// Monitor measures the GPUs and judges them. It is the only writer of the snapshots.
type Monitor struct {
	config *Latest[Config]
	source *Latest[MonitorSource]
	out    *Latest[Snapshot]
	log    *zap.Logger

	// Run's own.
	now    Snapshot // what was published last
	opened uint64   // sessions
	said   string   // the last trouble that was logged
}

// NewMonitor returns a monitor that stores its snapshots in out. It follows both configurations: a new
// MonitorSource closes the session and opens one there.
func NewMonitor(config *Latest[Config], source *Latest[MonitorSource], out *Latest[Snapshot], log *zap.Logger) *Monitor {
	return &Monitor{config: config, source: source, out: out, log: log}
}

// Run measures until ctx ends. Whatever is wrong with a source is shown in the snapshots and tried again.
func (m *Monitor) Run(ctx context.Context) error {
	m.publish(func(s *Snapshot) { s.Source.Since = time.Now() })
	for ctx.Err() == nil {
		src, changed := m.source.Watch()
		if src == nil {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		srcCtx, cancel := context.WithCancel(ctx)
		go func() {
			defer cancel()
			select {
			case <-changed:
			case <-srcCtx.Done():
			}
		}()
		m.follow(srcCtx, caller{m, src.StallAfter, ctx.Done()}, src.Open)
		cancel()
	}
	return nil
}

// follow keeps a session open to one source until ctx ends.
func (m *Monitor) follow(ctx context.Context, c caller, open Opener) {
	backoff, first := minBackoff, true
	for {
		err := m.session(ctx, c, open, func(r *Reading) {
			if first {
				m.forget(r)
			}
			backoff, first = minBackoff, false
			m.judge(r)
		})
		if ctx.Err() != nil {
			return
		}
		m.trouble(SourceDown, err.Error())
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// session opens one session and polls it until it fails or ctx ends.
func (m *Monitor) session(ctx context.Context, c caller, open Opener, read func(*Reading)) error {
	s, err := call(ctx, c, "opening the source", open)
	if err != nil {
		return err
	}
	defer func() {
		_, err := call(ctx, c, "closing the source", func(context.Context) (struct{}, error) { return struct{}{}, s.Close() })
		if err != nil && !errors.Is(err, errAbandoned) {
			m.log.Warn("the source did not close cleanly", zap.Error(err))
		}
	}()
	m.opened++
	for {
		r, err := call(ctx, c, "reading the GPUs", s.Poll)
		if err != nil {
			return err
		}
		read(r)
		config, changed := m.config.Watch()
		timer := time.NewTimer(config.Interval)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-s.Wake():
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// caller makes calls that may hang.
type caller struct {
	m          *Monitor
	stallAfter time.Duration
	ending     <-chan struct{} // closed when the process ends
}

// call makes a call and waits for it, however long it takes: there is never a second one beside it. If it
// takes longer than stallAfter, the source is shown as stalled. Only the end of the process leaves it behind.
func call[T any](ctx context.Context, c caller, what string, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := f(ctx)
		done <- result{v, err}
	}()
	stalled := time.NewTimer(c.stallAfter)
	defer stalled.Stop()
	ending := c.ending
	var abandon <-chan time.Time
	for {
		select {
		case r := <-done:
			return r.v, r.err
		case <-stalled.C:
			c.m.trouble(SourceStalled, fmt.Sprintf("%s has not returned for %v", what, c.stallAfter))
		case <-ending:
			ending, abandon = nil, time.After(abandonAfter)
		case <-abandon:
			var none T
			return none, errAbandoned
		}
	}
}

// judge folds a reading into the state, says what has changed, and publishes it.
func (m *Monitor) judge(r *Reading) {
	now, before := time.Now(), m.now.Devices
	devices := Judge(*m.config.Load(), before, r, now)
	if m.now.Source.Status != SourceUp {
		m.log.Info("the source is up", zap.Int("devices", len(r.Devices)), zap.String("driver", r.Versions.Driver),
			zap.String("dcgm", r.Versions.DCGM), zap.String("engine", r.Versions.Engine))
		m.said = ""
	}
	m.publish(func(s *Snapshot) {
		s.At, s.Devices = now, devices
		s.Source.Versions = r.Versions
		s.Source.Reconnects = m.opened - 1
		s.Source.become(SourceUp, "", now)
	})
	logChanges(m.log, before, devices)
}

// trouble publishes that the source is not up. The verdicts stay: losing the source is not losing the GPUs.
func (m *Monitor) trouble(status SourceStatus, why string) {
	if why != m.said {
		m.log.Warn("the source is "+status.String(), zap.String("cause", why))
		m.said = why
	}
	m.publish(func(s *Snapshot) { s.Source.become(status, why, time.Now()) })
}

func (s *Source) become(status SourceStatus, why string, now time.Time) {
	if s.Status != status {
		s.Status, s.Since = status, now
	}
	s.Err = why
}

func (m *Monitor) publish(change func(*Snapshot)) {
	change(&m.now)
	m.now.Seq++
	s := m.now
	m.out.Store(&s)
}

// forget drops the devices that another source knew and this one does not.
func (m *Monitor) forget(r *Reading) {
	m.now.Devices = slices.DeleteFunc(slices.Clone(m.now.Devices), func(d DeviceState) bool {
		return !slices.ContainsFunc(r.Devices, func(e Device) bool { return e.ID == d.Device.ID })
	})
}

// logChanges says what a poll has changed: devices that came and went, XIDs, verdicts.
func logChanges(log *zap.Logger, before, after []DeviceState) {
	known := make(map[DeviceID]DeviceState, len(before))
	for _, d := range before {
		known[d.Device.ID] = d
	}
	for _, d := range after {
		was, ok := known[d.Device.ID]
		delete(known, d.Device.ID)
		id := []zap.Field{zap.String("device", string(d.Device.ID)), zap.Int("gpu", d.Device.Index)}
		if !ok {
			log.Info("device found", append(id, zap.String("model", d.Device.Model), zap.String("profile", d.Device.Profile),
				zap.String("pci", d.Device.PCI))...)
		}
		for code, n := range d.XIDCounts {
			if n > was.XIDCounts[code] {
				log.Warn("XID", append(id, zap.Int("xid", code), zap.String("meaning", LookupXID(code).Name),
					zap.Uint64("count", n), zap.Uint64("new", n-was.XIDCounts[code]))...)
			}
		}
		v := d.Verdict
		if v.State == was.Verdict.State && v.Cause() == was.Verdict.Cause() || !ok && v.State <= Healthy {
			continue
		}
		id = append(id, zap.Stringer("state", v.State), zap.Stringer("was", was.Verdict.State))
		if len(v.Findings) == 0 {
			log.Info("device state", append(id, zap.String("cleared", was.Verdict.Cause()))...)
			continue
		}
		f := v.Findings[0]
		log.Warn("device state", append(id, zap.String("cause", f.Cause), zap.String("reason", f.Reason),
			zap.String("action", f.Action), zap.Time("since", f.Since), zap.Stringer("clears", f.Clears))...)
	}
	for id := range known {
		log.Info("device gone", zap.String("device", string(id)))
	}
}
