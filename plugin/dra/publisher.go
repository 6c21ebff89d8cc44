package dra

import (
	"cmp"
	"context"
	"maps"
	"sync"
	"time"

	"github.com/go-logr/logr/funcr"
	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	syncDelay    = time.Second // from a change by another writer to its correction
	featureCheck = time.Hour   // between checks of the API server's features, which change with its release

	// unseen is how long the controller assumes that a slice exists which it has created and no watch has shown yet. The kubelet may have
	// wiped the slice meanwhile, so this is less than the controller's minute. If a watch were away for longer, the controller would create
	// the slice twice.
	unseen = 15 * time.Second
)

// publisher keeps the ResourceSlices of the node equal to a pool. The controller of k8s.io/dynamic-resource-allocation writes them. It
// gets a client and a queue of the publisher, which retry within seconds and report what happens.
type publisher struct {
	driver, node string // the node is also the name of the pool
	connect      func() (kubernetes.Interface, error)
	unseen       time.Duration
	log          *zap.Logger

	desired health.Latest[Pool]     // replaced only under mu; empty before the first, and after a withdrawal
	lacks   health.Latest[features] // replaced only under mu; never empty
	state   health.Latest[publication]
	recheck chan struct{} // whether the API server has the features
	refused chan struct{} // a device was refused: offer the others

	mu        sync.Mutex // guards all below
	applied   *givenPool // what the controller has
	started   *givenPool // what the controller writes now
	synced    *Pool      // what the API server has
	published time.Time  // when it last was what is desired
	failures  failures
	refusals  map[string]refusedDevice // by name of the device
}

// givenPool is a pool that the controller got. The controller then desires what the API server has stored of it.
type givenPool struct {
	pool    *Pool
	dropped bool // the API server has stored it without some fields
}

// publication is what the publisher reports. It is immutable.
type publication struct {
	desired   *Pool // nil if nothing is
	published time.Time
	behind    bool
	err       string
	errors    map[string]uint64
	lacks     features
}

func newPublisher(driver, node string, connect func() (kubernetes.Interface, error), log *zap.Logger) *publisher {
	p := &publisher{
		driver: driver, node: node, connect: connect, unseen: unseen, log: log,
		recheck: make(chan struct{}, 1), refused: make(chan struct{}, 1),
		failures: newFailures(), refusals: make(map[string]refusedDevice),
	}
	p.lacks.Store(&features{})
	p.change(func() {})
	return p
}

// update sets what is desired. It does not block. Before the first update nothing is written or deleted. A pool without slices is
// published as one slice without devices: the driver runs and offers nothing.
func (p *publisher) update(pool Pool) {
	if len(pool.Slices) == 0 {
		pool.Slices = []Slice{{}}
	}
	if last := p.desired.Load(); last != nil && equality.Semantic.DeepEqual(last.Slices, pool.Slices) {
		return
	}
	p.change(func() { p.desired.Store(&pool) })
}

// features returns what the API server lacks. When that changes, the driver builds the pool again: a pool that needs what is missing is not
// published.
func (p *publisher) features() features { return *p.lacks.Load() }

// watch returns a channel that closes when what report reports has changed.
func (p *publisher) watch() <-chan struct{} {
	_, changed := p.state.Watch()
	return changed
}

// report sets the fields of a status that concern slices.
func (p *publisher) report(s *Status) {
	now := p.state.Load()
	s.Published, s.Behind, s.PublishErr, s.PublishErrors, s.DroppedFeatures = now.published, now.behind, now.err, now.errors, now.lacks.gates()
	if now.desired == nil {
		return
	}
	s.Slices = len(now.desired.Slices)
	for _, slice := range now.desired.Slices {
		s.Devices += len(slice.Devices)
		for _, d := range slice.Devices {
			for _, t := range d.Taints {
				if t.Effect != resourceapi.DeviceTaintEffectNone {
					s.Tainted++
					break
				}
			}
		}
	}
}

// change changes the state under mu and stores what is reported.
func (p *publisher) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	desired := p.desired.Load()
	failing := p.failures.now[opSync] != nil || p.failures.now[opCleanUp] != nil
	now := publication{
		desired: desired, published: p.published, lacks: *p.lacks.Load(),
		behind: desired != nil && (p.synced != desired || len(p.refusals) > 0 || failing),
		errors: maps.Clone(p.failures.count), err: cmp.Or(p.failures.text(), refusalText(p.refusals)),
	}
	p.state.Store(&now)
}

// fail records a failure of an operation.
func (p *publisher) fail(op operation, err error) {
	p.change(func() { p.failures.add(op, err, p.log) })
}

// recovered records the success of an operation.
func (p *publisher) recovered(op operation) {
	p.change(func() { p.failures.recovered(op, len(p.refusals) == 0, p.log) })
}

// setLacks sets what the API server lacks.
func (p *publisher) setLacks(lacks features) {
	if *p.lacks.Load() == lacks {
		return
	}
	p.change(func() { p.lacks.Store(&lacks) })
	if off := lacks.gates(); len(off) > 0 {
		p.log.Warn("the API server lacks features of dynamic resource allocation", zap.Strings("featureGates", off))
	} else {
		p.log.Info("the API server has all features of dynamic resource allocation that the agent uses")
	}
}

// refuse records that the API server refuses devices of a slice, and offers the others.
func (p *publisher) refuse(slice *resourceapi.ResourceSlice, err error) {
	refused := refusedDevices(slice, err)
	if len(refused) == 0 {
		return
	}
	p.change(func() { maps.Copy(p.refusals, refused) })
	wait.Signal(p.refused)
}

// run publishes until ctx ends, and leaves the slices: the kubelet keeps them if the driver restarts within 30 seconds.
func (p *publisher) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(p.withLogger(ctx))
	defer p.change(func() { clear(p.failures.now) })
	defer cancel()
	p.change(func() { p.applied, p.started, p.synced = nil, nil, nil })
	for pool, changed := p.desired.Watch(); pool == nil; pool, changed = p.desired.Watch() {
		if !wait.For(ctx, changed) {
			return nil
		}
	}
	client, ok := p.open(ctx)
	if !ok {
		return nil
	}
	check := func() error {
		lacks, err := findLacks(ctx, client, p.driver, p.node)
		if err == nil {
			p.setLacks(lacks)
		}
		return err
	}
	if !p.retry(ctx, opConnect, check) {
		return nil
	}
	queue := newSliceQueue(ctx, p)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: p.driver, KubeClient: sliceClient{client, p}, Queue: queue, SyncDelay: new(syncDelay), MutationCacheTTL: new(p.unseen),
		ErrorHandler: queue.handleError,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.node, UID: "set by sliceClient"},
	})
	if err != nil { // ctx has ended while it waited for the first list
		return nil
	}
	defer controller.Stop()
	recheck := time.NewTicker(featureCheck)
	defer recheck.Stop()
	for {
		pool, changed := p.desired.Watch()
		if offered, ok := p.offer(pool); ok {
			p.change(func() {
				controller.Update(offered)
				p.applied = &givenPool{pool: pool}
			})
			queue.open()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			continue
		case <-p.refused:
			continue
		case <-p.recheck:
		case <-recheck.C:
		}
		recheck.Reset(featureCheck)
		if check() == nil {
			p.change(func() { clear(p.refusals) }) // it may be another API server
		} else {
			recheck.Reset(maxRefusedPause)
		}
	}
}

// offer returns the resources of a pool without the refused devices; ok is false if the pool needs a feature that is missing.
func (p *publisher) offer(pool *Pool) (r *resourceslice.DriverResources, ok bool) {
	if p.lacks.Load().neededBy(pool) {
		return nil, false
	}
	p.change(func() {
		pruneRefusals(p.refusals, pool)
		list := make([]resourceslice.Slice, len(pool.Slices))
		for i, s := range pool.Slices {
			for _, d := range s.Devices {
				if _, refused := p.refusals[d.Name]; !refused {
					list[i].Devices = append(list[i].Devices, d)
				}
			}
		}
		r = &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.node: {Slices: list}}}
	})
	return r, true
}

// withdraw deletes the slices and returns when the API server has none, or with the error of ctx. Then nothing is desired. Call it after
// run has returned.
func (p *publisher) withdraw(ctx context.Context) error {
	ctx = p.withLogger(ctx)
	client, ok := p.open(ctx)
	if !ok || !p.retry(ctx, opWithdraw, func() error { return deleteSlices(ctx, client, p.driver, p.node) }) {
		return ctx.Err()
	}
	p.change(func() {
		p.desired.Store(nil)
		p.synced, p.published = nil, time.Now()
	})
	return nil
}

// hasDesired reports whether the API server has what is desired.
func (p *publisher) hasDesired() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.synced != nil && p.synced == p.desired.Load()
}

// deleteSlices deletes slices until the API server has none: a request that has timed out may still create one.
func deleteSlices(ctx context.Context, client kubernetes.Interface, driver, node string) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	api := client.ResourceV1().ResourceSlices()
	for {
		list, err := api.List(ctx, metav1.ListOptions{FieldSelector: sliceSelector(driver, node)})
		if err != nil {
			return withoutNotFound(err, nil) // an API server without the API has no slices
		}
		if len(list.Items) == 0 {
			return nil
		}
		for _, s := range list.Items {
			err := api.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
			if withoutNotFound(err, nil) != nil {
				return err
			}
		}
	}
}

// open opens a client; ok is false if ctx ends first.
func (p *publisher) open(ctx context.Context) (client kubernetes.Interface, ok bool) {
	ok = p.retry(ctx, opConnect, func() (err error) {
		client, err = p.connect()
		return err
	})
	return client, ok
}

// retry calls f until it succeeds; it returns false if ctx ends first.
func (p *publisher) retry(ctx context.Context, op operation, f func() error) bool {
	var pauses retryPauses
	for failed := false; ; failed = true {
		err := f()
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			p.recovered(op)
			if op == opWatch && failed {
				wait.Signal(p.recheck)
			}
			return true
		}
		p.fail(op, err)
		if !wait.Sleep(ctx, pauses.after(err)) {
			return false
		}
	}
}

// withLogger returns a context with client-go's logger. Its messages are only for debugging: errors reach the publisher.
func (p *publisher) withLogger(ctx context.Context) context.Context {
	return klog.NewContext(ctx, funcr.New(func(_, text string) { p.log.Debug("client-go: " + text) }, funcr.Options{}))
}
