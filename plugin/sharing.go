package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// SharingConfig is the `sharing` section.
type SharingConfig struct {
	TimeSlicing TimeSlicing `yaml:"timeSlicing"`
}

// TimeSlicing hands one device to several containers, which take turns on it. Nothing is kept apart: each
// sees the whole memory, and a fault of one can end all.
type TimeSlicing struct {
	RenameByDefault bool `yaml:"renameByDefault"` // shared devices are called NAME.shared
	// FailRequestsGreaterThanOne refuses a container that asks for more than one replica. A second one may be
	// of the same device, and gives no more of it. NVIDIA's plugin has it false by default.
	FailRequestsGreaterThanOne bool             `yaml:"failRequestsGreaterThanOne"`
	Resources                  []SharedResource `yaml:"resources"` // for a device the first that fits it counts
}

// SharedResource makes replicas of the devices of a resource.
type SharedResource struct {
	Name     string   `yaml:"name"`     // the resource before sharing
	Replicas int      `yaml:"replicas"` // of each device
	Devices  []string `yaml:"devices"`  // selectors: only these; empty: all
	Rename   string   `yaml:"rename"`   // the resource after sharing; empty: as RenameByDefault has it
}

// sharedSuffix is what RenameByDefault adds, as in NVIDIA's plugin.
const sharedSuffix = ".shared"

// maxReplicas keeps the list of a node with many GPUs well below the 4 MiB that the kubelet's gRPC client
// takes in one message.
const maxReplicas = 1000

// sharedKey is the key of an entry.
func sharedKey(i int) string { return fmt.Sprintf("sharing.timeSlicing.resources[%d]", i) }

func (c Config) validateSharing() error {
	var errs []error
	bases := []string{c.Resource}
	for _, rule := range c.Resources {
		bases = append(bases, rule.Resource)
	}
	taken := make(map[string]int) // resources of which an entry takes every device
	for i, r := range c.Sharing.TimeSlicing.Resources {
		key := sharedKey(i)
		switch before, all := taken[r.Name]; {
		case all && len(r.Devices) == 0:
			errs = append(errs, fmt.Errorf("%s.name: %s is there twice; name the devices of each, or take one out", key, r.Name))
		case all:
			errs = append(errs, fmt.Errorf("%s.name: %s takes all devices of %s; put this one before it", key, sharedKey(before), r.Name))
		case len(r.Devices) == 0:
			taken[r.Name] = i
		}
		if !slices.Contains(bases, r.Name) && !strings.HasPrefix(r.Name, c.migPrefix()) {
			errs = append(errs, fmt.Errorf("%s.name: no device is called %q; use %s or %s with a MIG profile",
				key, r.Name, strings.Join(bases, ", "), c.migPrefix()))
		}
		if r.Replicas < 2 || r.Replicas > maxReplicas {
			errs = append(errs, fmt.Errorf("%s.replicas: %d is out of range; use 2 to %d", key, r.Replicas, maxReplicas))
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

// share returns what a device is called and in how many replicas, which is 0 if it is not shared.
func (t *TimeSlicing) share(name string, c *candidate, names *memo) (shared string, replicas int) {
	for i := range t.Resources {
		r := &t.Resources[i]
		if r.Name != name || len(r.Devices) > 0 && !selectsAny(r.Devices, c) {
			continue
		}
		switch {
		case r.Rename != "":
			name = r.Rename
		case t.RenameByDefault:
			name = names.get(name, func(base string) string { return base + sharedSuffix })
		}
		return name, r.Replicas
	}
	return name, 0
}
