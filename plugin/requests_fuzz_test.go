package plugin

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // what the server reads requests with
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// serversOfEachKind are servers of each kind that there is: whole GPUs, one of them dead; replicas of which a container
// may have one, and any number; MIG devices; and one that has nothing to hand out.
func serversOfEachKind() []*server {
	var all []*server
	add := func(snap *health.Snapshot, name string, change func(*Config)) {
		s := serverOf(name, &health.Latest[Config]{}, &health.Latest[health.Snapshot]{})
		cfg := configured(change)
		s.layouts.cfg.Store(&cfg)
		s.layouts.snapshots.Store(snap)
		all = append(all, s)
	}
	share := func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 4}} }
	add(with(snapshot(8), 2, health.Unhealthy), gpu, func(c *Config) { c.DeviceList = lists() })
	add(with(snapshot(3), 1, health.Unhealthy), gpu, share)
	add(snapshot(3), gpu, func(c *Config) {
		share(c)
		c.Sharing.TimeSlicing.FailRequestsGreaterThanOne = false
		c.AllocationPolicy = AllocationPacked
	})
	add(partitioned([]string{"1g.10gb", "1g.10gb", "2g.20gb"}, []string{"1g.10gb"}), "nvidia.com/mig-1g.10gb", func(c *Config) {
		c.MIGStrategy, c.DeviceID = MIGMixed, DeviceIDIndex
	})
	add(nil, gpu, func(*Config) {})
	return all
}

// wire reads and writes messages as the server does.
func wire() encoding.CodecV2 { return encoding.GetCodecV2("proto") }

func onWire(f *testing.F, message any) []byte {
	f.Helper()
	data, err := wire().Marshal(message)
	if err != nil {
		f.Fatal(err)
	}
	defer data.Free()
	return data.Materialize()
}

// fromWire reports whether the server would hand a request with these bytes to a handler.
func fromWire(text []byte, to any) bool {
	return wire().Unmarshal(mem.BufferSlice{mem.SliceBuffer(text)}, to) == nil
}

func FuzzAllocate(f *testing.F) {
	for which, ids := range [][][]string{
		{{"GPU-0", "GPU-1"}, {"GPU-7", "GPU-7"}, {}},
		{{"GPU-0::1"}, {"GPU-2::3", "GPU-2::0"}},
		{{"GPU-0::0", "GPU-0::3", "GPU-1::2"}},
		{{"MIG-0-0", "MIG-1-0"}},
		{{"GPU-0"}},
	} {
		f.Add(uint8(which), onWire(f, ask(ids...)))
	}
	for _, id := range []string{"", "GPU-2", "GPU-0::", "GPU-0::4", "GPU-0::1::1", "gpu-0", "all", "0:0", "../GPU-0", "GPU-0,GPU-1", "GPU-0\n", "GPU-\x00", "%s%n"} {
		f.Add(uint8(0), onWire(f, ask([]string{"GPU-1", id})))
	}
	f.Add(uint8(1), []byte("\n\x00\n\x00\n\x00")) // three containers that ask for nothing
	f.Fuzz(func(t *testing.T, which uint8, text []byte) {
		var req pluginapi.AllocateRequest
		if !fromWire(text, &req) {
			return
		}
		all := serversOfEachKind()
		s := all[int(which)%len(all)]
		resp, err := s.Allocate(t.Context(), &req)
		allocated, refused := s.counts.read()
		if err != nil {
			checkRefusal(t, &req, err)
			if allocated != 0 || resp != nil {
				t.Errorf("refused, and %d containers are counted; answered %v", allocated, resp)
			}
			return
		}
		if len(refused) != 0 || allocated != uint64(len(req.ContainerRequests)) || len(resp.ContainerResponses) != len(req.ContainerRequests) {
			t.Fatalf("%d containers asked, %d answers, %d counted, refused %v", len(req.ContainerRequests), len(resp.ContainerResponses), allocated, refused)
		}
		for i, c := range req.ContainerRequests {
			checkAnswer(t, s.resource(), *s.layouts.cfg.Load(), c.GetDevicesIds(), resp.ContainerResponses[i])
		}
		if data, err := wire().Marshal(resp); err != nil {
			t.Errorf("the answer cannot be sent: %v", err)
		} else {
			data.Free()
		}
	})
}

// checkRefusal checks that an error says which device it is about, in the kubelet's own words for it.
func checkRefusal(t *testing.T, req *pluginapi.AllocateRequest, err error) {
	t.Helper()
	r, ok := errors.AsType[*refusal](err)
	if !ok || !slices.Contains(AllocationErrors(), r.reason) {
		t.Fatalf("not a refusal with a reason of ours: %v", err)
	}
	if code := status.Code(err); code != codes.InvalidArgument && code != codes.FailedPrecondition {
		t.Errorf("the code is %v", code)
	}
	for _, c := range req.ContainerRequests {
		for _, id := range c.GetDevicesIds() {
			name := "device " + id
			if r.reason == reasonUnknownDevice { // it may be anything
				name = "device " + strconv.Quote(id)
			}
			if strings.Contains(err.Error(), name) {
				return
			}
		}
	}
	t.Errorf("%q names none of the devices in %v", err, req)
}

// checkAnswer checks that a container gets all of its devices and no others, and that none came of one that the
// layout does not have or that is unhealthy.
func checkAnswer(t *testing.T, r Resource, cfg Config, ids []string, a *pluginapi.ContainerAllocateResponse) {
	t.Helper()
	var want []string
	for _, id := range ids {
		d, known := r.device(id)
		if !known || !d.Healthy() {
			t.Fatalf("%q was handed out", id)
		}
		want = append(want, cfg.idOf(d))
	}
	want = unique(want)
	if cfg.usesCDI() {
		if len(a.CdiDevices) != len(want) {
			t.Errorf("%d CDI devices of %v", len(a.CdiDevices), want)
		}
		for i, d := range a.CdiDevices {
			if i < len(want) && !strings.HasSuffix(d.Name, "="+want[i]) {
				t.Errorf("CDI device %d is %s, want %s", i, d.Name, want[i])
			}
		}
	}
	got := a.Envs[envDevices]
	if slices.Contains(cfg.DeviceList, ListMounts) {
		got = ""
		for _, m := range a.Mounts {
			if !strings.HasPrefix(m.ContainerPath, mountedDevices+"/") {
				t.Errorf("mounts %s", m.ContainerPath)
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

func FuzzPreferredAllocation(f *testing.F) {
	question := func(size int32, must []string, available ...string) []byte {
		return onWire(f, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: size}, {},
		}})
	}
	f.Add(uint8(0), question(2, []string{"GPU-5"}, "GPU-0", "GPU-1", "GPU-2", "GPU-5"))
	f.Add(uint8(0), question(-1, nil, "GPU-0"))
	f.Add(uint8(0), question(1<<31-1, []string{"", "", "x"}, "GPU-0", "GPU-0"))
	f.Add(uint8(1), question(3, nil, "GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-2::9"))
	f.Add(uint8(2), question(4, []string{"GPU-0"}, "GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-2::3", "::"))
	f.Add(uint8(3), question(2, nil, "MIG-0-0", "MIG-0-1", "MIG-1-0", "MIG-0-2"))
	f.Add(uint8(4), question(1, nil, "GPU-0", "GPU-1"))
	f.Fuzz(func(t *testing.T, which uint8, text []byte) {
		var req pluginapi.PreferredAllocationRequest
		if !fromWire(text, &req) {
			return
		}
		all := serversOfEachKind()
		s := all[int(which)%len(all)]
		resp, err := s.GetPreferredAllocation(t.Context(), &req)
		if err != nil || len(resp.GetContainerResponses()) != len(req.ContainerRequests) {
			t.Fatalf("%d answers to %d questions, %v", len(resp.GetContainerResponses()), len(req.ContainerRequests), err)
		}
		for i, c := range req.ContainerRequests {
			available, must, size := c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize())
			checkPrefer(t, s.resource(), s.layouts.cfg.Load().AllocationPolicy, available, must, size)
			alone := prefer(newWiring(s.resource()), s.resource(), s.layouts.cfg.Load().AllocationPolicy, available, must, size)
			if got := resp.ContainerResponses[i].DeviceIDs; !slices.Equal(got, alone) {
				t.Errorf("the server says %v to what is %v", got, alone)
			}
		}
	})
}
