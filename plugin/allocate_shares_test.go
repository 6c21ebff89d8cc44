package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const mpsResource = "nvidia.com/gpu.mps"

// sized returns a snapshot of healthy GPUs with these sizes in GiB, of which the driver reserves none.
func sized(gibibytes ...uint64) *health.Snapshot {
	snap := snapshot(len(gibibytes))
	for i, size := range gibibytes {
		snap.Devices[i].Device.Memory = size << 30
		snap.Devices[i].Device.ComputeCapability = health.ComputeCapability{Major: 9}
	}
	return snap
}

// served returns a later snapshot in which GPUs have MPS daemons that are ready.
func served(snap *health.Snapshot, gpus ...int) *health.Snapshot {
	for _, i := range gpus {
		snap = with(snap, i, snap.Devices[i].Verdict.State)
		snap.Devices[i].MPS = readyDaemon()
	}
	return snap
}

// mpsStopped returns a later snapshot in which the daemon of a GPU is not ready.
func mpsStopped(snap *health.Snapshot, i int, cause string) *health.Snapshot {
	state := health.Healthy
	if cause != "" {
		state = health.Unhealthy
	}
	next := with(snap, i, state)
	next.Devices[i].MPS = &health.MPSDaemon{Cause: cause, Reason: "the MPS daemon ended"}
	if cause != "" {
		next.Devices[i].Verdict.Findings[0].Cause = cause
	}
	return next
}

// memoryBy offers the memory of all GPUs in units of 1 GiB without a reserve.
func memoryBy(resource, enforcement string) func(*Config) {
	return func(c *Config) {
		m := &c.Sharing.Memory
		m.Resource, m.Enforcement, m.Reserve = resource, enforcement, "0"
	}
}

// mpsBy shares the GPUs by MPS under another name. No devices are all.
func mpsBy(replicas int, devices ...string) func(*Config) {
	return mpsShared(MPSResource{Name: gpu, Replicas: replicas, Rename: mpsResource, Devices: devices})
}

func severalShares(c *Config) { c.Sharing.MPS.FailRequestsGreaterThanOne = false }

// driverLimits are the capabilities of a node whose driver limits the memory of these GPUs.
func driverLimits(gpus ...health.DeviceID) *memlimits.Capabilities {
	c := &memlimits.Capabilities{Driver: map[health.DeviceID]string{}, Hook: true}
	for _, id := range gpus {
		c.Driver[id] = ""
	}
	return c
}

// units returns the IDs of units of a GPU, without what they promise: GPU-1::2 for GPU-1::1024Mi::2.
func units(gpu, from, to int) (ids []string) {
	for i := from; i < to; i++ {
		ids = append(ids, fmt.Sprintf("GPU-%d::%d", gpu, i))
	}
	return ids
}

// idsOf replaces IDs of units by the resource's IDs. It keeps the others.
func idsOf(r Resource, ids []string) []string {
	ids = slices.Clone(ids)
	for i, id := range ids {
		device, number, _ := strings.Cut(id, "::")
		if n, err := strconv.Atoi(number); err == nil && r.byID[health.DeviceID(device)] != nil {
			if d := r.byID[health.DeviceID(device)]; n < d.units() {
				ids[i] = d.id(n)
			}
		}
	}
	return ids
}

// holding returns a holder for each ID of a resource.
func holding(resource string, ids []string) map[health.DeviceID][]podresources.Holder {
	by := map[health.DeviceID][]podresources.Holder{}
	for i, id := range ids {
		h := podresources.Holder{Namespace: "default", Pod: fmt.Sprintf("pod-%d", i), Container: "main", Resource: resource, DeviceID: id}
		by[deviceid.Parse(id).Device()] = append(by[deviceid.Parse(id).Device()], h)
	}
	return by
}

// The response for each kind of share with each device list.
func TestAllocateSharesGolden(t *testing.T) {
	for _, c := range []struct {
		name     string
		resource string
		changes  []func(*Config)
		limits   *memlimits.Capabilities // nil if nothing examines the node
		ids      []string
	}{
		{"mps", mpsResource, []func(*Config){mpsBy(4)}, nil, units(1, 2, 3)},
		{"mps-3-shares", mpsResource, []func(*Config){mpsBy(4), severalShares}, nil, units(1, 0, 3)},
		{"memory-none", memoryResource, []func(*Config){memoryBy(memoryResource, EnforceNone)}, nil, units(1, 0, 10)},
		{"memory-driver", memoryResource, []func(*Config){memoryBy(memoryResource, EnforceAuto)}, driverLimits("GPU-1"), units(1, 0, 10)},
		{"memory-mps", memoryResource, []func(*Config){memoryBy(memoryResource, EnforceMPS)}, nil, units(1, 0, 10)},
		{"memory-gpushare", GPUShareResource, []func(*Config){memoryBy(GPUShareResource, EnforceNone)}, nil, units(1, 0, 10)},
	} {
		for _, list := range DeviceLists() {
			cfg := configured(append(c.changes, func(cfg *Config) { cfg.DeviceList = []string{list} })...)
			if err := cfg.Validate(); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			snap := sized(80, 80)
			if strings.Contains(c.name, "mps") {
				snap = served(snap, 0, 1)
			}
			l := newLayout(layoutInput{cfg: &cfg, snap: snap, capabilities: c.limits, examined: c.limits != nil})
			r := findResource(l.resources, c.resource)
			resp, err := testAllocation(cfg, machine()).allocate(t.Context(), r, request(idsOf(r, c.ids)))
			if err != nil {
				t.Errorf("%s, %s: %v", c.name, list, err)
				continue
			}
			golden.CheckJSON(t, "testdata/allocate/"+c.name+"-"+list+".json", resp)
		}
	}
}

// Each case requests IDs for one container. A case with a reason is refused, with these texts; one without has this environment,
// in which "" is an unset variable.
func TestAllocateShares(t *testing.T) {
	type env = map[string]string
	one, several := configured(mpsBy(4)), configured(mpsBy(4), severalShares)
	limited := configured(mpsBy(10), severalShares, func(c *Config) {
		c.Sharing.MPS.Resources[0].ActiveThreadPercentage, c.Sharing.MPS.Resources[0].PinnedMemory = 40, "2Gi"
	})
	memory, driver := configured(memoryBy(memoryResource, EnforceNone)), configured(memoryBy(memoryResource, EnforceDriver))
	byMPS := configured(memoryBy(memoryResource, EnforceMPS))
	mixed := configured(mpsBy(4, "1"), severalShares, func(c *Config) { c.Sharing.MPS.Resources[0].Rename = gpu })
	plain := sized(80, 80, 24)
	ready := served(plain, 0, 1, 2)
	fragmented := slices.Concat(units(0, 0, 73), units(1, 0, 71), units(2, 0, 20)) // free: 7, 9 and 4
	partlyFree := slices.Concat(units(0, 0, 73), units(2, 0, 20))
	lost := with(plain, 1, health.Unhealthy)
	for _, c := range []struct {
		name     string
		cfg      Config
		snap     *health.Snapshot
		limits   *memlimits.Capabilities
		held     []string // by other containers; nil if the holders are unknown
		resource string
		ids      []string
		want     env
		reason   string
		texts    []string
	}{
		{
			"one MPS share", one, ready, nil, nil, mpsResource, units(2, 3, 4),
			env{envDevices: "GPU-2", envMPSThreads: "25", envMPSMemory: "0=6144M"},
			"", nil,
		},
		{
			"three MPS shares", several, ready, nil, nil, mpsResource, units(0, 1, 4),
			env{envDevices: "GPU-0", envMPSThreads: "75", envMPSMemory: "0=61440M"},
			"", nil,
		},
		{"all MPS shares", several, ready, nil, nil, mpsResource, units(0, 0, 4), env{envMPSThreads: "", envMPSMemory: "0=81920M"}, "", nil},
		{"configured limits", limited, ready, nil, nil, mpsResource, units(0, 0, 2), env{envMPSThreads: "80", envMPSMemory: "0=4096M"}, "", nil},
		{
			"more than all threads", limited, ready, nil, nil, mpsResource, units(0, 0, 3),
			env{envMPSThreads: "", envMPSMemory: "0=6144M"},
			"",
			nil,
		},
		{
			"two MPS shares where one is allowed", one, ready, nil, nil, mpsResource, units(0, 0, 2), nil, reasonTooManyReplicas,
			[]string{"plugin.sharing.mps.failRequestsGreaterThanOne"},
		},
		{
			"MPS shares of two GPUs", several, ready, nil, nil, mpsResource,
			[]string{"GPU-0::0", "GPU-2::1"},
			nil, reasonSeveralDevices,
			[]string{"1 of the 2 requested are on GPU 0, 1 on GPU 2"},
		},
		{
			"MPS daemon starting", one, mpsStopped(ready, 0, ""), nil, nil, mpsResource, units(0, 0, 1), nil, reasonMPSNotReady,
			[]string{"the MPS daemon ended"},
		},
		{
			"MPS daemon down", one, mpsStopped(ready, 0, health.CauseMPSDown), nil, nil, mpsResource, units(0, 0, 1), nil, reasonMPSNotReady,
			[]string{"the MPS daemon ended"},
		},
		{
			"MPS daemon of another GPU down", one, mpsStopped(ready, 0, health.CauseMPSDown), nil, nil, mpsResource, units(1, 0, 1),
			env{envDevices: "GPU-1"},
			"", nil,
		},
		{
			"lost GPU with MPS", one, with(ready, 1, health.Unhealthy), nil, nil, mpsResource, units(1, 0, 1), nil, reasonUnhealthyDevice,
			[]string{"xid-79"},
		},
		{"MPS share and a whole GPU", mixed, served(plain, 1), nil, nil, gpu, []string{"GPU-0", "GPU-1::0"}, nil, reasonSeveralDevices, nil},
		{
			"two whole GPUs beside MPS", mixed, served(plain, 1), nil, nil, gpu,
			[]string{"GPU-0", "GPU-2"},
			env{envDevices: "GPU-0,GPU-2", envMPSPipes: ""},
			"", nil,
		},
		{
			"MPS shares beside whole GPUs", mixed, served(plain, 1), nil, nil, gpu, units(1, 0, 2),
			env{envDevices: "GPU-1", envMPSPipes: "/mps/nvidia.com/gpu/pipe"},
			"", nil,
		},

		{
			"memory", memory, plain, nil, nil, memoryResource, units(2, 0, 6),
			env{envDevices: "GPU-2", envMemoryLimit: "6144", envMemoryFraction: "0.2500", envDriverLimit: "", envMPSPipes: ""},
			"", nil,
		},
		{
			"all memory", memory, plain, nil, nil, memoryResource, units(2, 0, 24),
			env{envMemoryLimit: "24576", envMemoryFraction: "1.0000"},
			"",
			nil,
		},
		{"a third of the memory", memory, sized(3), nil, nil, memoryResource, units(0, 0, 1), env{envMemoryFraction: "0.3333"}, "", nil},
		{
			"limited by the driver", driver, plain, driverLimits("GPU-2"), nil, memoryResource, units(2, 0, 2),
			env{envDriverLimit: "2048", envDriverRequest: "0", envMemoryLimit: "2048"},
			"", nil,
		},
		{"not limited by the driver", driver, plain, &memlimits.Capabilities{
			Driver: map[health.DeviceID]string{"GPU-2": "cgroup v1"},
			Hook:   true,
		}, nil, memoryResource, units(2, 0, 2), env{envDriverLimit: "", envDriverRequest: "", envMemoryLimit: "2048"}, "", nil},
		{"not examined by the driver", driver, plain, driverLimits(), nil, memoryResource, units(2, 0, 2), nil, reasonWithheldDevice, nil},
		{
			"memory by MPS", byMPS, ready, nil, nil, memoryResource, units(2, 0, 2),
			env{envMPSMemory: "0=2048M", envMPSThreads: "", envDriverLimit: "", envMPSPipes: "/mps/nvidia.com/gpu-memory/pipe"},
			"", nil,
		},
		{
			"memory by MPS that is not ready", byMPS, mpsStopped(ready, 2, health.CauseMPSHung), nil, nil, memoryResource, units(2, 0, 2), nil,
			reasonMPSNotReady, nil,
		},
		{
			"memory of two GPUs, holders unknown", memory, plain, nil, nil, memoryResource, slices.Concat(units(0, 0, 3), units(1, 0, 7)), nil,
			reasonSeveralDevices,
			[]string{"3 of the 10 requested are on GPU 0, 7 on GPU 1"},
		},
		{
			"memory of two GPUs, none has enough", memory, plain, nil, fragmented, memoryResource, slices.Concat(units(0, 73, 76), units(1, 71, 78)),
			nil, reasonSeveralDevices,
			[]string{"3 of the 10 requested are on GPU 0 (7 free), 7 on GPU 1 (9 free)", "none has 10 free: the largest request that fits is 9"},
		},
		{
			"memory of two GPUs, another has enough", memory, plain, nil, partlyFree, memoryResource,
			slices.Concat(units(0, 73, 76), units(2, 20, 24)), nil, reasonSeveralDevices,
			[]string{"3 of the 7 requested are on GPU 0 (7 free), 4 on GPU 2 (4 free)", "GPU 1 (80 free) can serve 7"},
		},
		{
			"memory of two GPUs, the other is lost", memory, lost, nil, partlyFree, memoryResource,
			slices.Concat(units(0, 73, 77), units(2, 20, 24)), nil, reasonSeveralDevices,
			[]string{"none has 8 free: the largest request that fits is 7"},
		},
		{"memory of a lost GPU", memory, lost, nil, nil, memoryResource, units(1, 0, 2), nil, reasonUnhealthyDevice, []string{"xid-79"}},
		{"units that the GPU lacks", memory, plain, nil, nil, memoryResource, units(2, 23, 25), nil, reasonUnknownDevice, nil},
	} {
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		in := layoutInput{cfg: &c.cfg, snap: c.snap, capabilities: c.limits, examined: c.limits != nil}
		r := findResource(newLayout(in).resources, c.resource)
		ids := idsOf(r, c.ids)
		if c.held != nil {
			in.facts = factsOf(holding(c.resource, idsOf(r, c.held)))
			r = findResource(newLayout(in).resources, c.resource)
		}
		resp, err := testAllocation(c.cfg, machine()).allocate(t.Context(), r, request(ids))
		if c.reason != "" {
			r, ok := errors.AsType[*refusal](err)
			if !ok || r.reason != c.reason || !slices.Contains(ids, r.device) || !strings.Contains(r.text, r.device) || status.Code(err) != r.code ||
				len(r.text) > 1<<10 {
				t.Errorf("%s: %+v, want %s", c.name, err, c.reason)
				continue
			}
			for _, text := range c.texts {
				if !strings.Contains(r.text, text) {
					t.Errorf("%s: %q lacks %q", c.name, r.text, text)
				}
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for key, want := range c.want {
			if got := resp.ContainerResponses[0].Envs[key]; got != want {
				t.Errorf("%s: %s=%q, want %q", c.name, key, got, want)
			}
		}
	}
}

// The environment of gpushare's device plugin, for the second GPU.
func TestAllocateGPUShare(t *testing.T) {
	cfg := configured(memoryBy(GPUShareResource, EnforceNone))
	r := findResource(Layout(cfg, sized(80, 24)), GPUShareResource)
	resp, err := testAllocation(cfg, machine()).allocate(t.Context(), r, request(idsOf(r, units(1, 3, 8))))
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "5", "ALIYUN_COM_GPU_MEM_CONTAINER": "5", "ALIYUN_COM_GPU_MEM_DEV": "24",
	} {
		if got := resp.ContainerResponses[0].Envs[key]; got != want {
			t.Errorf("%s=%q, want %q", key, got, want)
		}
	}
}

// A refusal of many MIG devices names some of them. What a device could serve is unknown until the kubelet says who holds its units.
func TestSeveralDevicesOfMany(t *testing.T) {
	cfg := configured(memoryBy(memoryResource, EnforceNone))
	sizes := slices.Repeat([]uint64{8}, 100)
	r := findResource(Layout(cfg, sized(sizes...)), memoryResource)
	_, err := testAllocation(cfg, machine()).allocate(t.Context(), r, request(all(r)))
	if reason := refusalReason(err); reason != reasonSeveralDevices || len(err.Error()) > 1<<10 || strings.Contains(err.Error(), "largest") {
		t.Errorf("%s: %v", reason, err)
	}
}
