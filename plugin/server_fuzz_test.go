package plugin

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the server's codec
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/prefer"
)

// serversOfEachKind returns servers of whole GPUs, one of them unhealthy; of replicas, of which a container may request
// one, or any number; of MIG devices; of nothing; of MPS shares, of which a container may request one, or, beside whole GPUs, any
// number; of memory, with gpushare's environment and with MPS. A daemon of MPS is not ready.
func serversOfEachKind() []*server {
	var all []*server
	add := func(snap *health.Snapshot, name string, change func(*Config)) {
		cfg := configured(change)
		all = append(all, newServerOf(name, &cfg, snap))
	}
	share := sharedBy(4)
	add(with(snapshot(8), 2, health.Unhealthy), gpu, func(c *Config) { c.DeviceList = DeviceLists() })
	add(with(snapshot(3), 1, health.Unhealthy), gpu, share)
	add(snapshot(3), gpu, func(c *Config) {
		share(c)
		c.Sharing.TimeSlicing.FailRequestsGreaterThanOne = false
		c.AllocationPolicy = AllocationPacked
	})
	add(partitioned("1g.10gb 1g.10gb 2g.20gb", "1g.10gb"), "nvidia.com/mig-1g.10gb", func(c *Config) {
		c.MIGStrategy, c.DeviceID = MIGMixed, DeviceIDIndex
	})
	add(nil, gpu, func(*Config) {})
	stopped := mpsStopped(served(sized(8, 8, 4), 0, 1), 1, health.CauseMPSDown)
	add(served(stopped, 2), mpsResource, mpsBy(4))
	add(stopped, gpu, func(c *Config) {
		mpsBy(4, "0", "1")(c)
		severalShares(c)
		c.Sharing.MPS.Resources[0].Rename = gpu
		c.DeviceList = DeviceLists()
	})
	add(with(sized(8, 8, 4), 1, health.Unhealthy), GPUShareResource, memoryBy(GPUShareResource, EnforceNone))
	add(served(stopped, 2), memoryResource, func(c *Config) {
		memoryBy(memoryResource, EnforceMPS)(c)
		c.DeviceList = []string{ListCDICRI}
	})
	return all
}

// codec encodes and decodes messages as the server does.
func codec() encoding.CodecV2 { return encoding.GetCodecV2("proto") }

func encode(f *testing.F, message any) []byte {
	f.Helper()
	data, err := codec().Marshal(message)
	if err != nil {
		f.Fatal(err)
	}
	defer data.Free()
	return data.Materialize()
}

// decode reports whether the server would pass a request with these bytes to a handler.
func decode(text []byte, to any) bool {
	return codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(text)}, to) == nil
}

func FuzzAllocate(f *testing.F) {
	for kind, ids := range [][][]string{
		{{"GPU-0", "GPU-1"}, {"GPU-7", "GPU-7"}, {}},
		{{"GPU-0::1"}, {"GPU-2::3", "GPU-2::0"}},
		{{"GPU-0::0", "GPU-0::3", "GPU-1::2"}},
		{{"MIG-0-0", "MIG-1-0"}},
		{{"GPU-0"}},
		{{"GPU-0::mps4::1"}, {"GPU-2::mps4::3"}, {"GPU-0::mps4::0"}},
		{{"GPU-0::mps4::1", "GPU-0::mps4::0"}, {"GPU-2"}},
		{{"GPU-0::1024Mi::1", "GPU-0::1024Mi::7"}, {"GPU-2::1024Mi::3", "GPU-2::1024Mi::0"}},
		{{"GPU-0::mps1024Mi::1", "GPU-0::mps1024Mi::7"}, {"GPU-2::mps1024Mi::3"}},
	} {
		f.Add(uint8(kind), encode(f, request(ids...)))
	}
	for _, id := range []string{
		"", "GPU-2", "GPU-0::", "GPU-0::4", "GPU-0::1::1", "gpu-0", "all", "0:0", "../GPU-0", "GPU-0,GPU-1", "GPU-0\n",
		"GPU-\x00", "%s%n",
	} {
		f.Add(uint8(0), encode(f, request([]string{"GPU-1", id})))
	}
	f.Add(uint8(5), encode(f, request([]string{"GPU-1::mps4::2"})))
	f.Add(uint8(6), encode(f, request([]string{"GPU-0::mps4::1", "GPU-2"})))
	f.Add(uint8(7), encode(f, request([]string{"GPU-0::1024Mi::1", "GPU-2::1024Mi::0"}, []string{"GPU-1::1024Mi::0"})))
	f.Add(uint8(8), encode(f, request([]string{"GPU-0::mps1024Mi::8"}, []string{"GPU-0::1024Mi::0"}, []string{"GPU-0::0"})))
	f.Add(uint8(1), []byte("\n\x00\n\x00\n\x00")) // three containers without devices
	f.Fuzz(func(t *testing.T, kind uint8, text []byte) {
		var req pluginapi.AllocateRequest
		if !decode(text, &req) {
			return
		}
		all := serversOfEachKind()
		s := all[int(kind)%len(all)]
		resp, err := s.Allocate(t.Context(), &req)
		allocated, refused := s.counts.read()
		if err != nil {
			checkRefusal(t, &req, err)
			if allocated != 0 || resp != nil {
				t.Errorf("refused, and counted %d containers; answered %v", allocated, resp)
			}
			return
		}
		if len(refused) != 0 || allocated != uint64(len(req.ContainerRequests)) || len(resp.ContainerResponses) != len(req.ContainerRequests) {
			t.Fatalf("%d containers, %d answers, %d counted, refused %v", len(req.ContainerRequests), len(resp.ContainerResponses), allocated,
				refused)
		}
		for i, c := range req.ContainerRequests {
			checkAnswer(t, s.resource(), *s.layouts.cfg.Load(), c.GetDevicesIds(), resp.ContainerResponses[i])
		}
		if data, err := codec().Marshal(resp); err != nil {
			t.Errorf("cannot encode the answer: %v", err)
		} else {
			data.Free()
		}
	})
}

// checkRefusal checks that an error has a reason, a status code and the kubelet's ID of a requested device.
func checkRefusal(t *testing.T, req *pluginapi.AllocateRequest, err error) {
	t.Helper()
	r, ok := errors.AsType[*refusal](err)
	if !ok || !slices.Contains(AllocationErrors(), r.reason) {
		t.Fatalf("no refusal with a known reason: %v", err)
	}
	if code := status.Code(err); !slices.Contains([]codes.Code{
		codes.NotFound, codes.InvalidArgument, codes.FailedPrecondition,
		codes.ResourceExhausted,
	}, code) {
		t.Errorf("the code is %v", code)
	}
	if len(req.ContainerRequests) > maxContainers {
		return
	}
	for _, c := range req.ContainerRequests {
		for _, id := range c.GetDevicesIds() {
			if id = abbreviated(id); id == r.device && (strings.Contains(r.text, id) || strings.Contains(r.text, strconv.Quote(id))) {
				return
			}
		}
	}
	t.Errorf("%q names no device of %v", err, req)
}

// unitOf finds the unit with an ID by the IDs of all.
func unitOf(r Resource, id string) (u unit, ok bool) {
	units := unitsOf(r)
	i := slices.IndexFunc(units, func(u unit) bool { return u.text() == id })
	if i < 0 {
		return u, false
	}
	return units[i], true
}

// checkAnswer checks that a container gets exactly its devices, and that all of them are in the layout and healthy.
func checkAnswer(t *testing.T, r Resource, cfg Config, ids []string, a *pluginapi.ContainerAllocateResponse) {
	t.Helper()
	var want []string
	for n, id := range ids {
		u, ok := unitOf(r, id)
		if !ok || !u.isHealthy() || slices.Index(ids, id) < n {
			t.Fatalf("%q was allocated", id)
		}
		if name := cfg.runtimeID(&u.State.Device); !slices.Contains(want, name) {
			want = append(want, name)
		}
	}
	if cfg.UsesCDI() {
		if len(a.CdiDevices) != len(want) {
			t.Errorf("%d CDI devices of %v", len(a.CdiDevices), want)
		}
		for i, d := range a.CdiDevices {
			if i < len(want) && !strings.HasSuffix(d.Name, "="+want[i]) {
				t.Errorf("CDI device %d is %s, want %s", i, d.Name, want[i])
			}
		}
	}
	devicesOnly := checkShare(t, r, ids, a)
	got := a.Envs[envDevices]
	if !slices.Contains(cfg.DeviceList, ListEnv) && !slices.Contains(cfg.DeviceList, ListMounts) {
		want = nil // the CDI spec sets the variable
	} else if slices.Contains(cfg.DeviceList, ListMounts) {
		got = ""
		for _, m := range devicesOnly {
			if !strings.HasPrefix(m.ContainerPath, mountedDevices+"/") {
				t.Errorf("mount %s", m.ContainerPath)
			}
			got = strings.TrimPrefix(got+","+strings.TrimPrefix(m.ContainerPath, mountedDevices+"/"), ",")
		}
	} else if len(want) == 0 {
		want = []string{noDevices}
	}
	if got != strings.Join(want, ",") {
		t.Errorf("%v gets %q, want %v", ids, got, want)
	}
}

// checkShare checks that MPS shares and memory are of one device, that they come with their environment, and that no other devices
// do. It returns the mounts without the mounts of MPS.
func checkShare(t *testing.T, r Resource, ids []string, a *pluginapi.ContainerAllocateResponse) []*pluginapi.Mount {
	t.Helper()
	var shared *Device
	devices := map[health.DeviceID]bool{}
	for _, id := range ids {
		u, _ := unitOf(r, id)
		devices[u.State.Device.ID] = true
		if u.share != nil && u.share.kind != SharingTimeSlicing {
			shared = u.Device
		}
	}
	if shared != nil && len(devices) != 1 {
		t.Errorf("%v of %d devices were allocated", ids, len(devices))
	}
	isMemory := shared != nil && shared.share.kind == SharingMemory
	wantLimit := ""
	if isMemory {
		wantLimit = strconv.Itoa(int(shared.share.unit>>20) * len(ids)) //nolint:gosec // small
	}
	if got := a.Envs[envMemoryLimit]; got != wantLimit || (a.Envs[envGPUShareContainer] != "") != (isMemory && r.Name == GPUShareResource) {
		t.Errorf("%d units with %v", len(ids), a.Envs)
	}
	useMPS := shared != nil && (!isMemory || shared.share.by == memlimits.MPS)
	var mps, others []*pluginapi.Mount
	for _, m := range a.Mounts {
		if m.ContainerPath == "/dev/shm" || strings.HasPrefix(m.ContainerPath, "/mps/") {
			mps = append(mps, m)
		} else {
			others = append(others, m)
		}
	}
	if !useMPS {
		if len(mps) != 0 || a.Envs[envMPSPipes] != "" || a.Envs[envMPSMemory] != "" {
			t.Errorf("%v has MPS: %v", ids, a)
		}
		return others
	}
	pipes := slices.IndexFunc(mps, func(m *pluginapi.Mount) bool { return m.ContainerPath == a.Envs[envMPSPipes] })
	if len(mps) != 3 || pipes < 0 || !strings.HasSuffix(mps[pipes].HostPath, "/"+string(shared.State.Device.ID)+"/pipe") ||
		a.Envs[envMPSMemory] == "" {
		t.Errorf("%v lacks MPS: %v", ids, a)
	}
	return others
}

func FuzzPreferredAllocation(f *testing.F) {
	request := func(size int32, must []string, available ...string) []byte {
		return encode(f, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: size}, {},
		}})
	}
	f.Add(uint8(0), request(2, []string{"GPU-5"}, "GPU-0", "GPU-1", "GPU-2", "GPU-5"))
	f.Add(uint8(0), request(-1, nil, "GPU-0"))
	f.Add(uint8(0), request(1<<31-1, []string{"", "", "x"}, "GPU-0", "GPU-0"))
	f.Add(uint8(1), request(3, nil, "GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-2::9"))
	f.Add(uint8(2), request(4, []string{"GPU-0"}, "GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-2::3", "::"))
	f.Add(uint8(3), request(2, nil, "MIG-0-0", "MIG-0-1", "MIG-1-0", "MIG-0-2"))
	f.Add(uint8(4), request(1, nil, "GPU-0", "GPU-1"))
	f.Add(uint8(5), request(2, nil, "GPU-0::mps4::0", "GPU-1::mps4::1", "GPU-2::mps4::0", "GPU-2::mps4::3"))
	f.Add(uint8(6), request(3, []string{"GPU-0::mps4::0"}, "GPU-0::mps4::0", "GPU-0::mps4::1", "GPU-0::mps4::2", "GPU-2", "GPU-1::mps4::0"))
	f.Add(uint8(7), request(1, nil, "GPU-0::1024Mi::0", "GPU-0::1024Mi::1", "GPU-2::1024Mi::0"))
	f.Add(uint8(8), request(3, nil, "GPU-0::mps1024Mi::0", "GPU-1::mps1024Mi::1", "GPU-2::mps1024Mi::0", "GPU-2::mps1024Mi::3",
		"GPU-2::mps1024Mi::1"))
	f.Fuzz(func(t *testing.T, kind uint8, text []byte) {
		var req pluginapi.PreferredAllocationRequest
		if !decode(text, &req) {
			return
		}
		all := serversOfEachKind()
		s := all[int(kind)%len(all)]
		resp, err := s.GetPreferredAllocation(t.Context(), &req)
		if len(req.ContainerRequests) > maxContainers {
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%d containers: %v", len(req.ContainerRequests), err)
			}
			return
		}
		if err != nil || len(resp.GetContainerResponses()) != len(req.ContainerRequests) {
			t.Fatalf("%d answers to %d questions, %v", len(resp.GetContainerResponses()), len(req.ContainerRequests), err)
		}
		for i, c := range req.ContainerRequests {
			devices, bestFit := s.resource().preferDevices()
			want := new(prefer.Allocator).Choose(devices, prefer.Request{
				Available: c.GetAvailableDeviceIDs(), Required: c.GetMustIncludeDeviceIDs(), Size: int(c.GetAllocationSize()),
				Packed: s.layouts.cfg.Load().AllocationPolicy == AllocationPacked, BestFit: bestFit,
			})
			if got := resp.ContainerResponses[i].DeviceIDs; !slices.Equal(got, want) {
				t.Errorf("the server answers %v, want %v", got, want)
			}
		}
	})
}
