// Package processes measures which containers use how much of each device: it lists the devices' processes and finds the pod
// and the container of each.
package processes

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
)

// Config is the `metrics.processes` section.
type Config struct {
	Enabled bool   `yaml:"enabled"`
	Proc    string `yaml:"proc"`    // procfs of the host
	PodLogs string `yaml:"podLogs"` // the kubelet's directory of container logs; "" for none
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config { return Config{Proc: "/proc", PodLogs: "/var/log/pods"} }

// Validate returns every invalid value with its key below `metrics.processes`.
func (c Config) Validate() []error {
	var errs []error
	if !filepath.IsAbs(c.Proc) {
		errs = append(errs, fmt.Errorf("proc: expected an absolute path, such as /proc, got %q", c.Proc))
	}
	if c.PodLogs != "" && !filepath.IsAbs(c.PodLogs) {
		errs = append(errs, fmt.Errorf("podLogs: expected an absolute path, or \"\" for none, got %q", c.PodLogs))
	}
	return errs
}

// Container is a container of a pod; the zero Container stands for processes of no pod.
type Container containers.Container

// Usage is what the processes of one container use of one device.
type Usage struct {
	Device    health.DeviceID
	Container Container
	Processes int

	// What the driver does not report for every process of the container is absent.
	Memory, SM       float64 // framebuffer in bytes; share of the time in which kernels ran, 0 to 1
	HasMemory, HasSM bool
}

// Other is the name of the container that stands for those above the limit of containers per device.
const Other = "other"

// Snapshot is the newest measurement. It is never modified once stored.
type Snapshot struct {
	driver.ProcessReading                // each process once per device; Measured is sorted
	Usage                 []Usage        // by device, then by container, Other last; a device of Measured without an entry has no process
	Containers            []Container    // of each of Processes
	WithoutPod            map[Reason]int // number of processes of no pod
	Warning               string         // why processes may lack their pod; empty if they do not
	Err                   string         // why the newest measurement failed; all else is empty then
}

// Of returns the usage of a device; measured is false if its processes are unknown. s may be nil.
func (s *Snapshot) Of(id health.DeviceID) (usage []Usage, measured bool) {
	if s == nil {
		return nil, false
	}
	if _, measured = slices.BinarySearch(s.Measured, id); !measured {
		return nil, false
	}
	start, _ := slices.BinarySearchFunc(s.Usage, id, func(u Usage, id health.DeviceID) int { return cmp.Compare(u.Device, id) })
	end := start
	for end < len(s.Usage) && s.Usage[end].Device == id {
		end++
	}
	return s.Usage[start:end], true
}

// ContainerOf returns the container of a process, the zero Container if it is unknown. s may be nil.
func (s *Snapshot) ContainerOf(pid int) Container {
	if s != nil {
		for i, p := range s.Processes {
			if p.PID == pid && i < len(s.Containers) && s.Containers[i] != (Container{}) {
				return s.Containers[i]
			}
		}
	}
	return Container{}
}

// Open gives a lister of processes and a function that releases what it uses.
type Open func() (list driver.ProcessLister, release func(), err error)
