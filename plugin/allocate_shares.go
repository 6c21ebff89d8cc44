package plugin

import (
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// alone reports whether a container with this device must have no other. One container has one MPS pipe directory, which is of
// one device. A request for memory means memory of one device: no process could use more of it at once.
func (d *Device) alone() bool {
	return d.share != nil && (d.share.kind == SharingMPS || d.share.kind == SharingMemory)
}

// singleReason is the text of a request for several units of a device of which a container may request one.
func (s *share) singleReason(requested int) string {
	noun, several := "replica", ", because more replicas give no larger share of a GPU; request 1, or set %s to false"
	if s.kind == SharingMPS {
		noun, several = "share", "; request 1, or set %s to false: the limits of a container are then those of its shares together"
	}
	return fmt.Sprintf("a container may request 1 %s, not %d"+several, noun, requested,
		"plugin.sharing."+string(s.kind)+".failRequestsGreaterThanOne")
}

// maxNamedDevices limits the devices that a refusal names: a node may have more than a hundred MIG devices.
const maxNamedDevices = 8

// severalDevices refuses a request for units of several devices, at least one of which must be alone. It describes what is free, as
// of the last response of the kubelet's pod resources.
func severalDevices(r Resource, grants []grant, requested int) error {
	n := slices.IndexFunc(grants, func(g grant) bool { return g.alone() })
	shared, other := grants[n], grants[0]
	if n == 0 {
		other = grants[1]
	}
	var where []string
	for i, g := range grants[:min(len(grants), maxNamedDevices)] {
		part := fmt.Sprintf("%d on %s", g.count, g.place())
		if i == 0 {
			part = fmt.Sprintf("%d of the %d requested are on %s", g.count, requested, g.place())
		}
		where = append(where, part)
	}
	if more := len(grants) - maxNamedDevices; more > 0 {
		where = append(where, fmt.Sprintf("the others on %d more", more))
	}
	text := fmt.Sprintf("%s: %s and %s are of two devices, and a container gets shares or memory of one only: %s",
		r.Name, shared.id, other.id, strings.Join(where, ", "))
	return &refusal{reasonSeveralDevices, shared.id, codes.FailedPrecondition, text + r.largestRequest(requested)}
}

// place names the GPU or MIG device, with its free units if they are known.
func (d *Device) place() string {
	device := &d.State.Device
	name := "GPU " + strconv.Itoa(device.Index)
	if device.Kind == health.KindMIG {
		name = fmt.Sprintf("MIG device %d:%d", device.Index, device.MIGIndex)
	}
	if free := d.free(); d.share != nil && free >= 0 {
		name += fmt.Sprintf(" (%d free)", free)
	}
	return name
}

// largestRequest returns the end of a refusal of so many units: whether a device could serve them, or how many one can at most. It
// is empty if that is unknown.
func (r Resource) largestRequest(requested int) string {
	var best *Device
	for _, d := range r.Devices {
		if !d.alone() || d.largest() < 0 {
			return ""
		}
		if best == nil || d.largest() > best.largest() {
			best = d
		}
	}
	switch {
	case best == nil:
		return ""
	case best.largest() >= requested:
		return fmt.Sprintf("; %s can serve %d: a new pod may get them", best.place(), requested)
	}
	return fmt.Sprintf("; none has %d free: the largest request that fits is %d", requested, best.largest())
}

func setEnv(resp *pluginapi.ContainerAllocateResponse, key, value string) {
	setEnvs(resp, map[string]string{key: value})
}

func setEnvs(resp *pluginapi.ContainerAllocateResponse, env map[string]string) {
	if resp.Envs == nil {
		resp.Envs = make(map[string]string)
	}
	maps.Copy(resp.Envs, env)
}

// The interface of MPS clients. The paths in the container equal the paths of NVIDIA's plugin.
const (
	envMPSPipes   = "CUDA_MPS_PIPE_DIRECTORY"
	envMPSLogs    = "CUDA_MPS_LOG_DIRECTORY"
	envMPSThreads = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	envMPSMemory  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	mpsDir        = "/mps"
	shmDir        = "/dev/shm"
)

// containerPipeDir returns the directory in a container that has the socket of its MPS daemon.
func containerPipeDir(resource string) string { return path.Join(mpsDir, resource, "pipe") }

// addMPS makes the container a client of the device's MPS daemon, with the limits of its shares together. A client may remove limits
// in its environment, but not the daemon's own. The daemon's are the limits of one share if a container may request no more.
func (g grant) addMPS(resp *pluginapi.ContainerAllocateResponse, resource string, root mps.Root) {
	s := g.share
	if s == nil || !s.mps {
		return
	}
	env, mounts := MPSClient(g.State.Device.ID, resource, root, s.threads*g.count, mebibytes(s.pinned, g.count)*mebibyte)
	setEnvs(resp, env)
	resp.Mounts = append(resp.Mounts, mounts...)
}

// MPSClient returns the environment and the mounts that make a container a client of the MPS daemon of a device, with limits in percent
// of the SMs and in bytes; 100 and 0 for no limit. name is a directory in the container.
func MPSClient(id health.DeviceID, name string, root mps.Root, threads int, pinned uint64) (env map[string]string,
	mounts []*pluginapi.Mount,
) {
	pipes, logs := containerPipeDir(name), path.Join(mpsDir, name, "log")
	env = map[string]string{envMPSPipes: pipes, envMPSLogs: logs}
	if threads < 100 {
		env[envMPSThreads] = strconv.Itoa(threads)
	}
	if pinned > 0 { // the container's only device has the number 0
		env[envMPSMemory] = fmt.Sprintf("0=%dM", pinned/mebibyte)
	}
	return env, []*pluginapi.Mount{
		{ContainerPath: pipes, HostPath: root.PipeDir(id)},
		{ContainerPath: shmDir, HostPath: root.ShmDir()},
		{ContainerPath: logs, HostPath: root.LogDir(id), ReadOnly: true},
	}
}

// The environment of containers with GPU memory.
const (
	// For applications, whether anything enforces the limit or not.
	envMemoryLimit    = "GPU_NODE_AGENT_MEMORY_LIMIT_MIB"
	envMemoryFraction = "GPU_NODE_AGENT_MEMORY_FRACTION" // of the device's memory, as frameworks take it

	// For the hook of the NVIDIA container toolkit, which sets the driver's limits. The request is a reservation; none is needed,
	// because no unit is given twice, and the parent of a removed cgroup would keep it.
	envDriverLimit   = "NVIDIA_GPU_MEMORY_LIMIT"
	envDriverRequest = "NVIDIA_GPU_MEMORY_REQUEST"
)

// The environment of containers with GPUShareResource, as gpushare's device plugin sets it.
const (
	envGPUShareIndex     = "ALIYUN_COM_GPU_MEM_IDX"       // of the GPU
	envGPUSharePod       = "ALIYUN_COM_GPU_MEM_POD"       // units of the pod; the container's, which is all that a device plugin knows
	envGPUShareContainer = "ALIYUN_COM_GPU_MEM_CONTAINER" // units of the container
	envGPUShareDevice    = "ALIYUN_COM_GPU_MEM_DEV"       // units of the GPU
)

// addMemory passes the limit of a container's GPU memory.
func (g grant) addMemory(resp *pluginapi.ContainerAllocateResponse, resource string) {
	s := g.share
	if s == nil || s.kind != SharingMemory {
		return
	}
	setEnvs(resp, MemoryEnv(mebibytes(s.unit, g.count)*mebibyte, g.State.Device.Memory, s.by))
	if resource == GPUShareResource {
		units := strconv.Itoa(g.count)
		maps.Copy(resp.Envs, map[string]string{
			envGPUShareIndex: strconv.Itoa(g.State.Device.Index), envGPUSharePod: units, envGPUShareContainer: units,
			envGPUShareDevice: strconv.Itoa(s.units),
		})
	}
}

// MemoryEnv returns the environment of a container with a part of a device's memory, both in bytes. The toolkit's variables are in it only
// where the driver's limits work: with an older driver the hook would keep the container from starting.
func MemoryEnv(limit, memory uint64, by memlimits.Enforcement) map[string]string {
	text := strconv.FormatUint(limit/mebibyte, 10)
	env := map[string]string{envMemoryLimit: text, envMemoryFraction: fraction(limit, memory)}
	if by == memlimits.Driver {
		env[envDriverLimit], env[envDriverRequest] = text, "0"
	}
	return env
}

// mebibytes returns the size of n units in MiB.
func mebibytes(unit uint64, n int) uint64 { return unit * uint64(n) >> 20 }

// fraction returns part/whole, rounded down to four decimals, at most 1.
func fraction(part, whole uint64) string {
	return strconv.FormatFloat(math.Floor(min(1, float64(part)/float64(whole))*1e4)/1e4, 'f', 4, 64)
}
