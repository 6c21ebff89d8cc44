package plugin

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

func TestCanServe(t *testing.T) {
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rules := func(c *Config) { c.Resources = []ResourceRule{{"*H100*", "example.com/h100"}} }
	renamed := timeSliced(SharedResource{Name: gpu, Replicas: 2, Rename: "example.com/part"})
	suffix := func(c *Config) { sharedBy(2)(c); c.Sharing.TimeSlicing.RenameByDefault = true }
	for _, c := range []struct {
		change   func(*Config)
		resource string
		want     bool
	}{
		{func(*Config) {}, gpu, true},
		{func(*Config) {}, "nvidia.com/gpus", false},
		{func(*Config) {}, migResource, false},
		{mixed, migResource, true},
		{mixed, "example.com/mig-1g.10gb", false},
		{rules, "example.com/h100", true},
		{rules, gpu, true},
		{renamed, "example.com/part", true},
		{suffix, gpu + sharedSuffix, true},
		{sharedBy(2), gpu + sharedSuffix, false},
		{memoryShared("1Gi"), memoryResource, true},
	} {
		if got := configured(c.change).CanServe(c.resource); got != c.want {
			t.Errorf("%s: %v, want %v", c.resource, got, c.want)
		}
	}
}

func TestEvicts(t *testing.T) {
	c := DRAConfig{EvictOn: []string{"xid=79", "lost"}}
	for cause, want := range map[string]bool{"xid-79": true, "lost": true, "xid-7": false, "xid=79": true, "detached": false, "": false} {
		if got := c.Evicts(cause); got != want {
			t.Errorf("%q: %v, want %v", cause, got, want)
		}
	}
}

// Keys that have no effect, or less than they seem to, have a note each.
func TestSharingNotes(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*Config)
		notes   []string
		enabled bool
	}{
		"defaults": {func(*Config) {}, nil, false},
		"replicas": {sharedBy(2), nil, true},
		"MPS":      {mpsSharedBy(2), nil, true},
		"MPS without limits": {
			both(mpsSharedBy(2), func(c *Config) { c.Sharing.MPS.FailRequestsGreaterThanOne = false }),
			[]string{"sharing.mps.failRequestsGreaterThanOne"},
			true,
		},
		"no MPS":               {func(c *Config) { c.Sharing.MPS.FailRequestsGreaterThanOne = false }, nil, false},
		"memory":               {memoryShared("1Gi", "0"), nil, true},
		"devices of no memory": {func(c *Config) { c.Sharing.Memory.Devices = []string{"0"} }, []string{"sharing.memory.devices"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := configured(c.change)
			notes := cfg.Notes()
			if !slices.EqualFunc(notes, c.notes, strings.HasPrefix) {
				t.Errorf("%q, want %q", notes, c.notes)
			}
			if got := cfg.Sharing.Enabled(); got != c.enabled {
				t.Errorf("enabled: %v", got)
			}
			cfg.API = APIDRA
			if notes := cfg.Notes(); !slices.EqualFunc(notes, c.notes, strings.HasPrefix) {
				t.Errorf("with DRA: %q, want %q", notes, c.notes)
			}
		})
	}
	// With DRA, each key of resources has one.
	for key, change := range map[string]func(*Config){
		"resource": func(c *Config) { c.Resource = "a.com/b" }, "migStrategy": func(c *Config) { c.MIGStrategy = MIGSingle },
		"resources":  func(c *Config) { c.Resources = []ResourceRule{{"*", "a.com/b"}} },
		"deviceList": func(c *Config) { c.DeviceList = []string{ListCDICRI} },
		"deviceID":   func(c *Config) { c.DeviceID = DeviceIDIndex }, "passDeviceSpecs": func(c *Config) { c.PassDeviceSpecs = true },
		"allocationPolicy": func(c *Config) { c.AllocationPolicy = AllocationPacked }, "onStop": func(c *Config) { c.OnStop = OnStopWithdraw },
	} {
		cfg := configured(change)
		if notes := cfg.Notes(); len(notes) > 0 {
			t.Errorf("%s: %q", key, notes)
		}
		cfg.API = APIDRA
		if notes := cfg.Notes(); len(notes) != 1 || !strings.HasPrefix(notes[0], key+": ") {
			t.Errorf("%s with DRA: %q", key, notes)
		}
	}
}

// slowFS is a file system whose first access takes until the end of a call.
type slowFS struct {
	fs.FS
	access func()
}

func (f slowFS) Open(name string) (fs.File, error) { f.access(); return f.FS.Open(name) }

// A call that ends while its device nodes are read gets no response.
func TestAllocateEndsWhileItReadsNodes(t *testing.T) {
	cfg := configured(func(c *Config) { c.PassDeviceSpecs = true })
	ctx, cancel := context.WithCancel(t.Context())
	a := testAllocation(cfg, machine())
	a.host = cfg.Host(slowFS{machine(), cancel})
	resp, err := a.allocate(ctx, Layout(cfg, snapshot(2))[0], request([]string{"GPU-0", "GPU-1"}))
	if status.Code(err) != codes.Canceled || resp != nil {
		t.Errorf("%v, %v", resp, err)
	}
}

// While the plugin does not have its turn, Allocate says why.
func TestAllocateWithoutTurn(t *testing.T) {
	cfg := DefaultConfig()
	s := newServerOf(gpu, &cfg, snapshot(2))
	s.layouts.turn = &health.Latest[turn]{}
	s.layouts.turn.Store(&turn{notServing: "another agent serves this node"})
	_, err := s.Allocate(t.Context(), request([]string{"GPU-0"}))
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "another agent serves this node") ||
		!strings.Contains(err.Error(), createAgain) {
		t.Errorf("%v", err)
	}
	if _, refused := s.counts.read(); refused[reasonWithheldDevice] != 1 {
		t.Errorf("%v", refused)
	}
}

// The container runtime warns once, and keeps the devices from pods only if it surely ignores CDI.
func TestLayoutJudgesRuntime(t *testing.T) {
	for support, c := range map[cdi.Support]struct {
		warnings int
		err      string
	}{cdi.SupportDepends: {1, ""}, cdi.SupportIgnored: {0, "too old"}} {
		cfg := configured(memoryShared("40Gi"), func(c *Config) { c.DeviceList = []string{ListCDICRI} })
		in := layoutInput{cfg: &cfg, snap: withReserved(2), runtime: cdi.RuntimeVerdict{Support: support, Found: "containerd is too old"}}
		in.facts.NoCDI = in.runtime.Refusal()
		l := newLayout(in)
		if len(l.warnings) != c.warnings || c.warnings > 0 && l.warnings[0] != "containerd is too old" {
			t.Errorf("%v: warnings %q", support, l.warnings)
		}
		if (l.err == "") != (c.err == "") || !strings.Contains(l.err, c.err) {
			t.Errorf("%v: %q", support, l.err)
		}
		if healthy := l.resources[0].healthy(); (healthy == 2) != (c.err == "") {
			t.Errorf("%v: %d healthy", support, healthy)
		}
	}
}

// The environment of a container with a part of a device.
func TestPartEnvironment(t *testing.T) {
	for _, c := range []struct {
		limit, memory uint64
		by            memlimits.Enforcement
		want          string
	}{
		{8 << 30, 80 << 30, memlimits.None, "map[GPU_NODE_AGENT_MEMORY_FRACTION:0.1000 GPU_NODE_AGENT_MEMORY_LIMIT_MIB:8192]"},
		{1 << 30, 3 << 30, memlimits.MPS, "map[GPU_NODE_AGENT_MEMORY_FRACTION:0.3333 GPU_NODE_AGENT_MEMORY_LIMIT_MIB:1024]"},
		{4 << 30, 3 << 30, memlimits.None, "map[GPU_NODE_AGENT_MEMORY_FRACTION:1.0000 GPU_NODE_AGENT_MEMORY_LIMIT_MIB:4096]"},
		{8 << 30, 80 << 30, memlimits.Driver, "map[GPU_NODE_AGENT_MEMORY_FRACTION:0.1000 GPU_NODE_AGENT_MEMORY_LIMIT_MIB:8192 " +
			"NVIDIA_GPU_MEMORY_LIMIT:8192 NVIDIA_GPU_MEMORY_REQUEST:0]"},
	} {
		if got := fmt.Sprint(MemoryEnv(c.limit, c.memory, c.by)); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
	for _, c := range []struct {
		threads int
		pinned  uint64
		want    string
	}{
		{100, 0, "map[CUDA_MPS_LOG_DIRECTORY:/mps/x/log CUDA_MPS_PIPE_DIRECTORY:/mps/x/pipe]"},
		{99, 1 << 30, "map[CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:99 CUDA_MPS_LOG_DIRECTORY:/mps/x/log CUDA_MPS_PINNED_DEVICE_MEM_LIMIT:0=1024M " +
			"CUDA_MPS_PIPE_DIRECTORY:/mps/x/pipe]"},
	} {
		env, mounts := MPSClient("GPU-0", "x", mps.Root("/run/mps"), c.threads, c.pinned)
		if got := fmt.Sprint(env); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
		var got []string
		for _, m := range mounts {
			got = append(got, fmt.Sprint(m.HostPath, " ", m.ContainerPath, " ", m.ReadOnly))
		}
		if want := []string{
			"/run/mps/GPU-0/pipe /mps/x/pipe false", "/run/mps/shm /dev/shm false",
			"/run/mps/GPU-0/log /mps/x/log true",
		}; !slices.Equal(got, want) {
			t.Errorf("mounts %q, want %q", got, want)
		}
	}
}
