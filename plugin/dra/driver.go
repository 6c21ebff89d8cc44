// Package dra is a driver of dynamic resource allocation (DRA): it publishes the devices of a snapshot as ResourceSlices, prepares
// ResourceClaims for the kubelet and reports the health of devices to it.
//
//	Snapshot, Config ─► Pool ─► publisher ─► ResourceSlices, with taints ─► scheduler
//	kubelet ─► claims: Prepare, Unprepare ─► checkpoint, CDI specs
//	Snapshot ─► WatchHealthStatus ─► kubelet ─► status of pods
//
// Decisions are pure: pool.go decides what is published. The libraries of k8s.io/dynamic-resource-allocation speak to the kubelet
// and to the API server.
package dra

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Domain qualifies the taints and attributes that are not NVIDIA's.
const Domain = "gpu-node-agent"

// Options configure a Driver. All fields but Runtime, Lock and Faster are required to run it.
type Options struct {
	Config         *health.Latest[plugin.Config]
	Snapshots      *health.Latest[health.Snapshot]
	Node           string                               // the node's name in Kubernetes, which is also the name of the pool
	BootID         string                               // identifies the boot; "" if unknown
	Connect        func() (kubernetes.Interface, error) // opens a client of the API server, without a request
	PluginReleased *health.Latest[plugin.Handover]      // whether the device plugin has released the devices
	Holders        *health.Latest[podresources.Holders] // never empty
	// Ask asks the kubelet now and returns its answer, or the last one after a timeout; see podresources.Client.
	Ask func(context.Context, time.Duration) podresources.Holders
	// Runtime is the container runtime of the node, empty before it was asked for. nil: it is unknown.
	Runtime   *health.Latest[cdi.Runtime]
	NoPlugin  func() bool                 // no device plugin of ours has served in this boot; see plugin.Note
	MPS       *health.Latest[mps.Desired] // which MPS daemons run; the driver stores it while it serves
	Simulated func() bool                 // the devices are not real: a container needs no device nodes
	Lock      *nodelock.Lock              // that the driver must hold to serve; nil: there is one agent on the node
	Faster    int                         // divides the intervals, for tests that play many sequences; 0 is 1
	// Properties are those of the devices that have none in the snapshot; never empty. AwaitProperties waits for them while ctx allows, also
	// if the driver does not serve.
	Properties      *health.Latest[health.KnownProperties]
	AwaitProperties func(context.Context, *health.Snapshot)
	Log             *zap.Logger
}

// runtimeUnasked is why the driver publishes nothing and prepares no new claim when it starts.
const runtimeUnasked = "the driver is starting; it is about to learn which container runtime the node has"

// runtime returns the container runtime of the node; asked is false until it was asked for once.
func (o *Options) runtime() (r cdi.Runtime, asked bool) {
	if o.Runtime == nil {
		return r, true
	}
	last := o.Runtime.Load()
	return *cmp.Or(last, &r), last != nil
}

// Driver publishes devices and prepares claims while plugin.api is dra.
type Driver struct {
	Options
	timing       timing
	released     health.Latest[plugin.Handover]
	saved        health.Latest[[]byte] // see Saved
	claims       health.Latest[Claims]
	names        health.Latest[names]
	pool         health.Latest[Pool] // the newest that was built; empty before the first instance
	preparer     *preparer
	former       *plugin.Config                         // that served last; nil if unknown; for Run only
	capabilities *health.Latest[memlimits.Capabilities] // nil if nothing examines the node

	mu      sync.Mutex // guards the fields below
	enabled bool       // Status.Enabled
	err     string     // why nothing is served; empty while an instance is
	forPods bool       // Status.WaitsForPods
	since   time.Time  // Status.HandoverSince
	session *session   // nil while no instance is served
}

// New returns a driver. It does nothing while plugin.api is not dra and no claim of it is prepared.
func New(o Options) *Driver {
	d := &Driver{Options: o, timing: defaultTiming(), err: "starting"}
	if c := o.Config.Load(); c != nil {
		d.enabled = c.ServesDRA()
	}
	d.preparer = newPreparer(&d.Options, &d.claims)
	t, claims := &d.timing, &d.preparer.timing
	for _, interval := range []*time.Duration{
		&t.poll, &t.retryMin, &t.retryMax, &t.resend, &t.streamLost, &claims.sweep, &claims.lost, &claims.unprepare,
	} {
		*interval /= time.Duration(max(1, o.Faster))
	}
	return d
}

// SetMemoryCapabilities sets where the driver finds what can limit the memory of containers. Call it before Run.
func (d *Driver) SetMemoryCapabilities(c *health.Latest[memlimits.Capabilities]) {
	d.capabilities, d.preparer.capabilities = c, c
}

// SetFormer sets the configuration of the process before this one, for CheckFormer. Call it before Run. Without it, it is unknown.
func (d *Driver) SetFormer(former *plugin.Config) { d.former = former }

// GenerateCDI generates parts of CDI specs with the driver until ctx ends; see cdi.Toolkit.Run.
func (d *Driver) GenerateCDI(ctx context.Context) { d.preparer.writer.Toolkit.Run(ctx) }

// timing holds the intervals and timeouts; tests shorten them.
type timing struct {
	poll       time.Duration // between checks of the sockets and, while the devices are being released, of what holds them
	retryMin   time.Duration // the bounds of the pause between two attempts; see backoff.Backoff
	retryMax   time.Duration
	call       time.Duration // of another driver's socket
	answer     time.Duration // from the end of the kubelet's call until its answer is sent
	resend     time.Duration // of the health of all devices; the kubelet forgets it after 30 s
	streamLost time.Duration // from the end of the kubelet's health stream until the kubelet counts as lost; it opens a new one every 5 s
}

func defaultTiming() timing {
	return timing{
		poll: time.Second, retryMin: time.Second, retryMax: 30 * time.Second, call: 2 * time.Second, answer: time.Second / 2,
		resend: 10 * time.Second, streamLost: 15 * time.Second,
	}
}

func (t *timing) pauses() backoff.Backoff { return backoff.Backoff{Min: t.retryMin, Max: t.retryMax} }

// instance is a driver as the kubelet and the API server identify it on this node. Its claims end with it, so the configuration does not
// change it while the process runs: see CheckFormer.
type instance struct{ driver, kubeletDir string }

func configuredInstance(c *plugin.Config) instance { return instance{c.DRA.DriverName, c.KubeletDir} }

func (i instance) dataDir() string     { return filepath.Join(i.kubeletDir, "plugins", i.driver) }
func (i instance) registryDir() string { return filepath.Join(i.kubeletDir, "plugins_registry") }

// Dirs returns the directories of the kubelet that the driver uses: none if it serves no claims and is not configured to.
func (d *Driver) Dirs() []string {
	c := d.Config.Load()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.session == nil && !c.ServesDRA() {
		return nil
	}
	i := configuredInstance(c)
	return []string{i.registryDir(), i.dataDir()}
}

// makeDataDir makes the directory of the checkpoint and of the socket that the kubelet calls, if the kubelet's directory exists.
func (i instance) makeDataDir() error {
	_, err := os.Stat(i.registryDir())
	if err == nil {
		err = os.MkdirAll(i.dataDir(), 0o750)
	}
	if err != nil {
		return fmt.Errorf("plugin.kubeletDir: %w; set it to the kubelet's directory and mount that", err)
	}
	return nil
}

// Run serves until ctx ends. It retries after errors and reports them in Status. The slices and prepared claims stay, for the next
// process.
func (d *Driver) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if i, ok := d.awaitInstance(ctx); ok {
			d.serveWhileHeld(ctx, i)
		}
	}
	return nil
}

// awaitInstance waits until there is an instance to serve; ok is false if ctx ends first.
func (d *Driver) awaitInstance(ctx context.Context) (i instance, ok bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pauses, wake := d.timing.pauses(), health.Wake(ctx, d.Config, d.PluginReleased, d.Lock.State())
	for ctx.Err() == nil {
		cfg := d.Config.Load()
		lock := d.requestLock(cfg)
		var retry <-chan time.Time
		switch serve, err := d.next(cfg, lock); {
		case serve:
			return configuredInstance(cfg), true
		case err != nil:
			retry = time.After(pauses.Next())
		case lock.Held: // otherwise it is unknown what is left
			d.followHandover()
		}
		select {
		case <-ctx.Done():
		case <-wake:
		case <-retry:
		}
	}
	return instance{}, false
}

// requestLock requests the lock of the node if there is something to serve, by this driver or the device plugin. It returns whether the
// driver may serve.
func (d *Driver) requestLock(cfg *plugin.Config) nodelock.State {
	if cfg == nil || !cfg.Enabled && !neededCheckpoint(cfg.DRADir()) {
		d.Lock.Request("")
		return nodelock.State{Held: true}
	}
	d.Lock.Request(cfg.KubeletDir)
	return d.Lock.In(cfg.KubeletDir)
}

// serveWhileHeld serves an instance until ctx ends, its devices are released, or the lock of its directory is lost.
func (d *Driver) serveWhileHeld(ctx context.Context, i instance) {
	if d.Lock == nil {
		d.serve(ctx, i)
		return
	}
	lost := func(s *nodelock.State) bool { return s.KubeletDir == i.kubeletDir && !s.Held }
	if isLost, ctx, cancel := health.WatchPart(ctx, d.Lock.State(), lost); !isLost {
		defer cancel()
		d.serve(ctx, i)
	} else {
		cancel()
	}
}

// next reports whether to serve now: the configuration says so, or an earlier process or configuration has left claims or slices. An error
// means that the prepared claims are unknown, or that the driver cannot end them. Then nothing may serve the devices.
func (d *Driver) next(cfg *plugin.Config, lock nodelock.State) (serve bool, err error) {
	if cfg == nil {
		return false, nil
	}
	if !lock.Held { // the checkpoint may belong to the holder
		d.setReleased(lock.Reason)
		d.mu.Lock() // the lock logs why
		defer d.mu.Unlock()
		d.enabled, d.err, d.forPods = cfg.ServesDRA(), lock.Reason, false
		return false, nil
	}
	left := false
	if err = CheckFormer(cfg, d.former, d.BootID); err == nil { // the process before this one may have prepared claims since the start
		left, err = d.leftover(cfg)
	}
	switch {
	case err != nil:
		d.setReleased(err.Error())
		d.setWaiting(cfg.ServesDRA(), err.Error(), false)
		return false, err
	case left:
		d.setReleased("dynamic resource allocation has claims or slices on this node")
		return true, nil
	case !cfg.ServesDRA():
		d.setReleased("")
		d.setWaiting(false, "", false)
		return false, nil
	}
	if r := d.PluginReleased.Load(); r == nil || !r.Released {
		r = cmp.Or(r, &plugin.Handover{Reason: "it is starting"})
		d.setReleased("")
		d.setWaiting(true, "waiting for the device plugin to release the devices: "+r.Reason, r.Pods)
		return false, nil
	}
	d.setReleased("dynamic resource allocation serves the devices")
	// The plugin stores that it has not released the devices before it reads that the driver has: see plugin.Handover.
	if r := d.PluginReleased.Load(); !r.Released {
		d.setReleased("")
		return false, nil // Run sees the change
	}
	return true, nil
}

// leftover reports whether the driver has claims or slices on this node.
func (d *Driver) leftover(cfg *plugin.Config) (bool, error) {
	i := configuredInstance(cfg)
	if !cfg.ServesDRA() && !exists(filepath.Join(i.dataDir(), checkpointName)) && !exists(i.registryDir()) {
		return false, nil // this agent has no mounts of DRA: see Orphans
	}
	if err := d.preparer.open(i.dataDir()); err != nil {
		return false, fmt.Errorf("the prepared claims are unknown: %w", err)
	}
	return d.preparer.needed(), nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// checkpoints returns the checkpoints of all drivers on the node.
func checkpoints(kubeletDir string) []string {
	files, err := filepath.Glob(filepath.Join(kubeletDir, "plugins", "*", checkpointName))
	if err != nil { // the pattern is bad: kubeletDir has meta characters
		return nil
	}
	return files
}

// neededCheckpoint reports whether pods may have devices by the checkpoint in a directory, or may get them.
func neededCheckpoint(dir string) bool {
	c, err := readCheckpoint(dir)
	return c.needed() || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// DRAReleased holds whether the driver has released the devices: with plugin.api devicePlugin, when no claim is prepared and no slice is
// published.
func (d *Driver) DRAReleased() *health.Latest[plugin.Handover] { return &d.released }

// setReleased stores why the devices are not released; empty if they are.
func (d *Driver) setReleased(reason string) {
	d.storeReleased(plugin.Handover{Released: reason == "", Reason: reason})
}

func (d *Driver) storeReleased(h plugin.Handover) {
	if last := d.released.Load(); last == nil || *last != h {
		d.released.Store(&h)
	}
}

// setWaiting stores why no instance is served, and whether that is only that pods hold devices. It logs the reason when it changes.
func (d *Driver) setWaiting(enabled bool, reason string, forPods bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if reason != "" && reason != d.err {
		d.Log.Info("not serving", zap.String("reason", reason))
	}
	d.enabled, d.err, d.forPods = enabled, reason, forPods
}

// Claims holds the prepared claims.
func (d *Driver) Claims() *health.Latest[Claims] { return &d.claims }

// Prepared holds the prepared claims, for decisions.
func (d *Driver) Prepared() *health.Latest[offer.Claims] { return &d.preparer.prepared }

// names are the devices by their names in the pool of an instance, including devices that are no longer published. They are immutable.
type names struct {
	instance
	byName    map[string]health.DeviceID
	published map[string]health.DeviceID // of these
}

// storeNames stores the names of a pool and the remembered names.
func (d *Driver) storeNames(i instance, pool *Pool, remembered map[health.DeviceID]string) {
	next := &names{instance: i, byName: make(map[string]health.DeviceID, len(remembered)), published: pool.ByName}
	for id, name := range remembered {
		next.byName[name] = id
	}
	maps.Copy(next.byName, pool.ByName)
	last := d.names.Load()
	if last == nil || last.instance != i || !maps.Equal(last.byName, next.byName) || !maps.Equal(last.published, next.published) {
		d.names.Store(next)
	}
}

// Device returns the device that the driver publishes, or has published, under a name; ok is false if there is none. It has the form of
// podresources.Resolver for the devices of claims.
func (d *Driver) Device(driver, pool, name string) (id health.DeviceID, ok bool) {
	n := d.names.Load()
	if n == nil || driver != n.driver || pool != d.Node {
		return "", false
	}
	id, ok = n.byName[name]
	return id, ok
}

// Status is the state of the driver. It is immutable.
type Status struct {
	Enabled bool   // plugin.api is dra, or the driver still releases the devices
	Err     string // why it does not serve; empty if it does
	Warning string // what works only in part, such as features that the API server lacks

	WaitsForPods bool // Err is only that pods still hold devices; see plugin.Handover.Pods

	// The devices are being handed over: the driver waits for them, or releases them. New pods get none, as the configuration orders.
	Handover      bool
	HandoverSince time.Time // by the wall clock, also before the process started; zero if there is none

	DriverName string
	Pool       string
	Registered bool // the kubelet has accepted the registration

	Devices    int       // desired in slices
	Tainted    int       // of these, with a taint NoSchedule or NoExecute
	Slices     int       // desired
	Published  time.Time // when the API server last had what is desired; zero before
	Behind     bool      // the API server has something else than what is desired
	PublishErr string    // of the last try to publish; empty after success

	DroppedFeatures []string          // feature gates of the API server that are off
	PublishErrors   map[string]uint64 // failed tries by reason, see PublishErrors
	PrepareErrors   map[string]uint64 // refused claims by reason, see PrepareErrors
	Prepares        Durations
	Unprepares      Durations

	Checkpoint durable.Failure // why the checkpoint cannot be written: claims are refused
	Unreserved string          // why a full disk would refuse claims; empty if it would not
}

// Durations is a histogram of the durations of calls.
type Durations struct {
	Counts []uint64 // by bound of DurationBounds, not cumulative; the last is for longer calls
	Sum    float64  // seconds
}

// DurationBounds returns the bounds of Durations in seconds.
func DurationBounds() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
}

// Status may be called from any goroutine.
func (d *Driver) Status() Status {
	d.mu.Lock()
	s, session := Status{Enabled: d.enabled, Err: d.err, WaitsForPods: d.forPods}, d.session
	since := d.since
	d.mu.Unlock()
	if !s.Enabled {
		s.Err = "" // the plugin reports why it does not offer the devices
	}
	if s.Handover = s.Enabled && d.handingOver(session); s.Handover {
		s.HandoverSince = since
	}
	if session != nil {
		session.report(&s)
	} else {
		s.Warning = d.Orphans()
	}
	d.preparer.status(&s)
	if !s.Enabled { // no claim is refused, and nothing tries to write again
		s.Checkpoint, s.Unreserved = durable.Failure{}, ""
	}
	return s
}

// handingOver reports whether the devices are to go to the device plugin, or have to come from it.
func (d *Driver) handingOver(s *session) bool {
	if s != nil {
		return !d.Config.Load().ServesDRA()
	}
	r := d.PluginReleased.Load()
	return r == nil || !r.Released
}

// savedHandover is the section of the state file.
type savedHandover struct {
	Since time.Time `json:"handoverSince,omitzero"`
}

// Saved holds the section of the state file for Restore, empty before there is one.
func (d *Driver) Saved() *health.Latest[[]byte] { return &d.saved }

// Restore continues the handover of an earlier process. It may be called while Run runs.
func (d *Driver) Restore(text []byte) error {
	var s savedHandover
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("handover: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.since.IsZero() || !s.Since.IsZero() && s.Since.Before(d.since) {
		d.since = s.Since
	}
	return nil
}

// followHandover stores when a handover began, and that it has ended.
func (d *Driver) followHandover() {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch on := d.enabled && d.handingOver(d.session); {
	case on == !d.since.IsZero():
		return
	case on:
		d.since = time.Now()
	default:
		d.since = time.Time{}
	}
	text, err := json.Marshal(savedHandover{d.since})
	if err != nil {
		return // impossible: the year has four digits
	}
	d.saved.Store(&text)
}
