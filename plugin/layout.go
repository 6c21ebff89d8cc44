package plugin

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Resource is an extended resource with the devices that the kubelet may allocate under its name.
type Resource struct {
	Name    string
	Devices []*Device // by index

	Unschedulable *Unschedulable // nil if the holders are unknown

	byID map[health.DeviceID]*Device
}

// Device is a device of a resource. The kubelet counts its units: one of a whole device, several of a shared one. A unit has a number from
// 0 and an ID: see package deviceid.
type Device struct {
	State *health.DeviceState // never nil; immutable, because it is part of a snapshot

	share     *share       // nil if the device is not shared
	offer     offer.Answer // to new pods
	give      offer.Answer // to a container that asks now
	held      map[int]bool // the units that containers hold; nil if the holders are unknown
	displaced string       // why the device is withheld: a container holds it under an ID outside the layout; empty if none does
}

// form returns the form of the units' IDs.
func (d *Device) form() deviceid.Form {
	if d.share == nil {
		return deviceid.Form{}
	}
	return d.share.form
}

// units returns the number of units.
func (d *Device) units() int {
	if d.share == nil {
		return 1
	}
	return d.share.units
}

// ids yields the IDs of the units by number.
func (d *Device) ids() iter.Seq2[int, string] { return d.form().Units(d.State.Device.ID, d.units()) }

// healthy reports whether the list says that a unit is healthy: the kubelet may allocate it, or a container keeps it. Only
// health.Unhealthy prevents that. An unknown state does not: a node does not stop because the state of a GPU is unknown.
func (d *Device) healthy(unit int) bool {
	return d.offer.Allows(offer.Offer) || d.held[unit] && d.offer.Keeps()
}

// countHealthy returns the number of healthy units.
func (d *Device) countHealthy() int {
	switch {
	case d.offer.Allows(offer.Offer):
		return d.units()
	case d.offer.Keeps():
		return len(d.held)
	}
	return 0
}

// free returns how many units no container holds, 0 if one holds the device under an ID outside the layout; -1 if the holders are unknown.
func (d *Device) free() int {
	switch {
	case d.held == nil:
		return -1
	case d.displaced != "":
		return 0
	}
	return d.units() - len(d.held)
}

// largest returns the largest request of a container that a shared device can serve now; -1 if the holders are unknown.
func (d *Device) largest() int {
	switch {
	case d.held == nil:
		return -1
	case !d.offer.Allows(offer.Offer):
		return 0
	case d.share.single:
		return min(d.free(), 1)
	}
	return d.free()
}

// usable reports whether the device itself is fit for containers, withheld or not.
func (d *Device) usable() bool {
	code := d.offer.Code()
	return code != offer.Unhealthy && code != offer.NotReady
}

// starting reports whether the device is not usable only because its share is not ready yet.
func (d *Device) starting() bool { return d.offer.Code() == offer.NotReady && !d.share.faulty }

// Layout returns the resources of a snapshot, sorted. It returns none if there are no devices to offer or the plugin is
// disabled.
func Layout(cfg Config, snap *health.Snapshot) []Resource {
	return newLayout(layoutInput{cfg: &cfg, snap: snap}).resources
}

// layoutInput is everything that a layout depends on.
type layoutInput struct {
	cfg    *Config          // nil before the first
	snap   *health.Snapshot // nil before the first
	facts  offer.Facts
	before uniformLayout // of the previous layout

	runtime cdi.RuntimeVerdict // if pods need CDI

	capabilities *memlimits.Capabilities // nil before the node is examined
	examined     bool                    // the node is examined at all
}

// layout is the resources of a snapshot and the reasons for what they lack. It is immutable once published.
type layout struct {
	cfg       *Config
	snap      *health.Snapshot
	holders   *podresources.Holders // nil before the first
	absent    string                // why there is no resource: the plugin does not serve; empty if it does
	resources []Resource            // by name
	// why some or all are missing or not offered: the configuration does not fit the node, or the container runtime
	err      string
	misfits  grouped.Texts    // the part of err about how devices are shared, with the devices
	warnings []string         // devices that are not offered, with the reason
	withheld []withheldDevice // by resource and index
	uniform  uniformLayout    // input of the next layout
}

// warn adds a warning, once: the MIG devices of a GPU have the same.
func (l *layout) warn(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(l.warnings, text) {
		l.warnings = append(l.warnings, text)
	}
}

// candidate is a device that may be offered.
type candidate struct {
	state    *health.DeviceState
	resource string      // before sharing, then after it
	entry    *shareEntry // nil if it is not shared
	share    *share      // nil if it is not shared
	profile  string      // of a MIG device, as NVIDIA names it
	migCount int         // of a GPU: its MIG devices
	bindings health.Bindings
}

func (c *candidate) device() *health.Device { return &c.state.Device }

// newLayout decides which devices are offered under which resource. It is pure and cheap: it runs for every snapshot and
// every change of the holders.
func newLayout(in layoutInput) layout {
	cfg, snap := in.cfg, in.snap
	l := layout{cfg: cfg, snap: snap, absent: in.facts.NotServing}
	if cfg == nil || !cfg.Enabled || !snap.Polled() || l.absent != "" {
		return l
	}
	selected, n := cfg.selectCandidates(snap)
	if len(selected) == 0 && n > 0 {
		l.err = selectsNone(n)
	}
	offered := l.share(in, l.applyMIGStrategy(in, selected))
	slices.SortStableFunc(offered, func(x, y candidate) int { return cmp.Compare(x.resource, y.resource) })
	for len(offered) > 0 {
		n := 1
		for n < len(offered) && offered[n].resource == offered[0].resource {
			n++
		}
		l.addResource(offered[:n])
		offered = offered[n:]
	}
	for _, text := range l.misfits.Strings() {
		l.err = strings.TrimPrefix(l.err+"; "+text, "; ")
	}
	if warning := in.runtime.Warning(); warning != "" {
		l.warn("%s", warning)
	}
	if noCDI := in.facts.NoCDI; noCDI != "" && len(l.resources) > 0 {
		l.err = strings.TrimPrefix(l.err+"; "+noCDI, "; ")
	}
	l.decide(in)
	if by := in.facts.Holders.By; by != nil { //nolint:forbidigo // only counts
		l.countUnschedulable(by)
	}
	return l
}

// selectCandidates returns the devices that include and exclude select, and the number of all.
func (c *Config) selectCandidates(snap *health.Snapshot) (selected []candidate, n int) {
	all := candidates(snap)
	n = len(all)
	return slices.DeleteFunc(all, func(d candidate) bool {
		return len(c.Include) > 0 && !selectsAny(keyInclude, c.Include, &d) || selectsAny(keyExclude, c.Exclude, &d)
	}), n
}

func selectsNone(n int) string {
	return fmt.Sprintf("plugin.include and plugin.exclude select none of the %d devices of this node", n)
}

// addResource adds the resource of these devices, unless the kubelet could not receive its list.
func (l *layout) addResource(devices []candidate) {
	name := devices[0].resource
	if slices.ContainsFunc(devices, func(c candidate) bool { return c.share != nil }) && !l.checkListSize(devices) {
		return
	}
	r := Resource{Name: name, Devices: make([]*Device, len(devices)), byID: make(map[health.DeviceID]*Device, len(devices))}
	for i := range devices {
		c := &devices[i]
		r.Devices[i] = &Device{State: c.state, share: c.share}
		r.byID[c.device().ID] = r.Devices[i]
	}
	l.resources = append(l.resources, r)
}

// candidates returns all devices by index, each GPU followed by its MIG devices.
func candidates(snap *health.Snapshot) []candidate {
	all := make([]candidate, 0, len(snap.Devices))
	for i := range snap.Devices {
		if state := &snap.Devices[i]; state.Device.ID != "" {
			all = append(all, candidate{state: state, bindings: snap.Bindings})
		}
	}
	slices.SortStableFunc(all, func(x, y candidate) int {
		a, b := &x.state.Device, &y.state.Device
		return cmp.Or(health.CompareIndex(a, b), cmp.Compare(a.GPU(), b.GPU()), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI), cmp.Compare(a.ID, b.ID))
	})
	var gpu, last *candidate
	for i := range all {
		c := &all[i]
		d := &c.state.Device
		if d.Kind == health.KindGPU {
			gpu = c
			continue
		}
		var gpuMemory uint64
		if gpu != nil && gpu.state.Device.ID == d.Parent {
			gpuMemory = gpu.state.Device.Memory
			gpu.migCount++
		}
		if last != nil && last.state.Device.Profile == d.Profile && last.state.Device.Memory == d.Memory && last.state.Device.Parent == d.Parent {
			c.profile = last.profile
		} else {
			c.profile = profileOf(d, gpuMemory)
		}
		last = c
	}
	return all
}

// findResource returns the resource of that name, without devices if there is none.
func findResource(resources []Resource, name string) Resource {
	for _, r := range resources {
		if r.Name == name {
			return r
		}
	}
	return Resource{Name: name}
}

// unit is a unit of a device.
type unit struct {
	*Device
	number int
}

// unit returns the unit with an ID; ok is false if the resource lacks it. Its cost does not depend on the number of units.
func (r Resource) unit(id string) (u unit, ok bool) {
	parsed := deviceid.Parse(id)
	if u.Device = r.byID[parsed.Device()]; u.Device == nil {
		return u, false
	}
	u.number, ok = u.form().Number(parsed)
	return u, ok && u.number < u.units()
}

// has reports whether an ID is of a unit of the resource.
func (r Resource) has(id string) bool {
	_, ok := r.unit(id)
	return ok
}

// units counts the units of all devices.
func (r Resource) units() (n int) {
	for _, d := range r.Devices {
		n += d.units()
	}
	return n
}

// healthy counts the units that the list says are healthy.
func (r Resource) healthy() (n int) {
	for _, d := range r.Devices {
		n += d.countHealthy()
	}
	return n
}

// healthyIDs returns the IDs of these units, sorted.
func (r Resource) healthyIDs() []string {
	ids := make([]string, 0, r.units())
	for _, d := range r.Devices {
		for n, id := range d.ids() {
			if d.healthy(n) {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

// message returns the units of a ListAndWatch response.
func (r Resource) message() []*pluginapi.Device {
	devices := make([]*pluginapi.Device, 0, r.units())
	for _, d := range r.Devices {
		topology := numaTopology(d.State.Device.NUMA)
		for n, id := range d.ids() {
			device := &pluginapi.Device{ID: id, Health: pluginapi.Healthy, Topology: topology}
			if !d.healthy(n) {
				device.Health = pluginapi.Unhealthy
			}
			devices = append(devices, device)
		}
	}
	return devices
}

// numaTopology returns nil if the NUMA nodes are unknown: an empty list would tell the topology manager that no node is
// near the device. Linux reports node -1 for a device without one.
func numaTopology(numa []int) *pluginapi.TopologyInfo {
	var nodes []*pluginapi.NUMANode
	for _, n := range numa {
		if n >= 0 {
			nodes = append(nodes, &pluginapi.NUMANode{ID: int64(n)})
		}
	}
	if nodes == nil {
		return nil
	}
	return &pluginapi.TopologyInfo{Nodes: nodes}
}

// sameMessage reports whether two messages are equal for the kubelet.
func sameMessage(a, b []*pluginapi.Device) bool {
	return slices.EqualFunc(a, b, func(x, y *pluginapi.Device) bool {
		return x.ID == y.ID && x.Health == y.Health &&
			slices.EqualFunc(x.GetTopology().GetNodes(), y.GetTopology().GetNodes(), func(m, n *pluginapi.NUMANode) bool { return m.ID == n.ID })
	})
}

// layoutCache builds the layout of the newest inputs once for all readers: every stream and call, the audit and the manager. It passes the
// state of the previous layout to the next, so that newLayout is pure. The fields up to mu are set before the first call.
type layoutCache struct {
	cfg          *health.Latest[Config]
	snapshots    *health.Latest[health.Snapshot]
	holders      *health.Latest[podresources.Holders]
	capabilities *health.Latest[memlimits.Capabilities] // nil: nothing examines the node
	turn         *health.Latest[turn]                   // nil: this process serves
	runtime      *health.Latest[cdi.Runtime]            // nil: it is unknown
	claims       *health.Latest[offer.Claims]           // nil: there are none
	recent       *recentAllocations

	mu        sync.Mutex // guards the fields below
	last      *layout
	lastInput cacheInput // of last
}

// cacheInput is what a layout is built of.
type cacheInput struct {
	cfg          *Config
	snap         *health.Snapshot
	holders      *podresources.Holders
	capabilities *memlimits.Capabilities
	turn         *turn
	runtime      *cdi.Runtime
	claims       *offer.Claims
}

func newLayoutCache(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot],
	holders *health.Latest[podresources.Holders],
) *layoutCache {
	return &layoutCache{cfg: cfg, snapshots: snapshots, holders: holders, last: &layout{}, recent: &recentAllocations{}}
}

// load returns the newest value; nil if there is none, or nothing to load from.
func load[T any](from *health.Latest[T]) *T {
	if from == nil {
		return nil
	}
	return from.Load()
}

// current returns the newest layout. It is empty until there are a configuration and a snapshot.
func (l *layoutCache) current() *layout {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Loaded under the mutex, so that no older layout replaces a newer one.
	now := cacheInput{l.cfg.Load(), l.snapshots.Load(), l.holders.Load(), load(l.capabilities), load(l.turn), load(l.runtime), load(l.claims)}
	if now == l.lastInput {
		return l.last
	}
	in := layoutInput{cfg: now.cfg, snap: now.snap, before: l.last.uniform, capabilities: now.capabilities, examined: l.capabilities != nil}
	if now.holders != nil {
		in.facts.Holders = *now.holders
		in.facts.Recent = l.recent.holders(now.holders)
	}
	if now.turn != nil {
		in.facts.NotServing, in.facts.Releasing = now.turn.notServing, now.turn.releasing
	}
	if l.runtime != nil && now.cfg != nil && !now.cfg.ServesDRA() && now.cfg.NeedsCDI() {
		if now.runtime == nil { // for a moment
			in.facts.Releasing = cmp.Or(in.facts.Releasing, "about to learn which container runtime the node has")
		} else {
			in.runtime = now.cfg.JudgeRuntime(*now.runtime)
			in.facts.NoCDI = in.runtime.Refusal()
		}
	}
	if now.claims != nil {
		in.facts.Claims = *now.claims
	}
	if now.snap != nil {
		in.facts.Detached = offer.DetachedReason(now.snap.Source.Detachment)
	}
	next := newLayout(in)
	next.holders = now.holders
	l.last, l.lastInput = &next, now
	return l.last
}

// wake returns a channel that receives when an input of the layout or one of the others changes, until ctx ends.
func (l *layoutCache) wake(ctx context.Context, others ...health.Replaceable) <-chan struct{} {
	return health.Wake(ctx, append(others, l.cfg, l.snapshots, l.holders, l.capabilities, l.turn, l.runtime, l.claims)...)
}
