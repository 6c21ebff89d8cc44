package plugin

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// errorKeys returns the key of each joined error.
func errorKeys(err error) (keys []string) {
	if err == nil {
		return nil
	}
	for line := range strings.Lines(err.Error()) {
		key, _, _ := strings.Cut(line, ": ")
		keys = append(keys, key)
	}
	return keys
}

func TestConfigValidateNames(t *testing.T) {
	long := strings.Repeat("x", 64)
	resource := []string{"resource"}
	for _, c := range []struct {
		resource, dir string
		want          []string // keys with an error
	}{
		{"nvidia.com/mig-1g.10gb.me", "/k", nil},
		{"nvidia.com/A_100", "/k", nil},
		{"nvidia.com/" + long[:63], "/k", nil},
		{"", "/k", resource},
		{"gpu", "/k", resource},
		{"/gpu", "/k", resource},
		{"nvidia.com/", "/k", resource},
		{"nvidia.com/a/b", "/k", resource},
		{"kubernetes.io/gpu", "/k", resource},
		{"x.kubernetes.io/gpu", "/k", resource},
		{"requests.nvidia.com/gpu", "/k", resource},
		{"NVIDIA.com/gpu", "/k", resource},
		{"nvidia..com/gpu", "/k", resource},
		{"nvidia.com/gpu-", "/k", resource},
		{"nvidia.com/gpü", "/k", resource},
		{"nvidia.com/" + long, "/k", resource},
		{strings.Repeat("a.", 121) + "b/c", "/k", nil},
		{strings.Repeat("a.", 122) + "b/c", "/k", resource},
		{"nvidia.com/gpu", "k", []string{"kubeletDir"}},
		{"nvidia.com/gpu", "", []string{"kubeletDir"}},
		{"nvidia.com/gpu", "/" + strings.Repeat("d", 47), nil},
		{"nvidia.com/gpu", "/" + strings.Repeat("d", 48), []string{"kubeletDir"}},
		{"gpu", "k", []string{"resource", "kubeletDir"}},
	} {
		err := configured(func(cfg *Config) { cfg.Resource, cfg.KubeletDir = c.resource, c.dir }).Validate()
		if got := errorKeys(err); !slices.Equal(got, c.want) {
			t.Errorf("%q in %q: %v, want errors of %q", c.resource, c.dir, err, c.want)
		}
		if c.resource != "" && len(c.want) == 1 && !strings.Contains(err.Error(), c.dir) && !strings.Contains(err.Error(), c.resource) {
			t.Errorf("%v does not contain the value", err)
		}
	}
}

func TestConfigValidateKeys(t *testing.T) {
	shared := func(resources ...SharedResource) func(*Config) {
		return func(c *Config) { c.Sharing.TimeSlicing.Resources = resources }
	}
	const entry = "sharing.timeSlicing.resources"
	for _, c := range []struct {
		key    string // empty: valid
		change func(*Config)
	}{
		{"", func(*Config) {}},
		{"migStrategy", func(c *Config) { c.MIGStrategy = "all" }},
		{"resources[0].pattern", func(c *Config) { c.Resources = []ResourceRule{{"", "a.com/b"}} }},
		{"resources[0].resource", func(c *Config) { c.Resources = []ResourceRule{{"*", "b"}} }},
		{"include[0]", func(c *Config) { c.Include = []string{""} }},
		{"exclude[0]", func(c *Config) { c.Exclude = []string{"a:b"} }},
		{entry + "[0].name", shared(SharedResource{Name: "nvidia.com/gpus", Replicas: 2})},
		{entry + "[0].replicas", shared(SharedResource{Name: gpu, Replicas: 1})},
		{entry + "[0].devices[0]", shared(SharedResource{Name: gpu, Replicas: 2, Devices: []string{""}})},
		{entry + "[0].rename", shared(SharedResource{Name: gpu, Replicas: 2, Rename: "x"})},
		{entry + "[0].name", func(c *Config) { // too long with the suffix .shared
			c.Resource = "nvidia.com/" + strings.Repeat("x", 60)
			c.Sharing.TimeSlicing = TimeSlicing{RenameByDefault: true, Resources: []SharedResource{{Name: c.Resource, Replicas: 2}}}
		}},
		// An entry that applies to no device is an error.
		{entry + "[1].name", shared(SharedResource{Name: gpu, Replicas: 2}, SharedResource{Name: gpu, Replicas: 3})},
		{entry + "[1].name", shared(SharedResource{Name: gpu, Replicas: 2}, SharedResource{Name: gpu, Replicas: 3, Devices: []string{"0"}})},
		{"", shared(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}, SharedResource{Name: gpu, Replicas: 3})},
		{"", shared(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}},
			SharedResource{Name: gpu, Replicas: 3, Devices: []string{"1"}})},
		{"sharing.mps.resources[0].name", mpsShared(MPSResource{Name: "nvidia.com/gpus", Replicas: 2})},
		{"sharing.mps.resources[0].replicas", mpsSharedBy(1)},
		{"sharing.mps.resources[0].replicas", mpsSharedBy(49)},
		{"", mpsSharedBy(48)},
		{"sharing.mps.resources[0].devices[0]", mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0-3"}})},
		{"sharing.mps.resources[0].rename", mpsShared(MPSResource{Name: gpu, Replicas: 2, Rename: "x"})},
		{"sharing.mps.resources[1].name", mpsShared(MPSResource{Name: gpu, Replicas: 2}, MPSResource{Name: gpu, Replicas: 3})},
		{"sharing.mps.resources[0].activeThreadPercentage", mpsShared(MPSResource{Name: gpu, Replicas: 2, ActiveThreadPercentage: 101})},
		{"sharing.mps.resources[0].activeThreadPercentage", mpsShared(MPSResource{Name: gpu, Replicas: 2, ActiveThreadPercentage: -1})},
		{"", mpsShared(MPSResource{Name: gpu, Replicas: 2, ActiveThreadPercentage: 100, PinnedMemory: "8Gi"})},
		{"sharing.mps.resources[0].pinnedMemory", mpsShared(MPSResource{Name: gpu, Replicas: 2, PinnedMemory: "8G"})},
		{"sharing.mps.resources[0].pinnedMemory", mpsShared(MPSResource{Name: gpu, Replicas: 2, PinnedMemory: "0"})},
		{"sharing.mps.resources[0].pinnedMemory", mpsShared(MPSResource{Name: gpu, Replicas: 2, PinnedMemory: "8GB"})},
		{"sharing.mps.root", func(c *Config) { c.Sharing.MPS.Root = "run/mps" }},
		{"", func(c *Config) { c.Sharing.MPS.Root = "/" + strings.Repeat("x", 52) }},
		{"sharing.mps.root", func(c *Config) { c.Sharing.MPS.Root = "/" + strings.Repeat("x", 53) }}, // with <root>/<MIG UUID>/pipe/control
		{
			"sharing.mps.resources[0].rename",
			mpsShared(MPSResource{Name: gpu, Replicas: 2, Rename: strings.Repeat("x", 40) + ".com/" + strings.Repeat("y", 45)}),
		},
		// with /mps/NAME/pipe/control
		{"", mpsShared(MPSResource{Name: gpu, Replicas: 2, Rename: strings.Repeat("x", 40) + ".com/" + strings.Repeat("y", 44)})},
		{"sharing.memory.resource", func(c *Config) {
			memoryShared("1Gi")(c)
			c.Sharing.Memory.Enforcement, c.Sharing.Memory.Resource = EnforceMPS, strings.Repeat("x", 40)+".com/"+strings.Repeat("y", 45)
		}},
		{"sharing.mps.control", func(c *Config) { c.Sharing.MPS.Control = "" }},
		{"sharing.mps.control", func(c *Config) { c.Sharing.MPS.Control = "./nvidia-cuda-mps-control" }},
		{"", memoryShared("1Gi")},
		{"", memoryShared("1Mi")},
		{"sharing.memory.unit", memoryShared("1G")},
		{"sharing.memory.unit", memoryShared("1023Ki")},
		{"sharing.memory.unit", memoryShared("")},
		{"sharing.memory.unit", func(c *Config) { c.Sharing.Memory.Unit = "0" }}, // also while no memory is shared
		{"sharing.memory.devices[0]", memoryShared("1Gi", "")},
		{"sharing.memory.devices[0]", func(c *Config) { c.Sharing.Memory.Devices = []string{""} }},
		{"sharing.memory.reserve", func(c *Config) { c.Sharing.Memory.Reserve = "-1Gi" }},
		{"", func(c *Config) { c.Sharing.Memory.Reserve = "0" }},
		{"sharing.memory.enforcement", func(c *Config) { c.Sharing.Memory.Enforcement = "hard" }},
		{"sharing.memory.requireEnforcement", func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.RequireEnforcement = true }},
		{"sharing.memory.resource", func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.Resource = "gpumem" }},
		{"sharing.memory.resource", func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.Resource = gpu }},
		{"sharing.memory.resource", func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.Resource = "nvidia.com/mig-1g.10gb" }},
		{"sharing.memory.resource", func(c *Config) {
			memoryShared("1Gi", "0")(c)
			mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"1"}, Rename: memoryResource})(c)
		}},
		{"", func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.Resource = GPUShareResource }},
		// Devices that two kinds of sharing select, whatever the devices of the node are.
		{"sharing.mps.resources[0].devices", both(sharedBy(2), mpsSharedBy(2))},
		{"sharing.mps.resources[0].devices", both(sharedBy(2), mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}))},
		{"sharing.mps.resources[0].devices", both(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"1", "0"}}),
			mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}))},
		{"sharing.mps.resources[0].devices", both(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"ALL"}}),
			mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}))},
		{"", both(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"1"}}),
			mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}))},
		{"", both(sharedBy(2), mpsShared(MPSResource{Name: migResource, Replicas: 2}))},
		{"sharing.memory.devices", both(sharedBy(2), memoryShared("1Gi"))},
		{"sharing.memory.devices", both(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}), memoryShared("1Gi", "1", "0"))},
		{"sharing.memory.devices", both(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}), memoryShared("1Gi", "all"))},
		{"", both(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}), memoryShared("1Gi", "1"))},
		{"", both(mpsShared(MPSResource{Name: migResource, Replicas: 2}), memoryShared("1Gi", "1"))},
		{"deviceList", func(c *Config) { c.DeviceList = nil }},
		{"deviceList[0]", func(c *Config) { c.DeviceList = []string{"cdi"} }},
		{"deviceList[1]", func(c *Config) { c.DeviceList = []string{ListEnv, ListEnv} }},
		{"deviceID", func(c *Config) { c.DeviceID = "name" }},
		{"driverRoot", func(c *Config) { c.DriverRoot = "x" }},
		{"containerDriverRoot", func(c *Config) { c.ContainerDriverRoot = "x" }},
		{"devRoot", func(c *Config) { c.DevRoot = "x" }},
		{"cdi.kind", func(c *Config) { c.CDI.Kind = "gpu" }},
		{"cdi.dir", func(c *Config) { c.CDI.Dir = "" }},
		{"cdi.hookPath", func(c *Config) { c.CDI.HookPath = "/bin/sh" }},
		{"cdi.hookPath", func(c *Config) { c.CDI.HookPath = "nvidia-ctk" }},
		{"cdi.annotationPrefix", func(c *Config) { c.CDI.AnnotationPrefix = "cdi" }},
		{"allocationPolicy", func(c *Config) { c.AllocationPolicy = "spread" }},
		{"onStop", func(c *Config) { c.OnStop = "leave" }},
	} {
		err := configured(c.change).Validate()
		if got := strings.Join(errorKeys(err), " "); got != c.key {
			t.Errorf("%v, want an error of %q", err, c.key)
		}
	}
}

// An error about devices in two kinds of sharing names the other key, and the device if it is one.
func TestSharedTwice(t *testing.T) {
	for _, c := range []struct {
		mps, memory []string // devices
		want        []string
	}{
		{[]string{"0", "1"}, []string{"1", "2"}, []string{`"1"`, "sharing.mps.resources[0].devices"}},
		{[]string{"0"}, nil, []string{"sharing.memory.devices", "sharing.mps.resources[0]"}},
	} {
		err := configured(both(mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: c.mps}), memoryShared("1Gi", c.memory...))).Validate()
		for _, text := range c.want {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%v, want %s", err, text)
			}
		}
	}
}

func TestSocketPath(t *testing.T) {
	c := Config{KubeletDir: "/var/lib/kubelet"}
	if got := c.socketPath(gpu, 0x1f); got != "/var/lib/kubelet/device-plugins/gpu-node-agent-nvidia.com_gpu-0000001f.sock" {
		t.Errorf("got %s", got)
	}
	for _, resource := range []string{gpu, "a.b/c", "nvidia.com/mig-1g.10gb.shared", "example.com/" + strings.Repeat("x", 63)} {
		one, other := c.socketPath(resource, 1), c.socketPath(resource, 2)
		if one == other || len(one) > 92 {
			t.Errorf("%s: %s, %s", resource, one, other)
		}
		if ours, err := filepath.Match(SocketPattern, filepath.Base(one)); !ours || err != nil {
			t.Errorf("%s does not match %s", one, SocketPattern)
		}
	}
}

func TestConfigValidateDRA(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		want   []string // keys with an error
	}{
		"defaults":      {func(*Config) {}, nil},
		"own driver":    {func(c *Config) { c.DRA.DriverName = "gpu.example.com" }, nil},
		"63 characters": {func(c *Config) { c.DRA.DriverName = strings.Repeat("d", 63) }, nil},
		"64 characters": {func(c *Config) { c.DRA.DriverName = strings.Repeat("d", 64) }, []string{"dra.driverName"}},
		"empty":         {func(c *Config) { c.DRA.DriverName = "" }, []string{"dra.driverName"}},
		"upper case":    {func(c *Config) { c.DRA.DriverName = "GPU.nvidia.com" }, []string{"dra.driverName"}},
		"slash":         {func(c *Config) { c.DRA.DriverName = "../x" }, []string{"dra.driverName"}},
		"underscore":    {func(c *Config) { c.DRA.DriverName = "gpu_x" }, []string{"dra.driverName"}},
		"longest paths": {func(c *Config) {
			c.KubeletDir, c.DRA.DriverName = "/"+strings.Repeat("k", 46), strings.Repeat("d", 33)
		}, nil},
		"path too long": {func(c *Config) {
			c.KubeletDir, c.DRA.DriverName = "/"+strings.Repeat("k", 46), strings.Repeat("d", 34)
		}, []string{"dra.driverName"}},
		"relative directory": {func(c *Config) { c.KubeletDir = "k" }, []string{"kubeletDir"}},
		"causes":             {func(c *Config) { c.DRA.EvictOn = []string{"xid=79", "lost", "dcgm-nvlink-down"} }, nil},
		"unknown cause":      {func(c *Config) { c.DRA.EvictOn = []string{"xid=79", "xid-79"} }, []string{"dra.evictOn[1]"}},
		"prefix of causes":   {func(c *Config) { c.DRA.EvictOn = []string{"xid=*"} }, []string{"dra.evictOn[0]"}},
		"duplicate":          {func(c *Config) { c.DRA.EvictOn = []string{"lost", "lost"} }, []string{"dra.evictOn[1]"}},
	} {
		err := configured(func(c *Config) { c.API = APIDRA; test.change(c) }).Validate()
		if got := errorKeys(err); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want errors of %q", name, err, test.want)
		}
	}
}
