package plugin

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// SharingConfig is the `sharing` section. A device is shared in one way only.
type SharingConfig struct {
	TimeSlicing TimeSlicing   `yaml:"timeSlicing"`
	MPS         MPS           `yaml:"mps"`
	Memory      MemorySharing `yaml:"memory"`
}

// MPS lets the processes of several containers run on one device at the same time, each with a part of its SMs and memory.
type MPS struct {
	RenameByDefault bool `yaml:"renameByDefault"` // the resource of shared devices is NAME.shared
	// FailRequestsGreaterThanOne refuses containers that request more than one share. If it is false, a container's limits are those
	// of all its shares together, and its environment alone keeps it within them.
	FailRequestsGreaterThanOne bool          `yaml:"failRequestsGreaterThanOne"`
	Resources                  []MPSResource `yaml:"resources"` // the first that matches a device applies
	Root                       string        `yaml:"root"`      // directory that the agent, mps-daemon and containers share
	Control                    string        `yaml:"control"`   // the control program
}

// MPSResource creates shares of the devices of a resource, which MPS serves.
type MPSResource struct {
	Name                   string   `yaml:"name"`                   // the resource before sharing
	Replicas               int      `yaml:"replicas"`               // of each device
	Devices                []string `yaml:"devices"`                // selectors of devices; empty: all
	Rename                 string   `yaml:"rename"`                 // the resource after sharing; empty: see RenameByDefault
	ActiveThreadPercentage int      `yaml:"activeThreadPercentage"` // of the SMs, for one share; 0: an equal part
	PinnedMemory           string   `yaml:"pinnedMemory"`           // for one share, such as 8Gi; empty: an equal part
}

// MemorySharing offers the memory of devices in units, so that several containers share a device by memory.
type MemorySharing struct {
	Resource           string   `yaml:"resource"`           // such as nvidia.com/gpu-memory; empty: off
	Unit               string   `yaml:"unit"`               // memory of one unit, such as 1Gi
	Devices            []string `yaml:"devices"`            // selectors of devices; empty: all
	Reserve            string   `yaml:"reserve"`            // memory of each device that is not offered, besides what the driver reserves
	Enforcement        string   `yaml:"enforcement"`        // auto, driver, mps, none
	RequireEnforcement bool     `yaml:"requireEnforcement"` // offer nothing while nothing enforces the limits
}

// The values of MemorySharing.Enforcement.
const (
	EnforceAuto   = "auto" // driver if it can, else none
	EnforceDriver = "driver"
	EnforceMPS    = "mps" // MPS serves the devices
	EnforceNone   = "none"
)

const memoryResourceExample = "nvidia.com/gpu-memory"

// GPUShareResource is the resource of gpushare. Containers with it get gpushare's environment.
const GPUShareResource = "aliyun.com/gpu-mem"

// TimeSlicing lets several containers take turns on one device. It does not isolate them: each can use the whole memory,
// and a fault of one can end all.
type TimeSlicing struct {
	RenameByDefault bool `yaml:"renameByDefault"` // the resource of shared devices is NAME.shared
	// FailRequestsGreaterThanOne refuses containers that request more than one replica: a second one may be of the same
	// device and gives no larger share of it. NVIDIA's plugin defaults to false.
	FailRequestsGreaterThanOne bool             `yaml:"failRequestsGreaterThanOne"`
	Resources                  []SharedResource `yaml:"resources"` // the first that matches a device applies
}

// SharedResource creates replicas of the devices of a resource.
type SharedResource struct {
	Name     string   `yaml:"name"`     // the resource before sharing
	Replicas int      `yaml:"replicas"` // of each device
	Devices  []string `yaml:"devices"`  // selectors of devices; empty: all
	Rename   string   `yaml:"rename"`   // the resource after sharing; empty: see RenameByDefault
}

// sharedSuffix is appended by RenameByDefault, as in NVIDIA's plugin.
const sharedSuffix = ".shared"

// maxReplicas is more than a device can serve. A node with many devices fits fewer, see checkListSize.
const maxReplicas = 1000

// The most clients that an MPS server serves, since compute capability 7.0 (Volta) and before
// (https://docs.nvidia.com/deploy/mps).
const (
	maxMPSClients          = 48
	maxMPSClientsPreVolta  = 16
	firstVoltaMajorVersion = 7
)

// mebibyte is the granularity of memory limits: MPS and the container toolkit count in it.
const mebibyte = 1 << 20

// shareEntry is an entry of any kind of sharing.
type shareEntry struct {
	kind            Sharing
	key             string   // in the section
	index           int      // in the list of its kind
	name            string   // the resource before sharing; empty for all
	devices         []string // selectors; empty: all
	rename          string   // the resource after sharing; empty: see renameByDefault
	renameByDefault bool
	single          bool   // failRequestsGreaterThanOne
	replicas        int    // 0 for memory
	threads         int    // percent; 0: an equal part
	pinned          uint64 // bytes; 0: an equal part
	unit, reserve   uint64 // bytes, for memory
	byMPS           bool   // MPS serves the devices
}

// entries returns the entries of all kinds. Sizes that Validate refuses are 0.
func (s *SharingConfig) entries() []shareEntry {
	all := make([]shareEntry, 0, len(s.TimeSlicing.Resources)+len(s.MPS.Resources)+1)
	for i, r := range s.TimeSlicing.Resources {
		all = append(all, shareEntry{
			kind: SharingTimeSlicing, key: listKey(SharingTimeSlicing, i), index: i, name: r.Name, devices: r.Devices, rename: r.Rename,
			replicas:        r.Replicas,
			renameByDefault: s.TimeSlicing.RenameByDefault, single: s.TimeSlicing.FailRequestsGreaterThanOne,
		})
	}
	for i, r := range s.MPS.Resources {
		pinned, _ := parseSize(r.PinnedMemory)
		all = append(all, shareEntry{
			kind: SharingMPS, key: listKey(SharingMPS, i), index: i, name: r.Name, devices: r.Devices, rename: r.Rename, replicas: r.Replicas,
			renameByDefault: s.MPS.RenameByDefault, single: s.MPS.FailRequestsGreaterThanOne,
			threads: r.ActiveThreadPercentage, pinned: pinned, byMPS: true,
		})
	}
	if m := &s.Memory; m.Resource != "" {
		unit, _ := parseSize(m.Unit)
		reserve, _ := parseSize(m.Reserve)
		all = append(all, shareEntry{
			kind: SharingMemory, key: "sharing.memory", devices: m.Devices, rename: m.Resource, unit: unit, reserve: reserve,
			byMPS: m.Enforcement == EnforceMPS,
		})
	}
	return all
}

// selectorKey returns the key of the entry's selectors without its position in a list. It does not allocate.
func (e *shareEntry) selectorKey() string {
	switch e.kind {
	case SharingTimeSlicing:
		return "plugin.sharing.timeSlicing.resources.devices"
	case SharingMPS:
		return "plugin.sharing.mps.resources.devices"
	}
	return "plugin.sharing.memory.devices"
}

// listKey returns the key of an entry of a list.
func listKey(kind Sharing, index int) string {
	return fmt.Sprintf("sharing.%s.resources[%d]", kind, index)
}

// Enabled reports whether any device may be shared.
func (s *SharingConfig) Enabled() bool {
	return len(s.TimeSlicing.Resources) > 0 || len(s.MPS.Resources) > 0 || s.Memory.Resource != ""
}

// usesDriver reports whether the driver's limits are to keep containers within their memory.
func (m *MemorySharing) usesDriver() bool {
	return m.Resource != "" && (m.Enforcement == EnforceDriver || m.Enforcement == EnforceAuto)
}

// parseSize parses a size of memory such as 8Gi.
func parseSize(text string) (uint64, error) {
	q, err := resource.ParseQuantity(text)
	n := q.Value() // rounded up; the largest number if it is larger
	switch {
	case err != nil:
		return 0, errors.New("expected a size such as 8Gi")
	case n < 0 || q.CmpInt64(n) != 0:
		return 0, errors.New("expected a size in whole bytes such as 8Gi")
	}
	return uint64(n), nil
}

// validateSize returns an error unless a limit of memory has the form that MPS and the container toolkit accept.
func validateSize(key, text string) error {
	n, err := parseSize(text)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w, got %q", key, err, text)
	case n < mebibyte:
		return fmt.Errorf("%s: expected at least 1Mi, got %q", key, text)
	case n%mebibyte != 0:
		return fmt.Errorf("%s: expected a multiple of 1Mi such as %dMi, got %q", key, n/mebibyte, text)
	}
	return nil
}

func (c Config) validateSharing() error {
	var errs []error
	bases := []string{c.Resource}
	for _, rule := range c.Resources {
		bases = append(bases, rule.Resource)
	}
	entries := c.Sharing.entries()
	for i := range entries {
		e := &entries[i]
		key := e.key
		errs = append(errs, e.validateOverlap(entries[:i]), validateSelectors(key+".devices", e.devices))
		if e.kind == SharingMemory {
			continue
		}
		if !slices.Contains(bases, e.name) && !strings.HasPrefix(e.name, c.migPrefix()) {
			errs = append(errs, fmt.Errorf("%s.name: unknown resource %q; use %s or %s with a MIG profile",
				key, e.name, strings.Join(bases, ", "), c.migPrefix()))
		}
		most := maxReplicas
		if e.kind == SharingMPS {
			most = maxMPSClients
		}
		if e.replicas < 2 || e.replicas > most {
			got := strconv.Itoa(e.replicas)
			if e.replicas == 0 {
				got = "0 or no value"
			}
			errs = append(errs, fmt.Errorf("%s.replicas: expected 2 to %d, got %s", key, most, got))
		}
		nameKey, name := key+".name", e.name
		switch {
		case e.rename != "":
			nameKey, name = key+".rename", e.rename
		case e.renameByDefault:
			name += sharedSuffix
		}
		if name != e.name {
			errs = append(errs, validateName(nameKey, name))
		}
		if e.byMPS {
			errs = append(errs, validateMPSName(nameKey, name))
		}
	}
	for i, r := range c.Sharing.MPS.Resources {
		key := entries[len(c.Sharing.TimeSlicing.Resources)+i].key
		if r.ActiveThreadPercentage < 0 || r.ActiveThreadPercentage > 100 {
			errs = append(errs, fmt.Errorf("%s.activeThreadPercentage: expected 1 to 100, or 0 for an equal part, got %d", key,
				r.ActiveThreadPercentage))
		}
		if r.PinnedMemory != "" {
			errs = append(errs, validateSize(key+".pinnedMemory", r.PinnedMemory))
		}
	}
	return errors.Join(append(errs, c.Sharing.MPS.validate(), c.validateMemorySharing())...)
}

// validateOverlap returns an error if an entry selects devices that earlier entries share, whatever the devices of the node are.
func (e *shareEntry) validateOverlap(earlier []shareEntry) error {
	for i := range earlier {
		f := &earlier[i]
		switch {
		case e.kind != f.kind:
			if text := e.overlap(f); text != "" {
				return fmt.Errorf("%s.devices: %s; a device is shared in one way only", e.key, text)
			}
		case e.name == f.name && len(f.devices) == 0:
			return fmt.Errorf("%s.name: %s already applies to all devices of %s; set its devices, or remove one of the two",
				e.key, f.key, e.name)
		}
	}
	return nil
}

// overlap describes which devices an entry certainly has in common with f, and how to end that; empty if there are none. Which devices
// different selectors have in common depends on the node.
func (e *shareEntry) overlap(f *shareEntry) string {
	if e.name != "" && e.name != f.name { // the name is empty for memory: devices of any resource
		return ""
	}
	for _, s := range e.devices {
		if slices.Contains(f.devices, s) {
			return fmt.Sprintf("%q is also in %s.devices; remove it from one of the two", s, f.key)
		}
	}
	switch {
	case allDevices(e.devices):
		return fmt.Sprintf("selects all devices, also those of %s; list other devices", f.key)
	case e.name != "" && allDevices(f.devices):
		return fmt.Sprintf("%s shares all devices of %s; set %s.devices", f.key, f.name, f.key)
	}
	return ""
}

// allDevices reports whether selectors select every device.
func allDevices(selectors []string) bool {
	return len(selectors) == 0 || slices.ContainsFunc(selectors, func(s string) bool { return strings.EqualFold(s, selectAll) })
}

// controlSocket is the file name of a daemon's socket in its pipe directory.
const controlSocket = "control"

func (m *MPS) validate() error {
	var errs []error
	// The longest path of a socket below the root belongs to the daemon with the longest ID.
	control := filepath.Join(mps.Root(m.Root).PipeDir(health.DeviceID("MIG-"+strings.Repeat("0", 36))), controlSocket)
	switch {
	case !filepath.IsAbs(m.Root):
		errs = append(errs, fmt.Errorf("sharing.mps.root: expected an absolute path such as /run/nvidia/mps, got %q", m.Root))
	case len(control) > unixsock.MaxPath:
		errs = append(errs, fmt.Errorf(
			"sharing.mps.root: the path of the socket %s is %d bytes too long for a unix socket; use a shorter directory",
			control, len(control)-unixsock.MaxPath))
	}
	// A relative path would name a file of the working directory, which runs as root.
	if m.Control == "" || strings.Contains(m.Control, "/") && !filepath.IsAbs(m.Control) {
		errs = append(errs, fmt.Errorf(
			"sharing.mps.control: expected an absolute path, or a name in PATH such as nvidia-cuda-mps-control, got %q", m.Control))
	}
	return errors.Join(errs...)
}

// validateMPSName returns an error if the path of a daemon's socket in a container is too long.
func validateMPSName(key, resource string) error {
	path := filepath.Join(containerPipeDir(resource), controlSocket)
	if n := len(path) - unixsock.MaxPath; n > 0 {
		return fmt.Errorf("%s: %q is %d characters too long for MPS, whose socket in a container is %s; use a shorter name", key, resource, n,
			path)
	}
	return nil
}

// validateDRASharing returns an error for sharing that claims ask for themselves.
func (c Config) validateDRASharing() error {
	if c.API != APIDRA {
		return nil
	}
	var errs []error
	if len(c.Sharing.TimeSlicing.Resources) > 0 {
		errs = append(errs, errors.New(
			"sharing.timeSlicing.resources: replicas do not exist with api dra; remove it, and let pods share a claim, "+
				"or set sharing.memory.resource"))
	}
	if len(c.Sharing.MPS.Resources) > 0 {
		errs = append(errs, errors.New(
			"sharing.mps.resources: resources do not exist with api dra; remove it, and ask for MPS in the GpuConfig of a claim or a DeviceClass"))
	}
	return errors.Join(errs...)
}

// Notes warn about valid keys of the section that have no effect, or one that is easily overlooked. Each starts with its key.
func (s *SharingConfig) Notes() (notes []string) {
	if len(s.MPS.Resources) > 0 && !s.MPS.FailRequestsGreaterThanOne {
		notes = append(notes, "sharing.mps.failRequestsGreaterThanOne: is false, so only its environment keeps a container within its shares; "+
			"the daemons limit no client")
	}
	if s.Memory.Resource == "" && len(s.Memory.Devices) > 0 {
		notes = append(notes, "sharing.memory.devices: has no effect without sharing.memory.resource")
	}
	return notes
}

// validateMemorySharing checks the keys also while no resource is set, so that they are right when it is.
func (c Config) validateMemorySharing() error {
	const key = "sharing.memory."
	m := &c.Sharing.Memory
	errs := []error{
		validateSize(key+"unit", m.Unit),
		oneOf(key+"enforcement", m.Enforcement, EnforceAuto, EnforceDriver, EnforceMPS, EnforceNone),
	}
	if _, err := parseSize(m.Reserve); err != nil {
		errs = append(errs, fmt.Errorf("%sreserve: %w, or 0, got %q", key, err, m.Reserve))
	}
	if m.RequireEnforcement && m.Enforcement == EnforceNone {
		errs = append(errs, fmt.Errorf(
			"%srequireEnforcement: is true, and %senforcement is none, so nothing would be offered; use auto, driver or mps", key, key))
	}
	if m.Resource == "" {
		return errors.Join(append(errs, validateSelectors(key+"devices", m.Devices))...)
	}
	errs = append(errs, validateNameLike(key+"resource", m.Resource, memoryResourceExample))
	if m.Enforcement == EnforceMPS {
		errs = append(errs, validateMPSName(key+"resource", m.Resource))
	}
	others := c
	others.Sharing.Memory.Resource = ""
	if slices.Contains(others.resourceNames(), m.Resource) || strings.HasPrefix(m.Resource, c.migPrefix()) {
		errs = append(errs, fmt.Errorf(
			"%sresource: %s is also the resource of devices that are not shared by memory; use another name such as %s",
			key, m.Resource, memoryResourceExample))
	}
	return errors.Join(errs...)
}
