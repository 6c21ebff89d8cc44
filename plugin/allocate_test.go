package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

func testAllocation(cfg Config, root fstest.MapFS) allocation {
	return allocation{cfg: &cfg, host: cfg.Host(root), uuid: func() string { return "a1b2c3d4-0000-4000-8000-000000000000" }}
}

// machine returns the file system of a machine with three GPUs, the second of which is partitioned, and without
// /dev/nvidia-modeset.
func machine() fstest.MapFS {
	f := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	return fstest.MapFS{
		"dev/nvidiactl":                    f(""),
		"dev/nvidia-uvm":                   f(""),
		"run/nvidia/driver/dev/nvidiactl":  f(""),
		"run/nvidia/driver/dev/nvidia-uvm": f(""),
		"dev/nvidia-uvm-tools":             f(""),
		"proc/driver/nvidia-caps/mig-minors": f(
			"config 1\nmonitor 2\ngpu1/gi7/access 66\ngpu1/gi7/ci0/access 67\ngpu1/gi8/access 75\ngpu1/gi8/ci0/access 76\n"),
		"proc/driver/nvidia/gpus/0000:12:00.0/information": f("Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nDevice Minor: \t 5\n"),
	}
}

func request(containers ...[]string) *pluginapi.AllocateRequest {
	req := &pluginapi.AllocateRequest{}
	for _, ids := range containers {
		req.ContainerRequests = append(req.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
	}
	return req
}

// The response of each strategy to two containers, one of which requests the devices unordered.
func TestAllocateGolden(t *testing.T) {
	snap := partitioned(whole, "1g.10gb 1g.10gb", whole)
	snap.Devices[2].Device.Minor = -1 // unknown to the source
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	lists := func(how ...string) func(*Config) { return func(c *Config) { c.DeviceList = how } }
	index := func(c *Config) { c.DeviceID = DeviceIDIndex }
	nodes := func(c *Config) { c.PassDeviceSpecs = true }
	generated := func(c *Config) { c.CDI.Generate = true }
	shared := func(c *Config) {
		c.Sharing.TimeSlicing = TimeSlicing{Resources: []SharedResource{{Name: gpu, Replicas: 2}}}
	}
	gpus := request([]string{"GPU-2", "GPU-0"}, []string{"GPU-0"})
	migs := request([]string{"MIG-1-1", "MIG-1-0"}, []string{"MIG-1-0"})
	for _, c := range []struct {
		name     string
		changes  []func(*Config)
		resource string
		req      *pluginapi.AllocateRequest
	}{
		{"envvar", nil, gpu, gpus},
		{"envvar-index", []func(*Config){index}, gpu, gpus},
		{"envvar-replicas", []func(*Config){shared}, gpu, request([]string{"GPU-2::1", "GPU-0::0", "GPU-2::0"})},
		{"envvar-mig", []func(*Config){mixed}, migResource, migs},
		{"envvar-mig-index", []func(*Config){mixed, index}, migResource, migs},
		{"envvar-nodes", []func(*Config){nodes}, gpu, gpus},
		{"envvar-nodes-mig", []func(*Config){nodes, mixed}, migResource, migs},
		{"envvar-nodes-driver-root", []func(*Config){nodes, func(c *Config) { c.DriverRoot = "/run/nvidia/driver" }}, gpu, gpus},
		{"envvar-nodes-dev-root", []func(*Config){nodes, func(c *Config) { c.DriverRoot, c.DevRoot = "/run/nvidia/driver", "/" }}, gpu, gpus},
		{"volume-mounts", []func(*Config){lists(ListMounts)}, gpu, gpus},
		{"volume-mounts-mig-index", []func(*Config){lists(ListMounts), mixed, index}, migResource, migs},
		{"cdi-cri", []func(*Config){lists(ListCDICRI)}, gpu, gpus},
		{"cdi-cri-generated", []func(*Config){lists(ListCDICRI), generated}, gpu, gpus},
		{"cdi-cri-nodes", []func(*Config){lists(ListCDICRI), nodes}, gpu, gpus},
		{"cdi-cri-mig-index", []func(*Config){lists(ListCDICRI), mixed, index}, migResource, migs},
		{"cdi-annotations", []func(*Config){lists(ListCDIAnnotations)}, gpu, gpus},
		{"cdi-annotations-prefix", []func(*Config){lists(ListCDIAnnotations), generated, func(c *Config) {
			c.CDI.AnnotationPrefix, c.CDI.Kind = "cdi.example.com/", "example.com/gpu"
		}}, gpu, gpus},
		{"all", []func(*Config){lists(ListCDICRI, ListCDIAnnotations, ListEnv, ListMounts), nodes}, gpu, gpus},
		{"cdi-and-envvar", []func(*Config){lists(ListEnv, ListCDICRI)}, gpu, gpus},
	} {
		cfg := configured(c.changes...)
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		resp, err := testAllocation(cfg, machine()).allocate(t.Context(), findResource(Layout(cfg, snap), c.resource), c.req)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		golden.CheckJSON(t, "testdata/allocate/"+c.name+".json", resp)
	}
}

// Each case requests one container per list of IDs. A case without a reason succeeds with these values of
// NVIDIA_VISIBLE_DEVICES.
func TestAllocateDevices(t *testing.T) {
	plain, shared := DefaultConfig(), configured(sharedBy(4))
	several := configured(sharedBy(4), func(c *Config) { c.Sharing.TimeSlicing.FailRequestsGreaterThanOne = false })
	nodes := configured(func(c *Config) { c.PassDeviceSpecs = true })
	mixed := configured(func(c *Config) { c.PassDeviceSpecs, c.MIGStrategy = true, MIGMixed })
	states := with(with(snapshot(4), 3, health.Unhealthy), 2, health.Degraded)
	noFinding := with(snapshot(1), 0, health.Unhealthy)
	noFinding.Devices[0].Verdict.Findings = nil
	snap := partitioned(whole, "1g.10gb 1g.10gb 1g.10gb")
	noMinor := partitioned(whole, whole)
	noMinor.Devices[1].Device.Minor = -1
	noPCI := partitioned(whole)
	noPCI.Devices[0].Device.Minor, noPCI.Devices[0].Device.PCI = -1, ""
	type ids = []string
	for _, c := range []struct {
		name       string
		cfg        Config
		resource   string
		snap       *health.Snapshot
		containers [][]string
		want       []string
		reason     string
		device     string
		data       string // in the text
	}{
		{"order of the request", plain, gpu, states, []ids{{"GPU-1", "GPU-0"}}, ids{"GPU-1,GPU-0"}, "", "", ""},
		{"replicas of one device", several, gpu, snap, []ids{{"GPU-1::3", "GPU-0::1", "GPU-1::0"}}, ids{"GPU-1,GPU-0"}, "", "", ""},
		{"degraded", plain, gpu, states, []ids{{"GPU-2"}}, ids{"GPU-2"}, "", "", ""},
		{"two containers", plain, gpu, states, []ids{{"GPU-1"}, {"GPU-0"}}, ids{"GPU-1", "GPU-0"}, "", "", ""},
		{"no devices", plain, gpu, states, []ids{{}}, ids{"void"}, "", "", ""},
		{"one replica per container", shared, gpu, snap, []ids{{"GPU-0::1"}, {"GPU-0::2"}}, ids{"GPU-0", "GPU-0"}, "", "", ""},
		{"duplicate", plain, gpu, states, []ids{{"GPU-1", "GPU-0", "GPU-1"}}, nil, reasonOther, "GPU-1", "twice"},
		{"unknown", plain, gpu, states, []ids{{"GPU-1", "GPU-9"}}, nil, reasonUnknownDevice, "GPU-9", "GPU-0, GPU-1, GPU-2, GPU-3"},
		{"unknown resource", plain, "a/b", states, []ids{{"GPU-1"}}, nil, reasonUnknownDevice, "GPU-1", "a/b"},
		{"unhealthy", plain, gpu, states, []ids{{"GPU-1"}, {"GPU-3"}}, nil, reasonUnhealthyDevice, "GPU-3", "(xid-79)"},
		{"unhealthy without a finding", plain, gpu, noFinding, []ids{{"GPU-0"}}, nil, reasonUnhealthyDevice, "GPU-0", gpu},
		{
			"two replicas", shared, gpu, snap,
			[]ids{{"GPU-0::1", "GPU-1::0"}},
			nil, reasonTooManyReplicas, "GPU-0::1",
			"failRequestsGreaterThanOne",
		},
		{"unknown replica", shared, gpu, snap, []ids{{"GPU-0::4"}}, nil, reasonUnknownDevice, "GPU-0::4", "GPU-0::0, GPU-0::1"},
		{"replica with another number", shared, gpu, snap, []ids{{"GPU-0::01"}}, nil, reasonUnknownDevice, "GPU-0::01", gpu},
		{"replica of the next device", shared, gpu, snap, []ids{{"GPU-0::5"}}, nil, reasonUnknownDevice, "GPU-0::5", gpu},
		{"negative replica", shared, gpu, snap, []ids{{"GPU-0::-1"}}, nil, reasonUnknownDevice, "GPU-0::-1", gpu},
		{
			"replica beyond all numbers", shared, gpu, snap,
			[]ids{{"GPU-1::99999999999999999999"}},
			nil, reasonUnknownDevice,
			"GPU-1::99999999999999999999", gpu,
		},
		{"replica of a whole GPU", plain, gpu, states, []ids{{"GPU-0::0"}}, nil, reasonUnknownDevice, "GPU-0::0", gpu},
		{
			"long ID", plain, gpu, states,
			[]ids{{strings.Repeat("x", 1<<20)}},
			nil, reasonUnknownDevice, abbreviated(strings.Repeat("x", 1<<20)),
			gpu,
		},
		{"GPU of replicas", shared, gpu, snap, []ids{{"GPU-0"}}, nil, reasonUnknownDevice, "GPU-0", `"GPU-0"`},
		{"no capability", mixed, migResource, snap, []ids{{"MIG-1-2"}}, nil, reasonNoDeviceNode, "MIG-1-2", "gpu1/gi9/access"},
		{
			"no minor", nodes, gpu, noMinor,
			[]ids{{"GPU-0", "GPU-1"}},
			nil, reasonNoDeviceNode, "GPU-1",
			"/proc/driver/nvidia/gpus/0000:11:00.0/information",
		},
		{"no minor and no PCI bus ID", nodes, gpu, noPCI, []ids{{"GPU-0"}}, nil, reasonNoDeviceNode, "GPU-0", "PCI"},
	} {
		resp, err := testAllocation(c.cfg, machine()).allocate(t.Context(), findResource(Layout(c.cfg, c.snap), c.resource),
			request(c.containers...))
		if c.reason != "" {
			r, ok := errors.AsType[*refusal](err)
			if !ok || r.reason != c.reason || r.device != c.device || status.Code(err) != r.code || r.code == codes.OK {
				t.Errorf("%s: %+v, want %s of %s", c.name, err, c.reason, c.device)
			} else if !strings.Contains(r.text, c.device) || !strings.Contains(r.text, c.data) || len(r.text) > 1<<10 {
				t.Errorf("%s: %q lacks %q or %q", c.name, r.text, c.device, c.data)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []string
		for _, cr := range resp.ContainerResponses {
			got = append(got, cr.Envs[envDevices])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func benchmarkAllocate(b *testing.B, n int) {
	s := newTestServer(snapshot(n))
	req := request(all(s.resource()))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Allocate(b.Context(), req); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAllocate8(b *testing.B)  { benchmarkAllocate(b, 8) }
func BenchmarkAllocate16(b *testing.B) { benchmarkAllocate(b, 16) }

// BenchmarkAllocateAll requests every replica of 16 GPUs. The cost of an ID does not depend on their number.
func BenchmarkAllocateAll(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("16x%d", replicas), func(b *testing.B) {
			cfg := configured(sharedBy(replicas), func(c *Config) { c.Sharing.TimeSlicing.FailRequestsGreaterThanOne = false })
			s := newServerOf(gpu, &cfg, snapshot(16))
			req := request(all(s.resource()))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Allocate(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkAllocateMemory requests units of memory of one GPU of eight: a GPU of 80 GiB in units of 1 GiB, and in small ones.
func BenchmarkAllocateMemory(b *testing.B) {
	for _, c := range []struct {
		unit  string
		units int
	}{{"1Gi", 10}, {"1Gi", 80}, {"64Mi", 1000}} {
		b.Run(fmt.Sprintf("%dx%s", c.units, c.unit), func(b *testing.B) {
			cfg := configured(memoryBy(memoryResource, EnforceNone), func(cfg *Config) { cfg.Sharing.Memory.Unit = c.unit })
			s := newServerOf(memoryResource, &cfg, sized(slices.Repeat([]uint64{80}, 8)...))
			available := all(s.resource())
			preferred := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, AllocationSize: int32(c.units)}, //nolint:gosec // small
			}}
			req := request(available[:c.units])
			b.Run("Allocate", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := s.Allocate(b.Context(), req); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run("GetPreferredAllocation", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := s.GetPreferredAllocation(b.Context(), preferred); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}
