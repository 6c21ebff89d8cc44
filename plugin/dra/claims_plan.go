package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	kubeletapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// The environment of containers with devices of claims.
const (
	envDevice         = "GPU_NODE_AGENT_DEVICE_" // and the device's name: its UUID
	envVisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	noVisibleDevices  = "void" // where NVIDIA's runtime is used as well, the variable of the image must not add GPUs
)

// plan is what a claim gets.
type plan struct {
	claim  Claim
	driver string
	specs  []cdi.ClaimDevice

	// For offer.Facts.Grant.
	facts    offer.Facts
	requests []offer.Request
	offered  map[health.DeviceID]uint64 // the memory that all shares of a device may have
}

// newPlan returns what a claim gets, or why it gets nothing. It waits for nothing except, once after a start, for the first check of the
// devices' CDI spec.
func (p *preparer) newPlan(
	ctx context.Context, in *claimInput, facts *offer.Facts, claim *resourceapi.ResourceClaim,
	results []resourceapi.DeviceRequestAllocationResult,
) (*plan, error) {
	pl := &plan{
		claim:  Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name, Prepared: time.Now().UTC(), CDIDir: in.cfg.CDI.Dir},
		driver: in.cfg.DRA.DriverName, facts: *facts, offered: make(map[health.DeviceID]uint64),
	}
	states := make([]*health.DeviceState, len(results))
	related := offer.RelatedTo(in.snap)
	for i := range results {
		state, err := p.find(in, &results[i])
		if err != nil {
			return nil, err
		}
		states[i] = state
		pl.addDevice(in, claim, &results[i], state, related)
		if err := p.addShare(in, pl, claim, &results[i], state); err != nil {
			return nil, err
		}
	}
	if err := pl.checkShares(); err != nil {
		return nil, err
	}
	if _, _, err := facts.Grant(new(pl.claim.offerClaim(pl.driver)), pl.requests, pl.offered); err != nil { // reserve looks for conflicts
		return nil, refusalOf(err)
	}
	base, cancel := context.WithTimeout(ctx, p.timing.base)
	defer cancel()
	for i, state := range states {
		if err := p.addCDI(base, in, pl, i, state); err != nil {
			return nil, err
		}
	}
	return pl, nil
}

// planned returns the device that was added last, what is asked for it, and its CDI spec.
func (pl *plan) planned() (*ClaimDevice, *offer.Request, *cdi.ClaimDevice) {
	return &pl.claim.Devices[len(pl.claim.Devices)-1], &pl.requests[len(pl.requests)-1], &pl.specs[len(pl.specs)-1]
}

// addDevice adds the device of a result.
func (pl *plan) addDevice(
	in *claimInput, claim *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult, state *health.DeviceState,
	related map[health.DeviceID][]health.DeviceID,
) {
	device := &state.Device
	d := ClaimDevice{
		Request: resourceclaim.BaseRequestRef(r.Request), Pool: r.Pool, Name: r.Device, Device: device.ID, Parent: device.Parent,
		Admin: isAdmin(r), ShareID: shareID(r),
	}
	name := string(claim.UID) + "-" + d.Name
	if d.ShareID != "" {
		name += "-" + string(d.ShareID)
	}
	pl.claim.Devices = append(pl.claim.Devices, d)
	pl.specs = append(pl.specs, cdi.ClaimDevice{Name: name, Env: map[string]string{
		envDevice + strings.ToUpper(strings.ReplaceAll(d.Name, "-", "_")): string(device.ID), envVisibleDevices: noVisibleDevices,
	}})
	pl.requests = append(pl.requests, offer.Request{
		Device: device, Related: related[device.ID], Verdict: &state.Verdict, Admin: d.Admin,
		Tolerates: func(f *health.Finding) bool { return tolerates(r, f.Cause, &in.cfg.DRA) },
	})
}

// addCDI sets the CDI names of a device. It waits for the first check of the devices' CDI spec until ctx ends.
func (p *preparer) addCDI(ctx context.Context, in *claimInput, pl *plan, n int, state *health.DeviceState) error {
	d := &pl.claim.Devices[n]
	d.CDI = []string{cdi.ClaimDeviceName(pl.specs[n].Name)}
	if !p.options.Simulated() && state.Sample.Presence != health.Missing { // no spec has a missing one
		base, err := p.baseName(ctx, in, &state.Device)
		if err != nil {
			return refuse(reasonCDI, "device %s: %v", d.Name, err)
		}
		d.CDI = append(d.CDI, base)
	}
	return nil
}

// mergedSpecs returns the CDI devices, one for each name: an admin may have a device by several requests.
func (pl *plan) mergedSpecs() (specs []cdi.ClaimDevice) {
	for _, s := range pl.specs {
		if i := slices.IndexFunc(specs, func(other cdi.ClaimDevice) bool { return other.Name == s.Name }); i >= 0 {
			maps.Copy(specs[i].Env, s.Env)
			specs[i].Mounts = append(specs[i].Mounts, s.Mounts...)
		} else {
			specs = append(specs, s)
		}
	}
	return specs
}

// factsFor returns what the decision about a claim depends on. A claim of the checkpoint, or one with adminAccess only, gets its devices
// whatever containers hold.
func (p *preparer) factsFor(
	ctx context.Context, in *claimInput, claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult, exists bool,
) (*offer.Facts, error) {
	f := &offer.Facts{
		Now: time.Now(), NotServing: p.notServing(), Detached: offer.DetachedReason(in.snap.Source.Detachment),
		Holders: podresources.NewHolders(time.Now(), nil, podresources.Resolvers{}), // nobody
	}
	runtime, _ := p.options.runtime()
	f.NoCDI = in.cfg.JudgeRuntime(runtime).Refusal()
	state := p.state.Load()
	f.Claims = state.offerClaims(in.cfg.DRA.DriverName)
	if f.NotServing != "" || exists || !slices.ContainsFunc(results,
		func(r resourceapi.DeviceRequestAllocationResult) bool { return !isAdmin(&r) }) {
		return f, nil
	}
	f.Holders, f.NoPlugin = p.askHolders(ctx), p.options.NoPlugin()
	f.Now = time.Now()
	if f.Unknown() != "" || !state.Lost {
		return f, nil
	}
	return f, p.exemptAdmins(ctx, in, f, claim, results)
}

// denialReasons are the reasons of refused claims by the code of the answer.
func denialReason(c offer.Code) string {
	switch c {
	case offer.NotServing, offer.Releasing:
		return reasonReleasing
	case offer.Detached:
		return reasonDetached
	case offer.MIGMode:
		return reasonMIGMode
	case offer.Unhealthy:
		return reasonUnhealthyDevice
	case offer.NotReady, offer.Reserved:
		return reasonMPSNotReady
	case offer.Unknown:
		return reasonNotReady
	case offer.Held:
		return reasonInUse
	case offer.NoCDI:
		return reasonNoCDI
	case offer.Blocked:
		return reasonMemoryNotEnforced
	}
	return reasonOther
}

// refusalOf returns the refusal of a claim for an error of offer.Facts.Grant.
func refusalOf(err error) error {
	if err == nil {
		return nil
	}
	denial, ok := errors.AsType[*offer.Denial](err)
	if !ok {
		return refuse(reasonConfiguration, "%v", err)
	}
	reason, text := denialReason(denial.Answer.Code()), denial.Error()
	switch denial.Answer.Code() {
	case offer.NotServing, offer.NoCDI:
		text = denial.Answer.Reason()
	case offer.Unknown:
		text += "; the kubelet tries again"
	case offer.Unhealthy:
		text = fmt.Sprintf("device %s: %s is unhealthy: %s", denial.Part.Name, denial.Device.Name(), denial.Answer.Reason())
		if f := denial.Answer.Finding(); f != nil && f.Advice() != "" {
			text += "; " + f.Advice()
		}
	}
	return refuse(reason, "%s", text)
}

// find returns the device of a result. It also finds a device that was published and is not for now, because its claim may be older.
func (p *preparer) find(in *claimInput, r *resourceapi.DeviceRequestAllocationResult) (*health.DeviceState, error) {
	if r.Pool != p.options.Node {
		return nil, refuse(reasonUnknownDevice, "device %s: expected pool %s, found %q", r.Device, p.options.Node, r.Pool)
	}
	id, published := in.pool.ByName[r.Device]
	if !published {
		for other, name := range p.names() {
			if name == r.Device {
				id = other
			}
		}
	}
	i := slices.IndexFunc(in.snap.Devices, func(s health.DeviceState) bool { return s.Device.ID == id })
	if id == "" || i < 0 || !published && in.snap.Devices[i].Verdict.State != health.Unhealthy {
		names := slices.Sorted(maps.Keys(in.pool.ByName))
		return nil, refuse(reasonUnknownDevice, "device %q is unknown; node %s has %s", r.Device, p.options.Node,
			orNone(grouped.Abbreviate(names)))
	}
	return &in.snap.Devices[i], nil
}

func orNone(list string) string {
	if list == "" {
		return "none"
	}
	return list
}

// tolerates reports whether the claim tolerates the taint of an Unhealthy finding.
func tolerates(r *resourceapi.DeviceRequestAllocationResult, cause string, c *plugin.DRAConfig) bool {
	taint := findingTaint(cause)
	if taint.Effect = resourceapi.DeviceTaintEffectNoSchedule; c.Evicts(cause) {
		taint.Effect = resourceapi.DeviceTaintEffectNoExecute
	}
	return slices.ContainsFunc(r.Tolerations, func(t resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, taint) })
}

// addShare adds what a container needs to use a share, or to use a device by MPS.
func (p *preparer) addShare(
	in *claimInput, pl *plan, claim *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult, state *health.DeviceState,
) error {
	device := &state.Device
	d, ask, spec := pl.planned()
	if d.Admin {
		return nil
	}
	config, err := configFor(claim.Status.Allocation.Devices.Config, in.cfg.DRA.DriverName, r, device.Kind)
	if err != nil {
		return refuse(reasonConfiguration, "%v", err)
	}
	memory, shared := consumedMemory(r)
	if shared {
		if d.Memory = memory &^ (1<<20 - 1); d.Memory == 0 {
			return refuse(reasonMemory, "device %s: expected a share of at least 1 MiB of memory, found %d bytes", d.Name, memory)
		}
		m := p.sharedMemory(in, device)
		pl.offered[device.ID] = m.Offered
		ask.Blocked = m.Blocked
		maps.Copy(spec.Env, plugin.MemoryEnv(d.Memory, device.Memory, m.Enforcement))
		if m.Enforcement == memlimits.MPS {
			d.MPS, d.Threads = true, 100
			addMPS(spec, in, d, d.Threads, d.Memory)
		}
	}
	if config == nil || config.Sharing == nil || config.Sharing.Strategy != strategyMPS {
		if !d.MPS && state.MPS != nil {
			ask.Reserved = "its MPS daemon still runs, and only MPS clients can use " + device.Name()
		}
		return nil
	}
	if shared {
		return refuse(reasonConfiguration, "device %s: expected a whole device for sharing.strategy %s, found a share of its memory", d.Name,
			strategyMPS)
	}
	for _, other := range pl.claim.Devices[:len(pl.claim.Devices)-1] {
		if other.Request == d.Request && other.MPS {
			return refuse(reasonConfiguration, "request %s: sharing.strategy %s: expected one device, found %s and %s; use a request for each",
				d.Request, strategyMPS, other.Name, d.Name)
		}
	}
	if d.Threads, d.Pinned, err = config.Sharing.MPSConfig.limits(device.ID, 0); err != nil {
		return refuse(reasonConfiguration, "request %s: %v", r.Request, err)
	}
	d.MPS = true
	addMPS(spec, in, d, d.Threads, d.Pinned)
	return nil
}

// addMPS makes the containers clients of the device's MPS daemon.
func addMPS(spec *cdi.ClaimDevice, in *claimInput, d *ClaimDevice, threads int, pinned uint64) {
	env, mounts := plugin.MPSClient(d.Device, d.Name, mps.Root(in.cfg.Sharing.MPS.Root), threads, pinned)
	maps.Copy(spec.Env, env)
	for _, m := range mounts {
		spec.Mounts = append(spec.Mounts, claimMount(m))
	}
}

func claimMount(m *kubeletapi.Mount) cdi.ClaimMount {
	return cdi.ClaimMount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath(), ReadOnly: m.GetReadOnly()}
}

// sharedMemory returns what is offered of a device's memory. If the memory is not shared any more, earlier claims may have all of it.
func (p *preparer) sharedMemory(in *claimInput, device *health.Device) plugin.SharedMemory {
	selected, _ := in.cfg.SelectDevices(in.snap, p.memoryCapabilities(), p.capabilities != nil)
	for _, s := range selected {
		if s.State.Device.ID == device.ID && s.Memory != nil {
			return *s.Memory
		}
	}
	return plugin.SharedMemory{Offered: device.Memory, Enforcement: memlimits.None}
}

// memoryCapabilities returns what can limit the memory of containers, nil if it is unknown.
func (p *preparer) memoryCapabilities() *memlimits.Capabilities {
	if p.capabilities == nil {
		return nil
	}
	return p.capabilities.Load()
}

// consumedMemory returns the memory of a share in bytes. ok is false for a whole device.
func consumedMemory(r *resourceapi.DeviceRequestAllocationResult) (memory uint64, ok bool) {
	for _, name := range []string{capacityMemory, r.Driver + "/" + capacityMemory} {
		if q, exists := r.ConsumedCapacity[resourceapi.QualifiedName(name)]; exists {
			return uint64(max(0, q.Value())), true
		}
	}
	return 0, r.ShareID != nil
}

// checkShares returns why a container could not use all devices of a claim together: the variables that limit its memory are for all
// devices.
func (pl *plan) checkShares() error {
	var first *ClaimDevice
	for i := range pl.claim.Devices {
		d := &pl.claim.Devices[i]
		if d.Memory == 0 || d.Admin {
			continue
		}
		switch {
		case first == nil:
			first = d
		case d.MPS && first.Request == d.Request:
			return refuse(reasonMemory,
				"request %s: expected shares of one device with plugin.sharing.memory.enforcement %s, found %s and %s; use a request for each",
				d.Request, plugin.EnforceMPS, first.Name, d.Name)
		case d.Memory != first.Memory && first.Request == d.Request:
			return refuse(reasonMemory, "request %s: expected shares of equal size, found %d MiB of %s and %d MiB of %s", d.Request,
				first.Memory>>20, first.Name, d.Memory>>20, d.Name)
		}
	}
	return nil
}

// awaitMPS waits until the MPS daemons of a claim are ready, with its limits.
func (p *preparer) awaitMPS(ctx context.Context, claim *Claim) error {
	if !slices.ContainsFunc(claim.Devices, func(d ClaimDevice) bool { return d.MPS }) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.timing.mps)
	defer cancel()
	for {
		snap, changed := p.options.Snapshots.Watch()
		name, reason := mpsUnready(snap, claim)
		if reason == "" {
			return nil
		}
		if !wait.For(ctx, changed) {
			return refuse(reasonMPSNotReady, "device %s: the MPS daemon is not ready: %s; gpu-node-agent mps-daemon must run on the node", name,
				reason)
		}
	}
}

// mpsUnready returns the first device of a claim whose MPS daemon cannot serve it, and why.
func mpsUnready(snap *health.Snapshot, claim *Claim) (name, reason string) {
	for _, d := range claim.Devices {
		if !d.MPS {
			continue
		}
		i := slices.IndexFunc(snap.Devices, func(s health.DeviceState) bool { return s.Device.ID == d.Device })
		if i < 0 {
			return d.Name, "the device is missing"
		}
		daemon := snap.Devices[i].MPS
		if reason := plugin.MPSUnready(daemon); reason != "" {
			return d.Name, reason
		}
		const tolerance = 1 // MPS may round what it reports
		if t := daemon.ThreadPercentage; t > float64(d.Threads)+tolerance || t < float64(d.Threads)-tolerance ||
			d.Pinned > 0 && daemon.PinnedMemory > d.Pinned+1<<30 {
			return d.Name, "its limits are not set yet"
		}
	}
	return "", ""
}

// baseSpec is whether container runtimes can resolve the CDI names of the devices. It is immutable.
type baseSpec struct{ err error }

// text returns why they cannot, and what to do.
func (b *baseSpec) text() string {
	if missing, ok := errors.AsType[*cdi.MissingError](b.err); ok && missing.Devices != nil {
		return fmt.Sprintf("the CDI spec for %s in %s lacks %s and has %s; run nvidia-ctk cdi generate --device-name-strategy=uuid, or set "+
			"plugin.cdi.generate to true",
			missing.Kind, strings.Join(missing.Dirs, " or "), grouped.Abbreviate(missing.Devices), orNone(grouped.Abbreviate(missing.Names)))
	}
	return b.err.Error()
}

// baseName returns the CDI name of a device in the spec of all devices, or why container runtimes cannot resolve it.
func (p *preparer) baseName(ctx context.Context, in *claimInput, d *health.Device) (string, error) {
	name := string(d.ID)
	if in.cfg.CDI.Generate { // a device without nodes is left out of the spec
		if _, err := in.cfg.Host(os.DirFS("/")).DeviceNodes(d); err != nil {
			return "", fmt.Errorf("%s has no device node: %w", d.Name(), err)
		}
	}
	for {
		base, changed := p.base.Watch()
		if base != nil && !errors.Is(base.err, cdi.ErrPending) {
			missing, ok := errors.AsType[*cdi.MissingError](base.err)
			if base.err != nil && (!ok || missing.Devices == nil || slices.Contains(missing.Devices, name)) {
				return "", errors.New(base.text())
			}
			return in.cfg.CDI.QualifiedName(name), nil
		}
		if !wait.For(ctx, changed) {
			return "", errors.New("the CDI spec of the devices is not checked yet")
		}
	}
}
