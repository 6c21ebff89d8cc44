package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// Config is the `plugin` section of config.yaml.
type Config struct {
	Enabled    bool   `yaml:"enabled"`    // false: nothing is registered, because another device plugin serves the GPUs
	API        string `yaml:"api"`        // how pods get devices: devicePlugin, dra
	Resource   string `yaml:"resource"`   // the extended resource that pods request, such as nvidia.com/gpu
	KubeletDir string `yaml:"kubeletDir"` // device-plugins/kubelet.sock and pod-resources/kubelet.sock are below it

	MIGStrategy string         `yaml:"migStrategy"` // none, single, mixed
	Resources   []ResourceRule `yaml:"resources"`   // resources by model and profile, the first match applies; Resource for the rest
	Include     []string       `yaml:"include"`     // selectors of the devices to offer; empty: all
	Exclude     []string       `yaml:"exclude"`     // selectors of devices not to offer; they override Include
	Sharing     SharingConfig  `yaml:"sharing"`

	DeviceList          []string   `yaml:"deviceList"`          // how a container learns its devices, see the List constants
	DeviceID            string     `yaml:"deviceID"`            // how a device is named there: uuid, index
	PassDeviceSpecs     bool       `yaml:"passDeviceSpecs"`     // also list the device nodes
	DriverRoot          string     `yaml:"driverRoot"`          // where the driver is installed on the host
	ContainerDriverRoot string     `yaml:"containerDriverRoot"` // the same directory in the agent's view; empty: DriverRoot
	DevRoot             string     `yaml:"devRoot"`             // the parent of /dev on the host; empty: DriverRoot
	CDI                 cdi.Config `yaml:"cdi"`

	DRA DRAConfig `yaml:"dra"`

	NVIDIAConfig string `yaml:"nvidiaConfig"` // a configuration file of NVIDIA's device plugin; it overrides this section

	AllocationPolicy string `yaml:"allocationPolicy"` // which GPU a replica or a MIG device is allocated from: distributed, packed
	OnStop           string `yaml:"onStop"`           // what the kubelet keeps when the agent ends: keep, withdraw
}

// The values of API. A node serves its devices by one of them.
const (
	APIDevicePlugin = "devicePlugin" // as extended resources, by the kubelet's device plugin API
	APIDRA          = "dra"          // by dynamic resource allocation: ResourceSlices and ResourceClaims
)

// DRAConfig is the `dra` section, for API dra.
type DRAConfig struct {
	DriverName string   `yaml:"driverName"` // in DeviceClasses and claims; gpu.nvidia.com is NVIDIA's driver
	EvictOn    []string `yaml:"evictOn"`    // taints of findings that evict pods: xid=79, lost
}

// DefaultDRADriver is the name of NVIDIA's driver, which DeviceClasses and claims contain.
const DefaultDRADriver = "gpu.nvidia.com"

// ServesDRA reports whether the node serves its devices by dynamic resource allocation.
func (c *Config) ServesDRA() bool { return c.Enabled && c.API == APIDRA }

// The values of AllocationPolicy. Whole GPUs are chosen by their connections instead.
const (
	AllocationDistributed = "distributed" // from the GPU that is used least
	AllocationPacked      = "packed"      // from the GPU that is used most
)

// The values of OnStop.
const (
	OnStopKeep     = "keep"     // the kubelet keeps the devices, unhealthy, for its grace period of five minutes
	OnStopWithdraw = "withdraw" // the plugin sends an empty list first
)

// The values of DeviceList, named as in NVIDIA's plugin (its deviceListStrategy).
const (
	ListCDICRI         = "cdi-cri"         // CDI names in the response; Kubernetes 1.28, containerd 1.7 or CRI-O 1.27
	ListCDIAnnotations = "cdi-annotations" // CDI names in an annotation, for older runtimes
	ListEnv            = "envvar"          // NVIDIA_VISIBLE_DEVICES, which images can set themselves
	ListMounts         = "volume-mounts"   // mounts below a directory, which only a pod can request
)

// DeviceLists returns the values of DeviceList.
func DeviceLists() []string { return []string{ListCDICRI, ListCDIAnnotations, ListEnv, ListMounts} }

// The values of DeviceID.
const (
	DeviceIDUUID  = "uuid"
	DeviceIDIndex = "index" // 0, for a MIG device 0:1
)

// DefaultConfig returns the section's defaults.
func DefaultConfig() Config {
	return Config{
		Enabled: true, API: APIDevicePlugin, Resource: "nvidia.com/gpu", KubeletDir: "/var/lib/kubelet",
		MIGStrategy: MIGNone, Resources: []ResourceRule{}, Include: []string{}, Exclude: []string{},
		Sharing: SharingConfig{
			TimeSlicing: TimeSlicing{FailRequestsGreaterThanOne: true, Resources: []SharedResource{}},
			MPS: MPS{
				FailRequestsGreaterThanOne: true, Resources: []MPSResource{}, Root: "/run/nvidia/mps", Control: "nvidia-cuda-mps-control",
			},
			Memory: MemorySharing{Unit: "1Gi", Devices: []string{}, Reserve: "512Mi", Enforcement: EnforceAuto},
		},
		DeviceList: []string{ListEnv}, DeviceID: DeviceIDUUID, DriverRoot: "/",
		CDI:              cdi.Config{Dir: "/var/run/cdi", AnnotationPrefix: "cdi.k8s.io/", Runtime: cdi.RuntimeAuto},
		DRA:              DRAConfig{DriverName: DefaultDRADriver, EvictOn: []string{}},
		AllocationPolicy: AllocationDistributed, OnStop: OnStopKeep,
	}
}

// Validate returns every error in the section, joined. Each starts with its key.
func (c Config) Validate() error {
	return errors.Join(oneOf("api", c.API, APIDevicePlugin, APIDRA), validateName("resource", c.Resource), c.validateKubeletDir(),
		oneOf("migStrategy", c.MIGStrategy, MIGNone, MIGSingle, MIGMixed), c.validateRules(), c.validateDRASharing(),
		validateSelectors("include", c.Include), validateSelectors("exclude", c.Exclude), c.validateSharing(),
		c.validateAllocation(), c.CDI.Validate(), c.validateDRA(),
		oneOf("allocationPolicy", c.AllocationPolicy, AllocationDistributed, AllocationPacked),
		oneOf("onStop", c.OnStop, OnStopKeep, OnStopWithdraw))
}

// Notes warn about valid keys of the section that have no effect. Each starts with its key.
func (c Config) Notes() []string {
	notes := c.Sharing.Notes()
	if c.API != APIDRA {
		return notes
	}
	defaults := DefaultConfig()
	for _, k := range []struct {
		key string
		set bool
	}{
		{"resource", c.Resource != defaults.Resource},
		{"migStrategy", c.MIGStrategy != defaults.MIGStrategy},
		{"resources", len(c.Resources) > 0},
		{"deviceList", !slices.Equal(c.DeviceList, defaults.DeviceList)},
		{"deviceID", c.DeviceID != defaults.DeviceID},
		{"passDeviceSpecs", c.PassDeviceSpecs},
		{"allocationPolicy", c.AllocationPolicy != defaults.AllocationPolicy},
		{"onStop", c.OnStop != defaults.OnStop},
	} {
		if k.set {
			notes = append(notes, k.key+": has no effect on claims, which are served with api dra")
		}
	}
	return notes
}

// oneOf returns an error unless the key accepts value.
func oneOf(key, value string, accepted ...string) error {
	if slices.Contains(accepted, value) {
		return nil
	}
	return fmt.Errorf("%s: expected one of %s, got %q", key, strings.Join(accepted, ", "), value)
}

func (c Config) validateKubeletDir() error {
	if !filepath.IsAbs(c.KubeletDir) {
		return fmt.Errorf("kubeletDir: %q is not an absolute path; use the kubelet's --root-dir, such as /var/lib/kubelet", c.KubeletDir)
	}
	for _, name := range c.resourceNames() {
		path := c.socketPath(name, 0)
		if unixsock.PathLen(path) > unixsock.MaxPath {
			return fmt.Errorf("kubeletDir: the path of the socket %s is %d bytes too long for a unix socket; use a shorter directory",
				path, unixsock.PathLen(path)-unixsock.MaxPath)
		}
	}
	return nil
}

func (c Config) validateAllocation() error {
	var errs []error
	if len(c.DeviceList) == 0 {
		errs = append(errs, fmt.Errorf("deviceList: is empty; use one or more of %s", strings.Join(DeviceLists(), ", ")))
	}
	for i, list := range c.DeviceList {
		errs = append(errs, oneOf(fmt.Sprintf("deviceList[%d]", i), list, DeviceLists()...))
		if slices.Index(c.DeviceList, list) < i {
			errs = append(errs, fmt.Errorf("deviceList[%d]: duplicate %q", i, list))
		}
	}
	errs = append(errs, oneOf("deviceID", c.DeviceID, DeviceIDUUID, DeviceIDIndex))
	for _, path := range []struct {
		key, value string
		required   bool
	}{{"driverRoot", c.DriverRoot, true}, {"containerDriverRoot", c.ContainerDriverRoot, false}, {"devRoot", c.DevRoot, false}} {
		if (path.required || path.value != "") && !filepath.IsAbs(path.value) {
			errs = append(errs, fmt.Errorf("%s: %q is not an absolute path", path.key, path.value))
		}
	}
	return errors.Join(errs...)
}

// UsesCDI reports whether containers get their devices by CDI names.
func (c Config) UsesCDI() bool {
	return slices.Contains(c.DeviceList, ListCDICRI) || slices.Contains(c.DeviceList, ListCDIAnnotations)
}

// NeedsCDI reports whether pods get the devices by CDI names alone, so that a container runtime that ignores CDI runs them without.
func (c *Config) NeedsCDI() bool {
	return c.ServesDRA() || c.Enabled && c.UsesCDI() && !slices.Contains(c.DeviceList, ListEnv) && !slices.Contains(c.DeviceList, ListMounts)
}

// JudgeRuntime returns what the container runtime does with the devices of pods that get them by CDI names.
func (c *Config) JudgeRuntime(r cdi.Runtime) cdi.RuntimeVerdict {
	return c.CDI.Judge(r, !c.ServesDRA() && (slices.Contains(c.DeviceList, ListCDIAnnotations) || r.KubeletAnnotates()))
}

// Host returns the locations of device nodes and driver files in a file system.
func (c Config) Host(root fs.FS) cdi.Host {
	return cdi.Host{FS: root, DriverRoot: c.DriverRoot, ContainerDriverRoot: c.ContainerDriverRoot, DevRoot: c.DevRoot}
}

// socketDir returns the directory of kubelet.sock and of the plugins' sockets.
func (c Config) socketDir() string { return filepath.Join(c.KubeletDir, "device-plugins") }

// maxSocketStem limits the part of a socket's file name that comes from the resource, so that a long resource does not
// require a shorter kubeletDir.
const maxSocketStem = 20

// SocketPattern matches the file names of the plugin's sockets.
const SocketPattern = socketPrefix + "*" + socketSuffix

const socketPrefix, socketSuffix = "gpu-node-agent-", ".sock"

// socketPath returns a path for a socket of a resource. A random id makes it unique.
func (c Config) socketPath(resource string, id uint32) string {
	stem := strings.Map(func(r rune) rune {
		switch {
		case r == '-', r == '.', r >= '0' && r <= '9', r >= 'A' && r <= 'Z', r >= 'a' && r <= 'z':
			return r
		}
		return '_'
	}, resource)
	return filepath.Join(c.socketDir(), fmt.Sprintf("%s%s-%08x%s", socketPrefix, stem[:min(len(stem), maxSocketStem)], id, socketSuffix))
}
