package plugin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
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

	unready string // why containers cannot use the device although it works: its MPS daemon; empty if they can
	faulty  bool   // unready is a fault, not a start
}

// waiting returns why a resource of such devices should not be registered yet; empty if it can be.
func (d *Device) waiting() (reason string, starting bool) {
	s, name := d.share, d.State.Device.Name()
	switch {
	case s == nil:
		return "", false
	case s.unready != "" && d.displaced != "":
		return fmt.Sprintf("waiting for %s: %s", name, d.displaced), true
	case s.unready != "":
		return fmt.Sprintf("waiting for the MPS daemon of %s: %s", name, s.unready), !s.faulty
	case s.blocked != "":
		return fmt.Sprintf("%s: %s", name, s.blocked), s.pending
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
	n, ok := u.Form.Number(unit)
	return ok && u.Form.Kind != deviceid.Whole && unit.Device() == u.Device && n < u.Total
}

// Shares returns the units of each shared device, by resource, then by index. It may be called from any goroutine.
func (p *Plugin) Shares() (all []ShareUnits) {
	for _, r := range p.layouts.current().resources {
		for _, d := range r.Devices {
			if s := d.share; s != nil {
				all = append(all, ShareUnits{
					Resource: r.Name, Device: d.State.Device.ID, Sharing: s.kind, Form: s.form, Unit: s.unit,
					Total: s.units, Free: d.free(), Largest: d.largest(), Enforcement: s.by, Reason: s.reason,
				})
			}
		}
	}
	return all
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
		for _, device := range r.Devices {
			s, d := device.share, &device.State.Device
			if s == nil || !s.mps || device.displaced != "" {
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
		for _, d := range r.Devices {
			text, soon := d.waiting()
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
