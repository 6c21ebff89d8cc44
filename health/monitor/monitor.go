// Package monitor polls a source of devices, judges the readings and publishes snapshots; operators detach and attach the
// driver through it.
package monitor

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// Source describes how a Monitor opens sessions.
type Source struct {
	health.SourceID
	Open       health.Opener
	Attach     health.Opener // asks the host engine to attach the driver, then opens; nil if no other process uses the driver
	StallAfter time.Duration // a call that takes longer makes the source stalled
	DriverLoad func() string // identifies the loaded driver, "" if none is loaded; nil if the source has no driver
	// bus IDs of the GPUs on the PCI bus that the source should list, nil if they are unknown; nil if the bus cannot be read
	OnBus func() []string

	// RecoveryAction reads the recovery action of a GPU from the driver, and may hang as long as the driver does. It is nil without events.
	RecoveryAction func(health.DeviceID) (health.RecoveryAction, error)

	Events []health.EventSource // run beside the session, whether or not one is open, except while the driver is detached
	// Beside are other functions that use the driver and run with the event sources. Each runs until its context ends, and
	// then holds no file of the driver.
	Beside []func(context.Context)
	// Release has other processes of the node stop using the driver for a detach. It is called when the functions above have returned. It
	// returns within a limited time, and may be called again. It is nil if there are no such processes. A function of Beside makes them use
	// the driver again.
	Release func(context.Context)
}

// Monitor polls the devices and judges them. It is the only writer of snapshots.
type Monitor struct {
	config  *health.Latest[judge.Config]
	source  *health.Latest[Source]
	out     *health.Latest[health.Snapshot]
	held    health.Held
	mps     *health.Latest[health.MPSState] // nil without MPS
	log     *zap.Logger
	request health.Latest[request] // never empty

	events    *eventQueue
	eventPoll chan struct{} // holds one: events ask for a poll

	mu               sync.Mutex      // guards the fields up to unlogged: Run, operators and configuration changes publish
	now              health.Snapshot // the latest snapshot
	session          health.Session  // nil if none is open
	detach           detachment
	timeLimit        *time.Timer // of a detach; nil before the first one
	outageFilter     judge.OutageFilter
	driverVersion    string // the latest known
	unmatchedCordons []string
	restored         statefile.Restored
	bindings         bindings
	history          bool // Restored.History of the current source
	unrestored       bool // RestoreLate may come
	companions       *companions
	xids             xidWatch
	actions          map[health.DeviceID]*unmeasuredAction
	unjudged         []queuedEvent        // events that wait for a device, oldest first
	unknownGPUs      map[string]bool      // GPUs of events that the source does not list, logged
	changesLogged    time.Time            // when changes of devices were logged
	logged           []health.DeviceState // the devices as of the last comparison for the log
	logWaits         bool                 // XIDs were counted since, and are logged later
	unlogged         []func()             // log calls that unlock makes

	// Only Run uses these.
	sessions     uint64        // opened so far
	loggedCause  logonce.State // why the source is not up
	pollDuration time.Duration // of the latest poll
	newInventory bool          // the next reading replaces the devices: a device that it lacks is not missing
	eventPolls   eventPolls
}

// New returns a monitor that stores its snapshots in out. The monitor follows changes of the configuration; a new Source
// closes the session and opens one of the new source.
func New(config *health.Latest[judge.Config], source *health.Latest[Source], out *health.Latest[health.Snapshot],
	log *zap.Logger,
) *Monitor {
	m := &Monitor{
		config: config, source: source, out: out, log: log,
		events: newEventQueue(), eventPoll: make(chan struct{}, 1), companions: noCompanions(), unknownGPUs: make(map[string]bool),
		actions: make(map[health.DeviceID]*unmeasuredAction),
	}
	m.request.Store(&request{})
	return m
}

// SetHeld sets how the monitor finds out which devices pods hold. Call it before Run; held must not block. Without it,
// every device counts as held.
func (m *Monitor) SetHeld(held health.Held) { m.held = held }

// Run polls until ctx ends. If the source fails, Run publishes the reason and retries.
func (m *Monitor) Run(ctx context.Context) error {
	var followers sync.WaitGroup
	followers.Go(func() { m.followInputs(ctx) })
	followers.Go(func() { m.followEvents(ctx) })
	defer func() {
		m.awaitEnd()
		followers.Wait()
		m.mu.Lock()
		m.changesLogged = time.Time{} // XIDs that wait for their log entry wait no longer
		m.mu.Unlock()
		m.judgeEvents() // the last ones, for the state file
	}()
	var before *Source
	for ctx.Err() == nil {
		src, same, cancel := health.WatchPart(ctx, m.source, func(s *Source) *Source { return s })
		if src == nil {
			cancel()
			return nil // ctx ended before the first source
		}
		differs := before != nil && src.Inventory != before.Inventory
		m.newInventory = m.newInventory || differs
		if differs && (src.Simulated || before.Simulated) {
			m.judgeEvents()
			m.exchangeDevices(src.SourceID) // otherwise both may measure the same devices, which pods hold
		}
		before = src
		m.publish(func(s *health.Snapshot) {
			s.Source.Kind, s.Source.Inventory = src.Kind, src.Inventory
			m.bindings.onBus = src.OnBus
			if s.Source.Status == health.SourceDetached {
				m.showEvents(src, health.EventsOff, reasonDetached)
				return
			}
			m.showEvents(src, health.EventsStarting, "")
			setStatus(&s.Source, health.SourceStarting, "", time.Now())
		})
		m.serve(ctx, same, m.newWatchdog(src.StallAfter, ctx.Done()), src)
		cancel()
	}
	return nil
}

// awaitEnd waits for the companions at the end of the process, unless one hangs.
func (m *Monitor) awaitEnd() {
	m.mu.Lock()
	ended := m.companions.ended
	m.mu.Unlock()
	select {
	case <-ended:
	case <-time.After(abandonAfter):
	}
}

// reportSource publishes that the source is not up, and logs a new reason. The verdicts stay: losing the source is not
// losing the GPUs.
func (m *Monitor) reportSource(status health.SourceStatus, reason string) {
	m.publish(func(s *health.Snapshot) {
		now := time.Now()
		if status == health.SourceDown {
			m.outageFilter = judge.OutageFilter{}
			m.setAway(true, now)
		}
		setStatus(&s.Source, status, reason, now)
	})
	if m.loggedCause.Changed(reason) {
		m.log.Warn("source "+status.String(), zap.String("cause", reason))
	}
}

func setStatus(s *health.Source, status health.SourceStatus, reason string, now time.Time) {
	if s.Status != status || s.Since.IsZero() {
		s.Status, s.Since = status, now
	}
	s.Err = reason
}

func (m *Monitor) publish(change func(*health.Snapshot)) {
	m.mu.Lock()
	defer m.unlock()
	change(&m.now)
	m.store()
}

// store derives the verdicts, publishes a copy of now, and logs what has changed. Before the first poll, restored devices keep their
// verdicts. m.mu is held.
func (m *Monitor) store() { m.storeDevices(m.now.Polled()) }

// storeJudged is store after devices were judged or cleared: it derives the verdicts also before the first poll. m.mu is held.
func (m *Monitor) storeJudged() { m.storeDevices(true) }

func (m *Monitor) storeDevices(view bool) {
	now := time.Now()
	if view {
		m.now.Devices = judge.View(m.currentConfig(), m.now.Devices, m.viewContext(), now)
	}
	m.logChangesLater(now)
	m.now.Seq++
	m.now.Source.Detachment = m.detach.saved()
	s := m.now
	m.out.Store(&s)
}

// logLater leaves a log call to unlock: a log that blocks delays neither a snapshot nor a holder of m.mu. m.mu is held.
func (m *Monitor) logLater(call func()) { m.unlogged = append(m.unlogged, call) }

// unlock unlocks m.mu and makes the log calls that logLater collected.
func (m *Monitor) unlock() {
	calls := m.unlogged
	m.unlogged = nil
	m.mu.Unlock()
	for _, call := range calls {
		call()
	}
}
