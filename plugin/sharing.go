package plugin

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
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

// maxListBytes is the largest list that the kubelet receives: the default limit of a gRPC client, which the kubelet keeps
// (k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go). It drops a plugin that sends more.
const maxListBytes = 4 << 20

// sharedKey returns the key of an entry.
func sharedKey(i int) string { return fmt.Sprintf("sharing.timeSlicing.resources[%d]", i) }

func (c Config) validateSharing() error {
	var errs []error
	bases := []string{c.Resource}
	for _, rule := range c.Resources {
		bases = append(bases, rule.Resource)
	}
	complete := make(map[string]int) // by resource: the entry for all of its devices
	for i, r := range c.Sharing.TimeSlicing.Resources {
		key := sharedKey(i)
		switch before, done := complete[r.Name]; {
		case done:
			errs = append(errs, fmt.Errorf("%s.name: %s already applies to all devices of %s; set its devices, or remove one of the two",
				key, sharedKey(before), r.Name))
		case len(r.Devices) == 0:
			complete[r.Name] = i
		}
		if !slices.Contains(bases, r.Name) && !strings.HasPrefix(r.Name, c.migPrefix()) {
			errs = append(errs, fmt.Errorf("%s.name: unknown resource %q; use %s or %s with a MIG profile",
				key, r.Name, strings.Join(bases, ", "), c.migPrefix()))
		}
		if r.Replicas < 2 || r.Replicas > maxReplicas {
			got := strconv.Itoa(r.Replicas)
			if r.Replicas == 0 {
				got = "0 or no value"
			}
			errs = append(errs, fmt.Errorf("%s.replicas: expected 2 to %d, got %s", key, maxReplicas, got))
		}
		errs = append(errs, validateSelectors(key+".devices", r.Devices))
		if r.Rename != "" {
			errs = append(errs, validateName(key+".rename", r.Rename))
		} else if c.Sharing.TimeSlicing.RenameByDefault {
			if err := validateName(key+".name", r.Name+sharedSuffix); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// share sets how a device is shared and its resource after sharing.
func (c *candidate) share(t *TimeSlicing, names *nameCache) {
	for i := range t.Resources {
		r := &t.Resources[i]
		if r.Name != c.resource || len(r.Devices) > 0 && !selectsAny(r.Devices, c) {
			continue
		}
		switch {
		case r.Rename != "":
			c.resource = r.Rename
		case t.RenameByDefault:
			c.resource = names.get(c.resource, func(base string) string { return base + sharedSuffix })
		}
		c.shared = r
		return
	}
}

// CheckListSizes returns an error if the kubelet could not receive the list of a resource with the devices of a snapshot.
func (c Config) CheckListSizes(snap *health.Snapshot) error {
	return errors.Join(newLayout(layoutInput{cfg: &c, snap: snap}).tooLarge...)
}

// checkListSize returns an error if the list of a resource's devices exceeds maxListBytes. The error names the entries with
// too many replicas and the largest number that fits.
func (t *TimeSlicing) checkListSize(devices []candidate) error {
	if listBytes(devices, maxReplicas) <= maxListBytes {
		return nil
	}
	// Of n replicas or fewer, as configured. The kubelet must be able to receive the list in any state of health.
	largest := sort.Search(maxReplicas, func(n int) bool { return listBytes(devices, n+1) > maxListBytes })
	var errs []string
	for i := range t.Resources {
		r := &t.Resources[i]
		n := 0
		for _, c := range devices {
			if c.shared == r {
				n++
			}
		}
		if n > 0 && r.Replicas > largest {
			errs = append(errs, fmt.Sprintf("plugin.%s.replicas: expected at most %d, found %d for each of %d devices: the list of %s must fit the kubelet's limit of %d MiB",
				sharedKey(i), largest, r.Replicas, n, devices[0].resource, maxListBytes>>20))
		}
	}
	return errors.New(strings.Join(errs, "; "))
}

// listBytes returns the size of a ListAndWatch response with all IDs of these devices, of each at most so many replicas. All
// are unhealthy, because that takes more bytes than healthy.
func listBytes(devices []candidate, replicas int) (size int) {
	for _, c := range devices {
		d := &pluginapi.Device{Health: pluginapi.Unhealthy, Topology: numaTopology(c.state.Device.NUMA)}
		list := &pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{d}}
		if d.ID = string(c.state.Device.ID); c.shared == nil {
			size += proto.Size(list)
			continue
		}
		// The IDs of the replicas from 10 to 99 are equally long, and so on.
		for from, next := 0, 10; from < min(replicas, c.shared.Replicas); from, next = next, 10*next {
			d.ID = string(c.state.Device.ID) + replicaSep + strconv.Itoa(from)
			size += proto.Size(list) * (min(next, replicas, c.shared.Replicas) - from)
		}
	}
	return size
}
