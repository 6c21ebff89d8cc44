package plugin

import (
	"crypto/rand"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Why an allocation is refused: the keys of ResourceStatus.AllocationErrors.
const (
	reasonUnknownDevice   = "unknown_device"
	reasonUnhealthyDevice = "unhealthy_device"
	reasonWithheldDevice  = "withheld_device"
	reasonTooManyReplicas = "too_many_replicas"
	reasonNoDeviceNode    = "no_device_node"
	reasonOther           = "other"
)

// AllocationErrors returns these keys, so that a counter can begin at 0.
func AllocationErrors() []string {
	return []string{reasonUnknownDevice, reasonUnhealthyDevice, reasonWithheldDevice, reasonTooManyReplicas, reasonNoDeviceNode, reasonOther}
}

// refusal is the error of an allocation. Its text becomes the event of the pod.
type refusal struct {
	reason string // short and stable, fit for a label
	code   codes.Code
	text   string
}

func (r *refusal) Error() string { return r.text }

// GRPCStatus makes gRPC send the refusal's own code and text.
func (r *refusal) GRPCStatus() *status.Status { return status.New(r.code, r.text) }

func refuse(reason string, code codes.Code, format string, args ...any) *refusal {
	return &refusal{reason, code, fmt.Sprintf(format, args...)}
}

// How a container is told of its devices, in the words of NVIDIA's plugin (its deviceListStrategy).
const (
	ListCDICRI         = "cdi-cri"         // CDI names in the answer; Kubernetes 1.28, containerd 1.7 or CRI-O 1.27
	ListCDIAnnotations = "cdi-annotations" // CDI names in an annotation, for older ones
	ListEnv            = "envvar"          // NVIDIA_VISIBLE_DEVICES, which any image can set for itself
	ListMounts         = "volume-mounts"   // mounts below a directory, which only a pod can ask for
)

func lists() []string { return []string{ListCDICRI, ListCDIAnnotations, ListEnv, ListMounts} }

// How a device is named there.
const (
	DeviceIDUUID  = "uuid"
	DeviceIDIndex = "index" // 0, of a MIG device 0:1
)

// What the NVIDIA container runtime reads, and what NVIDIA's plugin calls it.
const (
	envDevices       = "NVIDIA_VISIBLE_DEVICES"
	mountedDevices   = "/var/run/nvidia-container-devices"
	annotationPlugin = "nvidia-device-plugin_"
)

// noDevices is NVIDIA_VISIBLE_DEVICES for a container that gets none. An empty value would do for the
// runtime, but reads like a mistake.
const noDevices = "void"

// terms are what an answer depends on besides the devices.
type terms struct {
	cfg  *Config
	host host
	uuid func() string // makes the key of an annotation, which must be unique in a pod
}

// termsHere are those of this machine.
func termsHere(cfg *Config) terms {
	return terms{cfg: cfg, host: host{os.DirFS("/"), cfg}, uuid: randomUUID}
}

func randomUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])                      // it cannot fail
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// allocate answers an Allocate call, one response for each container. Its error is a *refusal. What is in an
// answer, and in which order, is as NVIDIA's plugin has it (NVIDIA/k8s-device-plugin, internal/plugin/server.go).
//
// A device that is unhealthy now is refused, though the kubelet asked for it: it knows less than we do
// for as long as the news is on its way, and a container on a dead GPU fails later and with less reason.
// This cannot break a running pod: the kubelet calls Allocate only when it admits a container to new
// devices. A restarted container, and a pod that ran through a restart of the kubelet, keep the answer
// that the kubelet has stored, and a container whose device went bad is not re-admitted by the kubelet
// itself (k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/manager.go:635). A device that is withheld is refused
// for the same reason.
func allocate(t terms, r Resource, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	resp := &pluginapi.AllocateResponse{}
	for _, container := range req.GetContainerRequests() {
		devices, err := t.check(r, container.GetDevicesIds())
		if err != nil {
			return nil, err
		}
		answer, err := t.answer(r, devices)
		if err != nil {
			return nil, err
		}
		resp.ContainerResponses = append(resp.ContainerResponses, answer)
	}
	return resp, nil
}

// check returns the devices behind the ids, each once and in the order asked for, or says which may not be
// handed out, and why.
func (t terms) check(r Resource, ids []string) ([]Device, error) {
	var devices []Device
	for _, id := range ids {
		d, known := r.device(id)
		if !known {
			return nil, refuse(reasonUnknownDevice, codes.InvalidArgument, "%s: unknown device %q; this node has %s", r.Name, id, names(r.Devices))
		}
		if !d.works() {
			return nil, refuse(reasonUnhealthyDevice, codes.FailedPrecondition,
				"%s: device %s is unhealthy: %s; a new pod will be given another device", r.Name, id, whyUnhealthy(d))
		}
		if d.withheld != "" {
			return nil, refuse(reasonWithheldDevice, codes.FailedPrecondition,
				"%s: device %s is not offered to new pods: %s; a new pod will be given another device", r.Name, id, d.withheld)
		}
		if d.replica && len(ids) > 1 && t.cfg.Sharing.TimeSlicing.FailRequestsGreaterThanOne {
			return nil, refuse(reasonTooManyReplicas, codes.InvalidArgument,
				"%s: device %s is shared, and a container may have 1 replica, not %d: more of them give no more of a GPU; "+
					"ask for 1, or set plugin.sharing.timeSlicing.failRequestsGreaterThanOne to false", r.Name, id, len(ids))
		}
		if !slices.ContainsFunc(devices, func(o Device) bool { return o.State.Device.ID == d.State.Device.ID }) {
			devices = append(devices, d)
		}
	}
	return devices, nil
}

// answer gives a container its devices.
func (t terms) answer(r Resource, devices []Device) (*pluginapi.ContainerAllocateResponse, error) {
	c := t.cfg
	ids, cdiNames := make([]string, len(devices)), make([]string, len(devices))
	for i, d := range devices {
		ids[i] = c.idOf(d)
		cdiNames[i] = c.cdiKind() + "=" + ids[i]
	}
	a := &pluginapi.ContainerAllocateResponse{}
	if slices.Contains(c.DeviceList, ListCDIAnnotations) && len(devices) > 0 {
		a.Annotations = map[string]string{c.CDI.AnnotationPrefix + annotationPlugin + t.uuid(): strings.Join(cdiNames, ",")}
	}
	if slices.Contains(c.DeviceList, ListCDICRI) {
		for _, name := range cdiNames {
			a.CdiDevices = append(a.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}
	}
	var nodes []string
	if c.PassDeviceSpecs || c.usesCDI() && c.CDI.Generate { // our own spec leaves out what has no nodes
		for _, d := range devices {
			own, err := t.host.deviceNodes(&d.State.Device)
			if err != nil {
				return nil, refuse(reasonNoDeviceNode, codes.FailedPrecondition, "%s: device %s has no device node: %v", r.Name, d.ID, err)
			}
			nodes = append(nodes, own...)
		}
	}
	byMounts := slices.Contains(c.DeviceList, ListMounts)
	if c.usesCDI() && !byMounts && !slices.Contains(c.DeviceList, ListEnv) {
		return a, nil // the CDI spec has the rest
	}
	value := noDevices
	if len(ids) > 0 {
		value = strings.Join(ids, ",")
	}
	if byMounts {
		value = mountedDevices
		for _, id := range ids {
			a.Mounts = append(a.Mounts, &pluginapi.Mount{HostPath: "/dev/null", ContainerPath: path.Join(mountedDevices, id)})
		}
	}
	a.Envs = map[string]string{envDevices: value}
	if c.PassDeviceSpecs && len(devices) > 0 {
		for _, node := range once(append(t.host.controlNodes(), nodes...)) {
			a.Devices = append(a.Devices, &pluginapi.DeviceSpec{
				ContainerPath: node, HostPath: path.Join(c.devRoot(), node), Permissions: "rw",
			})
		}
	}
	return a, nil
}

// idOf names a device for the container runtime, and in the CDI spec.
func (c *Config) idOf(d Device) string {
	device := &d.State.Device
	switch {
	case c.DeviceID != DeviceIDIndex:
		return string(device.ID)
	case device.Kind == health.KindMIG:
		return strconv.Itoa(device.Index) + ":" + strconv.Itoa(device.MIGIndex)
	}
	return strconv.Itoa(device.Index)
}

// whyUnhealthy returns the worst finding in words.
func whyUnhealthy(d Device) string {
	if len(d.State.Verdict.Findings) == 0 {
		return "no reason is known"
	}
	f := d.State.Verdict.Findings[0]
	switch {
	case f.Reason == "":
		return f.Cause
	case f.Cause == "":
		return f.Reason
	}
	return f.Reason + " (" + f.Cause + ")"
}

// names lists devices.
func names(devices []Device) string {
	if len(devices) == 0 {
		return "none"
	}
	ids := make([]string, len(devices))
	for i, d := range devices {
		ids[i] = d.ID
	}
	return some(ids)
}

// maxNames bounds an error, which ends up in an event of at most 1 KiB.
const maxNames = 8

// some lists the first of many.
func some(ids []string) string {
	if len(ids) <= maxNames {
		return strings.Join(ids, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(ids[:maxNames], ", "), len(ids)-maxNames)
}

// once returns a list without repetitions, each where it came first.
func once(list []string) []string {
	var out []string
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
