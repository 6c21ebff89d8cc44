package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// session serves one instance, or releases its devices.
type session struct {
	*Driver
	instance
	sockets   *sockets
	publisher *publisher

	// These belong to run.
	input      PoolInput         // of the pool that was built last
	publishes  bool              // the pool of input, or of one that is the same
	roots      map[string]string // PoolInput.PCIeRoots
	rootsOf    []health.DeviceID // the devices of roots
	stop       func()            // ends what publishes or withdraws; nil if nothing does
	withdrawn  chan struct{}     // closed when no slice is left; nil while nothing withdraws
	loggedWarn []string          // Pool.Warnings that are logged
	clearing   clearing
	storing    *storing // the write of the checkpoint that publishing requires; nil if there is none

	holders sessionHolders

	mu       sync.Mutex // guards the fields below
	err      string     // why the devices are not published
	warnings []string
}

// clearing is how far the slices are removed because the container runtime ignores CDI.
type clearing uint8

const (
	notClearing clearing = iota
	tainting             // the API server does not have the taints of all devices yet
	withdrawing          // it may still have slices
	cleared              // it has none
)

// storing is a write of the checkpoint.
type storing struct {
	since time.Time
	done  chan struct{} // closed at its end
	err   error         // valid after the end
}

// serve runs a session until ctx ends or its devices are released.
func (d *Driver) serve(ctx context.Context, i instance) {
	ctx, cancel := context.WithCancel(ctx)
	log := d.Log.With(zap.String("driver", i.driver))
	s := &session{
		Driver: d, instance: i, sockets: newSockets(d, i, log),
		publisher: newPublisher(i.driver, d.Node, d.Connect, log),
	}
	s.publisher.unseen /= time.Duration(max(1, d.Faster))
	d.pool.Store(&Pool{})
	d.storeNames(i, d.pool.Load(), d.preparer.names())
	d.setSession(s)
	defer d.setSession(nil)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { d.preparer.run(ctx) })
	running.Go(func() { s.sockets.run(ctx) })
	s.run(ctx)
	s.stopPublishing()
}

func (d *Driver) setSession(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.session, d.enabled, d.err, d.forPods = s, s != nil, "", false
}

// run follows the configuration, the snapshots and the claims. It returns when ctx ends or the devices are released.
func (s *session) run(ctx context.Context) {
	s.Log.Info("serving claims", zap.String("driver", s.driver), zap.String("pool", s.Node))
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	asking.Go(func() { s.learnHolders(ctx) })
	serving := true
	wake := health.Wake(ctx, s.Config, s.Snapshots, &s.claims, s.Properties, &s.publisher.lacks, &s.sockets.other, s.Holders,
		&s.holders.known, &s.holders.before, s.capabilities, s.Runtime)
	for {
		cfg, snap, lacks, other := s.Config.Load(), s.Snapshots.Load(), s.publisher.features(), s.sockets.other.Load()
		var retry <-chan time.Time
		var changed <-chan struct{} // what the step has begun
		was := serving
		serving = cfg.ServesDRA()
		s.preparer.releasing(!serving)
		if serving {
			if !was {
				s.Log.Info("serving claims again", zap.String("driver", s.driver))
				s.setReleased("dynamic resource allocation serves the devices")
			}
			if other == nil || *other != "" {
				// Two drivers of one name would replace each other's slices. sockets reports the other one.
				s.stopPublishing()
				s.publishes, s.clearing = false, notClearing
				if pool := s.pool.Load(); len(pool.ByName) > 0 {
					s.preparer.update(cfg, snap, pool) // the kubelet may still call this driver
				}
			} else if err := s.publish(ctx, cfg, snap, lacks); err != nil {
				s.setError(err.Error(), nil)
				retry = time.After(s.timing.retryMin)
			} else if s.clearing == tainting || s.clearing == withdrawing {
				changed, retry = s.publisher.watch(), time.After(s.timing.poll)
			} else if s.storing != nil && !s.publishes {
				changed, retry = s.storing.done, time.After(s.timing.retryMin) // retry reports a disk that blocks
			}
		} else {
			if was {
				s.Log.Info("releasing the devices", zap.String("driver", s.driver))
			}
			s.publishes, s.clearing = false, notClearing
			s.preparer.update(cfg, snap, s.pool.Load())
			if s.release(ctx, other != nil && *other != "") {
				s.Log.Info("devices released", zap.String("driver", s.driver))
				return
			}
			changed, retry = s.publisher.watch(), time.After(s.timing.poll) // retry for the pods of claims
		}
		s.followHandover()
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-retry:
		case <-changed:
		case <-s.withdrawn:
		}
	}
}

// publish publishes the pool of a snapshot. Before the first poll nothing is published, and what the API server has stays.
func (s *session) publish(ctx context.Context, cfg *plugin.Config, snap *health.Snapshot, lacks features) error {
	if !snap.Polled() {
		s.setError(errNotPolled(snap).Error(), nil)
		return nil
	}
	names, known := s.preparer.names(), *s.Properties.Load()
	in := PoolInput{
		Config: cfg, Snapshot: withoutUnasked(snap, known, names), Properties: known, Names: names, PCIeRoots: s.pcieRoots(snap),
		Examined: s.capabilities != nil, NoTaints: lacks.noTaints, NoShares: lacks.noShares,
	}
	if in.Examined {
		in.Capabilities = s.capabilities.Load()
	}
	runtime, asked := s.runtime()
	verdict, unknown := cfg.JudgeRuntime(runtime), ""
	noCDI := verdict.Refusal()
	warnings := func(p *Pool) []string {
		if w := verdict.Warning(); w != "" {
			return append(slices.Clip(p.Warnings), w)
		}
		return p.Warnings
	}
	if in.Offers, unknown = s.offers(noCDI, snap); unknown != "" {
		before := s.holders.before.Load()
		if before == nil || before.err != "" { // nothing is added, and nothing there is changed
			if before != nil {
				unknown += "; " + before.err
			}
			s.setError(unknown, nil)
			s.preparer.update(cfg, snap, s.pool.Load())
			return nil
		}
		in.Before = before.taints
	}
	unknown = cmp.Or(unknown, s.refusal())
	if s.publishes && in.Same(&s.input) {
		s.setError(unknown, warnings(s.pool.Load()))
		s.preparer.update(cfg, snap, s.pool.Load())
		return nil
	}
	pool := BuildPool(in)
	s.pool.Store(&pool)
	remembered := pool.RememberNames(names)
	s.storeNames(s.instance, &pool, remembered)
	s.preparer.update(cfg, snap, &pool)
	if !asked || runtime.Away { // slices too need an API server that answers
		s.publishes = false
		reason := strings.TrimSuffix(runtimeUnasked+": "+runtime.Err, ": ")
		if s.preparer.publishing() { // the slices of an earlier process stay
			s.setError("", append(slices.Clip(pool.Warnings), reason))
		} else {
			s.setError(reason, pool.Warnings)
		}
		return nil
	}
	if noCDI != "" {
		s.publishes = false
		if err := s.clear(ctx, &pool); err != nil {
			noCDI += "; " + err.Error()
		}
		s.setError(noCDI, pool.Warnings)
		return nil
	}
	s.clearing = notClearing
	if waits, err := s.store(ctx, names, remembered); waits {
		s.publishes = false
		if err != nil && s.preparer.publishing() { // the disk must not keep taints from the devices whose names are stored
			s.publishPool(ctx, pool.named(names))
		}
		return err
	}
	s.setError(unknown, warnings(&pool))
	s.publishPool(ctx, pool)
	s.input, s.publishes = in, true
	return nil
}

// store writes the names of devices, and that there may be slices, to the checkpoint, because a later process must have both. If something
// has changed, it starts the write and reports that the caller must wait. An error means that the last write has failed or takes long.
func (s *session) store(ctx context.Context, names, remembered map[health.DeviceID]string) (waits bool, err error) {
	writing := false
	if w := s.storing; w != nil {
		if writing = !wait.Closed(w.done); !writing {
			s.storing, err = nil, w.err
		}
	}
	if maps.Equal(remembered, names) && s.preparer.publishing() {
		return false, nil
	}
	if writing {
		if time.Since(s.storing.since) >= s.timing.retryMin {
			err = errors.New("nothing new is published: the checkpoint is still being written")
		}
		return true, err
	}
	w := &storing{since: time.Now(), done: make(chan struct{})}
	s.storing = w
	go func() {
		defer close(w.done)
		err := s.makeDataDir()
		if err == nil {
			err = s.preparer.remember(ctx, remembered)
		}
		if err == nil {
			err = s.preparer.setPublishing(ctx, true)
		}
		if err != nil {
			w.err = fmt.Errorf("nothing new is published: %w", err)
		}
	}()
	return true, err
}

// pcieRoots returns the PCIe roots of the devices of a snapshot, which change only with the devices.
func (s *session) pcieRoots(snap *health.Snapshot) map[string]string {
	ids := snap.DeviceIDs()
	if s.roots == nil || !slices.Equal(ids, s.rootsOf) {
		s.roots, s.rootsOf = PCIeRoots(snap.Devices), ids
	}
	return s.roots
}

// publishPool publishes a pool. It ends a withdrawal first, which would forget the pool when it succeeds.
func (s *session) publishPool(ctx context.Context, pool Pool) {
	if s.withdrawn != nil {
		s.stopPublishing()
	}
	s.publisher.update(pool)
	if s.stop == nil {
		s.start(ctx, s.publisher.run)
	}
}

// stopPublishing ends what publishes or withdraws.
func (s *session) stopPublishing() {
	if s.stop != nil {
		s.stop()
	}
	s.stop, s.withdrawn = nil, nil
}

// start runs a function of the publisher until it succeeds or ctx ends. The result is closed then.
func (s *session) start(ctx context.Context, run func(context.Context) error) (done chan struct{}) {
	ctx, cancel := context.WithCancel(ctx)
	done = make(chan struct{})
	go func() {
		defer close(done)
		pauses := s.timing.pauses()
		for ctx.Err() == nil {
			err := run(ctx)
			if err == nil || ctx.Err() != nil {
				return
			}
			pause := pauses.Next()
			s.Log.Warn("cannot publish devices", zap.Error(err), zap.Duration("retry", pause))
			wait.Sleep(ctx, pause)
		}
	}()
	s.stop = func() {
		cancel()
		<-done
	}
	return done
}

// clear taints the devices, and removes the slices when the API server has the taints, so that no pod is scheduled to a device that is
// about to go. Claims that are prepared are served until they end.
func (s *session) clear(ctx context.Context, pool *Pool) error {
	if s.clearing == cleared || !s.stored() {
		return nil
	}
	if s.clearing == notClearing {
		s.clearing = withdrawing // at least the slices of a driver before this one
		if s.preparer.publishing() {
			s.clearing = tainting
		}
	}
	if s.clearing == tainting {
		s.publishPool(ctx, *pool)
		if !s.publisher.hasDesired() {
			return nil
		}
		s.clearing = withdrawing
	}
	if !s.withdraw(ctx) {
		return nil
	}
	if err := s.preparer.setPublishing(ctx, false); err != nil {
		return fmt.Errorf("cannot write the checkpoint: %w", err)
	}
	s.clearing = cleared
	s.Log.Info("no ResourceSlice of the node is left", zap.String("driver", s.driver))
	return nil
}

// stored reports whether no write of the checkpoint is in progress that may still store that there are slices.
func (s *session) stored() bool {
	if s.storing != nil && wait.Closed(s.storing.done) {
		s.storing = nil
	}
	return s.storing == nil
}

// withdraw removes the slices in the background, and reports whether that is done.
func (s *session) withdraw(ctx context.Context) (done bool) {
	if s.withdrawn == nil {
		s.stopPublishing()
		s.withdrawn = s.start(ctx, s.publisher.withdraw)
	}
	if !wait.Closed(s.withdrawn) {
		return false
	}
	s.stopPublishing()
	return ctx.Err() == nil // otherwise the withdrawal may have been ended
}

// release offers nothing, waits for the end of the claims, removes the slices and reports whether that is done. Claims that are prepared
// are served until they end. The slices of another driver of the same name stay.
func (s *session) release(ctx context.Context, other bool) (done bool) {
	if !s.stored() {
		s.setReleasing("the checkpoint is being written", false)
		return false
	}
	if claims := s.preparer.state.Load().Claims; len(claims) > 0 {
		if s.preparer.publishing() && !other {
			s.publishPool(ctx, Pool{})
		}
		s.setReleasing("waiting for the end of "+s.describeClaims(claims), true)
		return false
	}
	if (s.withdrawn != nil || s.preparer.publishing() && !other) && !s.withdraw(ctx) {
		reason := "removing the ResourceSlices of the node"
		var status Status
		if s.publisher.report(&status); status.PublishErr != "" {
			reason += ": " + status.PublishErr
		}
		s.setReleasing(reason, false)
		return false
	}
	if err := s.preparer.setPublishing(ctx, false); err != nil {
		s.setReleasing("cannot write the checkpoint: "+err.Error(), false)
		return false
	}
	if s.preparer.needed() {
		const reason = "waiting for the end of pods with claims that were prepared before the checkpoint was lost"
		facts := s.facts()
		s.setReleasing(reason, facts.Unknown() == "")
		return false
	}
	if !s.sockets.answered() {
		s.setReleasing("the kubelet's last call is being answered", false)
		return false
	}
	return true
}

// setReleasing stores why the devices are not released, and whether that is only that pods hold them.
func (s *session) setReleasing(reason string, forPods bool) {
	s.storeReleased(plugin.Handover{
		Reason: "plugin.api has changed, and dynamic resource allocation still has the devices: " + reason,
		Pods:   forPods,
	})
	if s.Config.Load().Enabled { // the plugin is to serve them, and reports the reason
		s.setError("", nil)
	} else {
		s.setError("", []string{"releasing the devices: " + reason})
	}
}

// maxNamedClaims limits the claims that a text names.
const maxNamedClaims = 5

// describeClaims names claims with the pods that hold them.
func (s *session) describeClaims(claims map[types.UID]Claim) string {
	type key struct{ namespace, name string }
	pods := make(map[key][]string)
	for _, holders := range s.Holders.Load().By { //nolint:forbidigo // for a text
		for _, h := range holders {
			if h.Claim.Driver == s.driver {
				k := key{h.Namespace, h.Claim.Name}
				if pod := h.Namespace + "/" + h.Pod; !slices.Contains(pods[k], pod) {
					pods[k] = append(pods[k], pod)
				}
			}
		}
	}
	texts := make([]string, 0, len(claims))
	for _, c := range claims {
		text := c.Namespace + "/" + c.Name
		if held := pods[key{c.Namespace, c.Name}]; len(held) > 0 {
			slices.Sort(held)
			text += " of " + strings.Join(held, " and ")
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	if more := len(texts) - maxNamedClaims; more > 0 {
		texts = append(texts[:maxNamedClaims], fmt.Sprintf("%d more", more))
	}
	if len(claims) == 1 {
		return "claim " + texts[0]
	}
	return "claims " + strings.Join(texts, ", ")
}

// setError stores why nothing is published, and warnings. It logs new ones.
func (s *session) setError(err string, warnings []string) {
	for _, w := range warnings {
		if !slices.Contains(s.loggedWarn, w) {
			s.Log.Warn(w)
		}
	}
	s.loggedWarn = warnings
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != "" && err != s.err {
		s.Log.Warn("cannot serve claims", zap.String("reason", err))
	}
	s.err, s.warnings = err, warnings
}

// report sets the fields of a status that concern the instance.
func (s *session) report(status *Status) {
	status.DriverName, status.Pool = s.driver, s.Node
	s.publisher.report(status)
	s.mu.Lock()
	status.Err, status.Warning = s.err, strings.Join(s.warnings, "; ")
	s.mu.Unlock()
	var socketsErr string
	status.Registered, socketsErr = s.sockets.status()
	if socketsErr != "" {
		status.Err = strings.TrimPrefix(status.Err+"; "+socketsErr, "; ")
	}
}

// withoutUnasked returns the snapshot without the MIG devices whose properties may still come: their names depend on the properties, and
// never change.
func withoutUnasked(snap *health.Snapshot, known health.KnownProperties, names map[health.DeviceID]string) *health.Snapshot {
	waits := func(s health.DeviceState) bool {
		d := &s.Device
		_, asked := known[d.ID]
		return d.Kind == health.KindMIG && d.Properties == nil && names[d.ID] == "" && !asked
	}
	if !slices.ContainsFunc(snap.Devices, waits) {
		return snap
	}
	next := *snap
	next.Devices = slices.DeleteFunc(slices.Clone(snap.Devices), waits)
	return &next
}
