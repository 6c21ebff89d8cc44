package node

import (
	"cmp"
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/pci"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// hostDevice is what only the host has of a device, not the source.
type hostDevice struct {
	class string // of PCI; empty if unknown
	vgpu  *vgpu  // nil if it is none, or unknown
}

// host is what the host has of its devices. It is immutable.
type host struct {
	machine string // its product name; empty if unknown
	devices map[health.DeviceID]hostDevice
	known   health.KnownProperties // nil if NVML was not asked
	fabric  bool                   // a device had a clique; a new partition of the fabric gives it another one, without a reboot
}

// settled reports whether the properties of a device stay as they are.
func (h *host) settled(id health.DeviceID) bool {
	p := h.known[id]
	return p != nil && !p.FabricPending && !h.fabric
}

// The bounds of the time until values that are unknown or may change are read again; see backoff.Backoff.
const (
	examineAgain    = 5 * time.Second
	maxExamineAgain = 10 * time.Minute
)

// Known holds what NVML has of the devices. Examine asks while the labels or dynamic resource allocation need it, and once somebody awaits
// it. The Latest is never empty.
func (f *Follower) Known() *health.Latest[health.KnownProperties] { return &f.known }

// AwaitKnown waits, while ctx allows, until NVML was asked for the devices of a snapshot. Before the first poll it returns at once. It may
// be called from any goroutine.
func (f *Follower) AwaitKnown(ctx context.Context, snap *health.Snapshot) {
	f.asked.Store(&struct{}{})
	for snap.Polled() {
		known, changed := f.known.Watch()
		unasked := func(id health.DeviceID) bool { _, asked := (*known)[id]; return !asked }
		if !slices.ContainsFunc(snap.DeviceIDs(), unasked) {
			return
		}
		if !wait.For(ctx, changed) {
			return
		}
	}
}

// Examine reads what the host has of the devices until ctx ends. It reads new devices at once. Later it reads again what is unknown or
// may change. A driver that hangs delays nothing else, not even the end.
func (f *Follower) Examine(ctx context.Context) error {
	go f.examineHost(ctx)
	<-ctx.Done()
	return nil
}

func (f *Follower) examineHost(ctx context.Context) {
	var examined []health.DeviceID
	var again <-chan time.Time // nil if nothing is to be read again
	var due, servedDRA bool
	pauses := backoff.Backoff{Min: examineAgain, Max: maxExamineAgain}
	wake := health.Wake(ctx, f.Config, f.Plugin, &f.asked, f.Snapshots)
	for {
		if snap := f.Snapshots.Load(); snap.Polled() {
			ids, last, dra := snap.DeviceIDs(), f.host.Load(), f.Plugin.Load().ServesDRA()
			useNVML := dra || f.needsNVML()
			if dra && !servedDRA {
				f.forgetUnanswered()
			}
			if last == nil || useNVML && last.known == nil || dra && !servedDRA || !slices.Equal(ids, examined) {
				due = true
				pauses.Reset()
			}
			servedDRA = dra
			if due {
				complete, err := f.update(ctx, snap, last, useNVML)
				if err != nil {
					return
				}
				examined, again, due = ids, nil, false
				if !complete {
					again = time.After(pauses.Next())
				}
				continue
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-again:
			again, due = nil, true
		}
	}
}

// update stores what the host has of the devices now, and reports whether that is complete and final. Its error is that of ctx: NVML had no
// time to answer, and a MIG device would get a name for good.
func (f *Follower) update(ctx context.Context, snap *health.Snapshot, last *host, useNVML bool) (complete bool, err error) {
	next, complete := f.examine(ctx, snap, last, useNVML)
	if err := ctx.Err(); err != nil {
		return false, err
	}
	f.host.Store(next) // before known: Labels awaits that
	if useNVML {
		f.known.Store(&next.known)
	}
	return complete, nil
}

// needsNVML reports whether the labels, or somebody who awaits them, need what NVML has.
func (f *Follower) needsNVML() bool {
	config := f.Config.Load()
	return f.asked.Load() != nil || config != nil && config.Labels.Output != LabelsOff
}

// forgetUnanswered has nobody take a device for one that NVML was asked for if it did not answer: a MIG device gets its name for good.
func (f *Follower) forgetUnanswered() {
	answered := maps.Clone(*f.known.Load())
	maps.DeleteFunc(answered, func(_ health.DeviceID, p *health.Properties) bool { return p == nil })
	f.known.Store(&answered)
}

// examine returns what the host has of the devices of a snapshot, and whether that is complete and final. What cannot be read of a device
// now is taken from last, which may be nil.
func (f *Follower) examine(ctx context.Context, snap *health.Snapshot, last *host, useNVML bool) (next *host, complete bool) {
	sysfs := f.SysFS()
	last = cmp.Or(last, &host{})
	next = &host{machine: machineOf(sysfs), devices: make(map[health.DeviceID]hostDevice, len(snap.Devices)), fabric: last.fabric}
	complete = true
	var missing []health.Device
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		h := last.devices[d.ID]
		switch {
		case d.Kind != health.KindGPU:
		case snap.Source.Kind == simulation:
			h.class = simulatedClass
		case sysfs != "" && h.class == "":
			h.class, h.vgpu = classOf(sysfs, d.PCI), vgpuOf(sysfs, d.PCI)
			complete = complete && h.class != ""
		}
		if d.Properties == nil && !last.settled(d.ID) {
			missing = append(missing, *d)
		}
		next.devices[d.ID] = h
	}
	if !useNVML {
		return next, complete
	}
	found := f.Properties(ctx, missing)
	next.known = make(health.KnownProperties, len(snap.Devices))
	for id := range next.devices {
		p := cmp.Or(found[id], last.known[id])
		next.known[id], next.fabric = p, next.fabric || p != nil && p.Clique != ""
	}
	for i := range missing {
		complete = complete && next.settled(missing[i].ID)
	}
	return next, complete
}

// Simulated GPUs are 3D controllers in all profiles.
const (
	simulation     = "sim" // health.Source.Kind
	simulatedClass = "0x030200"
)

// machineOf returns the product name of the machine, empty if it is unknown.
func machineOf(sysfs string) string {
	if sysfs == "" {
		return ""
	}
	text, _ := os.ReadFile(filepath.Join(sysfs, "class/dmi/id/product_name")) // absent on some boards
	return strings.TrimSpace(string(text))
}

// classOf returns the PCI class of a device, empty if it is unknown.
func classOf(sysfs, id string) string {
	text, _ := os.ReadFile(filepath.Join(pciDir(sysfs, id), "class")) // absent while the device is off the bus
	return strings.TrimSpace(string(text))
}

// vgpuOf returns the description of the host that the PCI capability of a vGPU has, nil without one.
func vgpuOf(sysfs, id string) *vgpu {
	config, _ := os.ReadFile(filepath.Join(pciDir(sysfs, id), "config")) // only the first 64 bytes without CAP_SYS_ADMIN
	return parseVGPU(config)
}

// pciDir returns the directory of a PCI device.
func pciDir(sysfs, id string) string { return filepath.Join(sysfs, "bus/pci/devices", pci.ID(id)) }

// parseVGPU finds the host's version in the PCI configuration of a vGPU: in its vendor-specific capability, a list of records follows the
// signature VF. The record with ID 0 has the version and the branch of the host's driver, each 10 bytes. It returns nil for other devices.
func parseVGPU(config []byte) *vgpu {
	const (
		statusByte, hasCapabilities = 0x06, 0x10
		firstCapability, vendorID   = 0x34, 0x09
		size, records, textSize     = 256, 5, 10
	)
	if len(config) < size || config[statusByte]&hasCapabilities == 0 {
		return nil
	}
	pos := int(config[firstCapability])
	for range size { // a loop in the list
		if pos == 0 || pos+records > size {
			return nil
		}
		if config[pos] == vendorID {
			break
		}
		pos = int(config[pos+1])
	}
	capability := config[pos:min(pos+int(config[pos+2]), size)]
	if config[pos] != vendorID || len(capability) < records || string(capability[3:records]) != "VF" {
		return nil
	}
	v := &vgpu{}
	for rest := capability[records:]; len(rest) >= 2; {
		id, length := rest[0], int(rest[1])
		if id == 0 && len(rest) >= 2+2*textSize {
			v.HostVersion = strings.Trim(string(rest[2:2+textSize]), "\x00")
			v.HostBranch = strings.Trim(string(rest[2+textSize:2+2*textSize]), "\x00")
		}
		if id == 0 || length == 0 || length > len(rest) {
			break
		}
		rest = rest[length:]
	}
	return v
}
