//go:build cgo && linux

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// eventTiming holds the times of an event source.
type eventTiming struct {
	wait      time.Duration // of one call that waits; Run ends within it
	callLimit time.Duration // after which a call counts as hanging
	retry     time.Duration // between attempts to register the GPUs that are left out

	minPause, maxPause time.Duration // the bounds of the pause before a failed attempt is repeated; see backoff.Backoff
}

//nolint:gochecknoglobals // a constant
var defaultTiming = eventTiming{
	wait: time.Second, callLimit: 5 * time.Second, retry: 30 * time.Second, minPause: time.Second, maxPause: 30 * time.Second,
}

// Events returns an event source of NVML's events. It needs neither the library nor the driver at the start. A GPU that does not
// report events is left out, and tried again. The source returns when no call to the driver is left; a call that hangs delays it.
//
// listed returns the UUIDs of the GPUs that the source lists, none before it has listed any. The event source is unused, and holds no
// file of the driver, while these are all of another host, and while the library cannot be loaded. If listed is nil, it is always used.
func Events(log *zap.Logger, listed func() []string) func(context.Context, health.EventReceiver) {
	return defaultTiming.events(log, listed)
}

func (t eventTiming) events(log *zap.Logger, listed func() []string) func(context.Context, health.EventReceiver) {
	return func(ctx context.Context, to health.EventReceiver) {
		r := &eventRun{eventTiming: t, to: to, log: log, listed: listed}
		r.run(ctx)
	}
}

// eventRun is one run of an event source.
type eventRun struct {
	eventTiming
	to     health.EventReceiver
	log    *zap.Logger
	listed func() []string // see Events
	calls  sync.WaitGroup  // calls to the driver beside the one that waits for events

	mu        sync.Mutex // guards the fields below and the session's; held while the receiver is called
	ended     bool
	published bool     // state is
	state     string   // why events do not arrive, "" if they do
	others    []string // the GPUs that the source lists, if all are of another host
}

func (r *eventRun) run(ctx context.Context) {
	defer func() {
		r.calls.Wait()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ended = true
	}()
	retry := backoff.Backoff{Min: r.minPause, Max: r.maxPause}
	for ctx.Err() == nil {
		started := time.Now()
		err := r.runSession(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errNotLoaded) && r.listed != nil {
			err = health.UnusedEvents{Err: err}
		}
		if err != nil {
			r.publish(err)
		}
		if errors.Is(err, errOthers) {
			r.awaitOtherList(ctx)
			continue
		}
		lasted := time.Since(started)
		if lasted > r.maxPause {
			retry.Reset()
		}
		if err != nil || lasted < r.minPause {
			retry.Wait(ctx)
		}
	}
}

// awaitOtherList waits until the source lists other GPUs, or until ctx ends.
func (r *eventRun) awaitOtherList(ctx context.Context) {
	for ctx.Err() == nil && slices.Equal(r.listed(), r.others) {
		wait.Sleep(ctx, r.wait)
	}
}

// publish publishes whether events arrive, if that has changed.
func (r *eventRun) publish(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.publishLocked(err)
}

// publishLocked is publish for a caller that holds eventRun.mu.
func (r *eventRun) publishLocked(err error) {
	state := ""
	if err != nil {
		state = err.Error()
	}
	if r.ended || (r.published && r.state == state) {
		return
	}
	r.published, r.state = true, state
	r.log.Debug("NVML's events", zap.Error(err)) // the receiver logs what matters
	r.to.SetEvents(err)
}

// shared is a resource of the driver. Its last user frees it, because a call that hangs still uses it.
type shared struct {
	users atomic.Int32
	free  func()
}

func share(free func()) *shared {
	s := &shared{free: free}
	s.users.Store(1)
	return s
}

// use adds a user; the caller is one already.
func (s *shared) use() { s.users.Add(1) }

func (s *shared) release() {
	if s.users.Add(-1) == 0 {
		s.free()
	}
}

// session is the time from an Init to its Shutdown.
type session struct {
	*eventRun
	*shared  // the Init
	library  nvml.Interface
	watchdog *time.Timer   // publishes that the waiting call hangs
	changed  chan struct{} // a registration has ended

	// Guarded by eventRun.mu. An event has the handle of the registration, so it finds its GPU even if the GPU is lost.
	set     *eventSet                 // the current one
	unclear bool                      // sets have failed with a lost GPU, and no set has lasted since
	gpus    []gpu                     // by NVML's index
	uuids   map[unsafe.Pointer]string // by handleOf
}

var (
	errNoGPU   = errors.New("the driver lists no GPU")
	errLost    = errors.New("a GPU is lost, and the driver does not show which one")
	errSpoiled = errors.New("a failed registration made the event set unusable")
	errOthers  = errors.New("source.events is auto, and this host's driver lists none of the GPUs of source.address")
)

// runSession reports events until ctx ends, or the driver must be initialized again: with an error, or because its GPUs have
// changed.
func (r *eventRun) runSession(ctx context.Context) error {
	watchdog := time.AfterFunc(r.callLimit, func() {
		r.publish(fmt.Errorf("a call to the driver has not returned in %v", r.callLimit))
	})
	defer watchdog.Stop()
	library, shutdown, err := Use()
	if err != nil {
		return err
	}
	s := &session{
		eventRun: r, shared: share(shutdown), library: library, watchdog: watchdog,
		changed: make(chan struct{}, 1), uuids: map[unsafe.Pointer]string{},
	}
	defer s.release()
	count, ret := library.DeviceGetCount()
	if err := failure("nvmlDeviceGetCount_v2", ret); err != nil {
		return err
	}
	if count == 0 {
		return errNoGPU
	}
	s.gpus = make([]gpu, count)
	system := openSystemEvents(library)
	defer system.close()
	return s.run(ctx, system)
}

// run reports the events of one set after the other, until ctx ends or the driver must be initialized again.
func (s *session) run(ctx context.Context, system *systemEvents) error {
	var lostAt time.Time
	var fewest int // registered with a set that failed with a lost GPU, since a set has lasted
	unclear := backoff.Backoff{Min: s.minPause, Max: s.maxPause}
	for {
		registered, err := s.watch(ctx, system)
		switch {
		case errors.Is(err, errSpoiled): // the next set leaves that GPU out
		case errors.Is(err, errLost):
			// A set without the lost GPU follows at once, because the events of the others are not recorded meanwhile. If sets keep
			// failing although none becomes smaller, the driver does not show which GPU is lost.
			if time.Since(lostAt) >= s.maxPause {
				fewest = len(s.gpus) + 1
				unclear.Reset()
			}
			if registered >= fewest {
				s.watchdog.Stop()
				s.setUnclear(true)
				s.publish(errLost)
				unclear.Wait(ctx)
			}
			lostAt, fewest = time.Now(), min(fewest, registered)
		default:
			return err
		}
	}
}

// watch reports the events of a new set. It returns how many GPUs were registered with it, and errLost or errSpoiled if another
// set must replace it.
func (s *session) watch(ctx context.Context, system *systemEvents) (registered int, err error) {
	created, ret := s.library.EventSetCreate()
	if err := failure("nvmlEventSetCreate", ret); err != nil {
		return 0, err
	}
	set := &eventSet{EventSet: created, shared: share(func() { _ = created.Free() })}
	defer set.release()
	s.replaceSet(set)
	defer s.replaceSet(nil)
	now := time.Now()
	w := &setWatch{session: s, set: set, nextTick: now.Add(s.wait), nextRetry: now.Add(s.retry)}
	defer w.stop()
	for ctx.Err() == nil {
		s.watchdog.Reset(s.callLimit)
		if over, err := w.tick(system); over || err != nil {
			return registered, err
		}
		if set.spoiled.Load() {
			return registered, errSpoiled
		}
		var pending int
		switch registered, pending = s.countRegistered(set); {
		case registered > 0:
			if err := w.receiveNext(ctx); err != nil {
				return registered, err
			}
		case pending > 0:
			select {
			case <-ctx.Done():
			case <-s.changed:
			case <-time.After(s.wait):
			}
		default:
			s.mu.Lock()
			defer s.mu.Unlock()
			_, err := s.registrations()
			return 0, err
		}
	}
	return registered, nil
}

// setWatch watches one set.
type setWatch struct {
	*session
	set                 *eventSet
	waiter              *waiter // nil until a GPU is registered, because a set without GPUs may fail
	nextTick, nextRetry time.Time
}

// tick does what is due beside the set's events. over means that the driver must be initialized again, because its GPUs have changed.
func (w *setWatch) tick(system *systemEvents) (over bool, err error) {
	now := time.Now()
	if !now.After(w.nextTick) {
		return false, nil
	}
	w.nextTick = now.Add(w.wait / 2) // a wait may end before it
	w.setUnclear(false)
	w.publishRegistrations()
	if w.ofOtherHost() {
		return false, health.UnusedEvents{Err: errOthers}
	}
	if w.pollSystem(system) {
		return true, nil
	}
	if !now.After(w.nextRetry) {
		return false, nil
	}
	w.nextRetry = now.Add(w.retry)
	if n, ret := w.library.DeviceGetCount(); ret == nvml.SUCCESS && n != len(w.gpus) {
		return true, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.register(true)
	return false, nil
}

// receiveNext passes on the next event of the set, if there is one within a wait.
func (w *setWatch) receiveNext(ctx context.Context) error {
	if w.waiter == nil {
		started, err := startWaiter(ctx, w.set.EventSet, w.wait)
		if err != nil {
			return err
		}
		w.waiter = started
	}
	e, ret, err := w.waiter.next()
	switch {
	case err != nil:
		return fmt.Errorf("wait for NVML's events: %w", err)
	case ret == nvml.SUCCESS:
		w.receive(e)
		return nil
	case ret == nvml.ERROR_TIMEOUT:
		return nil
	case w.set.spoiled.Load():
		return errSpoiled
	case ret == nvml.ERROR_GPU_IS_LOST:
		return errLost
	}
	return failure("nvmlEventSetWait_v2", ret)
}

// stop returns when no call waits for events of the set.
func (w *setWatch) stop() {
	if w.waiter != nil {
		w.waiter.stop(w.receive)
	}
}

// ofOtherHost reports whether the GPUs that the source lists are all of another host. A GPU whose UUID is not read yet may be one of them.
func (s *session) ofOtherHost() bool {
	if s.listed == nil {
		return false
	}
	listed := s.listed()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.others = nil
	if !slices.ContainsFunc(s.gpus, func(g gpu) bool { return g.uuid == "" || slices.Contains(listed, g.uuid) }) {
		s.others = listed
	}
	return len(s.others) > 0
}

func (s *session) setUnclear(unclear bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unclear = unclear
}

// replaceSet makes a set the current one and registers the GPUs with it; nil only ends the current one.
func (s *session) replaceSet(set *eventSet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
	s.register(false)
}

// eventKinds are the types of NVML's events that are registered.
//
//nolint:gochecknoglobals // a table of constants
var eventKinds = []struct {
	bit  uint64
	kind health.EventKind
}{
	{nvml.EventTypeXidCriticalError, health.EventXID},
	{nvml.EventTypeGpuRecoveryAction, health.EventRecoveryAction},
	{nvml.EventTypeGpuUnavailableError, health.EventUnavailable},
	{nvml.EventMigConfigChange, health.EventMIG},
	{nvml.EventTypeDoubleBitEccError, health.EventDBE},
}

// receive passes an event on.
func (s *session) receive(data driverEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	uuid := s.uuids[data.device] // "" if the set was replaced
	for _, k := range eventKinds {
		if data.kind&k.bit == 0 {
			continue
		}
		e := health.Event{Kind: k.kind, GPU: uuid, GI: instanceID(data.gi), CI: instanceID(data.ci)}
		if k.kind == health.EventXID {
			e.XID = health.XID{Code: health.XIDNumber(data.data), At: data.received, Witness: health.WitnessNVML}
		}
		s.to.Receive(e)
	}
}

// instanceID returns the ID of an instance, -1 for none.
func instanceID(id uint32) int {
	if id == noInstance {
		return -1
	}
	return int(id)
}

// noInstance is the ID in events of no instance (nvml.h: nvmlEventData_t).
const noInstance = 0xFFFFFFFF

// pollSystem reports the GPUs that were bound to the driver or unbound from it. After a bind the driver must be initialized again
// to list the GPU.
func (s *session) pollSystem(system *systemEvents) (bound bool) {
	for _, e := range system.poll() {
		bound = bound || e.EventType&nvml.SystemEventTypeGpuDriverBind != 0
		s.mu.Lock()
		s.to.Receive(health.Event{Kind: health.EventDriver, GI: -1, CI: -1})
		s.mu.Unlock()
	}
	return bound
}

// registrations returns why events of some or all GPUs do not arrive, and whether that is still open. The caller holds
// eventRun.mu.
func (s *session) registrations() (pending bool, err error) {
	pending = s.unclear || s.set == nil || s.set.spoiled.Load()
	var missing []string
	for i, g := range s.gpus {
		name := g.uuid
		if name == "" {
			name = fmt.Sprintf("GPU with NVML's index %d", i)
		}
		switch {
		case g.busy && time.Since(g.since) < s.callLimit:
			pending = true
		case g.busy:
			missing = append(missing, fmt.Sprintf("%s: a call to the driver has not returned in %v", name, s.callLimit))
		case g.err != nil:
			missing = append(missing, fmt.Sprintf("%s: %v", name, g.err))
		}
	}
	if len(missing) > 0 {
		err = fmt.Errorf("%d of %d GPUs report no events: %s", len(missing), len(s.gpus), strings.Join(missing, "; "))
		if len(missing) < len(s.gpus) {
			err = health.PartialEvents{Err: err}
		}
	}
	return pending, err
}

// publishRegistrations publishes whether events of all GPUs arrive, once that is clear.
func (s *session) publishRegistrations() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pending, err := s.registrations(); !pending {
		s.publishLocked(err)
	}
}
