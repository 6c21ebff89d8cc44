// Package monitor measures the devices of a source, judges them and publishes the snapshots; an operator detaches and attaches
// the driver here.
package monitor

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// Source is where a Monitor gets its sessions.
type Source struct {
	health.SourceID
	Open       health.Opener
	Attach     health.Opener // as Open, and has a host engine take the driver back before; nil where no other process holds it
	StallAfter time.Duration // a call that takes longer is shown as a stalled source
	DriverLoad func() string // identifies the load of the driver that the devices have, "" while there is none; nil without a driver
}

const (
	// The pause between two attempts to open a session grows from the one to the other.
	minBackoff = time.Second
	maxBackoff = 30 * time.Second

	// steady is for how long a session must have given readings for the next one to begin with the short pause again.
	steady = 10 * time.Second

	// maxXIDGap is the longest time between two reads of an XIDWatcher, polls among them. Each read a second costs about a
	// tenth of a percent of a core, most of it for waking up.
	maxXIDGap = 500 * time.Millisecond

	// abandonAfter is how long a call that hangs is waited for when the process ends.
	abandonAfter = time.Second
)

var errAbandoned = errors.New("abandoned a call that hangs: the process ends")

// Monitor measures the GPUs and judges them. It is the only writer of the snapshots.
type Monitor struct {
	config *health.Latest[health.Config]
	source *health.Latest[Source]
	out    *health.Latest[health.Snapshot]
	held   health.Held
	log    *zap.Logger
	word   health.Latest[word] // what an operator has said last of the driver; never empty

	mu   sync.Mutex      // guards all below to Run's own: Run, operators and a new configuration all make a new now
	now  health.Snapshot // what was published last
	idle []string        // the words of health.cordon that mean no device, as they were logged last

	driver string       // the newest version of the driver that was told
	doubt  health.Doubt // of the newest reading

	live      health.Session     // nil while there is none
	release   *release           // nil while the driver is ours and the devices were seen since
	attaching bool               // the next session is opened with Source.Attach
	unasked   bool               // the driver was let go of, and a host engine was not asked to
	recalled  statefile.Restored // what an earlier process knew, of other kinds of source too
	history   bool               // Restored.History of the source that is open

	unlogged []func() // log calls that wait for unlock

	// Run's own.
	opened uint64        // sessions
	said   string        // the last trouble that was logged
	took   time.Duration // of the last poll
	fresh  bool          // the first reading tells which devices there are: others are not missed
}

// New returns a monitor that stores its snapshots in out. It follows both configurations: a new
// Source closes the session and opens one there.
func New(config *health.Latest[health.Config], source *health.Latest[Source], out *health.Latest[health.Snapshot], log *zap.Logger) *Monitor {
	m := &Monitor{config: config, source: source, out: out, log: log}
	m.word.Store(&word{})
	return m
}

// AskHolders tells the monitor how to know which devices pods have. It must come before Run, and held must not
// wait. Without it every device is taken to be held.
func (m *Monitor) AskHolders(held health.Held) { m.held = held }

// Run measures until ctx ends. Whatever is wrong with a source is shown in the snapshots and tried again.
func (m *Monitor) Run(ctx context.Context) error {
	var config sync.WaitGroup
	defer config.Wait()
	config.Go(func() { m.followConfig(ctx) })
	var before *Source
	for ctx.Err() == nil {
		src, same, cancel := health.While(ctx, m.source, func(s *Source) *Source { return s })
		if src == nil {
			cancel()
			return nil // ctx has ended before there was one
		}
		other := before != nil && src.Inventory != before.Inventory
		m.fresh = m.fresh || other
		if other && (src.Simulated || before.Simulated) {
			m.exchange(*src) // devices of a source that may see the same ones stay: pods hold them
		}
		before = src
		m.publish(func(s *health.Snapshot) {
			s.Source.Kind, s.Source.Inventory = src.Kind, src.Inventory
			if s.Source.Status != health.SourceDetached {
				become(&s.Source, health.SourceStarting, "", time.Now())
			}
		})
		m.obey(same, caller{m, src.StallAfter, ctx.Done()}, src)
		cancel()
	}
	return nil
}

// follow keeps a session open to one source until ctx ends.
func (m *Monitor) follow(ctx context.Context, c caller, open health.Opener) {
	backoff := minBackoff
	for {
		var first time.Time // good reading of the session
		err := m.session(ctx, c, open, func(r *health.Reading) {
			if first.IsZero() {
				first = time.Now()
			}
			if time.Since(first) >= steady { // one that dies young again and again is not helped by hurry
				backoff = minBackoff
			}
			m.judge(r)
		})
		if ctx.Err() != nil {
			return
		}
		m.trouble(health.SourceDown, err.Error())
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// session opens one session and polls it until it fails or ctx ends.
func (m *Monitor) session(ctx context.Context, c caller, open health.Opener, read func(*health.Reading)) (failed error) {
	s, err := call(ctx, c, "opening the source", open)
	if err != nil {
		return err
	}
	m.hold(s)
	defer func() {
		m.hold(nil)
		if errors.Is(failed, errAbandoned) || errors.Is(m.handOver(ctx, c, s, failed), errAbandoned) {
			return // the call is still at work in there, and there is never a second one beside it
		}
		_, err := call(ctx, c, "closing the source", func(context.Context) (struct{}, error) { return struct{}{}, s.Close() })
		if err != nil && !errors.Is(err, errAbandoned) {
			m.log.Warn("the source did not close cleanly", zap.Error(err))
		}
	}()
	m.opened++
	for {
		started := time.Now()
		r, err := call(ctx, c, "reading the GPUs", s.Poll)
		if err != nil {
			return err
		}
		m.took = time.Since(started)
		if err := m.notBack(r); err != nil {
			return err
		}
		read(r)
		config, changed := m.config.Watch()
		if err := awaitPoll(ctx, c, s, config.Interval, changed); err != nil {
			return err
		}
		if ctx.Err() != nil {
			m.lastWords(ctx, c, s, read)
			return ctx.Err()
		}
	}
}

// awaitPoll returns when the next poll is due: after the interval, for a new configuration, when the session has news,
// or when a call has stalled, so that the source is shown as up again. It also returns when ctx ends. An error is the
// session's end.
func awaitPoll(ctx context.Context, c caller, s health.Session, interval time.Duration, changed <-chan struct{}) error {
	due := time.NewTimer(interval)
	defer due.Stop()
	watcher, _ := s.(health.XIDWatcher)
	gaps := (interval + maxXIDGap - 1) / maxXIDGap
	for looks := time.Duration(1); ; looks++ {
		var look <-chan time.Time
		if watcher != nil && looks < gaps { // the poll is the last look
			look = time.After(interval / gaps)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.Wake():
			return nil
		case <-changed:
			return nil
		case <-due.C:
			return nil
		case <-look:
			started := time.Now()
			news, err := call(ctx, c, "looking for XIDs", watcher.XIDsChanged)
			if err != nil || news || time.Since(started) >= c.stallAfter {
				return err
			}
		}
	}
}

// lastWords reads once more from a session that is about to be closed for another: DCGM forgets the XIDs that nobody has
// read when the last watch on them goes. The end of the process does not wait for it.
func (m *Monitor) lastWords(ctx context.Context, c caller, s health.Session, read func(*health.Reading)) {
	select {
	case <-c.ending:
		return
	default:
	}
	r, err := call(context.WithoutCancel(ctx), c, "reading the GPUs", s.Poll)
	if err == nil && m.notBack(r) == nil {
		read(r)
	}
}

// judge folds a reading into the state, says what has changed, and publishes it.
func (m *Monitor) judge(r *health.Reading) {
	m.mu.Lock()
	defer m.unlock()
	now, before := time.Now(), m.now.Devices
	if m.fresh && len(r.Devices) > 0 { // another inventory is expected
		before = slices.DeleteFunc(slices.Clone(before), func(d health.DeviceState) bool {
			return !slices.ContainsFunc(r.Devices, func(e health.Device) bool { return e.ID == d.Device.ID })
		})
		m.fresh, m.doubt = false, health.Doubt{}
	} else {
		var why string
		if r, why = m.doubt.Check(before, r, now); why != "" {
			m.judgeDoubted(r, why, now)
			return
		}
	}
	config := *m.config.Load()
	b := health.Basis{History: m.history, First: m.now.Source.Polls == 0, Reloaded: m.driverReloaded(r.Versions.Driver)}
	devices := health.Decide(config, before, health.Judge(config, before, r, b, now), m.held, m.release.detachment(), now)
	m.seen(devices)
	if m.now.Source.Status != health.SourceUp {
		m.logLater(func() {
			m.log.Info("the source is up", zap.Int("devices", len(r.Devices)), zap.String("driver", r.Versions.Driver),
				zap.String("dcgm", r.Versions.DCGM), zap.String("engine", r.Versions.Engine))
		})
		m.said = ""
	}
	m.logChangesLater(m.now.Devices, devices)
	m.sayIdle(config.UnmatchedCordons(devices))
	m.now.At, m.now.Devices = now, devices
	m.now.Source.Versions = r.Versions
	m.now.Source.Reconnects = m.opened - 1
	m.now.Source.Polls++
	m.now.Source.PollTook = m.took
	become(&m.now.Source, health.SourceUp, "", now)
	m.store()
}

// driverReloaded tells whether the driver of this version is another, or was loaded anew, since the reading before. What
// is not known is no evidence. m.mu is held.
func (m *Monitor) driverReloaded(version string) bool {
	was, load := &m.now.Source, ""
	if src := m.source.Load(); src != nil && src.DriverLoad != nil {
		load = src.DriverLoad()
	}
	differs := func(before, now string) bool { return before != "" && now != "" && before != now }
	reloaded := differs(m.driver, version) || differs(was.DriverLoad, load)
	if load != "" {
		was.DriverLoad = load
	}
	if version != "" {
		m.driver = version
	}
	if reloaded {
		m.logLater(func() { m.log.Info("the driver was loaded anew, which reset every GPU", zap.String("driver", version)) })
	}
	return reloaded
}

// judgeDoubted publishes what a reading tells that is not believed as a whole: XIDs, and GPUs that the driver calls lost. The source
// counts as down. m.mu is held.
func (m *Monitor) judgeDoubted(r *health.Reading, why string, now time.Time) {
	config, before := *m.config.Load(), m.now.Devices
	devices := health.Decide(config, before, health.Judge(config, before, r, health.Basis{History: m.history}, now), m.held, m.release.detachment(), now)
	if why != m.said {
		m.logLater(func() { m.log.Warn("the source is down", zap.String("cause", why)) })
		m.said = why
	}
	m.logChangesLater(before, devices)
	shown := make(map[health.DeviceID]map[health.Field]float64, len(before))
	for _, d := range before {
		shown[d.Device.ID] = d.Sample.Values
	}
	for i := range devices { // what was measured is shown for a while, as with any source that is away
		if s := &devices[i].Sample; s.Presence == health.PresenceUnknown && s.Values == nil {
			s.Values = shown[s.Device]
		}
	}
	m.now.Devices = devices
	become(&m.now.Source, health.SourceDown, why, now)
	m.store()
}

// trouble publishes that the source is not up. The verdicts stay: losing the source is not losing the GPUs.
func (m *Monitor) trouble(status health.SourceStatus, why string) {
	m.publish(func(s *health.Snapshot) {
		if status == health.SourceDown {
			m.doubt = health.Doubt{} // the next session begins anew
		}
		become(&s.Source, status, why, time.Now())
	})
	if why != m.said {
		m.log.Warn("the source is "+status.String(), zap.String("cause", why))
		m.said = why
	}
}

func become(s *health.Source, status health.SourceStatus, why string, now time.Time) {
	if s.Status != status || s.Since.IsZero() {
		s.Status, s.Since = status, now
	}
	s.Err = why
}

func (m *Monitor) publish(change func(*health.Snapshot)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.now)
	m.store()
}

// store publishes a copy of now. m.mu is held.
func (m *Monitor) store() {
	m.now.Seq++
	m.now.Source.Detachment = m.detachment()
	s := m.now
	m.out.Store(&s)
}

// logLater has a log call made by unlock: a log that blocks keeps no verdict from its readers, and neither Run nor an
// operator from m.mu. m.mu is held.
func (m *Monitor) logLater(call func()) { m.unlogged = append(m.unlogged, call) }

// logChangesLater is logLater of logChanges. m.mu is held.
func (m *Monitor) logChangesLater(before, after []health.DeviceState) {
	m.logLater(func() { logChanges(m.log, before, after) })
}

// unlock unlocks m.mu, and makes the log calls that were collected meanwhile.
func (m *Monitor) unlock() {
	calls := m.unlogged
	m.unlogged = nil
	m.mu.Unlock()
	for _, call := range calls {
		call()
	}
}
