package dra

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// getClaim asks the API server for a claim. It is nil if there is none.
func (p *preparer) getClaim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	client := p.api.Load()
	if client == nil {
		c, err := p.options.Connect()
		if err != nil {
			return nil, err
		}
		client = &c
		p.api.Store(client)
	}
	ctx, cancel := context.WithTimeout(ctx, p.timing.api)
	defer cancel()
	claim, err := (*client).ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return claim, nil
}

// removeStale deals with a stale claim that keeps another claim from a device: it does not exist any more, or is not allocated to that
// device. A stale claim that cannot have a container is removed. Otherwise its container may still run, so removeStale waits until the
// kubelet unprepares the claim. After a pod is deleted by force, the kubelet may prepare the claim of a new pod before it ends the old
// pod's claim, and it does not list the old pod. The error is a refusal of the other claim.
func (p *preparer) removeStale(ctx context.Context, found *offer.Conflict) error {
	c, exists := p.state.Load().Claims[types.UID(found.Claim.UID)]
	if !exists {
		return nil // the caller looks again
	}
	allocated := func(claim *resourceapi.ResourceClaim) bool {
		return slices.ContainsFunc(c.Devices, func(d ClaimDevice) bool { return d.Name == found.Part.Name && d.allocatedTo(claim) })
	}
	claim, err := p.getClaim(ctx, c.Namespace, c.Name)
	switch {
	case err != nil:
		return refuse(reasonAPIServer,
			"device %s is prepared for claim %s, and the API server cannot be asked whether that claim still exists: %v", found.Device, &c, err)
	case claim == nil || claim.UID != c.UID || !allocated(claim):
	case found.Memory > 0:
		return refuse(reasonMemory, "device %s: expected at most %d MiB of memory for all claims, found %d MiB, with that of claim %s of %s",
			found.Device, found.Offered>>20, found.Memory>>20, &c, p.users(&c, claim))
	default:
		return refuse(reasonInUse, "device %s is prepared for claim %s of %s", found.Device, &c, p.users(&c, claim))
	}
	limited, cancel := context.WithTimeout(ctx, p.timing.unprepare)
	defer cancel()
	for {
		_, changed := p.published.Watch()
		if now, exists := p.state.Load().Claims[c.UID]; !exists || !now.Prepared.Equal(c.Prepared) {
			return nil // the caller looks again
		}
		if removed, err := p.removeUnused(ctx, &c); removed || err != nil {
			return err
		}
		if !wait.For(limited, changed) {
			return refuse(reasonInUse, "device %s is prepared for claim %s, which does not exist any more or has other devices, and which the "+
				"kubelet has not unprepared yet; the kubelet tries again", found.Device, &c)
		}
	}
}

// allocatedTo reports whether a claim of the API server has a device for which it was prepared.
func (d *ClaimDevice) allocatedTo(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return d.isOf(&r)
		})
}

// users names the pods of a claim.
func (p *preparer) users(c *Claim, claim *resourceapi.ResourceClaim) string {
	var pods []string
	for _, r := range claim.Status.ReservedFor {
		if r.Resource == "pods" {
			pods = append(pods, c.Namespace+"/"+r.Name)
		}
	}
	for _, holders := range p.options.Holders.Load().By { //nolint:forbidigo // for a text
		for _, h := range holders {
			if pod := h.Namespace + "/" + h.Pod; h.Claim.Name == c.Name && h.Namespace == c.Namespace && !slices.Contains(pods, pod) {
				pods = append(pods, pod)
			}
		}
	}
	if len(pods) == 0 {
		return "no pod"
	}
	slices.Sort(pods)
	return grouped.Named("pod", pods)
}

// holdersTimeout limits the wait for the kubelet's answer: it waits for the call.
const holdersTimeout = 2 * time.Second

// askHolders returns which containers hold devices. It asks the kubelet, and falls back to the last answer. The holders are unknown if that
// answer is older than the driver's devices, because devices of claims have names only since then.
func (p *preparer) askHolders(ctx context.Context) podresources.Holders {
	h := lastAnswer(p.options.Ask(ctx, holdersTimeout))
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.Err == "" && (p.pooled.IsZero() || h.At.Before(p.pooled)) {
		h.Err = "the kubelet has not been asked since the driver has its devices"
	}
	return h
}

// lastAnswer returns holders without the kubelet's refusal, so that its last answer counts until that is too old.
func lastAnswer(h podresources.Holders) podresources.Holders {
	if !h.Forgotten() && time.Since(h.At) <= podresources.MaxHoldersAge {
		h.Err = ""
	}
	return h
}

// exemptAdmins removes the holders of a claim's devices that have adminAccess. After the checkpoint was lost, only the API server knows
// that.
//
//nolint:forbidigo // it completes the facts
func (p *preparer) exemptAdmins(
	ctx context.Context, in *claimInput, f *offer.Facts, claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult,
) error {
	driver, state := in.cfg.DRA.DriverName, p.state.Load()
	related := offer.RelatedTo(in.snap)
	f.Holders.By = maps.Clone(f.Holders.By)
	for i := range results {
		if isAdmin(&results[i]) {
			continue
		}
		d, err := p.find(in, &results[i])
		if err != nil {
			return err
		}
		for _, id := range append([]health.DeviceID{d.Device.ID}, related[d.Device.ID]...) {
			var held []podresources.Holder
			for _, h := range f.Holders.By[id] {
				if state.lacks(h, driver) && (h.Namespace != claim.Namespace || h.Claim.Name != claim.Name) {
					other, err := p.getClaim(ctx, h.Namespace, h.Claim.Name)
					if err != nil {
						return refuse(reasonAPIServer,
							"device %s: the checkpoint was lost, and the API server cannot be asked about claim %s/%s of pod %s: %v",
							results[i].Device, h.Namespace, h.Claim.Name, h.Pod, err)
					}
					if other != nil && onlyAdmin(other, driver, h.DeviceID) {
						continue
					}
				}
				held = append(held, h)
			}
			f.Holders.By[id] = held
		}
	}
	return nil
}

// lacks reports whether a container holds a device of the driver by a claim that is not prepared.
func (c *checkpoint) lacks(h podresources.Holder, driver string) bool {
	if h.Claim.Driver != driver || h.Claim.Name == "" {
		return false
	}
	for _, claim := range c.Claims {
		if claim.Namespace == h.Namespace && claim.Name == h.Claim.Name {
			return false
		}
	}
	return true
}

// onlyAdmin reports whether a claim has a device with adminAccess only.
func onlyAdmin(claim *resourceapi.ResourceClaim, driver, device string) (admin bool) {
	for _, r := range resultsOf(claim, driver) {
		if r.Device != device {
			continue
		}
		if !isAdmin(&r) {
			return false
		}
		admin = true
	}
	return admin
}

// run checks the CDI spec of the devices, orders MPS daemons and removes claims that nobody has any more, until ctx ends.
func (p *preparer) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { p.followDevices(ctx) })
	running.Go(func() { p.orderMPS(ctx) })
	timer := time.NewTimer(p.timing.lost)
	defer timer.Stop()
	retry := time.NewTicker(p.timing.retryWrite)
	defer retry.Stop()
	for {
		_, changed := p.published.Watch()
		var due <-chan time.Time
		if s := p.state.Load(); s != nil && (s.Lost || len(s.Claims) > 0) {
			due = timer.C
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-retry.C:
			p.retryWrite(ctx)
		case <-due:
			p.sweep(ctx)
			next := p.timing.sweep/2 + rand.N(p.timing.sweep) //nolint:gosec // no secret
			if s := p.state.Load(); s != nil && s.Lost {
				next = min(next, p.timing.lost)
			}
			timer.Reset(next)
		}
	}
}

// sweep removes stale claims that cannot have a container: they do not exist any more, or have other devices now. It also removes the specs
// of claims that are not prepared.
func (p *preparer) sweep(ctx context.Context) {
	s, in := p.state.Load(), p.input.Load()
	if in == nil || in.cfg == nil {
		return
	}
	holders := p.askHolders(ctx)
	if holders.Unknown(time.Now()) != "" {
		return
	}
	lacks := false
	for _, by := range []map[health.DeviceID][]podresources.Holder{holders.By, holders.Admin} { //nolint:forbidigo // decides about claims
		for _, list := range by {
			lacks = lacks || slices.ContainsFunc(list, func(h podresources.Holder) bool { return s.lacks(h, in.cfg.DRA.DriverName) })
		}
	}
	if s.Lost && !lacks && time.Since(s.opened) > p.timing.lost {
		err := p.change(ctx, func(c checkpoint) (checkpoint, bool, error) {
			changed := c.Lost
			c.Lost = false
			return c, changed, nil
		})
		if err != nil {
			p.options.Log.Warn("cannot note that no pod holds a lost claim", zap.Error(err))
		}
	}
	for uid, c := range s.Claims {
		if c.hasSpec() {
			continue
		}
		claim, err := p.getClaim(ctx, c.Namespace, c.Name)
		if err != nil {
			break // the next sweep asks again
		}
		if claim != nil && claim.UID == uid && slices.ContainsFunc(c.Devices, func(d ClaimDevice) bool { return d.allocatedTo(claim) }) {
			continue
		}
		if _, err := p.removeUnused(ctx, &c); err != nil {
			p.options.Log.Warn("cannot remove a claim that does not exist any more", zap.String("claim", c.String()), zap.Error(err))
		}
	}
	p.sweepSpecs(ctx, in.cfg.CDI.Dir)
}

// removeUnused removes a stale claim if it cannot have a container: no pod holds it, and it has no CDI spec. Then it was never prepared, or
// it was unprepared while the checkpoint could not be written.
func (p *preparer) removeUnused(ctx context.Context, c *Claim) (removed bool, err error) {
	end, err := p.begin(ctx, c.UID)
	if err != nil {
		return false, err
	}
	defer end()
	if now, exists := p.state.Load().Claims[c.UID]; !exists || !now.Prepared.Equal(c.Prepared) {
		return true, nil // or prepared again: the caller looks again
	}
	if c.hasSpec() {
		return false, nil
	}
	if h := p.askHolders(ctx); h.Unknown(time.Now()) != "" || h.ClaimHeld(c.Namespace, c.Name) {
		return false, nil
	}
	p.options.Log.Info("claim is removed: it does not exist any more or has other devices, and has no CDI spec",
		zap.String("claim", c.String()), zap.String("uid", string(c.UID)))
	return true, p.unprepare(ctx, c.UID)
}

// sweepSpecs removes the CDI specs of claims that are not prepared. It removes none while a checkpoint is lost: a container that restarts
// needs its spec.
func (p *preparer) sweepSpecs(ctx context.Context, dir string) {
	uids, err := cdi.ClaimSpecs(dir)
	if err != nil {
		p.options.Log.Warn("cannot list the CDI specs of claims", zap.String("directory", dir), zap.Error(err))
	}
	for _, uid := range uids {
		if err := p.removeOrphan(ctx, dir, types.UID(uid)); err != nil {
			p.options.Log.Warn("cannot remove the CDI spec of a claim", zap.String("uid", uid), zap.Error(err))
		}
	}
}

func (p *preparer) removeOrphan(ctx context.Context, dir string, uid types.UID) error {
	end, err := p.begin(ctx, uid) // a call that prepares it writes the spec after the checkpoint
	if err != nil {
		return err
	}
	defer end()
	if s := p.state.Load(); s.Lost || s.Claims[uid].UID != "" {
		return nil
	}
	return p.disk.removeSpec(dir, string(uid))
}

// followDevices ensures, for each input, that container runtimes can resolve the CDI names of the devices.
func (p *preparer) followDevices(ctx context.Context) {
	swept := false
	var logged logonce.State
	wake := health.Wake(ctx, &p.input, p.writer.Toolkit.Parts())
	for {
		in := p.input.Load()
		if in != nil && in.cfg != nil && in.pool != nil && in.snap.Polled() {
			if !swept { // of an earlier process
				p.sweepSpecs(ctx, in.cfg.CDI.Dir)
				swept = true
			}
			base := &baseSpec{p.ensureBase(in)}
			p.base.Store(base)
			text := ""
			if base.err != nil && !errors.Is(base.err, cdi.ErrPending) {
				text = base.text()
			}
			if logged.Changed(text) && text != "" {
				p.options.Log.Warn("claims cannot be prepared", zap.String("error", text))
			}
		}
		if !wait.For(ctx, wake) {
			return
		}
	}
}

func (p *preparer) ensureBase(in *claimInput) error {
	if p.options.Simulated() {
		p.writer.Toolkit.Stop()
		return nil
	}
	return p.writer.Ensure(p.baseInput(in))
}

// baseInput returns the input of the CDI spec of the devices.
func (p *preparer) baseInput(in *claimInput) cdi.Input {
	input := in.cfg.CDIInput(in.snap, os.DirFS("/"))
	used := make(map[health.DeviceID]bool, len(in.pool.ByName))
	for _, id := range in.pool.ByName {
		used[id] = true
	}
	if claims := p.published.Load(); claims != nil { // a container that restarts needs its device, also if that is not published any more
		for _, c := range claims.ByUID { //nolint:forbidigo // the spec has what a container may need
			for _, d := range c.Devices {
				used[d.Device] = true
			}
		}
	}
	for i := range in.snap.Devices {
		if s := &in.snap.Devices[i]; used[s.Device.ID] {
			input.Devices = append(input.Devices, cdi.Device{Name: string(s.Device.ID), State: s, Offered: s.Sample.Presence != health.Missing})
		}
	}
	return input
}

// orderMPS stores which MPS daemons the claims need.
func (p *preparer) orderMPS(ctx context.Context) {
	wake := health.Wake(ctx, p.published, &p.input)
	for {
		claims, in := p.published.Load(), p.input.Load()
		if in != nil && in.cfg != nil && in.snap.Polled() && claims != nil {
			desired := mpsDesired(in, claims)
			if last := p.options.MPS.Load(); last == nil || last.Root != desired.Root || last.Control != desired.Control ||
				!slices.Equal(last.Daemons, desired.Daemons) {
				p.options.MPS.Store(&desired)
			}
		}
		if !wait.For(ctx, wake) {
			return
		}
	}
}

// mpsDesired returns the MPS daemons of the claims. A daemon has the limits of a whole device; the environment of a container has the
// limits of its share.
func mpsDesired(in *claimInput, claims *Claims) mps.Desired {
	c := &in.cfg.Sharing.MPS
	desired := mps.Desired{Root: mps.Root(c.Root), Control: c.Control}
	for _, claim := range claims.ByUID { //nolint:forbidigo // claims have their daemons
		for _, d := range claim.Devices {
			i := slices.IndexFunc(in.snap.Devices, func(s health.DeviceState) bool { return s.Device.ID == d.Device })
			if !d.MPS || i < 0 || slices.ContainsFunc(desired.Daemons, func(s mps.Spec) bool { return s.Device == d.Device }) {
				continue
			}
			device := &in.snap.Devices[i].Device
			desired.Daemons = append(desired.Daemons, mps.Spec{
				Device: d.Device, Kind: device.Kind, GPU: device.GPU(), Index: device.Index, ThreadPercentage: d.Threads, PinnedMemory: d.Pinned,
			})
		}
	}
	slices.SortFunc(desired.Daemons, func(a, b mps.Spec) int { return strings.Compare(string(a.Device), string(b.Device)) })
	return desired
}
