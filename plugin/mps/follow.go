package mps

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const (
	statusInterval  = time.Second
	examineInterval = 5 * time.Second
	examineRetry    = time.Second     // between the first examinations of a daemon that does not answer
	quickRetries    = 10              // at examineRetry
	holdersSettle   = 5 * time.Second // until the kubelet lists a container whose share was allocated
	restartAfter    = 30 * time.Second
	restartInterval = time.Minute
)

// Run follows Desired until ctx ends. The daemons continue then: see Stop. Run may be called again after it has returned.
func (f *Follower) Run(ctx context.Context) {
	r := &run{
		Follower: f, devices: make(map[health.DeviceID]*device), done: make(chan func()),
	}
	defer r.workers.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // before Wait
	var tick *time.Ticker
	var ticks <-chan time.Time // nil while there is no daemon
	for {
		desired, changed := f.Desired.Watch()
		if desired != nil {
			r.setDesired(desired)
			r.step(ctx)
		}
		switch active := r.active(); {
		case active && tick == nil:
			tick = time.NewTicker(statusInterval)
			ticks = tick.C
		case !active && tick != nil:
			tick.Stop()
			tick, ticks = nil, nil
		}
		select {
		case <-ctx.Done():
			if tick != nil {
				tick.Stop()
			}
			return
		case <-changed:
		case <-ticks:
			r.due = true
		case apply := <-r.done:
			apply()
		case <-f.poked:
			r.examineAll()
		}
	}
}

// run is the state of one call of Run.
type run struct {
	*Follower
	root    Root
	desired *Desired
	devices map[health.DeviceID]*device // desired ones, and ones that leave

	asking     bool   // a request to mps-daemon is under way
	due        bool   // the next is due
	used       bool   // see Root.used
	known      bool   // mps-daemon has said what an earlier agent has it run
	sent       Follow // the newest
	asked      bool   // mps-daemon has responded, or has had the time to
	supervisor error
	reached    time.Time // when mps-daemon responded last, or when it was to respond first
	status     Status    // the latest

	workers sync.WaitGroup
	done    chan func() // see do
}

// do runs work beside the loop, which then calls what work returns.
func (r *run) do(ctx context.Context, work func() (apply func())) {
	r.workers.Go(func() {
		apply := work()
		select {
		case r.done <- apply:
		case <-ctx.Done():
		}
	})
}

// device is the state of the daemon of a device.
type device struct {
	evidence
	examiner *examiner
	inFlight context.CancelFunc // ends the examination; nil if there is none
	asked    request            // of the examination in flight
	next     time.Time          // when the next examination is due

	leaving    time.Time // since when the device is no longer shared by MPS; zero if it is
	released   bool      // leaving, and nobody uses it: mps-daemon stops the daemon
	pinnedBy   bool      // an earlier agent had set a limit of memory, at a daemon that has run since
	outsiders  bool      // clients were connected while no container held a share
	stuckSince time.Time // since when only a restart can help; zero if none is needed
	restarted  time.Time // when a restart was requested
}

// setDesired takes over which daemons must run. The devices that are no longer among them leave. The root does not change while the process
// runs: see CheckFormer.
func (r *run) setDesired(desired *Desired) {
	if r.desired == desired {
		return
	}
	now := time.Now()
	if r.desired == nil {
		r.begin(desired.Root, now)
	}
	r.desired = desired
	r.mu.Lock()
	r.Follower.desired = *desired
	r.mu.Unlock()
	wanted := make(map[health.DeviceID]bool, len(desired.Daemons))
	for _, spec := range desired.Daemons {
		wanted[spec.Device] = true
		d := r.devices[spec.Device]
		if d == nil {
			d = r.add(spec, now)
		}
		if d.spec != spec || !d.leaving.IsZero() {
			d.next = time.Time{}
		}
		if d.released {
			d.wanted = now
		}
		d.spec, d.leaving, d.released = spec, time.Time{}, false
	}
	for id, d := range r.devices {
		if !wanted[id] && d.leaving.IsZero() {
			d.leaving, d.next = now, time.Time{}
		}
	}
}

// begin follows the daemons below a root. Those that an earlier process had run leave, unless they are desired: the directories show them
// until mps-daemon says which they are.
func (r *run) begin(root Root, now time.Time) {
	r.root, r.supervisor, r.reached, r.due = root, errors.New("not asked yet"), now, true
	r.used = root.used()
	for _, id := range root.devices() {
		r.add(unknownSpec(id), now).leaving = now
	}
}

// active reports whether there is a daemon, or mps-daemon may have one, or a compute mode to set back.
func (r *run) active() bool {
	if len(r.devices) > 0 {
		r.used = true
	}
	done := r.supervisor == nil && r.known && r.follows() && len(r.status.Follows.Daemons)+len(r.status.Daemons) == 0
	return len(r.devices) > 0 || r.used && !done
}

// follows reports whether mps-daemon does what it was told last.
func (r *run) follows() bool { return r.status.Follows != nil && !r.status.Pending }

// add adds a device. If an earlier Run has judged its daemon, the verdict stays until the first examination.
func (r *run) add(spec Spec, now time.Time) *device {
	d := &device{evidence: evidence{spec: spec, wanted: now}, examiner: &examiner{root: r.root, command: r.controlInTurn}}
	d.before.Reason = "the MPS daemon has not been examined yet"
	if s := r.state.Load(); s != nil && s.Daemons[spec.Device] != nil {
		d.before = *s.Daemons[spec.Device]
		if d.ready = d.before.Ready; d.ready {
			d.pid = d.before.PID
			d.last = &examination{
				spec: spec, pid: d.pid, servers: d.before.Servers, percent: d.before.ThreadPercentage, pinned: d.before.PinnedMemory,
			}
		}
	}
	r.devices[spec.Device] = d
	return d
}

// step does what is due, and publishes.
func (r *run) step(ctx context.Context) {
	now, facts := time.Now(), r.Facts()
	for id, d := range r.devices {
		r.update(d, now)
		r.release(id, d, &facts)
		r.restartStuck(ctx, d, &facts)
	}
	r.ask(ctx)
	for _, d := range r.devices {
		r.examine(ctx, d)
	}
	r.publish()
	r.report(now)
}

// update brings the evidence about a device up to date with what mps-daemon reports.
func (r *run) update(d *device, now time.Time) {
	d.now = now
	if !r.asked {
		return
	}
	d.supervisor, d.refusal, d.shm = r.supervisor, r.status.Error, r.status.Shm
	if r.Simulated() {
		d.shm = ""
	}
	d.status = nil
	if i := slices.IndexFunc(r.status.Daemons, func(s DaemonStatus) bool { return s.Device == d.spec.Device }); i >= 0 {
		d.status = &r.status.Daemons[i]
	}
	pid := 0
	switch reachable := r.reachable(now); {
	case reachable && d.status != nil:
		pid = d.status.PID
	case !reachable: // an mps-daemon that hangs still has its daemons
		pid = d.pid
	}
	if pid != d.pid {
		d.pinnedBy = d.pinnedBy && d.pid == 0
		d.pid, d.next, d.noAnswer, d.refused, d.noDaemon, d.failure = pid, time.Time{}, 0, 0, 0, nil
	}
}

// reachable reports whether mps-daemon responds. A response that is late changes nothing yet.
func (r *run) reachable(now time.Time) bool {
	return r.supervisor == nil || now.Sub(r.reached) < supervisorOut
}

// take returns whether the daemon may be taken from a device: no container holds a share of it, and that is known. With claims, a claim
// that the daemon serves keeps it before its container starts.
func (d *device) take(f *offer.Facts, claims bool) offer.Answer {
	return f.Decide(&offer.Request{
		Purpose: offer.Take, Device: &health.Device{ID: d.spec.Device}, MustKnow: true,
		Except: func(h podresources.Holder) bool {
			return !h.ByClaim() && deviceid.Parse(h.DeviceID).Form().Kind == deviceid.Whole
		},
		ExceptClaim: func(_ *offer.Claim, p *offer.Part) bool { return !claims || !p.MPS },
	})
}

func (d *device) hasClients() bool {
	return d.last != nil && slices.ContainsFunc(d.last.servers, func(s health.MPSServer) bool { return len(s.Clients) > 0 })
}

// unexaminable reports whether the daemon runs and cannot be asked who its clients are.
func (d *device) unexaminable() bool { return d.noAnswer >= hungAfter || d.noDaemon >= missingAfter }

// inUse reports whether somebody uses the daemon of a device that leaves, or may use it.
func (d *device) inUse(f *offer.Facts) bool {
	switch {
	case !d.take(f, true).Allows(offer.Take) || f.Holders.At.Sub(d.leaving) < holdersSettle:
		return true
	case d.pid == 0:
		return false
	case d.unexaminable(), d.last != nil && d.last.pid == d.pid && d.last.unlisted:
		return d.outsiders
	}
	return d.last == nil || d.last.pid != d.pid || !d.last.listed.After(d.leaving) || d.hasClients()
}

// release lets mps-daemon stop the daemon of a device that leaves, once nobody uses it. It forgets the device when the daemon has ended.
func (r *run) release(id health.DeviceID, d *device, f *offer.Facts) {
	switch {
	case d.leaving.IsZero() || !r.asked:
	case !d.released:
		if d.released = !d.inUse(f); d.released {
			r.Log.Info("stopping the MPS daemon of a device that is no longer shared: nobody uses it", zap.String("device", string(id)))
		}
	case r.supervisor == nil && r.known && d.status == nil && r.follows() && !r.status.Follows.has(id),
		r.supervisor != nil && (d.pid == 0 || d.noDaemon > 0):
		if d.inFlight != nil {
			d.inFlight()
		}
		delete(r.devices, id)
	}
}

// restartStuck has mps-daemon restart a daemon that cannot recover, once nobody uses it.
func (r *run) restartStuck(ctx context.Context, d *device, f *offer.Facts) {
	missing := d.last != nil && d.last.pid == d.pid && d.last.files != nil
	if !d.leaving.IsZero() || d.pid == 0 || r.supervisor != nil || !d.unexaminable() && !missing {
		d.stuckSince = time.Time{}
		return
	}
	if d.stuckSince.IsZero() {
		d.stuckSince = d.now
	}
	// A claim waits for the daemon before its container starts.
	used := !d.take(f, false).Allows(offer.Take) || d.outsiders || missing && d.hasClients()
	if used || d.now.Sub(d.stuckSince) < restartAfter || !d.restarted.IsZero() && d.now.Sub(d.restarted) < restartInterval {
		return
	}
	d.restarted = d.now
	r.Log.Warn("restarting the MPS daemon: it does not recover, and nobody uses it", zap.String("device", string(d.spec.Device)),
		zap.String("reason", d.before.Reason))
	root, id := r.root, d.spec.Device
	r.workers.Go(func() {
		if _, err := r.callWithin(ctx, root, restartRoute, Restart{Device: id}); err != nil && ctx.Err() == nil {
			r.Log.Warn("mps-daemon does not restart the MPS daemon", zap.String("device", string(id)), zap.Error(err))
		}
	})
}

// follow returns what mps-daemon is to run.
func (r *run) follow() Follow {
	f := Follow{Version: followVersion, Sent: sinceBoot(), Daemons: []followDaemon{}}
	for _, d := range r.devices {
		if !d.released {
			f.Daemons = append(f.Daemons, newFollowDaemon(d.spec))
		}
	}
	slices.SortFunc(f.Daemons, func(a, b followDaemon) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Device, b.Device))
	})
	return f
}

// ask tells mps-daemon what to run, if that has changed or is due, and asks for its status. Before, it asks what an earlier agent has it
// run, because mps-daemon would end those daemons at once. Only one request is under way.
func (r *run) ask(ctx context.Context) {
	next := r.follow()
	if r.asking || !r.active() || !r.due && (!r.known || next.same(&r.sent)) {
		return
	}
	root, route, body := r.root, statusRoute, any(nil)
	if r.known {
		r.sent, route, body = next, followRoute, next
	}
	r.asking, r.due = true, false
	r.do(ctx, func() func() {
		status, err := r.callWithin(ctx, root, route, body)
		return func() { r.applyStatus(status, err) }
	})
}

func (r *run) applyStatus(status Status, err error) {
	r.asking = false
	now := time.Now()
	if (err == nil) != (r.supervisor == nil) {
		r.examineAll() // daemons may have ended with mps-daemon, or been started by it
	}
	r.supervisor = err
	if err == nil {
		r.status, r.reached = status, now
		if !r.known {
			r.learn(now)
		}
	}
	r.asked = r.asked || err == nil || !r.reachable(now)
}

// learn takes over which daemons mps-daemon runs for an earlier agent. They leave, unless they are desired. What it does not run stays so,
// unless a container is known to hold it.
func (r *run) learn(now time.Time) {
	r.known, r.due = true, true
	follows, facts := r.status.Follows, r.Facts()
	for id, d := range r.devices {
		d.released = !d.leaving.IsZero() && !follows.has(id) &&
			(follows != nil || facts.Unknown() != "" || d.take(&facts, true).Allows(offer.Take))
	}
	if follows == nil { // mps-daemon has just started
		return
	}
	for _, old := range follows.Daemons {
		d := r.devices[old.Device]
		if d == nil || !d.leaving.IsZero() {
			d = r.add(old.spec(), now)
			d.leaving, d.released = now, follows.Stopped
		}
		d.pinnedBy = old.PinnedMemory > 0
	}
}

// examineAll has all daemons examined now.
func (r *run) examineAll() {
	for _, d := range r.devices {
		d.next = time.Time{}
	}
}

// examine starts an examination of a daemon if it is due. Each device has its own, so that a daemon that hangs delays no other.
func (r *run) examine(ctx context.Context, d *device) {
	switch {
	case d.inFlight != nil:
		if d.asked.pid != d.pid {
			d.inFlight()
		}
		return
	case d.pid == 0 || !r.asked || d.now.Before(d.next):
		return
	}
	d.asked = request{
		program: r.desired.Control, spec: d.spec, pid: d.pid, pinnedBy: d.pinnedBy, allClients: !d.leaving.IsZero(),
	}
	d.next = d.now.Add(examineInterval)
	q := d.asked
	var examination context.Context
	examination, d.inFlight = context.WithCancel(ctx)
	r.do(ctx, func() func() {
		x := d.examiner.examine(examination, q)
		return func() { r.applyExamination(d, &x) }
	})
}

func (r *run) applyExamination(d *device, x *examination) {
	d.inFlight()
	d.inFlight = nil
	now := time.Now()
	if x.pid != d.pid { // of an earlier daemon, or ended early
		d.next = now
		return
	}
	retry := examineInterval
	d.failure = x.err
	switch err := x.err; {
	case err == nil:
		if proven := d.last != nil && d.last.pid == x.pid && d.last.spec == x.spec && d.last.limits == nil; !proven && x.limits == nil &&
			x.spec.ThreadPercentage > 0 {
			r.Log.Info("MPS daemon has its limits", zap.String("device", string(x.spec.Device)), zap.Int("pid", x.pid),
				zap.Bool("adopted", x.adopted),
				zap.Float64("activeThreadPercentage", x.percent), zap.Uint64("pinnedMemoryMiB", x.pinned>>20))
		}
		d.last, d.noAnswer, d.refused, d.noDaemon = x, 0, 0, 0
		if !d.hasClients() {
			d.outsiders = false
		} else if f := r.Facts(); f.Unknown() == "" {
			d.outsiders = d.take(&f, true).Allows(offer.Take)
		}
	case errors.Is(err, errNoAnswer):
		d.noAnswer, retry = d.noAnswer+1, examineRetry
	case errors.Is(err, errNoDaemon):
		if d.noDaemon++; d.noDaemon <= quickRetries {
			retry = examineRetry
		}
	case errors.Is(err, errRefused):
		d.refused, d.noAnswer, d.noDaemon = d.refused+1, 0, 0
	}
	d.next = now.Add(retry)
}

// publish stores the state of all daemons if it has changed.
func (r *run) publish() {
	state := &health.MPSState{Daemons: make(map[health.DeviceID]*health.MPSDaemon, len(r.devices))}
	for id, d := range r.devices {
		if r.asked {
			d.before = d.judge()
			d.ready = d.ready || d.before.Ready
		}
		if !d.leaving.IsZero() {
			d.before.Leaving, d.before.Cause, d.before.Action = true, "", ""
			d.before.Reason = "the device is no longer shared by MPS; its MPS daemon runs until no container holds a share and no client is " +
				"connected"
			if d.released {
				d.before.Reason = "the device is no longer shared by MPS; its MPS daemon is being stopped"
			}
		}
		state.Daemons[id] = new(d.before)
	}
	if old := r.state.Load(); old == nil && len(state.Daemons) == 0 || old != nil && reflect.DeepEqual(old, state) {
		return
	}
	r.state.Store(state)
}

// report logs and keeps why the daemons cannot be followed. It leaves out what the finding of a device tells.
func (r *run) report(now time.Time) {
	var text string
	switch {
	case len(r.devices) == 0:
	case r.asked && !r.reachable(now):
		text = "mps-daemon cannot be reached: " + r.supervisor.Error()
	case r.status.Error != "":
		text = "mps-daemon does not follow the agent: " + r.status.Error
	default:
		for _, d := range r.devices {
			if errors.Is(d.failure, errProgram) {
				text = d.failure.Error()
			}
		}
	}
	r.mu.Lock()
	before := r.err
	r.err = text
	r.mu.Unlock()
	switch text {
	case before:
	case "":
		r.Log.Info("MPS daemons are followed again")
	default:
		r.Log.Warn("MPS daemons cannot be followed", zap.String("cause", text))
	}
}
