//go:build cgo && linux

package dcgm

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// instance is a GPU instance or a compute instance in DCGM's MIG hierarchy.
type instance struct {
	entity
	parent  entity // of a compute instance: its GPU instance; of a GPU instance: its GPU
	gpu     uint   // DCGM's number of the GPU
	gi, ci  uint   // the driver's IDs; ci is undefined for a GPU instance
	index   int    // health.Device.MIGIndex of a compute instance
	profile uint   // the driver's ID of the profile: another instance can have the same position
	suffix  string // of the profile's name, from the GPU instance
}

// hierarchy lists the GPUs and instances. Two are equal if no GPU was added or removed and none was repartitioned.
type hierarchy struct {
	gpus      []uint
	instances []instance
}

func (h hierarchy) equal(o hierarchy) bool {
	return slices.Equal(h.gpus, o.gpus) && slices.Equal(h.instances, o.instances)
}

// readHierarchy lists all GPUs. GetSupportedDevices would omit lost ones.
func readHierarchy() (hierarchy, error) {
	gpus, err := dcgm.GetEntityGroupEntities(dcgm.FE_GPU)
	if err != nil {
		return hierarchy{}, fmt.Errorf("list GPUs: %w", err)
	}
	slices.Sort(gpus)
	h := hierarchy{gpus: gpus}
	if len(gpus) == 0 {
		return h, nil
	}
	list, err := dcgm.GetGPUInstanceHierarchy()
	if err != nil {
		return hierarchy{}, fmt.Errorf("list MIG instances: %w", err)
	}
	infos := list.EntityList[:min(list.Count, dcgm.MAX_HIERARCHY_INFO)]
	gpuInstances := map[entity]instance{} // DCGM may list them after their compute instances
	for _, in := range infos {
		if in.Entity.EntityGroupId == dcgm.FE_GPU_I {
			gpuInstances[entity{in.Entity.EntityGroupId, in.Entity.EntityId}] = instance{
				gpu: in.Parent.EntityId, suffix: profileSuffix(in.Info.NvmlMigProfileId, in.Info.NvmlProfileSlices),
			}
		}
	}
	for _, in := range infos {
		found := instance{
			entity: entity{in.Entity.EntityGroupId, in.Entity.EntityId},
			parent: entity{in.Parent.EntityGroupId, in.Parent.EntityId},
			gi:     in.Info.NvmlInstanceId, ci: in.Info.NvmlComputeInstanceId, profile: in.Info.NvmlMigProfileId,
		}
		switch found.kind {
		case dcgm.FE_GPU_I:
			found.gpu = found.parent.id
		case dcgm.FE_GPU_CI:
			parent, ok := gpuInstances[found.parent]
			if !ok {
				continue
			}
			found.gpu, found.suffix = parent.gpu, parent.suffix
		default:
			continue
		}
		h.instances = append(h.instances, found)
	}
	slices.SortFunc(h.instances, func(a, b instance) int {
		return cmp.Or(cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.kind, b.kind), cmp.Compare(a.gi, b.gi), cmp.Compare(a.ci, b.ci))
	})
	nextIndex := map[uint]int{} // by GPU
	for i := range h.instances {
		if in := &h.instances[i]; in.kind == dcgm.FE_GPU_CI {
			in.index = nextIndex[in.gpu]
			nextIndex[in.gpu]++
		}
	}
	return h, nil
}

// dcgmDevice is a device with its entity in DCGM.
type dcgmDevice struct {
	health.Device
	entity entity
	gpu    uint // DCGM's number of the GPU, or of the MIG device's parent
}

// entityValues holds the inventory fields of an entity.
type entityValues struct {
	text   map[dcgm.Short]string
	number map[dcgm.Short]int64
	blank  []dcgm.Short // in the latest read, except unsupported fields
	driver string       // version with which fieldReserved was measured
}

// texts returns the text fields that have a value, nil if none has.
func (v *entityValues) texts(fields []dcgm.Short) map[health.Field]string {
	var texts map[health.Field]string
	for _, field := range fields {
		if s := v.text[field]; s != "" {
			if texts == nil {
				texts = make(map[health.Field]string, len(fields))
			}
			texts[health.Field(field)] = s
		}
	}
	return texts
}

// inventoryValues reads the inventory fields of the entities, and the versions of driver and CUDA, from DCGM's cache.
func (s *session) inventoryValues() (map[entity]*entityValues, error) {
	values := map[entity]*entityValues{}
	add := func(v *dcgm.FieldValue_v2) {
		switch v.FieldID { // versions belong to the node, whatever their entity
		case fieldDriver:
			s.versions.Driver = cmp.Or(lib.Text(v), s.versions.Driver)
		case fieldCUDA:
			if n, ok := lib.Int(v); ok && n > 0 { // 13000 is 13.0
				s.versions.CUDA = fmt.Sprintf("%d.%d", n/1000, n%1000/10)
			}
		}
		e := entity{v.EntityGroupId, v.EntityID}
		to := values[e]
		if to == nil {
			to = &entityValues{text: map[dcgm.Short]string{}, number: map[dcgm.Short]int64{}}
			values[e] = to
		}
		n, ok := lib.Int(v)
		if v.FieldType == dcgm.DCGM_FT_STRING {
			to.text[v.FieldID] = lib.Text(v)
			ok = lib.Text(v) != ""
		} else if ok {
			to.number[v.FieldID] = n
		}
		if !ok && !lib.NotSupported(v) {
			to.blank = append(to.blank, v.FieldID)
		}
	}
	if err := readLatest(s.watches.gpuPairs, s.watches.inventoryFields, add); err != nil {
		return nil, err
	}
	return values, readLatest(s.watches.computePairs, instanceInventoryFields(), add)
}

// readInventory reads the devices of the hierarchy.
//
// A MIG device is a compute instance: it has a UUID of the driver, and containers run on it. GPU instances are not
// devices: for one, DCGM returns the UUID of its first compute instance (DCGM, DcgmGpuInstance::GetMigDeviceHandle).
func (s *session) readInventory(now time.Time) error {
	values, err := s.inventoryValues()
	if err != nil {
		return err
	}
	gpus := map[uint]*health.Device{}
	var unnamed []uint
	named := 0 // of the reachable GPUs; a blind DCGM still has the UUIDs of others
	s.inventoryPending = false
	for _, id := range s.hierarchy.gpus {
		v := values[entity{dcgm.FE_GPU, id}]
		listed := s.fillBlanks(now, id, v)
		d, ok := s.gpuDevice(id, v)
		if !ok {
			unnamed = append(unnamed, id)
			continue
		}
		if s.reaches(id) {
			named++
		}
		if listed {
			gpus[id] = &d
		}
	}
	if err := s.checkUnnamed(unnamed, named); err != nil {
		return err
	}
	var devices []dcgmDevice
	for id, d := range gpus {
		s.readLinks(id, d, gpus)
		devices = append(devices, dcgmDevice{*d, entity{dcgm.FE_GPU, id}, id})
	}
	s.unnamedInstances = nil
	for _, in := range s.hierarchy.instances {
		parent, ok := gpus[in.gpu]
		if !ok || in.kind != dcgm.FE_GPU_CI {
			continue
		}
		d, ok := s.migDevice(in, parent, values[in.entity])
		if !ok {
			if s.reaches(in.gpu) {
				s.unnamedInstances = append(s.unnamedInstances, health.UnnamedInstance{Parent: parent.ID, GI: int(in.gi), CI: int(in.ci)})
			}
			continue
		}
		devices = append(devices, dcgmDevice{d, in.entity, in.gpu})
	}
	s.hasUnnamed = s.hasUnnamed || len(s.unnamedInstances) > 0
	slices.SortFunc(devices, func(a, b dcgmDevice) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
	})
	s.setDevices(devices)
	s.builtAt = now
	return nil
}

// inventoryTimeout is how long the required fields of a GPU may be blank (OBSERVED.md#late-inventory).
const inventoryTimeout = 5 * time.Second

// fillBlanks takes the blank fields of a GPU from its last complete inventory, and reports whether the GPU can be listed. A reachable GPU
// without such an inventory is listed when no required field is blank, or after inventoryTimeout.
func (s *session) fillBlanks(now time.Time, id uint, v *entityValues) (listed bool) {
	if v == nil || v.text[fieldUUID] == "" { // the whole device is as it was
		delete(s.pendingSince, id)
		return true
	}
	v.driver = s.versions.Driver
	uuid := health.DeviceID(v.text[fieldUUID])
	old, exists := s.history.gpus[uuid]
	if s.reaches(id) {
		over := s.awaitRequired(now, id, v.blank)
		if !over && !exists {
			return false
		}
		if _, incomplete := s.pendingSince[id]; !incomplete || !exists {
			s.history.gpus[uuid] = v
		}
	}
	if !exists {
		return true
	}
	for _, field := range v.blank {
		v.text[field] = old.text[field]
		if n, ok := old.number[field]; ok {
			v.number[field] = n
		}
	}
	// The reserved memory stays as first measured with a driver, because the number of units of GPU memory follows from it. The total less
	// free and used memory is no substitute (OBSERVED.md#framebuffer).
	same := func(field dcgm.Short) bool { return old.number[field] == v.number[field] }
	stays := old.driver == v.driver && same(fieldMIGMode) && same(fieldMemory) && old.number[fieldReserved] > 0
	if stays || slices.Contains(v.blank, fieldReserved) {
		v.number[fieldReserved], v.driver = old.number[fieldReserved], old.driver
	}
	return true
}

// awaitRequired reports whether no required field of a GPU is blank, or one has been for inventoryTimeout.
func (s *session) awaitRequired(now time.Time, id uint, blank []dcgm.Short) (over bool) {
	blank = slices.DeleteFunc(slices.Clone(blank), func(field dcgm.Short) bool { return !slices.Contains(requiredFields(), field) })
	if len(blank) == 0 {
		delete(s.pendingSince, id)
		return true
	}
	since, pending := s.pendingSince[id]
	if !pending {
		since = now
		s.pendingSince[id] = now
		s.log.Info("waiting for the inventory of a GPU", zap.Uint("dcgm_id", id), zap.Any("fields", blank))
	}
	over = elapsed(since, now, inventoryTimeout)
	s.inventoryPending = s.inventoryPending || !over
	return over
}

// migDevice returns the device of a compute instance. Without a UUID, as on an unreachable GPU, it is the last device of
// the entity, if that had the same IDs.
func (s *session) migDevice(in instance, parent *health.Device, v *entityValues) (health.Device, bool) {
	if v == nil || v.text[fieldUUID] == "" {
		d := s.deviceOf(in.entity)
		d.MIGIndex = in.index
		return d, d.Parent == parent.ID && d.GI == int(in.gi) && d.CI == int(in.ci)
	}
	d := *parent
	d.ID, d.Parent, d.Kind = health.DeviceID(v.text[fieldUUID]), parent.ID, health.KindMIG
	d.Profile, d.Memory = withSuffix(v.text[fieldName], in.suffix), uint64(v.number[fieldMemory])<<20
	d.GI, d.CI, d.MIGIndex, d.Links, d.MIGMode, d.Reserved = int(in.gi), int(in.ci), in.index, nil, false, 0
	return d, true
}

// gpuDevice returns the device of a GPU. An unreachable GPU has blank fields: it is the last device of its number, or has
// DCGM's attributes. A GPU without a UUID is not a device.
func (s *session) gpuDevice(id uint, v *entityValues) (health.Device, bool) {
	d := health.Device{Kind: health.KindGPU, Index: int(id), Minor: -1, GI: -1, CI: -1, MIGIndex: -1}
	if v == nil || v.text[fieldUUID] == "" {
		if d := s.deviceOf(entity{dcgm.FE_GPU, id}); d.ID != "" {
			return d, true
		}
		if s.reaches(id) || !lib.Has("dcgmGetDeviceAttributes") {
			return health.Device{}, false
		}
		// For a GPU whose status is not OK, go-dcgm reads DCGM's attributes only; for others this call is slow.
		info, err := dcgm.GetDeviceInfo(id)
		uuid := strings.TrimSpace(info.UUID)
		if err != nil || !strings.HasPrefix(uuid, "GPU-") {
			return health.Device{}, false
		}
		d.ID, d.Model, d.PCI = health.DeviceID(uuid), attributeText(info.Identifiers.Model), attributeText(info.PCI.BusID)
		return d, true
	}
	d.ID, d.Model, d.PCI = health.DeviceID(v.text[fieldUUID]), v.text[fieldName], v.text[fieldPCI]
	d.Memory, d.MIGMode = uint64(v.number[fieldMemory])<<20, v.number[fieldMIGMode] == 1
	d.Reserved, d.Texts = uint64(max(0, v.number[fieldReserved]))<<20, v.texts(s.watches.texts)
	d.ComputeCapability = health.ComputeCapability{Major: int(v.number[fieldCompute] >> 16), Minor: int(v.number[fieldCompute] & 0xffff)}
	if n, ok := v.number[fieldIndex]; ok {
		d.Index = int(n)
	}
	if n, ok := v.number[fieldMinor]; ok {
		d.Minor = int(n)
	}
	for i := range 4 {
		mask := uint64(v.number[fieldAffinity+dcgm.Short(i)])
		for ; mask != 0; mask &= mask - 1 {
			d.NUMA = append(d.NUMA, i*64+bits.TrailingZeros64(mask))
		}
	}
	return d, true
}

// deviceOf returns the device of a GPU or compute instance in the latest inventory, an empty one if there is none.
func (s *session) deviceOf(e entity) (d health.Device) {
	if all := s.devicesOf[e]; len(all) > 0 {
		d = s.devices[all[0]]
	}
	return d
}

// attributeText returns a text of DCGM's attributes, or "" for a blank.
func attributeText(s string) string {
	if strings.HasPrefix(s, lib.BlankText) {
		return ""
	}
	return strings.TrimSpace(s)
}

// checkUnnamed handles GPUs without a UUID. If no reachable GPU has one, DCGM is blind (OBSERVED.md#blind-engine);
// otherwise these GPUs are omitted.
func (s *session) checkUnnamed(unnamed []uint, named int) error {
	s.hasUnnamed = slices.ContainsFunc(unnamed, s.reaches)
	if s.hasUnnamed && named == 0 {
		return errBlind
	}
	if len(unnamed) > 0 && !slices.Equal(unnamed, s.lastUnnamed) {
		s.log.Warn("omitting GPUs without a UUID in DCGM", zap.Uints("dcgm_ids", unnamed))
	}
	s.lastUnnamed = unnamed
	return nil
}

// profileAttribute is a property of a GPU instance besides slices and memory. NVIDIA's resource names contain it; the name
// in field 50 does not (OBSERVED.md#mig-profiles).
type profileAttribute struct {
	profile uint   // the driver's ID, from DCGM's hierarchy (nvml.h: nvmlGpuInstanceProfileInfo_t.id)
	slices  uint   // of such an instance
	suffix  string // of the profile's name
}

// profileAttributes lists the profiles that have an attribute, from `nvidia-smi mig -lgip` in NVIDIA's MIG user guide and
// on the machines named. The IDs are the driver's, not the macros of nvml.h (NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 and
// so on), which only request them; on all GPUs one ID has the same attribute.
//
//nolint:gochecknoglobals // a table of constants
var profileAttributes = []profileAttribute{
	{20, 1, "+me"},     // A100, H100, H200, B200: 1g.10gb+me; media extensions, NVML's 1_SLICE_REV1
	{21, 1, "+me"},     // A30, RTX PRO 6000: 1g.24gb+me
	{6, 2, "+me"},      // A30: 2g.12gb+me, NVML's 2_SLICE_REV1
	{47, 1, "+gfx"},    // RTX PRO 6000: 1g.24gb+gfx; graphics, NVML's 1_SLICE_GFX
	{35, 2, "+gfx"},    // RTX PRO 6000: 2g.48gb+gfx, NVML's 2_SLICE_GFX
	{32, 4, "+gfx"},    // RTX PRO 6000: 4g.96gb+gfx, NVML's 4_SLICE_GFX
	{65, 1, "+me.all"}, // RTX PRO 6000: 1g.24gb+me.all; all media engines
	{64, 2, "+me.all"}, // RTX PRO 6000: 2g.48gb+me.all
	{67, 1, "-me"},     // RTX PRO 6000: 1g.24gb-me; no media engine
	{66, 2, "-me"},     // RTX PRO 6000: 2g.48gb-me
}

// profileSuffix returns the suffix of a profile's name, or "" if it has no known attribute.
func profileSuffix(profile, slices uint) string {
	for _, a := range profileAttributes {
		if a.profile == profile && a.slices == slices {
			return a.suffix
		}
	}
	return ""
}

// withSuffix appends the suffix to a profile's name, unless a newer DCGM has done so already.
func withSuffix(name, suffix string) string {
	if !strings.HasSuffix(name, "gb") {
		return name
	}
	return name + suffix
}
