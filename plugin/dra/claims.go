package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// Claim is a prepared ResourceClaim.
type Claim struct {
	UID       types.UID     `json:"uid"`
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Prepared  time.Time     `json:"prepared"`
	CDIDir    string        `json:"cdiDir"` // the directory of its CDI spec
	Devices   []ClaimDevice `json:"devices"`
}

// ClaimDevice is a device, or a share of one, that a claim has.
type ClaimDevice struct {
	Request string          `json:"request"` // the name in the claim, without the name of a subrequest
	Pool    string          `json:"pool"`
	Name    string          `json:"name"` // of the published device
	Device  health.DeviceID `json:"device"`
	Parent  health.DeviceID `json:"parent,omitempty"` // of a MIG device
	Admin   bool            `json:"admin,omitempty"`  // the claim has adminAccess: it takes nothing from others

	ShareID types.UID `json:"shareID,omitempty"` // of a share; empty for a whole device
	Memory  uint64    `json:"memory,omitempty"`  // bytes of a share; 0 for a whole device
	MPS     bool      `json:"mps,omitempty"`     // MPS serves the device for this claim
	Threads int       `json:"threads,omitempty"` // MPS: percent of the SMs of each client by default; 100 for no limit
	Pinned  uint64    `json:"pinned,omitempty"`  // MPS: bytes of each client by default; 0 for no limit
	CDI     []string  `json:"cdi"`               // the CDI names that the kubelet got
}

// Claims are the prepared claims, by UID. It is immutable once published.
type Claims struct{ ByUID map[types.UID]Claim }

// String returns the namespace and the name.
func (c *Claim) String() string { return c.Namespace + "/" + c.Name }

// The reasons of refused claims, which are the keys of Status.PrepareErrors.
const (
	reasonNotReady          = "not_ready"
	reasonReleasing         = "releasing"
	reasonUnknownDevice     = "unknown_device"
	reasonUnhealthyDevice   = "unhealthy_device"
	reasonDetached          = "detached"
	reasonMIGMode           = "mig_mode"
	reasonInUse             = "in_use"
	reasonAPIServer         = "api_server"
	reasonConfiguration     = "configuration"
	reasonMemory            = "memory"
	reasonMPSNotReady       = "mps_not_ready"
	reasonMemoryNotEnforced = "memory_not_enforced"
	reasonNoCDI             = "runtime_ignores_cdi"
	reasonCDI               = "cdi"
	reasonCheckpoint        = "checkpoint"
)

// PrepareErrors returns these keys, so that a counter can start at 0.
func PrepareErrors() []string {
	return []string{
		reasonNotReady, reasonReleasing, reasonUnknownDevice, reasonUnhealthyDevice, reasonDetached, reasonMIGMode, reasonInUse, reasonAPIServer,
		reasonConfiguration, reasonMemory, reasonMPSNotReady, reasonMemoryNotEnforced, reasonNoCDI, reasonCDI, reasonCheckpoint, reasonOther,
	}
}

// claimRefusal is why a claim is not prepared. The kubelet puts its text into an event of the pod, and tries again.
type claimRefusal struct {
	reason string
	text   string
}

func (r *claimRefusal) Error() string { return r.text }

func refuse(reason, format string, args ...any) error {
	return &claimRefusal{reason, fmt.Sprintf(format, args...)}
}

func errNotOpen() error { return refuse(reasonNotReady, "the driver has not read its checkpoint yet") }

// claimTiming holds the limits and intervals of a preparer.
type claimTiming struct {
	api        time.Duration // for a call of the API server
	mps        time.Duration // until an MPS daemon is ready; the kubelet gives a call 45 s
	base       time.Duration // until the first check of the devices' CDI spec
	sweep      time.Duration // between sweeps
	unprepare  time.Duration // until the kubelet unprepares a claim that does not exist any more, in a call for another one
	retryWrite time.Duration // between two tries to write a checkpoint that cannot be written
	lost       time.Duration // how long a lost checkpoint counts at least: a kubelet that starts with the agent lists its pods one by one
}

func defaultClaimTiming() claimTiming {
	return claimTiming{
		api: 5 * time.Second, mps: 20 * time.Second, base: 5 * time.Second, sweep: 10 * time.Minute, lost: time.Minute,
		unprepare:  10 * time.Second,
		retryWrite: 10 * time.Second,
	}
}

// disk is what a preparer writes.
type disk struct {
	writeFile  func(path string, text []byte) (durable.Written, error)
	writeSpec  func(dir, uid string, devices []cdi.ClaimDevice) error
	removeSpec func(dir, uid string) error
}

// preparer prepares claims for the kubelet. Its checkpoint has every claim before a container can get a device of it, and as long as one
// may. The CDI spec of a claim is written last. A checkpointed claim is prepared once its CDI spec exists.
type preparer struct {
	options      *Options
	published    *health.Latest[Claims]
	prepared     health.Latest[offer.Claims]            // the same
	capabilities *health.Latest[memlimits.Capabilities] // nil: nothing examines what the node can enforce
	writer       *cdi.Writer                            // of the devices' spec; it belongs to run
	timing       claimTiming
	disk         disk

	input   health.Latest[claimInput]
	base    health.Latest[baseSpec]
	api     atomic.Pointer[kubernetes.Interface]
	refuses atomic.Bool // new claims, because the driver releases the devices

	state   atomic.Pointer[claimState] // nil before open; replaced only by the holder of writing
	writing chan struct{}              // of capacity 1: full while the checkpoint is being read or replaced
	writes  durable.Writes

	mu       sync.Mutex // guards the fields below
	pooled   time.Time  // since when there is a pool; zero before
	queue    []*change
	busy     map[types.UID]chan struct{} // claims of running calls; closed at their end
	errors   map[string]uint64
	prepares Durations
	undos    Durations
}

// claimInput is what claims are prepared by.
type claimInput struct {
	cfg  *plugin.Config
	snap *health.Snapshot
	pool *Pool
}

// claimState is an opened checkpoint. It is immutable.
type claimState struct {
	dir string // its last element is the driver's name
	checkpoint
	unwritten bool // the file still has claims that are removed
	opened    time.Time
	warning   string // what was lost
	doubled   string // claims that exclude each other; empty if there are none
}

func newPreparer(o *Options, claims *health.Latest[Claims]) *preparer {
	return &preparer{
		options: o, published: claims, writer: cdi.NewWriter(o.Log), timing: defaultClaimTiming(),
		disk: disk{
			writeFile: durable.WithSpare(reserve).Replace,
			writeSpec: cdi.WriteClaimSpec, removeSpec: cdi.RemoveClaimSpec,
		},
		writing: make(chan struct{}, 1), busy: make(map[types.UID]chan struct{}), errors: make(map[string]uint64),
		prepares: Durations{Counts: make([]uint64, len(DurationBounds())+1)}, undos: Durations{Counts: make([]uint64, len(DurationBounds())+1)},
	}
}

// open reads the checkpoint in the driver's directory. It creates nothing. An error means that there is a file, and that it may be readable
// later.
func (p *preparer) open(dir string) error {
	p.writing <- struct{}{}
	defer func() { <-p.writing }()
	if s := p.state.Load(); s != nil && s.dir == dir {
		return nil
	}
	s := &claimState{dir: dir, opened: time.Now()}
	path := filepath.Join(dir, checkpointName)
	p.writes.Begin(path)
	c, err := readCheckpoint(dir)
	p.writes.End()
	switch {
	case err == nil:
		s.checkpoint = c
		if boot := p.options.BootID; boot != "" && c.BootID != "" && c.BootID != boot {
			s.Claims, s.Lost = nil, false // no container outlives a boot
		}
	case isCorrupt(err):
		aside, asideErr := durable.SetAside(path, corruptSuffix)
		s.Lost, s.Publishing = true, true
		s.warning = fmt.Sprintf("the checkpoint %s was corrupt (%v)", path, err)
		p.options.Log.Error("checkpoint is corrupt; devices that pods hold by lost claims are refused", zap.String("file", path), zap.Error(err),
			zap.String("aside", aside), zap.NamedError("asideError", asideErr))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR): // also a file of another program in the place of the directory
		if uids, _ := cdi.ClaimSpecs(p.cdiDir()); len(uids) > 0 {
			s.Lost, s.Publishing = true, true
			s.warning = fmt.Sprintf("the checkpoint %s is missing, and %d claims have a CDI spec", path, len(uids))
			p.options.Log.Error("checkpoint is missing; devices that pods hold by lost claims are refused", zap.String("file", path),
				zap.Strings("claims", uids))
		}
	default:
		return fmt.Errorf("cannot read the checkpoint: %w", err)
	}
	s.BootID = p.options.BootID
	p.heal(&s.checkpoint, dir)
	if err := durable.RemoveTemporaries(p.cdiDir()); err != nil {
		p.options.Log.Warn("cannot remove the temporary files of an earlier process", zap.Error(err))
	}
	p.store(s)
	return nil
}

// refresh reads the checkpoint again. The process before this one may have prepared claims after open, until its sockets were closed.
func (p *preparer) refresh(ctx context.Context) error {
	select {
	case p.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.writing }()
	s := p.state.Load()
	if s == nil || s.unwritten {
		return nil
	}
	c, err := readCheckpoint(s.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) || isCorrupt(err): // the next write replaces it
		return nil
	case err != nil:
		return fmt.Errorf("cannot read the checkpoint: %w", err)
	case c.BootID != s.BootID: // not written since the boot
		return nil
	}
	next := *s
	next.checkpoint = c
	next.Lost = c.Lost || s.Lost
	p.heal(&next.checkpoint, s.dir)
	p.store(&next)
	return nil
}

// heal removes each claim without a CDI spec that excludes another claim: no container has its devices. The file has these claims until its
// next write.
func (p *preparer) heal(c *checkpoint, dir string) {
	claims := c.offerClaims(filepath.Base(dir))
	doubled, _ := claims.Doubled()
	for _, d := range doubled {
		if claim := c.Claims[types.UID(d.UID)]; !claim.hasSpec() {
			*c = c.without(claim.UID)
			p.options.Log.Warn("claim is removed: it was not prepared, and another one has its devices", zap.String("claim", claim.String()),
				zap.String("uid", string(claim.UID)), zap.Strings("devices", claim.deviceNames()))
		}
	}
}

// cdiDir returns the directory of new CDI specs.
func (p *preparer) cdiDir() string { return p.options.Config.Load().CDI.Dir }

// store replaces the state. The caller fills p.writing.
func (p *preparer) store(s *claimState) {
	claims := s.offerClaims(filepath.Base(s.dir))
	s.doubled = ""
	if doubled, _ := claims.Doubled(); len(doubled) > 0 {
		names := make([]string, len(doubled))
		for i, d := range doubled {
			names[i] = d.String()
		}
		s.doubled = fmt.Sprintf("claims %s have devices that they cannot share, and that are not offered to others; end their pods",
			strings.Join(names, " and "))
	}
	p.state.Store(s)
	p.published.Store(&Claims{ByUID: s.Claims}) //nolint:forbidigo // makes it
	p.prepared.Store(&claims)
}

// change is a change of the checkpoint that waits for its write.
type change struct {
	apply   func(checkpoint) (next checkpoint, changed bool, err error)
	removes bool       // it only removes claims
	retries bool       // it changes nothing and is written nevertheless
	done    chan error // of capacity 1
}

// change changes the checkpoint and writes it. Changes that wait together are written together. If an error occurs, nothing has changed.
// If ctx ends first, it may have.
func (p *preparer) change(ctx context.Context, apply func(checkpoint) (next checkpoint, changed bool, err error)) error {
	return p.enqueue(ctx, &change{apply: apply, done: make(chan error, 1)})
}

// removeClaim removes a claim from the checkpoint, even if the checkpoint cannot be written: a full disk must not keep pods from ending,
// because the kubelet removes their volumes only after that. The file has the claim until the next write. A later process that reads it
// there removes it as soon as another claim needs its devices, or at its sweep.
func (p *preparer) removeClaim(ctx context.Context, uid types.UID) error {
	return p.enqueue(ctx, &change{removes: true, done: make(chan error, 1), apply: func(c checkpoint) (checkpoint, bool, error) {
		_, exists := c.Claims[uid]
		return c.without(uid), exists, nil
	}})
}

func (p *preparer) enqueue(ctx context.Context, c *change) error {
	p.mu.Lock()
	p.queue = append(p.queue, c)
	p.mu.Unlock()
	select {
	case p.writing <- struct{}{}:
		p.commit()
		<-p.writing
		return <-c.done
	case err := <-c.done:
		return err
	case <-ctx.Done():
		p.mu.Lock()
		p.queue = slices.DeleteFunc(p.queue, func(other *change) bool { return other == c })
		p.mu.Unlock()
		return refuse(reasonCheckpoint, "the checkpoint is still being written: %v", ctx.Err())
	}
}

// commit makes all changes that wait. The caller fills p.writing.
func (p *preparer) commit() {
	p.mu.Lock()
	queue := p.queue
	p.queue = nil
	p.mu.Unlock()
	before := p.state.Load()
	if before == nil {
		for _, c := range queue {
			c.done <- errNotOpen()
		}
		return
	}
	next, removed := *before, *before // removed has only the changes that need no write
	var written []*change
	for _, c := range queue {
		changed, differs, err := c.apply(next.checkpoint)
		if err != nil || !differs && !before.unwritten && !c.retries {
			c.done <- err
			continue
		}
		if differs {
			next.checkpoint = changed
		}
		if c.removes {
			removed.checkpoint, _, _ = c.apply(removed.checkpoint)
			removed.unwritten = true
		}
		written = append(written, c)
	}
	if len(written) == 0 {
		return
	}
	text, err := next.encode()
	if err == nil {
		err = p.write(filepath.Join(next.dir, checkpointName), text)
	}
	next.unwritten = false
	switch {
	case err == nil:
		p.store(&next)
	case removed.unwritten && !before.unwritten:
		p.options.Log.Warn("cannot write the checkpoint; claims are removed from it later", zap.Error(err))
		fallthrough
	case removed.unwritten:
		p.store(&removed)
	}
	if err != nil {
		err = refuse(reasonCheckpoint, "cannot write the checkpoint: %v", err)
	}
	for _, c := range written {
		if c.removes {
			c.done <- nil
		} else {
			c.done <- err
		}
	}
}

// write writes the checkpoint.
func (p *preparer) write(path string, text []byte) error {
	p.writes.Begin(path)
	w, err := p.disk.writeFile(path, text)
	p.writes.Report(path, err)
	switch {
	case err != nil:
		return err
	case p.writes.SetUnreserved(w.Unreserved):
		p.options.Log.Warn("no space is reserved for the checkpoint; a full disk would refuse claims", zap.String("file", path),
			zap.Error(w.Unreserved))
	}
	if w.Aside != "" {
		p.options.Log.Warn("set aside what was in the place of the checkpoint", zap.String("file", path), zap.String("aside", w.Aside))
	}
	return nil
}

// retryWrite writes the checkpoint again if the last write has failed. The claim or the name of that write may not come again, and then
// nothing would tell that the disk works.
func (p *preparer) retryWrite(ctx context.Context) {
	if p.writes.Failure().Err == "" {
		return
	}
	_ = p.enqueue(ctx, &change{
		retries: true, done: make(chan error, 1),
		apply: func(c checkpoint) (checkpoint, bool, error) { return c, false, nil },
	})
}

// names returns the names of devices that have been published.
func (p *preparer) names() map[health.DeviceID]string {
	if s := p.state.Load(); s != nil {
		return s.Names
	}
	return nil
}

// remember stores the names of published devices.
func (p *preparer) remember(ctx context.Context, names map[health.DeviceID]string) error {
	var published map[string]health.DeviceID
	if in := p.input.Load(); in != nil && in.pool != nil {
		published = in.pool.ByName
	}
	return p.change(ctx, func(c checkpoint) (checkpoint, bool, error) {
		next := c.remember(names, published)
		return next, !maps.Equal(next.Names, c.Names), nil
	})
}

// publishing reports whether slices of the driver may be on the API server.
func (p *preparer) publishing() bool {
	s := p.state.Load()
	return s != nil && s.Publishing
}

func (p *preparer) setPublishing(ctx context.Context, on bool) error {
	return p.change(ctx, func(c checkpoint) (checkpoint, bool, error) {
		changed := c.Publishing != on
		c.Publishing = on
		return c, changed, nil
	})
}

// needed reports whether pods may have devices of the driver, or may get them.
func (p *preparer) needed() bool {
	s := p.state.Load()
	return s != nil && s.needed()
}

// update sets what claims are prepared by.
func (p *preparer) update(cfg *plugin.Config, snap *health.Snapshot, pool *Pool) {
	if pool != nil {
		pool = new(*pool) // the caller may replace it
	}
	p.input.Store(&claimInput{cfg, snap, pool})
	p.mu.Lock()
	defer p.mu.Unlock()
	if pool != nil && snap.Polled() && p.pooled.IsZero() {
		p.pooled = time.Now()
	}
}

// releasing sets whether new claims are refused, because the driver releases the devices.
func (p *preparer) releasing(on bool) { p.refuses.Store(on) }

// notServing returns why no new claim is prepared, empty if claims are.
func (p *preparer) notServing() string {
	if !p.refuses.Load() {
		return ""
	}
	return "plugin.enabled or plugin.api changed: the driver releases the devices and prepares no new claim"
}

// status adds what the preparer has done.
func (p *preparer) status(s *Status) {
	p.mu.Lock()
	s.PrepareErrors = maps.Clone(p.errors)
	s.Prepares = Durations{slices.Clone(p.prepares.Counts), p.prepares.Sum}
	s.Unprepares = Durations{slices.Clone(p.undos.Counts), p.undos.Sum}
	p.mu.Unlock()
	s.Checkpoint, s.Unreserved = p.writes.Failure(), p.writes.Unreserved()
	var warnings []string
	if state := p.state.Load(); state != nil && state.Lost {
		warnings = append(warnings, cmp.Or(state.warning, "a checkpoint was lost")+
			"; devices that pods hold by lost claims are refused until these pods have ended")
	}
	if state := p.state.Load(); state != nil && state.doubled != "" {
		warnings = append(warnings, state.doubled)
	}
	if base := p.base.Load(); base != nil && base.err != nil && !errors.Is(base.err, cdi.ErrPending) {
		warnings = append(warnings, base.text())
	}
	if s.Warning != "" {
		warnings = slices.Insert(warnings, 0, s.Warning)
	}
	s.Warning = strings.Join(warnings, "; ")
}

func (d *Durations) observe(took time.Duration) {
	seconds := took.Seconds()
	d.Sum += seconds
	i, _ := slices.BinarySearch(DurationBounds(), seconds)
	d.Counts[i]++
}

// begin waits until no other call works on a claim. The caller must call end.
func (p *preparer) begin(ctx context.Context, uid types.UID) (end func(), err error) {
	for {
		p.mu.Lock()
		running, exists := p.busy[uid]
		if !exists {
			done := make(chan struct{})
			p.busy[uid] = done
			p.mu.Unlock()
			return func() {
				p.mu.Lock()
				delete(p.busy, uid)
				p.mu.Unlock()
				close(done)
			}, nil
		}
		p.mu.Unlock()
		if !wait.For(ctx, running) {
			return nil, refuse(reasonOther, "another call for claim %s has not ended: %v", uid, ctx.Err())
		}
	}
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (p *preparer) PrepareResourceClaims(ctx context.Context,
	claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	start := time.Now()
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var calls sync.WaitGroup
	for i, claim := range claims {
		calls.Go(func() {
			prepared, err := p.prepare(ctx, claim)
			if err != nil {
				results[i].Err = fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
				return
			}
			results[i].Devices = prepared.answer()
		})
	}
	calls.Wait()
	all := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepares.observe(time.Since(start))
	for i, claim := range claims {
		all[claim.UID] = results[i]
		if err := results[i].Err; err != nil {
			reason := reasonOther
			if r, ok := errors.AsType[*claimRefusal](err); ok {
				reason = r.reason
			}
			p.errors[reason]++
		}
	}
	return all, nil
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (p *preparer) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	start := time.Now()
	errs := make([]error, len(claims))
	var calls sync.WaitGroup
	for i, claim := range claims {
		calls.Go(func() {
			end, err := p.begin(ctx, claim.UID)
			if err == nil {
				err = p.unprepare(ctx, claim.UID)
				end()
			}
			if err != nil {
				errs[i] = fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
			}
		})
	}
	calls.Wait()
	all := make(map[types.UID]error, len(claims))
	for i, claim := range claims {
		all[claim.UID] = errs[i]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.undos.observe(time.Since(start))
	return all, nil
}

// answer is what the kubelet gets for a claim.
func (c *Claim) answer() (devices []kubeletplugin.Device) {
	for _, d := range c.Devices {
		out := kubeletplugin.Device{Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Name, CDIDeviceIDs: d.CDI}
		if d.ShareID != "" {
			out.ShareID = new(d.ShareID)
		}
		devices = append(devices, out)
	}
	return devices
}

// has reports whether the claim was prepared for these results.
func (c *Claim) has(results []resourceapi.DeviceRequestAllocationResult) bool {
	return slices.EqualFunc(c.Devices, results, func(d ClaimDevice, r resourceapi.DeviceRequestAllocationResult) bool {
		return d.Request == resourceclaim.BaseRequestRef(r.Request) && d.isOf(&r)
	})
}

// isOf reports whether a result is the device, or the share of it.
func (d *ClaimDevice) isOf(r *resourceapi.DeviceRequestAllocationResult) bool {
	return d.Pool == r.Pool && d.Name == r.Device && d.Admin == isAdmin(r) && d.ShareID == shareID(r)
}

func isAdmin(r *resourceapi.DeviceRequestAllocationResult) bool {
	return r.AdminAccess != nil && *r.AdminAccess
}

func shareID(r *resourceapi.DeviceRequestAllocationResult) types.UID {
	if r.ShareID == nil {
		return ""
	}
	return *r.ShareID
}

// resultsOf returns the results of a driver in a claim.
func resultsOf(claim *resourceapi.ResourceClaim, driver string) (results []resourceapi.DeviceRequestAllocationResult) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver == driver {
			results = append(results, r)
		}
	}
	return results
}

// prepare prepares a claim, or returns what it has if it is prepared already.
func (p *preparer) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (*Claim, error) {
	end, err := p.begin(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	defer end()
	in, state := p.input.Load(), p.state.Load()
	if state == nil {
		return nil, errNotOpen()
	}
	results := resultsOf(claim, filepath.Base(state.dir))
	before, exists := state.Claims[claim.UID]
	switch {
	case !exists:
	case !before.has(results): // it was allocated again
		if err := p.unprepare(ctx, claim.UID); err != nil {
			return nil, err
		}
		exists = false
	case before.hasSpec(): // also before the first poll: a host engine that hangs must not keep a prepared claim from a pod
		return &before, nil
	}
	if in == nil || in.cfg == nil || in.pool == nil || !in.snap.Polled() {
		return nil, refuse(reasonNotReady, "the driver is starting; it does not have the devices yet")
	}
	if _, asked := p.options.runtime(); !asked {
		return nil, refuse(reasonNotReady, "%s", runtimeUnasked)
	}
	facts, err := p.factsFor(ctx, in, claim, results, exists)
	if err != nil {
		return nil, err
	}
	plan, err := p.newPlan(ctx, in, facts, claim, results)
	if err != nil || len(results) == 0 {
		return &Claim{}, err
	}
	if err := p.reserve(ctx, plan); err != nil {
		return nil, err
	}
	if err := p.awaitMPS(ctx, &plan.claim); err != nil {
		return nil, err // the claim remains reserved, so that its daemon continues to start
	}
	if err := p.disk.writeSpec(plan.claim.CDIDir, string(claim.UID), plan.mergedSpecs()); err != nil {
		err = refuse(reasonCDI, "cannot write the claim's CDI spec: %v", err)
		if !exists {
			err = errors.Join(err, p.unprepare(context.WithoutCancel(ctx), claim.UID))
		}
		return nil, err
	}
	p.options.Log.Info("claim prepared", zap.String("claim", plan.claim.String()), zap.String("uid", string(claim.UID)),
		zap.Strings("devices", plan.claim.deviceNames()))
	return &plan.claim, nil
}

func (c *Claim) deviceNames() (names []string) {
	for _, d := range c.Devices {
		names = append(names, d.Name)
	}
	return names
}

// hasSpec reports whether the claim has a CDI spec.
func (c *Claim) hasSpec() bool {
	path, ok := cdi.ClaimSpecPath(c.CDIDir, string(c.UID))
	if !ok {
		return false
	}
	_, err := os.Stat(path)
	return err == nil
}

// reserve stores a claim in the checkpoint, if no other claim and no container has its devices.
func (p *preparer) reserve(ctx context.Context, plan *plan) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		var conflicts []offer.Conflict
		err := p.change(ctx, func(c checkpoint) (next checkpoint, changed bool, err error) {
			facts := plan.facts
			facts.NotServing = p.notServing() // since the first check: release must see this claim, or refuse it
			facts.Claims = c.offerClaims(plan.driver)
			grant, found, err := facts.Grant(new(plan.claim.offerClaim(plan.driver)), plan.requests, plan.offered)
			conflicts = found
			if err != nil || len(found) > 0 {
				return c, false, refusalOf(err)
			}
			return c.add(&plan.claim, grant), true, nil
		})
		if err != nil || len(conflicts) == 0 {
			return err
		}
		removed := false
		var memory error // a claim that shares the memory exists; another one may not
		for i := range conflicts {
			err := p.removeStale(ctx, &conflicts[i])
			switch r, _ := errors.AsType[*claimRefusal](err); {
			case err == nil:
				removed = true
			case r != nil && r.reason == reasonMemory:
				memory = cmp.Or(memory, err)
			default:
				return err
			}
		}
		if !removed {
			return memory
		}
	}
}

// unprepare removes a claim: its CDI spec, then its part of the checkpoint. The caller has begun it.
func (p *preparer) unprepare(ctx context.Context, uid types.UID) error {
	dir := p.cdiDir()
	s := p.state.Load()
	if s == nil {
		return errNotOpen()
	}
	c, exists := s.Claims[uid]
	if exists {
		dir = c.CDIDir
	}
	if err := p.disk.removeSpec(dir, string(uid)); err != nil {
		return refuse(reasonCDI, "cannot remove the claim's CDI spec: %v", err)
	}
	err := p.removeClaim(ctx, uid)
	if exists && err == nil {
		p.options.Log.Info("claim unprepared", zap.String("claim", c.String()), zap.String("uid", string(uid)),
			zap.Strings("devices", c.deviceNames()))
	}
	return err
}
