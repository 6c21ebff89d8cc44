// Package plugin is a device plugin: it offers the devices of a snapshot to the kubelet and answers the kubelet's calls.
//
//	Snapshot, Config and Holders ─► layout ─► one server per resource ─► ListAndWatch, Allocate, GetPreferredAllocation
//	                                          one registrar per server ─► settle, listen, register, audit; again after a loss
//	podresources ─► Holders: the containers that hold each device
//
// Decisions are pure: layout.go, mig_strategy.go, withhold.go, allocate.go and package prefer. Failures of the kubelet are handled
// in registrar.go and audit.go.
package plugin

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Plugin runs a server and a registrar for each resource of the newest layout.
type Plugin struct {
	cfg       *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	log       *zap.Logger
	timing    timing
	pods      *podresources.Client
	layouts   *layoutCache

	allocations allocationTimes
	mps         health.Latest[mps.Desired]
	lock        *nodelock.Lock             // nil: there is one agent
	draReleased *health.Latest[Handover]   // nil without dynamic resource allocation
	claims      podresources.ClaimResolver // nil without dynamic resource allocation
	released    health.Latest[Handover]
	turn        health.Latest[turn]
	limitHooks  *cdi.LimitHooks
	note        Note
	noted       bool // belongs to Run

	// These belong to Run.
	cdi             *cdi.Writer
	hostFS          fs.FS // from the root on
	loggedWarnings  []string
	loggedUnmatched []health.UnmatchedRefs
	handover        handover

	mu       sync.Mutex          // guards the fields below
	running  []*runningRegistrar // by resource name
	disabled bool                // Status.Off
	err      string              // Status.Err
	forPods  bool                // Status.WaitsForPods
	warnings []string            // Status.Warnings

	stoppedAt time.Time // when a resource was last stopped
}

// Status is the state of the plugin.
type Status struct {
	Off          bool             // plugin.enabled is false, or plugin.api is dra and the devices are released, so nothing is served
	Resources    []ResourceStatus // by name
	Err          string           // why no resource, or not every resource, is served; empty if all are
	WaitsForPods bool             // Err is only that pods still hold devices of claims; see Handover.Pods
	Warnings     []string         // working devices that are not offered to pods, with the reason
	AuditErr     string           // why the kubelet's devices cannot be audited; empty if they can

	OtherPlugins map[string]int // see Plugin.OtherPlugins
}

// ResourceStatus is the state of one resource.
type ResourceStatus struct {
	Name       string
	Registered bool   // the kubelet has accepted the registration and has a ListAndWatch stream open
	Audited    bool   // it is registered, and the kubelet counts the devices that were sent last
	Err        string // why it is not registered; empty if it is

	Registrations    uint64            // accepted by the kubelet since the resource is served
	AuditMismatches  uint64            // audits that found another list in the kubelet and registered again
	Streams          int               // open ListAndWatch streams
	Allocations      uint64            // containers with devices from Allocate
	AllocationErrors map[string]uint64 // refused Allocate calls by reason, see AllocationErrors
	Devices          int               // offered to the kubelet
	Healthy          int               // of these
	Unschedulable    *Unschedulable    // nil if the holders are unknown
}

// New returns a plugin that follows cfg and snapshots, either of which may still be empty. A stored Config must be valid.
func New(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], log *zap.Logger) *Plugin {
	return newPlugin(cfg, snapshots, defaultTiming(), log)
}

// NewFaster is New with all intervals divided by n, for tests that play many sequences. Timeouts stay, because the machine is no faster.
func NewFaster(n int, cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], log *zap.Logger) *Plugin {
	t := defaultTiming()
	for _, d := range []*time.Duration{
		&t.poll, &t.settle, &t.endTimeout, &t.retryMin, &t.retryMax, &t.auditRetryMin, &t.auditRetryMax,
		&t.pods.Poll, &t.pods.Refresh, &t.pods.QuickRefresh, &t.pods.Settle, &t.pods.MaxAge, &t.pods.LogAfter,
	} {
		*d /= time.Duration(n)
	}
	return newPlugin(cfg, snapshots, t, log)
}

func newPlugin(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], t timing, log *zap.Logger) *Plugin {
	p := &Plugin{
		cfg: cfg, snapshots: snapshots, log: log, timing: t, err: "starting",
		cdi: cdi.NewWriter(log), limitHooks: cdi.NewLimitHooks(log), hostFS: os.DirFS("/"),
	}
	p.pods = p.newPodResources()
	p.pods.KubeletLost = p.kubeletLost
	p.layouts = newLayoutCache(cfg, snapshots, &p.pods.Holders)
	p.layouts.turn = &p.turn
	p.layouts.recent.settle, p.layouts.recent.maxAge = t.settle, t.pods.MaxAge
	return p
}

func (p *Plugin) newPodResources() *podresources.Client {
	settings := func() *podresources.Settings {
		c := p.cfg.Load()
		if c == nil {
			return nil
		}
		return &podresources.Settings{KubeletDir: c.KubeletDir, Allocatable: c.Enabled}
	}
	resolvers := func() podresources.Resolvers {
		return podresources.Resolvers{Resource: newResolver(*cmp.Or(p.cfg.Load(), &Config{}), p.snapshots.Load()), Claim: p.claims}
	}
	return podresources.New(settings, resolvers, p.timing.pods, p.log)
}

// kubeletLost reports whether there are resources and none is registered. Each registrar logs why.
func (p *Plugin) kubeletLost() bool {
	running := p.registrars()
	return len(running) > 0 && !slices.ContainsFunc(running, func(r *runningRegistrar) bool { return r.registrar.status().Registered })
}

func (p *Plugin) registrars() []*runningRegistrar {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.running)
}

// runningRegistrar serves a resource. Only its end in the layout stops it, no other change of the configuration.
type runningRegistrar struct {
	resource  string
	registrar *registrar
	stop      func(withdraw bool) // returns when the registrar has ended
}

// Run serves the kubelet until ctx ends, then removes its sockets and returns nil. Run retries after errors and reports
// them in Status. plugin.onStop decides which devices the kubelet keeps after the end.
func (p *Plugin) Run(ctx context.Context) error {
	var pods sync.WaitGroup
	pods.Go(func() { p.pods.Run(ctx) })
	defer pods.Wait()
	defer func() {
		last := p.cfg.Load()
		p.reconcile(ctx, nil, Config{}, last != nil && last.OnStop == OnStopWithdraw)
		if last == nil {
			return
		}
		if p.lock.In(last.KubeletDir).Held { // this agent may have registered nothing, and no other may follow
			p.removeStaleSockets(context.WithoutCancel(ctx), *last)
		}
	}()
	logged := &layout{}
	changed := p.layouts.wake(ctx, p.draReleased, p.lock.State(), p.cdi.Toolkit.Parts())
	for {
		hand := p.handOver()
		now := p.layouts.current()
		missing := p.missingReason(now)
		p.logHealthChanges(logged.resources, now.resources)
		p.logWithheld(logged, now)
		p.publishWarnings(now)
		logged = now
		next := newPlan(now, hand, missing, p.ensureCDI(now), p.registrars())
		if hand.ordersMPS {
			p.storeMPS(now)
		}
		// Without the lock, an empty list would take the devices from an agent that serves now.
		p.reconcile(ctx, next.resources, *cmp.Or(now.cfg, &Config{}), !hand.noLock)
		p.setError(now.cfg, next, hand.noLock)
		if !wait.For(ctx, changed) {
			return nil
		}
	}
}

// plan is what the plugin serves, and why that is not all.
type plan struct {
	resources []string
	reason    string // why no resource, or not every resource, is served or offered; empty if all are
	starting  bool   // the reason is no fault: the agent starts
	forPods   bool   // Status.WaitsForPods
}

// newPlan returns what to serve of a layout. missing is why the layout lacks resources. A running resource continues
// while noCDI, or while no device of it can be used: the kubelet retries a container that cannot be created, but a pod whose resource
// disappears fails.
func newPlan(now *layout, hand handoverStep, missing string, noCDI error, running []*runningRegistrar) plan {
	pl := plan{
		resources: namesOf(now.resources), reason: missing,
		starting: now.snap == nil || now.snap.Source.Status == health.SourceStarting,
	}
	isRunning := func(name string) bool { return contains(running, name) }
	if noCDI != nil {
		pl.resources = slices.DeleteFunc(pl.resources, func(name string) bool { return !isRunning(name) })
		pl.reason = noCDI.Error()
		pl.starting = pl.starting || errors.Is(noCDI, cdi.ErrPending)
	}
	if waiting, why, soon := now.waiting(isRunning); len(waiting) > 0 {
		pl.resources = slices.DeleteFunc(pl.resources, func(name string) bool { return slices.Contains(waiting, name) })
		pl.starting = pl.starting || soon && pl.reason == ""
		pl.reason = strings.TrimPrefix(pl.reason+"; "+why, "; ")
	}
	if h := hand.notOffered; h.Reason != "" {
		pl.starting = pl.starting || isStarting(h.Reason) || h.Pods
		pl.forPods = h.Pods && (now.absent != "" || pl.reason == "")
		if now.absent == "" && pl.reason != "" { // what is wrong with the layout that is still served
			h.Reason += "; " + pl.reason
		}
		pl.reason = h.Reason
	}
	if !hand.serve {
		pl.resources = nil
	}
	return pl
}

// SetRuntime sets where the plugin finds the container runtime of the node. It is empty until it was asked for once. Call it before Run.
// Without it, the runtime is unknown.
func (p *Plugin) SetRuntime(r *health.Latest[cdi.Runtime]) { p.layouts.runtime = r }

// GenerateCDI generates parts of CDI specs with the driver until ctx ends; see cdi.Toolkit.Run.
func (p *Plugin) GenerateCDI(ctx context.Context) { p.cdi.Toolkit.Run(ctx) }

// missingReason returns why there is nothing to serve, or not every resource. It is empty if the plugin is disabled. It is empty as well if
// dynamic resource allocation is to serve the devices, which then reports why they are not released.
func (p *Plugin) missingReason(now *layout) (reason string) {
	if now.cfg != nil && now.snap.Polled() {
		p.logUnmatchedRefs(now.cfg.UnmatchedRefs(now.snap.Bindings, now.snap.Devices))
	}
	switch cfg, snap := now.cfg, now.snap; {
	case cfg == nil:
		return "no configuration yet"
	case !cfg.Enabled, cfg.ServesDRA():
		return ""
	case !snap.Polled():
		// An early registration would tell the kubelet that the node has no GPUs.
		reason = "no poll of the GPUs has succeeded yet"
		if snap != nil && snap.Source.Err != "" {
			reason += ": " + snap.Source.Err
		}
		return reason
	}
	if now.err != "" || len(now.resources) > 0 {
		return now.err
	}
	return cmp.Or(strings.Join(now.warnings, "; "), "no GPUs")
}

// CDIInput returns the input of a CDI spec for a snapshot, without devices.
func (c *Config) CDIInput(snap *health.Snapshot, root fs.FS) cdi.Input {
	source := &snap.Source
	return cdi.Input{
		Config: c.CDI, Host: c.Host(root), Driver: source.Versions.Driver,
		NVML: source.Kind == "dcgm", Detached: source.Detachment.InForce(), MemoryLimits: c.Sharing.Memory.usesDriver(),
	}
}

// ensureCDI returns why the container runtime cannot resolve the CDI names of the layout.
func (p *Plugin) ensureCDI(now *layout) error {
	if now.cfg == nil || !now.cfg.UsesCDI() || len(now.resources) == 0 {
		p.cdi.Toolkit.Stop()
		return nil
	}
	in := now.cfg.CDIInput(now.snap, p.hostFS)
	for _, r := range now.resources {
		for _, d := range r.Devices {
			in.Devices = append(in.Devices, cdi.Device{Name: now.cfg.runtimeID(&d.State.Device), State: d.State, Offered: d.healthy(0)})
		}
	}
	return p.cdi.Ensure(in)
}

func contains(running []*runningRegistrar, name string) bool {
	return slices.ContainsFunc(running, func(r *runningRegistrar) bool { return r.resource == name })
}

func namesOf(resources []Resource) (names []string) {
	for _, r := range resources {
		names = append(names, r.Name)
	}
	return names
}

// reconcile stops the registrars outside desired and starts missing ones. With withdraw, the kubelet removes the
// devices of stopped resources at once; otherwise it keeps them, unhealthy, for its grace period.
func (p *Plugin) reconcile(ctx context.Context, desired []string, cfg Config, withdraw bool) {
	var stopping sync.WaitGroup
	var stopped []*runningRegistrar
	running := slices.DeleteFunc(p.registrars(), func(r *runningRegistrar) bool {
		if slices.Contains(desired, r.resource) {
			return false
		}
		stopping.Go(func() { r.stop(withdraw) })
		stopped = append(stopped, r)
		return true
	})
	stopping.Wait()
	if missing := slices.DeleteFunc(slices.Clone(desired), func(name string) bool { return contains(running, name) }); len(missing) > 0 {
		p.noteServing(ctx)
		p.removeStaleSockets(ctx, cfg)
		for _, name := range missing {
			running = append(running, p.start(ctx, name, cfg))
		}
	}
	slices.SortFunc(running, func(a, b *runningRegistrar) int { return cmp.Compare(a.resource, b.resource) })
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = running
	if len(stopped) > 0 {
		p.stoppedAt = time.Now()
	}
}

// Note is a durable note that a device plugin of ours has served in this boot. Both fields may be nil: then that is unknown.
type Note struct {
	Write   func(context.Context) error
	Missing func() bool // reports whether there is certainly none
}

// SetNote sets the note that the plugin writes before its first registration. Call it before Run.
func (p *Plugin) SetNote(n Note) { p.note = n }

// noteTimeout limits the wait for a disk.
const noteTimeout = 2 * time.Second

// noteServing notes once that the plugin serves. A disk that fails does not keep the devices from pods.
func (p *Plugin) noteServing(ctx context.Context) {
	if p.note.Write == nil || p.noted {
		return
	}
	p.noted = true
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	if err := p.note.Write(ctx); err != nil {
		p.log.Warn("cannot note that the device plugin serves; without the kubelet's pod resources, dynamic resource allocation could give "+
			"held devices to claims", zap.Error(err))
	}
}

// removeStaleSockets removes the sockets that an earlier agent left behind, before the registrars start and at the end.
func (p *Plugin) removeStaleSockets(ctx context.Context, cfg Config) {
	files, err := os.ReadDir(cfg.socketDir())
	if err != nil {
		return // each registrar reports it
	}
	var removing sync.WaitGroup
	for _, f := range files {
		if ours, _ := filepath.Match(SocketPattern, f.Name()); !ours { // the pattern is valid
			continue
		}
		removing.Go(func() {
			if err := unixsock.RemoveStale(ctx, filepath.Join(cfg.socketDir(), f.Name())); err != nil {
				p.log.Debug("keeping a socket", zap.Error(err))
			}
		})
	}
	removing.Wait()
}

func (p *Plugin) start(ctx context.Context, resource string, cfg Config) *runningRegistrar {
	// Only stop ends the registrar, because it also decides whether to withdraw the devices.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	srv := newServer(resource, p.layouts, p.log)
	srv.allocated = func(req *pluginapi.AllocateRequest) {
		p.allocations.add(req, time.Now())
		p.pods.FollowAllocation()
	}
	r := newRegistrar(srv, cfg, p.timing, p.pods, p.log)
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(ctx)
	}()
	return &runningRegistrar{resource, r, func(withdraw bool) {
		cancel()
		<-done
		r.stop(withdraw)
		p.log.Info("resource no longer served", zap.String("resource", resource))
	}}
}

// Status may be called from any goroutine, at any time.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	s, running := Status{Off: p.disabled, Err: p.err, WaitsForPods: p.forPods, Warnings: p.warnings}, slices.Clone(p.running)
	p.mu.Unlock()
	s.AuditErr = p.pods.AllocatableError()
	s.OtherPlugins = p.OtherPlugins()
	for _, r := range running {
		s.Resources = append(s.Resources, r.registrar.status())
	}
	return s
}

// LastAllocation returns when the kubelet last allocated a device ID in the last hour, since the agent started; else the zero time. It
// may be called from any goroutine.
func (p *Plugin) LastAllocation(deviceID string) time.Time { return p.allocations.last(deviceID) }

// Facts returns what a decision about a device depends on, with the holders of an answer of the kubelet. The caller considers that the
// answer may lack the newest allocations. It may be called from any goroutine.
func (p *Plugin) Facts(h podresources.Holders) offer.Facts {
	f := offer.Facts{Now: time.Now(), Holders: h, NoPlugin: p.note.Missing != nil && p.note.Missing()}
	if claims := load(p.layouts.claims); claims != nil {
		f.Claims = *claims
	}
	return f
}

// RefreshHolders schedules an early query of the kubelet's pod resources. It may be called from any goroutine and never
// waits.
func (p *Plugin) RefreshHolders() { p.pods.QueryWithin(p.timing.pods.QuickRefresh) }

// Holders returns the containers that hold each device, as of the last pod-resources response. It may be called from any
// goroutine and never waits.
func (p *Plugin) Holders() podresources.Holders { return *p.pods.Holders.Load() }

// AskHolders asks the kubelet now which containers hold devices; see podresources.Client.Ask.
func (p *Plugin) AskHolders(ctx context.Context, timeout time.Duration) podresources.Holders {
	return p.pods.Ask(ctx, timeout)
}

// LatestHolders holds what Holders returns.
func (p *Plugin) LatestHolders() *health.Latest[podresources.Holders] { return &p.pods.Holders }
