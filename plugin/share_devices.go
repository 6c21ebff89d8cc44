package plugin

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// matches reports whether the entry applies to a device.
func (e *shareEntry) matches(c *candidate) bool {
	return (e.name == "" || e.name == c.resource) && (len(e.devices) == 0 || selectsAny(e.selectorKey(), e.devices, c))
}

// form returns share.form.
func (e *shareEntry) form() deviceid.Form {
	switch {
	case e.kind == SharingMemory && e.byMPS:
		return deviceid.Form{Kind: deviceid.MemoryByMPS, Size: e.unit / mebibyte}
	case e.kind == SharingMemory:
		return deviceid.Form{Kind: deviceid.Memory, Size: e.unit / mebibyte}
	case e.pinned > 0:
		return deviceid.Form{Kind: deviceid.MPSMemory, Size: e.pinned / mebibyte}
	case e.byMPS:
		return deviceid.Form{Kind: deviceid.MPSShare, Size: uint64(e.replicas)} //nolint:gosec // Validate requires at least 2
	}
	return deviceid.Form{Kind: deviceid.Replica}
}

// share sets how each device is shared and its resource after sharing. It removes the devices that cannot be shared as configured.
func (l *layout) share(in layoutInput, offered []candidate) []candidate {
	entries := in.cfg.Sharing.entries()
	if len(entries) == 0 {
		return offered
	}
	var names nameCache
	var empty grouped.Texts
	shared := offered[:0]
	for _, c := range offered {
		ok := true
		for i := range entries {
			e := &entries[i]
			switch {
			case !ok || !e.matches(&c):
			case c.entry == nil:
				c.entry = e
			case c.entry.kind != e.kind:
				l.misfits.Addf(c.device().Name(), "plugin.%s and plugin.%s: a device is shared in one way only, and both select these", c.entry.key,
					e.key)
				ok = false
			}
		}
		if !ok || c.entry != nil && !l.shareBy(in, &c, &names, &empty) {
			continue
		}
		shared = append(shared, c)
	}
	for _, text := range empty.Strings() {
		l.warn("%s", text)
	}
	return shared
}

// shareBy sets the share of a device by its entry. It returns false, with a misfit or with the device in empty, if that is impossible.
func (l *layout) shareBy(in layoutInput, c *candidate, names *nameCache, empty *grouped.Texts) bool {
	e, d := c.entry, c.device()
	if e.kind != SharingTimeSlicing && d.Kind == health.KindGPU && d.MIGMode {
		l.misfits.Addf(d.Name(), "plugin.%s: expected MIG devices or GPUs that are not in MIG mode; set plugin.migStrategy to mixed or single, "+
			"or disable MIG mode", e.key)
		return false
	}
	s := &share{kind: e.kind, form: e.form(), units: e.replicas, single: e.single}
	usable := d.Memory - min(d.Reserved, d.Memory)
	switch e.kind {
	case SharingMPS:
		if !l.shareByMPS(c, s, usable) {
			return false
		}
	case SharingMemory:
		if s.units = e.units(d, empty); s.units == 0 {
			return false
		}
		s.unit = e.unit
		s.enforcement = in.cfg.Sharing.Memory.enforce(d, in.capabilities, in.examined)
		if s.by == memlimits.MPS {
			s.mps, s.threads, s.pinned = true, 100, e.unit
		}
	}
	if s.mps {
		s.setReadiness(c.state.MPS)
	}
	base := c.resource
	switch {
	case e.rename != "":
		c.resource = e.rename
	case e.renameByDefault:
		c.resource = names.get(base, func(base string) string { return base + sharedSuffix })
	}
	s.renamed = c.resource != base
	c.share = s
	return true
}

// shareByMPS sets the limits of a share. It returns false if the device cannot serve so many, or so large ones.
func (l *layout) shareByMPS(c *candidate, s *share, usable uint64) bool {
	e, d := c.entry, c.device()
	if cc := d.ComputeCapability; cc.Major > 0 && cc.Major < firstVoltaMajorVersion && e.replicas > maxMPSClientsPreVolta {
		l.misfits.Addf(d.Name(), "plugin.%s.replicas: expected at most %d with compute capability %d.%d, got %d", e.key, maxMPSClientsPreVolta,
			cc.Major,
			cc.Minor, e.replicas)
		return false
	}
	s.mps, s.threads, s.pinned = true, e.threads, e.pinned
	equal := usable / uint64(e.replicas) / mebibyte * mebibyte //nolint:gosec // Validate requires at least 2
	switch {
	case d.Memory == 0: // a share would have no limit
		s.unready = "the size of the device's memory is unknown"
	case s.pinned == 0:
		s.pinned = equal
	case s.pinned > equal:
		l.misfits.Addf(d.Name(), "plugin.%s.pinnedMemory: expected at most %dMi for each of %d shares, got %dMi", e.key, equal/mebibyte,
			e.replicas,
			s.pinned/mebibyte)
		return false
	}
	if s.threads == 0 {
		s.threads = 100 / e.replicas
	}
	return true
}

// setReadiness sets why containers cannot use a device that MPS serves.
func (s *share) setReadiness(daemon *health.MPSDaemon) {
	switch {
	case s.unready != "":
		s.faulty = true
	case MPSUnready(daemon) != "":
		s.unready, s.faulty = MPSUnready(daemon), daemon != nil && daemon.Cause != ""
	case s.single && (daemon.ThreadPercentage > float64(s.threads)+1 || daemon.PinnedMemory > s.pinned+1<<30):
		// It was judged by the configuration before. MPS may round the limits that it reports.
		s.unready = "its limits are not set yet"
	}
}

// MPSUnready returns why containers cannot be clients of an MPS daemon; it is empty if they can.
func MPSUnready(daemon *health.MPSDaemon) string {
	switch {
	case daemon == nil:
		return "not examined yet"
	case !daemon.Ready || daemon.Leaving: // it may be stopping
		return cmp.Or(daemon.Reason, "not ready")
	}
	return ""
}

// units returns how many units of a device's memory are offered. If there is none, it adds the device to left.
func (e *shareEntry) units(d *health.Device, left *grouped.Texts) int {
	units := memoryUnits(d, e.reserve, e.unit)
	switch {
	case units > 0:
	case d.Memory == 0:
		left.Addf(d.Name(), "plugin.%s: devices whose memory size is unknown are not offered", e.key)
	default:
		left.Addf(d.Name(), "plugin.%s.unit: devices that have less memory than one unit of %dMi are not offered", e.key, e.unit/mebibyte)
	}
	return units
}

// memoryUnits returns how many units of a device's memory are offered. It is stable, because it follows from properties of the
// device.
func memoryUnits(d *health.Device, reserve, unit uint64) int {
	withheld := d.Reserved + reserve
	if unit == 0 || withheld > d.Memory || withheld < reserve { // the last: an overflow
		return 0
	}
	return int((d.Memory - withheld) / unit) //nolint:gosec // a unit has at least 1 MiB
}

// CheckDevices returns an error if the configuration does not fit the devices of a snapshot: devices in two kinds of sharing, shares
// that a device cannot serve, or more device IDs than the kubelet can receive.
func (c Config) CheckDevices(snap *health.Snapshot) error {
	l := newLayout(layoutInput{cfg: &c, snap: snap})
	var errs []error
	for _, text := range l.misfits.Strings() {
		errs = append(errs, errors.New(text))
	}
	return errors.Join(errs...)
}

// maxIDs limits the device IDs of a resource. The kubelet drops a plugin whose list is larger than the default limit of a gRPC client, 4
// MiB (k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go). An ID of a shared device takes at most 128 bytes
// there if its GPU has at most ten NUMA nodes.
const maxIDs = 32768

// checkListSize reports whether a resource's devices have at most maxIDs IDs. Otherwise it adds errors that name the entries with too many
// units, and a number or size of units that fits.
func (l *layout) checkListSize(devices []candidate) bool {
	var whole, shared, units int
	var memory uint64
	counts := make(map[*shareEntry]int)
	for i := range devices {
		if c := &devices[i]; c.share == nil {
			whole++
		} else {
			shared, units, memory = shared+1, units+c.share.units, memory+c.device().Memory
			counts[c.entry]++
		}
	}
	if whole+units <= maxIDs {
		return true
	}
	const must = "the kubelet receives at most %d device IDs of %s"
	name := devices[0].resource
	if e := devices[0].entry; e != nil && e.kind == SharingMemory { // then all devices are
		smallest := (memory + maxIDs*mebibyte - 1) / (maxIDs * mebibyte)
		l.misfits.Addf("", "plugin.%s.unit: expected at least %dMi, got %dMi: "+must, e.key, smallest, e.unit/mebibyte, maxIDs, name)
		return false
	}
	largest := max(0, maxIDs-whole) / shared
	byKind := func(a, b *shareEntry) int { return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.index, b.index)) }
	for _, e := range slices.SortedFunc(maps.Keys(counts), byKind) {
		if e.replicas > largest {
			l.misfits.Addf("", "plugin.%s.replicas: expected at most %d, found %d for each of %d devices: "+must,
				e.key, largest, e.replicas, counts[e], maxIDs, name)
		}
	}
	return false
}
