package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Config is the `plugin` section of config.yaml.
type Config struct {
	Enabled    bool   `yaml:"enabled"`    // false: nothing is registered, because another device plugin hands the GPUs out
	Resource   string `yaml:"resource"`   // the extended resource that pods ask for, such as nvidia.com/gpu
	KubeletDir string `yaml:"kubeletDir"` // device-plugins/kubelet.sock and pod-resources/kubelet.sock lie below it

	MIGStrategy string         `yaml:"migStrategy"` // none, single, mixed
	Resources   []ResourceRule `yaml:"resources"`   // names by model and profile, the first that matches; Resource for the rest
	Include     []string       `yaml:"include"`     // selectors of the devices to hand out; empty: all
	Exclude     []string       `yaml:"exclude"`     // selectors of devices never to hand out; they win over Include
	Sharing     SharingConfig  `yaml:"sharing"`

	DeviceList          []string  `yaml:"deviceList"`          // how a container is told of its devices; see Allocate
	DeviceID            string    `yaml:"deviceID"`            // how a device is named there: uuid, index
	PassDeviceSpecs     bool      `yaml:"passDeviceSpecs"`     // list the device nodes too
	DriverRoot          string    `yaml:"driverRoot"`          // where the driver is installed, on the host
	ContainerDriverRoot string    `yaml:"containerDriverRoot"` // where the agent sees it; empty: at DriverRoot
	DevRoot             string    `yaml:"devRoot"`             // what /dev with the device nodes is below, on the host; empty: DriverRoot
	CDI                 CDIConfig `yaml:"cdi"`

	NVIDIAConfig string `yaml:"nvidiaConfig"` // a configuration file of NVIDIA's device plugin; what it says wins

	AllocationPolicy string `yaml:"allocationPolicy"` // which GPU a shared device or a MIG device comes from: distributed, packed
	OnStop           string `yaml:"onStop"`           // what the kubelet has of us when the agent ends: keep, withdraw
}

// The policies of allocation. Whole GPUs are chosen by how they are connected instead.
const (
	AllocationDistributed = "distributed" // from the GPU that is used least
	AllocationPacked      = "packed"      // from the GPU that is used most
)

// What is left with the kubelet when the agent ends.
const (
	OnStopKeep     = "keep"     // the devices, without any to give, for the kubelet's grace of five minutes
	OnStopWithdraw = "withdraw" // nothing: an empty list is sent first
)

// DefaultConfig returns the section as it is when config.yaml says nothing.
func DefaultConfig() Config {
	return Config{
		Enabled: true, Resource: "nvidia.com/gpu", KubeletDir: "/var/lib/kubelet",
		MIGStrategy: MIGNone, Resources: []ResourceRule{}, Include: []string{}, Exclude: []string{},
		Sharing:    SharingConfig{TimeSlicing: TimeSlicing{FailRequestsGreaterThanOne: true, Resources: []SharedResource{}}},
		DeviceList: []string{ListEnv}, DeviceID: DeviceIDUUID, DriverRoot: "/",
		CDI:              CDIConfig{Dir: "/var/run/cdi", AnnotationPrefix: "cdi.k8s.io/"},
		AllocationPolicy: AllocationDistributed, OnStop: OnStopKeep,
	}
}

// Validate returns every error in the section, joined. Each starts with its key.
func (c Config) Validate() error {
	return errors.Join(validateName("resource", c.Resource), c.validateKubeletDir(),
		oneOf("migStrategy", c.MIGStrategy, MIGNone, MIGSingle, MIGMixed), c.validateRules(),
		validateSelectors("include", c.Include), validateSelectors("exclude", c.Exclude), c.validateSharing(),
		c.validateAllocate(), c.CDI.validate(),
		oneOf("allocationPolicy", c.AllocationPolicy, AllocationDistributed, AllocationPacked),
		oneOf("onStop", c.OnStop, OnStopKeep, OnStopWithdraw))
}

// oneOf returns an error unless value is one of the words that the key takes.
func oneOf(key, value string, words ...string) error {
	if slices.Contains(words, value) {
		return nil
	}
	return fmt.Errorf("%s: %q is not known; use one of %s", key, value, strings.Join(words, ", "))
}

func (c Config) validateKubeletDir() error {
	if !filepath.IsAbs(c.KubeletDir) {
		return fmt.Errorf("kubeletDir: %q is not an absolute path; use the kubelet's --root-dir, such as /var/lib/kubelet", c.KubeletDir)
	}
	for _, name := range c.names() {
		if path := c.socketPath(name); unixsock.PathLen(path) > unixsock.MaxPath {
			return fmt.Errorf("kubeletDir: the path of the socket %s is %d bytes too long for a unix socket; use a shorter directory",
				path, unixsock.PathLen(path)-unixsock.MaxPath)
		}
	}
	return nil
}

// validateAllocate checks what containers are given.
func (c Config) validateAllocate() error {
	var errs []error
	if len(c.DeviceList) == 0 {
		errs = append(errs, fmt.Errorf("deviceList: is empty; use one or more of %s", strings.Join(lists(), ", ")))
	}
	for i, how := range c.DeviceList {
		errs = append(errs, oneOf(fmt.Sprintf("deviceList[%d]", i), how, lists()...))
		if slices.Index(c.DeviceList, how) < i {
			errs = append(errs, fmt.Errorf("deviceList[%d]: %q is there twice", i, how))
		}
	}
	errs = append(errs, oneOf("deviceID", c.DeviceID, DeviceIDUUID, DeviceIDIndex), absolute("driverRoot", c.DriverRoot))
	if c.ContainerDriverRoot != "" {
		errs = append(errs, absolute("containerDriverRoot", c.ContainerDriverRoot))
	}
	if c.DevRoot != "" {
		errs = append(errs, absolute("devRoot", c.DevRoot))
	}
	return errors.Join(errs...)
}

func absolute(key, path string) error {
	if filepath.IsAbs(path) {
		return nil
	}
	return fmt.Errorf("%s: %q is not an absolute path", key, path)
}

// driverRootHere is the driver root as the agent sees it.
func (c Config) driverRootHere() string { return cmp.Or(c.ContainerDriverRoot, c.DriverRoot, "/") }

// devRoot is the directory above /dev, on the host. By default it is the driver's root, as in NVIDIA's plugin.
func (c Config) devRoot() string { return cmp.Or(c.DevRoot, c.DriverRoot, "/") }

// socketDir is where device plugins meet the kubelet.
func (c Config) socketDir() string { return filepath.Join(c.KubeletDir, "device-plugins") }

// maxSocketStem bounds the part of a socket's name that comes from the resource, so that a long resource
// is not a reason to move the kubelet's directory.
const maxSocketStem = 40

// socketPath is where a resource's own socket lies. No two resources share one: a domain has no
// underscore, so the first underscore is always the slash, and what is cut off is replaced by a hash.
func (c Config) socketPath(resource string) string {
	safe := strings.Map(func(r rune) rune {
		switch {
		case r == '-', r == '.', r >= '0' && r <= '9', r >= 'A' && r <= 'Z', r >= 'a' && r <= 'z':
			return r
		}
		return '_'
	}, resource)
	if len(safe) > maxSocketStem {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(resource)) // cannot fail
		safe = fmt.Sprintf("%s-%08x", safe[:maxSocketStem-9], hash.Sum32())
	}
	return filepath.Join(c.socketDir(), "gpu-node-agent-"+safe+".sock")
}
