package plugin

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// The reasons of refused allocations, which are the keys of ResourceStatus.AllocationErrors.
const (
	reasonUnknownDevice   = "unknown_device"
	reasonUnhealthyDevice = "unhealthy_device"
	reasonMPSNotReady     = "mps_not_ready"
	reasonWithheldDevice  = "withheld_device"
	reasonTooManyReplicas = "too_many_replicas"
	reasonSeveralDevices  = "several_devices"
	reasonNoDeviceNode    = "no_device_node"
	reasonOther           = "other"
)

// AllocationErrors returns these keys, so that a counter can start at 0.
func AllocationErrors() []string {
	return []string{
		reasonUnknownDevice, reasonUnhealthyDevice, reasonMPSNotReady, reasonWithheldDevice, reasonTooManyReplicas, reasonSeveralDevices,
		reasonNoDeviceNode, reasonOther,
	}
}

// refusal is the error of an allocation. The kubelet puts its text into an event of the pod.
type refusal struct {
	reason string // short and stable, used as a label value
	device string // the kubelet's ID, abbreviated; empty if the refusal concerns the whole call
	code   codes.Code
	text   string
}

func (r *refusal) Error() string { return r.text }

// refusalReason returns the reason of an allocation's error.
func refusalReason(err error) string {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.reason
	}
	return reasonOther
}

// GRPCStatus makes gRPC send the refusal's own code and text.
func (r *refusal) GRPCStatus() *status.Status { return status.New(r.code, r.text) }

// The interface of the NVIDIA container runtime, and the annotation key of NVIDIA's plugin.
const (
	envDevices       = "NVIDIA_VISIBLE_DEVICES"
	mountedDevices   = "/var/run/nvidia-container-devices"
	annotationPlugin = "nvidia-device-plugin_"
)

// noDevices is NVIDIA_VISIBLE_DEVICES of a container without devices. The runtime also accepts an empty value, but that
// looks like a mistake.
const noDevices = "void"

// maxIDLength is the kubelet's limit of a device ID. A longer ID is abbreviated where people read it.
const maxIDLength = 63

func abbreviated(id string) string {
	if len(id) > maxIDLength {
		id = strings.ToValidUTF8(id[:maxIDLength], "") + "…"
	}
	return id
}

// allocation answers Allocate calls.
type allocation struct {
	cfg    *Config
	absent string // layout.absent
	host   cdi.Host
	uuid   func() string // for the key of an annotation, which must be unique in a pod
}

// allocate answers an Allocate call with one response per container. Its error is a *refusal, or ctx's. A response has the same contents in
// the same order as a response of NVIDIA's plugin (NVIDIA/k8s-device-plugin, internal/plugin/server.go).
//
// A device that has just become unhealthy is refused although the kubelet requested it: the kubelet does not have the new
// list yet, and a container on a dead GPU would fail later and with a worse error. This cannot break a running pod,
// because the kubelet calls Allocate only when it admits a container to new devices. For a restarted container, and for a
// pod that runs through a restart of the kubelet, the kubelet uses the stored response; it does not admit a container
// again whose device became unhealthy (k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/manager.go:635). Withheld
// devices are refused for the same reason.
func (a allocation) allocate(ctx context.Context, r Resource, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	if n := len(req.GetContainerRequests()); n > maxContainers {
		return nil, &refusal{reasonOther, "", codes.ResourceExhausted, tooManyContainers(r.Name, n)}
	}
	if a.absent != "" {
		return nil, &refusal{
			reasonWithheldDevice, "", codes.FailedPrecondition,
			"no device of this node is offered to new pods: " + a.absent + createAgain,
		}
	}
	resp := &pluginapi.AllocateResponse{}
	for _, container := range req.GetContainerRequests() {
		if err := ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		grants, err := a.grants(r, container.GetDevicesIds())
		if err != nil {
			return nil, err
		}
		answer, err := a.respond(ctx, r, grants)
		if err != nil {
			return nil, err
		}
		resp.ContainerResponses = append(resp.ContainerResponses, answer)
	}
	return resp, nil
}

// grant is a device of a container.
type grant struct {
	*Device
	id        string // the first that is requested
	requested []bool // by unit
	count     int    // of them
}

// grants returns the devices behind the IDs, each once and in the order of the request, or a refusal. An ID is unknown or a
// duplicate at the latest when there are more IDs than the resource has, so the cost is bounded whatever a client sends.
func (a allocation) grants(r Resource, ids []string) ([]grant, error) {
	var grants []grant
	granted := make(map[*Device]int) // its position in grants
	for _, id := range ids {
		refuse := func(reason string, code codes.Code, format string, args ...any) ([]grant, error) {
			return nil, &refusal{reason, abbreviated(id), code, r.Name + ": " + fmt.Sprintf(format, args...)}
		}
		u, ok := r.unit(id)
		if !ok {
			return refuse(reasonUnknownDevice, codes.NotFound, "unknown device %q; this node has %s", abbreviated(id), r.abbreviatedIDs())
		}
		n, exists := granted[u.Device]
		switch {
		case exists && grants[n].requested[u.number]:
			return refuse(reasonOther, codes.InvalidArgument, "device %s is requested twice for one container; request each device once", id)
		case !u.give.Allows(offer.Give):
			reason, text := refused(u.give)
			return refuse(reason, codes.FailedPrecondition, text, id, u.give.Reason())
		case u.share != nil && u.share.single && len(ids) > 1:
			return refuse(reasonTooManyReplicas, codes.InvalidArgument, "device %s is shared, and %s", id, u.share.singleReason(len(ids)))
		}
		if !exists {
			n = len(grants)
			granted[u.Device] = n
			grants = append(grants, grant{Device: u.Device, id: id, requested: make([]bool, u.units())})
		}
		grants[n].requested[u.number] = true
		grants[n].count++
	}
	if len(grants) > 1 && slices.ContainsFunc(grants, func(g grant) bool { return g.alone() }) {
		return nil, severalDevices(r, grants, len(ids))
	}
	return grants, nil
}

// createAgain is what to do about a pod that a node refuses while none of its devices is offered. The kubelet fails the pod.
const createAgain = "; if the pod has no controller that creates another, delete it and create it again"

// refused returns the reason of a refusal, and its text with verbs for the ID and the answer's reason.
func refused(a offer.Answer) (reason, text string) {
	const another = "; a new pod will get another device"
	switch a.Code() {
	case offer.Unhealthy, offer.Detached:
		return reasonUnhealthyDevice, "device %s is unhealthy: %s" + another
	case offer.NotReady:
		return reasonMPSNotReady, "the MPS daemon of device %s is not ready: %s" + another
	case offer.Releasing, offer.NoCDI: // no other device is offered either
		return reasonWithheldDevice, "device %s is not offered to new pods: %s" + createAgain
	}
	return reasonWithheldDevice, "device %s is not offered to new pods: %s" + another
}

// tooManyContainers is the text of a call with more than maxContainers.
func tooManyContainers(resource string, n int) string {
	return fmt.Sprintf("%s: %d containers in one call; expected at most %d", resource, n, maxContainers)
}

// respond returns the response for a container with these devices. It reads files of the driver, so it ends with ctx.
func (a allocation) respond(ctx context.Context, r Resource, grants []grant) (*pluginapi.ContainerAllocateResponse, error) {
	c := a.cfg
	ids, cdiNames := make([]string, len(grants)), make([]string, len(grants))
	for i, g := range grants {
		ids[i] = c.runtimeID(&g.State.Device)
		cdiNames[i] = c.CDI.QualifiedName(ids[i])
	}
	resp := &pluginapi.ContainerAllocateResponse{}
	for _, g := range grants { // of shares and of memory there is one device
		g.addMPS(resp, r.Name, mps.Root(c.Sharing.MPS.Root))
		g.addMemory(resp, r.Name)
	}
	if slices.Contains(c.DeviceList, ListCDIAnnotations) && len(grants) > 0 {
		resp.Annotations = map[string]string{c.CDI.AnnotationPrefix + annotationPlugin + a.uuid(): strings.Join(cdiNames, ",")}
	}
	if slices.Contains(c.DeviceList, ListCDICRI) {
		for _, name := range cdiNames {
			resp.CdiDevices = append(resp.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}
	}
	nodes, err := a.nodes(ctx, r, grants)
	if err != nil {
		return nil, err
	}
	useMounts := slices.Contains(c.DeviceList, ListMounts)
	if c.UsesCDI() && !useMounts && !slices.Contains(c.DeviceList, ListEnv) {
		return resp, nil // the CDI spec has the rest
	}
	value := noDevices
	if len(ids) > 0 {
		value = strings.Join(ids, ",")
	}
	if useMounts {
		value = mountedDevices
		for _, id := range ids {
			resp.Mounts = append(resp.Mounts, &pluginapi.Mount{HostPath: "/dev/null", ContainerPath: path.Join(mountedDevices, id)})
		}
	}
	setEnv(resp, envDevices, value)
	if c.PassDeviceSpecs && len(grants) > 0 {
		for _, node := range nodes {
			resp.Devices = append(resp.Devices, &pluginapi.DeviceSpec{ContainerPath: node, HostPath: a.host.HostPath(node), Permissions: "rw"})
		}
	}
	return resp, nil
}

// nodes returns the device nodes that a container needs. It fails if a device has none: the generated CDI spec omits such a device.
func (a allocation) nodes(ctx context.Context, r Resource, grants []grant) (nodes []string, err error) {
	c := a.cfg
	switch {
	case c.PassDeviceSpecs:
		nodes = a.host.ControlNodes()
	case !c.UsesCDI() || !c.CDI.Generate:
		return nil, nil
	}
	for _, g := range grants {
		if err := ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		deviceNodes, err := a.host.DeviceNodes(&g.State.Device)
		if err != nil {
			return nil, &refusal{
				reasonNoDeviceNode, g.id, codes.FailedPrecondition,
				fmt.Sprintf("%s: device %s has no device node: %v", r.Name, g.id, err),
			}
		}
		for _, node := range deviceNodes {
			if !slices.Contains(nodes, node) { // MIG devices of one GPU share a node
				nodes = append(nodes, node)
			}
		}
	}
	return nodes, nil
}

// runtimeID returns the name of a device for the container runtime and in the CDI spec.
func (c *Config) runtimeID(d *health.Device) string {
	switch {
	case c.DeviceID != DeviceIDIndex:
		return string(d.ID)
	case d.Kind == health.KindMIG:
		return strconv.Itoa(d.Index) + ":" + strconv.Itoa(d.MIGIndex)
	}
	return strconv.Itoa(d.Index)
}

func (r Resource) abbreviatedIDs() string {
	if len(r.Devices) == 0 {
		return "none"
	}
	ids := make([]string, 0, r.units())
	for _, d := range r.Devices {
		for _, id := range d.ids() {
			ids = append(ids, id)
		}
	}
	return grouped.Abbreviate(ids)
}
