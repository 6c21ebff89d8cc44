package plugin

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Resource is one extended resource and the devices that the kubelet may hand out under its name.
type Resource struct {
	Name    string
	Devices []Device // by index
}

// Device is a device as the kubelet knows it.
type Device struct {
	ID    string              // what the kubelet calls it: the UUID, of a replica followed by :: and its number
	State *health.DeviceState // the device behind it, never nil; part of a snapshot, so never modified

	replica  bool   // one of several of this device
	withheld string // why a device that works is not offered to new pods; empty if it is offered
}

// Healthy reports whether the kubelet may hand the device out. Only health.Unhealthy takes a device
// away from it: not knowing enough of a GPU is no reason to stop a node from working.
func (d Device) Healthy() bool { return d.works() && d.withheld == "" }

// works reports whether nothing is wrong with the device itself.
func (d Device) works() bool { return d.State.Verdict.State != health.Unhealthy }

// Layout lays a snapshot out as resources, in a fixed order. It returns none if there is nothing to
// hand out, or if the plugin is off.
func Layout(cfg Config, snap *health.Snapshot) []Resource {
	return arrange(layoutInput{cfg: &cfg, snap: snap}).Resources
}

// layoutInput is all that a layout is made of.
type layoutInput struct {
	cfg     *Config                      // nil before there is one
	snap    *health.Snapshot             // nil before there is one
	holders map[health.DeviceID][]Holder // nil if they are not known
	before  singleLayout                 // of the layout before this one
}

// arrangement is a layout and what is to be said about it. It is not modified once made.
type arrangement struct {
	cfg       *Config
	snap      *health.Snapshot
	Resources []Resource   // by name
	Err       string       // why there are none, if it is the configuration that does not fit the node
	Warnings  []string     // what is not handed out, and why
	Withheld  []withheld   // the devices that old holders keep from new pods, by resource and index
	Single    singleLayout // what the next layout needs to know of this one
}

func (a *arrangement) warn(format string, args ...any) {
	a.Warnings = append(a.Warnings, fmt.Sprintf(format, args...))
}

// candidate is a device that might be handed out.
type candidate struct {
	state   *health.DeviceState
	name    string // of its resource, before sharing
	profile string // MIG: as NVIDIA names it
	parts   int    // GPU: how many MIG devices it has
}

// arrange decides what is handed out under which name. It is pure, and called for every stream at every
// snapshot and for every allocation, so it is made to be cheap.
func arrange(in layoutInput) arrangement {
	cfg, snap := in.cfg, in.snap
	a := arrangement{cfg: cfg, snap: snap}
	if cfg == nil || !cfg.Enabled || !snap.Polled() {
		return a
	}
	all := candidates(snap)
	n := len(all)
	chosen := slices.DeleteFunc(all, func(c candidate) bool {
		return len(cfg.Include) > 0 && !selectsAny(cfg.Include, &c) || selectsAny(cfg.Exclude, &c)
	})
	if len(chosen) == 0 && n > 0 {
		a.Err = fmt.Sprintf("plugin.include and plugin.exclude leave none of the %d devices of this node", n)
	}
	var buf []byte
	var shared memo
	for _, c := range a.handOut(in, chosen) {
		name, replicas := cfg.Sharing.TimeSlicing.share(c.name, &c, &shared)
		r := a.resource(name)
		if replicas == 0 {
			r.Devices = append(r.Devices, Device{ID: string(c.state.Device.ID), State: c.state})
			continue
		}
		r.Devices = slices.Grow(r.Devices, replicas)
		for id := range replicaIDs(&buf, string(c.state.Device.ID), replicas) {
			r.Devices = append(r.Devices, Device{ID: id, State: c.state, replica: true})
		}
	}
	slices.SortFunc(a.Resources, func(x, y Resource) int { return cmp.Compare(x.Name, y.Name) })
	for _, r := range a.Resources {
		isReplica := func(d Device) bool { return d.replica }
		if slices.ContainsFunc(r.Devices, isReplica) && slices.ContainsFunc(r.Devices, func(d Device) bool { return !d.replica }) {
			a.warn("%s has shared and whole devices, and a pod cannot choose: set rename in sharing.timeSlicing.resources", r.Name)
		}
	}
	a.withhold(in.holders, snap)
	return a
}

// resource returns the resource of that name, a new one if there is none.
func (a *arrangement) resource(name string) *Resource {
	for i := range a.Resources {
		if a.Resources[i].Name == name {
			return &a.Resources[i]
		}
	}
	a.Resources = append(a.Resources, Resource{Name: name})
	return &a.Resources[len(a.Resources)-1]
}

// candidates returns every device, each GPU followed by its MIG devices, by index.
func candidates(snap *health.Snapshot) []candidate {
	all := make([]candidate, 0, len(snap.Devices))
	for i := range snap.Devices {
		if state := &snap.Devices[i]; state.Device.ID != "" {
			all = append(all, candidate{state: state})
		}
	}
	slices.SortStableFunc(all, func(x, y candidate) int {
		a, b := &x.state.Device, &y.state.Device
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(gpuOf(a), gpuOf(b)), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI), cmp.Compare(a.ID, b.ID))
	})
	var gpu, last *candidate
	for i := range all {
		c := &all[i]
		d := &c.state.Device
		if d.Kind == health.KindGPU {
			gpu = c
			continue
		}
		var whole uint64
		if gpu != nil && gpu.state.Device.ID == d.Parent {
			whole = gpu.state.Device.Memory
			gpu.parts++
		}
		if last != nil && last.state.Device.Profile == d.Profile && last.state.Device.Memory == d.Memory && last.state.Device.Parent == d.Parent {
			c.profile = last.profile
		} else {
			c.profile = profileOf(d, whole)
		}
		last = c
	}
	return all
}

// gpuOf returns the GPU that a device is or is a part of.
func gpuOf(d *health.Device) health.DeviceID { return cmp.Or(d.Parent, d.ID) }

// replicaSep parts a device's UUID from the number of its replica, as in NVIDIA's plugin.
const replicaSep = "::"

// deviceOf returns the device behind one of the kubelet's device ids: GPU-1 is behind GPU-1::0.
func deviceOf(id string) health.DeviceID {
	device, _, _ := strings.Cut(id, replicaSep)
	return health.DeviceID(device)
}

// replicaIDs returns UUID::0, UUID::1 and so on. They are parts of one string, for there are many of them.
func replicaIDs(buf *[]byte, uuid string, n int) func(yield func(string) bool) {
	b := (*buf)[:0]
	for i := range n {
		b = append(b, uuid...)
		b = append(b, replicaSep...)
		b = strconv.AppendInt(b, int64(i), 10)
	}
	*buf = b
	all := string(b)
	return func(yield func(string) bool) {
		for i, digits, next := 0, 1, 10; i < n; i++ {
			if i == next {
				digits, next = digits+1, next*10
			}
			end := len(uuid) + len(replicaSep) + digits
			if !yield(all[:end]) {
				return
			}
			all = all[end:]
		}
	}
}

// find returns the resource of that name, empty if the layout has none.
func find(layout []Resource, name string) Resource {
	for _, r := range layout {
		if r.Name == name {
			return r
		}
	}
	return Resource{Name: name}
}

// device returns the device of that id.
func (r Resource) device(id string) (Device, bool) {
	i := slices.IndexFunc(r.Devices, func(d Device) bool { return d.ID == id })
	if i < 0 {
		return Device{}, false
	}
	return r.Devices[i], true
}

// healthy counts the devices that the kubelet may hand out.
func (r Resource) healthy() int {
	n := 0
	for _, d := range r.Devices {
		if d.Healthy() {
			n++
		}
	}
	return n
}

// message returns the devices in the kubelet's words.
func (r Resource) message() []*pluginapi.Device {
	devices := make([]*pluginapi.Device, len(r.Devices))
	for i, d := range r.Devices {
		devices[i] = &pluginapi.Device{ID: d.ID, Health: pluginapi.Healthy, Topology: topology(d.State.Device.NUMA)}
		if !d.Healthy() {
			devices[i].Health = pluginapi.Unhealthy
		}
	}
	return devices
}

// topology returns nil if the NUMA nodes are unknown: an empty list would tell the topology manager that
// no node is near the device.
func topology(numa []int) *pluginapi.TopologyInfo {
	var nodes []*pluginapi.NUMANode
	for _, n := range numa {
		if n >= 0 { // Linux says -1 for a device without a node
			nodes = append(nodes, &pluginapi.NUMANode{ID: int64(n)})
		}
	}
	if nodes == nil {
		return nil
	}
	return &pluginapi.TopologyInfo{Nodes: nodes}
}

// sameMessage reports whether the kubelet would learn nothing new from b.
func sameMessage(a, b []*pluginapi.Device) bool {
	return slices.EqualFunc(a, b, func(x, y *pluginapi.Device) bool {
		return x.ID == y.ID && x.Health == y.Health &&
			slices.EqualFunc(x.GetTopology().GetNodes(), y.GetTopology().GetNodes(), func(m, n *pluginapi.NUMANode) bool { return m.ID == n.ID })
	})
}
