package node

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The prefixes of the labels: GFD's, and the agent's for labels that GFD does not have.
const (
	gfdPrefix = "nvidia.com/"
	ownPrefix = "gpu-node-agent/"
)

// inventory is everything that the labels depend on. The state file has it, so that the labels stay after a restart.
type inventory struct {
	Source      health.SourceID `json:"source"`
	OtherBoot   bool            `json:"otherBoot,omitempty"` // nothing was measured since a reboot
	Machine     string          `json:"machine,omitempty"`   // the product name of the machine; empty if unknown
	Driver      string          `json:"driver,omitempty"`
	CUDA        string          `json:"cuda,omitempty"`
	MIGStrategy string          `json:"migStrategy,omitempty"`
	Devices     []device        `json:"devices,omitempty"` // each GPU followed by its MIG devices
}

// device is what the labels need of a GPU or MIG device.
type device struct {
	ID         health.DeviceID          `json:"id"`
	Parent     health.DeviceID          `json:"parent,omitempty"` // MIG: its GPU
	Model      string                   `json:"model,omitempty"`  // MIG: its parent's
	Memory     uint64                   `json:"memory,omitempty"` // bytes
	Capability health.ComputeCapability `json:"capability,omitzero"`
	State      health.State             `json:"state,omitempty"`

	// Of a GPU.
	MIGMode    bool   `json:"migMode,omitempty"`
	MIGCapable bool   `json:"migCapable,omitempty"`
	Class      string `json:"class,omitempty"`  // of PCI, such as 0x030200; empty if unknown
	Clique     string `json:"clique,omitempty"` // of the fabric of NVLinks; empty if there is none, or unknown
	VGPU       *vgpu  `json:"vgpu,omitempty"`   // nil if it is not a vGPU, or unknown

	// Of a MIG device.
	Profile  string                `json:"profile,omitempty"`  // as NVIDIA names it
	Instance *health.MIGProperties `json:"instance,omitempty"` // nil if unknown

	// How the plugin serves it.
	Offered  bool           `json:"offered,omitempty"`
	Sharing  plugin.Sharing `json:"sharing,omitempty"`
	Replicas int            `json:"replicas,omitempty"`
	Renamed  bool           `json:"renamed,omitempty"`
}

// vgpu describes the host of a vGPU.
type vgpu struct{ HostVersion, HostBranch string }

func (d *device) isGPU() bool { return d.Parent == "" }

func (n *inventory) gpus() (all []*device) {
	for i := range n.Devices {
		if d := &n.Devices[i]; d.isGPU() {
			all = append(all, d)
		}
	}
	return all
}

// labels returns the labels of a node; none if it has no GPU. GFD 0.20 has the same labels for the same node, except that it chooses one of
// several models at random, and does not limit the values.
func (n *inventory) labels() map[string]string {
	all := make(labelSet)
	gpus := n.gpus()
	if len(gpus) == 0 {
		return all
	}
	all.addVersions(n)
	all.add("gpu.machine", cmp.Or(labelValue(n.Machine), "unknown"))
	all.addModel(gpus)
	all.addBool("mig.capable", slices.ContainsFunc(gpus, func(d *device) bool { return d.MIGCapable }))
	all.addBool("mps.capable", slices.ContainsFunc(n.Devices, func(d device) bool { return d.Sharing == plugin.SharingMPS }) &&
		!slices.ContainsFunc(gpus, func(d *device) bool { return d.MIGMode }))
	if class := common(gpus, func(d *device) string { return d.Class }); class != nil {
		all.add("gpu.mode", mode(class))
	}
	if cliques := common(gpus, func(d *device) string { return d.Clique }); len(cliques) == 1 {
		all.add("gpu.clique", labelValue(cliques[0]))
	}
	for _, d := range gpus {
		if v := d.VGPU; v != nil {
			all.addBool("vgpu.present", true)
			all.add("vgpu.host-driver-version", labelValue(v.HostVersion))
			all.add("vgpu.host-driver-branch", labelValue(v.HostBranch))
		}
	}
	switch n.MIGStrategy {
	case plugin.MIGSingle:
		all.add("mig.strategy", plugin.MIGSingle)
		all.addSingle(n, gpus)
	case plugin.MIGMixed:
		all.add("mig.strategy", plugin.MIGMixed)
		all.addMixed(n)
	}
	all.addHealth(n, gpus)
	return all
}

// common returns the different values of devices, without unknown ones.
func common(devices []*device, value func(*device) string) (all []string) {
	for _, d := range devices {
		if v := value(d); v != "" && !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return all
}

// mode returns the value of gpu.mode for the PCI classes of the GPUs.
func mode(classes []string) string {
	switch {
	case len(classes) > 1:
	case classes[0] == "0x030000":
		return "graphics"
	case classes[0] == "0x030200":
		return "compute"
	}
	return "unknown"
}

// family returns NVIDIA's name of an architecture.
func family(c health.ComputeCapability) string {
	switch {
	case c.Major == 7 && c.Minor < 5:
		return "volta"
	case c.Major == 8 && c.Minor == 9:
		return "ada-lovelace"
	}
	names := map[int]string{
		1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 7: "turing", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell",
		13: "rubin",
	}
	return cmp.Or(names[c.Major], "undefined")
}

// labelSet are labels under construction.
type labelSet map[string]string

func (l labelSet) add(name, value string)           { l[gfdPrefix+name] = value }
func (l labelSet) addInt(name string, value int)    { l.add(name, strconv.Itoa(value)) }
func (l labelSet) addBool(name string, value bool)  { l.add(name, strconv.FormatBool(value)) }
func (l labelSet) addMiB(name string, bytes uint64) { l.add(name, strconv.FormatUint(bytes>>20, 10)) }
func (l labelSet) addOwn(name string, value int)    { l[ownPrefix+name] = strconv.Itoa(value) }

// addVersions adds the versions of the driver and of CUDA, if they have the expected form.
func (l labelSet) addVersions(n *inventory) {
	if parts := strings.Split(n.Driver, "."); len(parts) == 2 || len(parts) == 3 {
		parts = append(parts, "")[:3]
		for i, part := range parts {
			parts[i] = labelValue(part)
		}
		l.add("cuda.driver-version.full", labelValue(n.Driver))
		l.add("cuda.driver-version.major", parts[0])
		l.add("cuda.driver-version.minor", parts[1])
		l.add("cuda.driver-version.revision", parts[2])
		l.add("cuda.driver.major", parts[0])
		l.add("cuda.driver.minor", parts[1])
		l.add("cuda.driver.rev", parts[2])
	}
	if major, minor, ok := strings.Cut(n.CUDA, "."); ok {
		major, minor = labelValue(major), labelValue(minor)
		l.add("cuda.runtime-version.full", labelValue(n.CUDA))
		l.add("cuda.runtime-version.major", major)
		l.add("cuda.runtime-version.minor", minor)
		l.add("cuda.runtime.major", major)
		l.add("cuda.runtime.minor", minor)
	}
}

// addModel adds the labels of the most numerous model; of the first by name if there are several.
func (l labelSet) addModel(gpus []*device) {
	counts := make(map[string]int)
	for _, d := range gpus {
		counts[d.Model]++
	}
	models := slices.SortedFunc(maps.Keys(counts),
		func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	model := models[0]
	if model == "" && len(models) > 1 {
		model = models[1]
	}
	// As in GFD, a GPU in MIG mode describes the model only if there is no other.
	alike := slices.DeleteFunc(slices.Clone(gpus), func(d *device) bool { return d.Model != model })
	whole := slices.DeleteFunc(slices.Clone(alike), func(d *device) bool { return d.MIGMode })
	served := sharing{strategy: sharingNone}
	if len(whole) > 0 {
		served = sharingOf(whole)
	}
	l.addResource("gpu", model, "", len(alike), served)
	for _, d := range append(whole, alike...) {
		if _, exists := l[gfdPrefix+"gpu.memory"]; !exists && d.Memory != 0 {
			l.addMiB("gpu.memory", d.Memory)
		}
		if _, exists := l[gfdPrefix+"gpu.family"]; !exists && d.Capability.Major > 0 {
			l.add("gpu.family", family(d.Capability))
			l.addInt("gpu.compute.major", d.Capability.Major)
			l.addInt("gpu.compute.minor", d.Capability.Minor)
		}
	}
}

// sharing is how devices of a resource are shared.
type sharing struct {
	strategy string
	replicas int
	shared   bool // under the resource of whole devices
}

// sharingNone is the value of sharing-strategy for devices that are not shared.
const sharingNone = "none"

// sharingOf returns how devices are shared. If some are shared in different ways, the first one that is shared counts.
func sharingOf(devices []*device) sharing {
	strategies := map[plugin.Sharing]string{
		plugin.SharingTimeSlicing: "time-slicing", plugin.SharingMPS: "mps",
		plugin.SharingMemory: "memory",
	}
	for _, d := range devices {
		if strategy := strategies[d.Sharing]; strategy != "" {
			return sharing{strategy, d.Replicas, !d.Renamed}
		}
	}
	return sharing{sharingNone, 1, false}
}

// addResource adds the labels that whole GPUs and MIG devices have.
func (l labelSet) addResource(resource, model, suffix string, count int, s sharing) {
	if s.shared {
		suffix += "-SHARED"
	}
	if model = sanitize(model); model != "" { // the suffix stays, because it tells devices of one model apart
		model = trimValue(model[:min(len(model), max(0, maxValue-len(suffix)))])
		l.add(resource+".product", trimValue(model+suffix))
	}
	l.addInt(resource+".count", count)
	l.addInt(resource+".replicas", s.replicas)
	l.add(resource+".sharing-strategy", s.strategy)
}

// addSingle adds the labels of the strategy single: MIG devices that are all alike count as GPUs.
func (l labelSet) addSingle(n *inventory, gpus []*device) {
	first := slices.IndexFunc(gpus, func(d *device) bool { return d.MIGMode })
	if first < 0 {
		return
	}
	var offered, all []*device
	for i := range n.Devices {
		d := &n.Devices[i]
		switch {
		case !d.isGPU() && d.Offered:
			offered = append(offered, d)
			fallthrough
		case !d.isGPU():
			all = append(all, d)
		case d.Offered: // the others are left out
			return
		}
	}
	if offered == nil && uniform(gpus, all) { // the plugin offers nothing, for another reason
		offered = all
	}
	if offered != nil {
		l.addMIG("gpu", offered)
		return
	}
	l.addResource("gpu", gpus[first].Model, "-MIG-INVALID", 0, sharing{strategy: l[gfdPrefix+"gpu.sharing-strategy"]})
	l.addMiB("gpu.memory", 0)
}

// uniform reports whether all GPUs have MIG devices, and these are all alike.
func uniform(gpus, mig []*device) bool {
	for _, gpu := range gpus {
		if !gpu.MIGMode || !slices.ContainsFunc(mig, func(d *device) bool { return d.Parent == gpu.ID }) {
			return false
		}
	}
	return !slices.ContainsFunc(mig, func(d *device) bool { return d.Profile != mig[0].Profile })
}

// addMixed adds the labels of the strategy mixed: each profile is a resource.
func (l labelSet) addMixed(n *inventory) {
	byProfile := make(map[string][]*device)
	for i := range n.Devices {
		if d := &n.Devices[i]; !d.isGPU() {
			byProfile[d.Profile] = append(byProfile[d.Profile], d)
		}
	}
	for profile, devices := range byProfile {
		resource := "mig-" + profileInKey(profile)
		if _, _, ok := plugin.ProfileSlices(profile); ok && len(resource+".sharing-strategy") <= maxName {
			l.addMIG(resource, devices)
		}
	}
}

// addMIG adds the labels of MIG devices of one profile.
func (l labelSet) addMIG(resource string, devices []*device) {
	first := devices[0]
	l.addResource(resource, first.Model, "-MIG-"+profileInKey(first.Profile), len(devices), sharingOf(devices))
	if first.Memory != 0 {
		l.addMiB(resource+".memory", first.Memory)
	}
	if gi, ci, ok := plugin.ProfileSlices(first.Profile); ok {
		l.addInt(resource+".slices.gi", gi)
		l.addInt(resource+".slices.ci", ci)
	}
	i := slices.IndexFunc(devices, func(d *device) bool { return d.Instance != nil })
	if i < 0 {
		return
	}
	p := devices[i].Instance
	if gi, ci, ok := plugin.ProfileSlices(first.Profile); ok && gi == ci { // else several compute instances share them
		l.addInt(resource+".multiprocessors", p.Multiprocessors)
	}
	l.addInt(resource+".engines.copy", p.CopyEngines)
	l.addInt(resource+".engines.decoder", p.Decoders)
	l.addInt(resource+".engines.encoder", p.Encoders)
	l.addInt(resource+".engines.jpeg", p.JPEGEngines)
	l.addInt(resource+".engines.ofa", p.OFAEngines)
}

// addHealth adds how many GPUs are in each state. A GPU counts with the worst state among itself and its MIG devices.
func (l labelSet) addHealth(n *inventory, gpus []*device) {
	counts := make(map[health.State]int)
	for _, gpu := range gpus {
		worst := gpu.State
		for i := range n.Devices {
			if d := &n.Devices[i]; d.Parent == gpu.ID {
				worst = max(worst, d.State)
			}
		}
		counts[worst]++
	}
	for _, state := range []health.State{health.Healthy, health.Degraded, health.Unhealthy} {
		l.addOwn("gpus-"+state.String(), counts[state])
	}
}
