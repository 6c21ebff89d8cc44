package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// SharingConfig is the `sharing` section.
type SharingConfig struct {
	TimeSlicing TimeSlicing `yaml:"timeSlicing"`
}

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

// maxReplicas keeps the list of a node with many GPUs well below the 4 MiB limit of a message to the kubelet.
const maxReplicas = 1000

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

// replicasOf returns the resource of a device after sharing and the number of its replicas, 0 if it is not shared.
func (t *TimeSlicing) replicasOf(c *candidate, names *nameCache) (resource string, replicas int) {
	name := c.resource
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
