package plugin

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Sharing is how a device is shared.
type Sharing string

// The kinds of sharing, named as in the configuration.
const (
	SharingNone        Sharing = ""
	SharingTimeSlicing Sharing = "timeSlicing"
	SharingMPS         Sharing = "mps"
	SharingMemory      Sharing = "memory"
)

// share is how a device is shared. All units of a device have the same.
type share struct {
	kind    Sharing
	form    deviceid.Form // of the kubelet's IDs of the units
	units   int           // IDs of the device: replicas, MPS shares, or units of memory
	single  bool          // a container may request one unit only
	renamed bool          // the resource has another name than the resource of unshared devices
	unit    uint64        // SharingMemory: bytes of a unit

	mps     bool   // MPS serves the device
	threads int    // MPS: percent of the SMs of one unit; 100 for no limit
	pinned  uint64 // MPS: bytes of one unit, a multiple of 1 MiB; 0 for no limit

	enforcement // SharingMemory

	unready   string // why containers cannot use the device although it works: its MPS daemon; empty if they can
	faulty    bool   // unready is a fault, not a start
	displaced string // why the device is withheld: a container holds it under an ID outside the layout; empty if none does

	free    int // units that no container holds, 0 if one holds the device under an ID outside the layout; -1 if the holders are unknown
	largest int // the largest request of a container that the device can serve now; -1 if the holders are unknown
}

// waiting returns why a resource of such units should not be registered yet; empty if it can be.
func (s *share) waiting(d *health.Device) (reason string, starting bool) {
	switch {
	case s == nil:
		return "", false
	case s.unready != "" && s.displaced != "":
		return fmt.Sprintf("waiting for %s: %s", d.Name(), s.displaced), true
	case s.unready != "":
		return fmt.Sprintf("waiting for the MPS daemon of %s: %s", d.Name(), s.unready), !s.faulty
	case s.blocked != "":
		return fmt.Sprintf("%s: %s", d.Name(), s.blocked), s.pending
	}
	return "", false
}

// ShareUnits is how the units of a shared device are used: replicas, MPS shares, or units of memory.
type ShareUnits struct {
	Resource string // empty with dynamic resource allocation
	Device   health.DeviceID
	Sharing  Sharing
	Form     deviceid.Form // of the kubelet's IDs of the units; Whole with dynamic resource allocation
	Unit     uint64        // bytes of a unit; 0 unless Sharing is SharingMemory

	Total   int // offered
	Free    int // of these, held by no container, nor the whole device; -1 if the holders are unknown
	Largest int // the largest request of a container that the device can serve now; -1 if the holders are unknown

	Enforcement memlimits.Enforcement // of memory, for the next container; "" unless Sharing is SharingMemory
	Reason      string                // why Enforcement is not the configured one; empty if it is
}

// HasUnit reports whether an ID of the kubelet names a unit that is offered.
func (u ShareUnits) HasUnit(id string) bool {
	unit := deviceid.Parse(id)
	return u.Form.Kind != deviceid.Whole && unit.Form() == u.Form && unit.Device() == u.Device && unit.Number() < u.Total
}

// Shares returns the units of each shared device, by resource, then by index. It may be called from any goroutine.
func (p *Plugin) Shares() (all []ShareUnits) {
	for _, r := range p.layouts.current().resources {
		for units := range r.byDevice() {
			s := units[0].share
			if s == nil {
				continue
			}
			all = append(all, ShareUnits{
				Resource: r.Name, Device: units[0].State.Device.ID, Sharing: s.kind, Form: s.form, Unit: s.unit,
				Total: s.units, Free: s.free, Largest: s.largest, Enforcement: s.by, Reason: s.reason,
			})
		}
	}
	return all
}

// byDevice yields the IDs of each device.
func (r Resource) byDevice() iter.Seq[[]Device] {
	return func(yield func([]Device) bool) {
		for rest := r.Devices; len(rest) > 0; {
			n := 1
			if s := rest[0].share; s != nil {
				n = s.units
			}
			if !yield(rest[:n]) {
				return
			}
			rest = rest[n:]
		}
	}
}

// countFree sets the free units of each shared device.
func (l *layout) countFree(holders map[health.DeviceID][]podresources.Holder) {
	held := make(map[int]bool)
	for _, r := range l.resources {
		for units := range r.byDevice() {
			if s, id := units[0].share, units[0].State.Device.ID; s != nil {
				clear(held)
				for _, h := range holders[id] { // containers of a pod can hold the same ID
					if i := r.index(h.DeviceID); i >= 0 && h.Resource == r.Name {
						held[i-r.first[id]] = true
					}
				}
				s.countFree(units, held)
			}
		}
	}
}

// countFree sets the free units. held are those that containers hold.
func (s *share) countFree(units []Device, held map[int]bool) {
	s.free, s.largest = s.units-len(held), 0
	for i, d := range units {
		if d.Healthy() && !held[i] {
			s.largest++
		}
	}
	if s.single {
		s.largest = min(s.largest, 1)
	}
	if s.displaced != "" { // by a container that holds the device under another ID
		s.free = 0
	}
}

// MPS returns what MPS daemons must run; empty until the devices are known.
func (p *Plugin) MPS() *health.Latest[mps.Desired] { return &p.mps }

// storeMPS stores which MPS daemons must run if that has changed. It is unknown until the devices are known and the kubelet was asked who
// holds them: after a start with another configuration, a container may still hold a device without MPS. For the same reason nothing
// changes while a kubelet that has answered before does not answer.
func (p *Plugin) storeMPS(now *layout) {
	if now.cfg == nil || now.cfg.Enabled && (!now.snap.Polled() || now.holders == nil || now.holders.Pending || now.holders.Forgotten()) {
		return
	}
	c := &now.cfg.Sharing.MPS
	desired := mps.Desired{Root: mps.Root(c.Root), Control: c.Control, Daemons: now.mpsSpecs()}
	last := p.mps.Load()
	if last == nil || last.Root != desired.Root || last.Control != desired.Control || !slices.Equal(last.Daemons, desired.Daemons) {
		p.mps.Store(&desired)
	}
}

// mpsSpecs returns the daemons of all devices that MPS serves. The limits of a daemon hold for each of its clients. So they are the limits
// of one share only if no container can have more shares. A device that a container still holds without MPS, or with other limits, gets its
// daemon when the container has ended: an earlier daemon would keep the container from its GPU, or change its limits.
func (l *layout) mpsSpecs() (specs []mps.Spec) {
	for _, r := range l.resources {
		for units := range r.byDevice() {
			s, d := units[0].share, &units[0].State.Device
			if s == nil || !s.mps || s.displaced != "" {
				continue
			}
			spec := mps.Spec{Device: d.ID, Kind: d.Kind, GPU: d.GPU(), Index: d.Index, ThreadPercentage: 100}
			if s.single {
				spec.ThreadPercentage, spec.PinnedMemory = s.threads, s.pinned
			}
			specs = append(specs, spec)
		}
	}
	slices.SortFunc(specs, func(a, b mps.Spec) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Device, b.Device)) })
	return specs
}

// waiting returns the resources to start later, because no device of them can be used yet, and why. A running resource continues.
// If starting, none of the reasons is a fault.
func (l *layout) waiting(running func(resource string) bool) (resources []string, reason string, starting bool) {
	starting = true
	var reasons []string
	for _, r := range l.resources {
		if running(r.Name) {
			continue
		}
		first, n, usable := "", 0, false
		faulty := false
		for units := range r.byDevice() {
			text, soon := units[0].share.waiting(&units[0].State.Device)
			if usable = text == ""; usable {
				break
			}
			first, faulty, n = cmp.Or(first, text), faulty || !soon, n+1
		}
		if usable {
			continue
		}
		if n > 1 {
			first += fmt.Sprintf(" (and %d more)", n-1)
		}
		resources = append(resources, r.Name)
		reasons = append(reasons, r.Name+": "+first)
		starting = starting && !faulty
	}
	return resources, strings.Join(reasons, "; "), starting
}

// SetMemoryCapabilities sets where the plugin finds what the node can enforce. Call it before Run. Without it, nothing is enforced.
func (p *Plugin) SetMemoryCapabilities(c *health.Latest[memlimits.Capabilities]) {
	p.layouts.capabilities = c
}
