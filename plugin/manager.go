// Package plugin shows the kubelet the GPUs of a snapshot, and answers it when a container wants some.
//
//	Snapshot, Config and Holders ─► Layout ─► one server per resource ─► ListAndWatch, Allocate, GetPreferredAllocation
//	                                          one link per server     ─► listen, settle, register, audit, and again when lost
//	pod-resources of the kubelet ─► Holders: who has which device
//
// What is decided is pure: layout.go, mig.go, withhold.go, allocate.go and prefer.go. What can go wrong with the kubelet is in
// kubelet.go and audit.go.
package plugin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Plugin is the kubelet's side of the agent.
type Plugin struct {
	cfg       *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	log       *zap.Logger
	timing    timing
	pods      *podResources
	layouts   *layouts
	cdi       *cdiKeeper      // belongs to Run
	remarked  []string        // belongs to Run: the newest warnings about the layout
	idle      []idleSelectors // belongs to Run: those of the newest layout

	mu      sync.Mutex // guards everything below
	running []*running // by resource name
	off     bool       // nothing is to be served
	err     string     // why nothing is served though it should be, in words
	lacks   []string   // Status.Warnings
}

// Status is what the plugin is doing now.
type Status struct {
	Off       bool             // plugin.enabled is false: nothing is served, and that is as it should be
	Resources []ResourceStatus // by name
	Err       string           // why nothing is served, or not all, in words; empty if all is
	Warnings  []string         // which devices are not offered to pods though they work, and why
	AuditErr  string           // why what the kubelet believes of us cannot be checked, in words; empty if it is
}

// ResourceStatus is the state of one resource.
type ResourceStatus struct {
	Name       string
	Registered bool   // the kubelet has accepted the registration and has a ListAndWatch stream open
	Err        string // why it is not registered, in words; empty if it is

	Registrations    uint64            // that the kubelet has accepted since the resource is served
	AuditMismatches  uint64            // times that the kubelet did not have what it was told, and was registered with again
	Streams          int               // open ListAndWatch streams
	Allocations      uint64            // containers that got their devices
	AllocationErrors map[string]uint64 // Allocate calls refused, by reason: unknown_device, unhealthy_device, withheld_device, too_many_replicas, no_device_node
	Devices          int               // that the kubelet is told of
	Healthy          int               // of these
}

// New returns a plugin that follows cfg and snapshots, either of which may still be empty. A stored
// Config must be valid.
func New(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], log *zap.Logger) *Plugin {
	return newPlugin(cfg, snapshots, defaultTiming(), log)
}

func newPlugin(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], t timing, log *zap.Logger) *Plugin {
	p := &Plugin{
		cfg: cfg, snapshots: snapshots, log: log, timing: t, err: "starting",
		pods: newPodResources(cfg, snapshots, t, log), cdi: newCDIKeeper(log),
	}
	p.pods.away = p.lost
	p.layouts = newLayouts(cfg, snapshots, &p.pods.holders)
	return p
}

// lost reports whether no resource is registered with the kubelet, though some should be: each has said why.
func (p *Plugin) lost() bool {
	p.mu.Lock()
	links := slices.Clone(p.running)
	p.mu.Unlock()
	return len(links) > 0 && !slices.ContainsFunc(links, func(r *running) bool { return r.link.status().Registered })
}

// target is what a running server serves. A change of anything else leaves the server alone.
type target struct {
	resource   string
	kubeletDir string
}

// running is a link and the goroutine that runs it.
type running struct {
	target
	link *link
	stop func(withdraw bool) // returns when the link has ended
}

// Run serves the kubelet until ctx ends, then removes its sockets and returns nil. Everything that can go
// wrong meanwhile is retried, and said in Status. What the kubelet keeps of us then is plugin.onStop.
func (p *Plugin) Run(ctx context.Context) error {
	var pods sync.WaitGroup
	pods.Go(func() { p.pods.run(ctx) })
	defer pods.Wait()
	defer func() {
		last := p.cfg.Load()
		p.reconcile(ctx, nil, Config{}, last != nil && last.OnStop == OnStopWithdraw)
	}()
	told := &arrangement{}
	for {
		changed := p.layouts.watch()
		now := p.layouts.newest()
		cfg, snap := now.cfg, now.snap
		why := p.lacking(now)
		p.logFlips(told.Resources, now.Resources)
		p.logWithheld(told, now)
		p.remark(now)
		told = now
		if cfg != nil {
			want := targets(now.Resources, *cfg)
			if missing := p.cdi.ready(cfg, now.Resources, snap); missing != "" {
				want, why = p.alreadyRunning(want), missing
			}
			p.reconcile(ctx, want, *cfg, true)
		}
		p.explain(cfg != nil && !cfg.Enabled, why, snap == nil || snap.Source.Status == health.SourceStarting)
		select {
		case <-ctx.Done():
			return nil
		case <-changed.cfg:
		case <-changed.snap:
		case <-changed.holders:
		}
	}
}

// lacking returns why nothing is served, if it should be.
func (p *Plugin) lacking(now *arrangement) (why string) {
	switch cfg, snap := now.cfg, now.snap; {
	case cfg == nil:
		return "no configuration yet"
	case !cfg.Enabled:
		p.sayIdle(nil)
		return ""
	case !snap.Polled():
		// An early registration would tell the kubelet that the node has none.
		why = "the GPUs have not been seen yet"
		if snap != nil && snap.Source.Err != "" {
			why += ": " + snap.Source.Err
		}
		return why
	}
	p.sayIdle(now.cfg.idle(candidates(now.snap)))
	if len(now.Resources) == 0 {
		return cmp.Or(now.Err, strings.Join(now.Warnings, "; "), "no GPUs")
	}
	return ""
}

// alreadyRunning leaves out what would be started. What runs goes on while a CDI spec is missing: a container
// that cannot be created is tried again, while a pod that finds its resource gone fails.
func (p *Plugin) alreadyRunning(want []target) []target {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(want, func(t target) bool {
		return !slices.ContainsFunc(p.running, func(r *running) bool { return r.target == t })
	})
}

func targets(layout []Resource, cfg Config) []target {
	var want []target
	for _, r := range layout {
		want = append(want, target{r.Name, cfg.KubeletDir})
	}
	return want
}

// diff returns what to stop and what to start to get from have to want.
func diff(have, want []target) (stop, start []target) {
	for _, t := range have {
		if !slices.Contains(want, t) {
			stop = append(stop, t)
		}
	}
	for _, t := range want {
		if !slices.Contains(have, t) {
			start = append(start, t)
		}
	}
	return stop, start
}

// reconcile stops what is not wanted any more, and starts what is missing. With withdraw, the kubelet is
// told that what stops has no devices any more; else it keeps them, unhealthy, for its grace time.
func (p *Plugin) reconcile(ctx context.Context, want []target, cfg Config, withdraw bool) {
	p.mu.Lock()
	old := slices.Clone(p.running)
	p.mu.Unlock()
	have := make([]target, len(old))
	for i, r := range old {
		have[i] = r.target
	}
	stop, start := diff(have, want)
	if len(stop) == 0 && len(start) == 0 {
		return
	}
	now := slices.DeleteFunc(slices.Clone(old), func(r *running) bool { return slices.Contains(stop, r.target) })
	var ending sync.WaitGroup
	for _, r := range old {
		if slices.Contains(stop, r.target) {
			ending.Go(func() { r.stop(withdraw) })
		}
	}
	ending.Wait()
	for _, t := range start {
		now = append(now, p.start(ctx, t, cfg))
	}
	slices.SortFunc(now, func(a, b *running) int { return cmp.Compare(a.resource, b.resource) })
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = now
}

func (p *Plugin) start(ctx context.Context, t target, cfg Config) *running {
	// It ends by stop alone, which knows whether to withdraw.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	srv := newServer(t.resource, p.layouts)
	srv.gave = p.pods.gave
	l := newLink(srv, cfg, p.timing, p.pods, p.log)
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.run(ctx)
	}()
	return &running{t, l, func(withdraw bool) {
		cancel()
		<-done
		l.stop(withdraw)
		p.log.Info("resource no longer served", zap.String("resource", t.resource))
	}}
}

// Status may be called from any goroutine, before Run and after it too.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	links, s := slices.Clone(p.running), Status{Off: p.off, Err: p.err, Warnings: p.lacks}
	p.mu.Unlock()
	for _, r := range links {
		s.Resources = append(s.Resources, r.link.status())
	}
	p.pods.mu.Lock()
	defer p.pods.mu.Unlock()
	s.AuditErr = p.pods.noAPI
	return s
}

// AskHolders has the kubelet asked soon who has which device, instead of in its turn. It may be called from any
// goroutine and never waits.
func (p *Plugin) AskHolders() { p.pods.ask(p.timing.hurry) }

// Holders returns who has which device, as the kubelet has said last. It may be called from any
// goroutine, asks nobody and never waits.
func (p *Plugin) Holders() Holders { return *p.pods.holders.Load() }
