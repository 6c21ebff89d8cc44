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
)

// instance is a GPU instance or a compute instance in the MIG hierarchy.
type instance struct {
	entity
	parent  entity // a compute instance's GPU instance; a GPU instance's GPU
	gpu     uint   // DCGM's number of the GPU
	gi, ci  uint   // the driver's ids; ci is not that of a GPU instance
	index   int    // health.Device.MIGIndex of a compute instance
	profile uint   // the driver's number of it: another instance can be in the same place
	suffix  string // of the profile's name: the attribute of the GPU instance
}

// topology is which entities there are. Two are equal if no GPU came or went and none was partitioned
// anew.
type topology struct {
	gpus      []uint
	instances []instance
}

func (t topology) equal(o topology) bool {
	return slices.Equal(t.gpus, o.gpus) && slices.Equal(t.instances, o.instances)
}

// readTopology asks for all GPUs, the lost ones too: GetSupportedDevices leaves those out (10).
func readTopology() (topology, error) {
	gpus, err := dcgm.GetEntityGroupEntities(dcgm.FE_GPU)
	if err != nil {
		return topology{}, fmt.Errorf("list GPUs: %w", err)
	}
	slices.Sort(gpus)
	t := topology{gpus: gpus}
	if len(gpus) == 0 {
		return t, nil
	}
	hierarchy, err := dcgm.GetGPUInstanceHierarchy()
	if err != nil {
		return topology{}, fmt.Errorf("list MIG instances: %w", err)
	}
	whole := map[entity]instance{} // GPU instances; DCGM may list them after their compute instances
	listed := hierarchy.EntityList[:min(hierarchy.Count, dcgm.MAX_HIERARCHY_INFO)]
	for _, in := range listed {
		if in.Entity.EntityGroupId == dcgm.FE_GPU_I {
			whole[entity{in.Entity.EntityGroupId, in.Entity.EntityId}] = instance{
				gpu: in.Parent.EntityId, suffix: attributeOf(in.Info.NvmlMigProfileId, in.Info.NvmlProfileSlices),
			}
		}
	}
	for _, in := range listed {
		found := instance{
			entity: entity{in.Entity.EntityGroupId, in.Entity.EntityId},
			parent: entity{in.Parent.EntityGroupId, in.Parent.EntityId},
			gi:     in.Info.NvmlInstanceId, ci: in.Info.NvmlComputeInstanceId, profile: in.Info.NvmlMigProfileId,
		}
		switch found.kind {
		case dcgm.FE_GPU_I:
			found.gpu = found.parent.id
		case dcgm.FE_GPU_CI:
			parent, ok := whole[found.parent]
			if !ok {
				continue
			}
			found.gpu, found.suffix = parent.gpu, parent.suffix
		default:
			continue
		}
		t.instances = append(t.instances, found)
	}
	slices.SortFunc(t.instances, func(a, b instance) int {
		return cmp.Or(cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.kind, b.kind), cmp.Compare(a.gi, b.gi), cmp.Compare(a.ci, b.ci))
	})
	next := map[uint]int{} // by GPU
	for i := range t.instances {
		if in := &t.instances[i]; in.kind == dcgm.FE_GPU_CI {
			in.index = next[in.gpu]
			next[in.gpu]++
		}
	}
	return t, nil
}

// located is a device and where DCGM has it.
type located struct {
	health.Device
	entity entity
	gpu    uint // DCGM's number of the GPU that it is, or is a part of
}

// facts are the inventory values of one entity.
type facts struct {
	text   map[dcgm.Short]string
	number map[dcgm.Short]int64
	lacks  []dcgm.Short // blank, and not because the GPU does not support them
}

// texts returns those of the fields that are there, nil if there are none.
func (f *facts) texts(fields []dcgm.Short) map[health.Field]string {
	if f == nil {
		return nil
	}
	var texts map[health.Field]string
	for _, field := range fields {
		if s := f.text[field]; s != "" {
			if texts == nil {
				texts = make(map[health.Field]string, len(fields))
			}
			texts[health.Field(field)] = s
		}
	}
	return texts
}

// inventory reads the devices of the topology from DCGM's cache, and the versions of driver and CUDA.
//
// A MIG device is a compute instance: that is what the driver gives a UUID to and a container is
// started on. DCGM's GPU instance has no UUID of its own; asked for it, DCGM gives that of its first
// compute instance (DCGM, DcgmGpuInstance::GetMigDeviceHandle), so GPU instances are no devices here.
func (s *session) inventory(now time.Time, t topology, w *watches, status map[uint]dcgm.EntityStatus) (devices []located, err error) {
	read := map[entity]*facts{}
	keep := func(v *dcgm.FieldValue_v2) {
		switch v.FieldID { // these are of the system, whichever entity they come with
		case fieldDriver:
			s.versions.Driver = cmp.Or(text(v), s.versions.Driver)
		case fieldCUDA:
			if n, ok := integer(v); ok && n > 0 { // 13000 is 13.0
				s.versions.CUDA = fmt.Sprintf("%d.%d", n/1000, n%1000/10)
			}
		}
		e := entity{v.EntityGroupId, v.EntityID}
		f := read[e]
		if f == nil {
			f = &facts{text: map[dcgm.Short]string{}, number: map[dcgm.Short]int64{}}
			read[e] = f
		}
		n, ok := integer(v)
		if v.FieldType == dcgm.DCGM_FT_STRING {
			f.text[v.FieldID] = text(v)
			ok = text(v) != ""
		} else if ok {
			f.number[v.FieldID] = n
		}
		if !ok && !notSupported(v) {
			f.lacks = append(f.lacks, v.FieldID)
		}
	}
	if err := latest(w.gpuPairs, w.inventoryFields, keep); err != nil {
		return nil, err
	}
	if err := latest(w.computePairs, instanceInventory(), keep); err != nil {
		return nil, err
	}

	gpus := map[uint]*health.Device{}
	var nameless []uint
	named := 0 // among those that can be reached; DCGM remembers the names of others even when it is blind
	s.waiting = false
	for _, id := range t.gpus {
		e := entity{dcgm.FE_GPU, id}
		d, ok := s.gpu(id, read[e], status[id])
		if !ok {
			nameless = append(nameless, id)
			continue
		}
		if reachable(status[id]) {
			named++
			if !s.complete(now, id, &d, read[e]) {
				continue
			}
		}
		if texts := read[e].texts(w.texts); texts != nil { // one that reads blank keeps what it had
			d.Texts = texts
		}
		gpus[id] = &d
	}
	if err := s.judgeNameless(nameless, named, status); err != nil {
		return nil, err
	}
	for id, d := range gpus {
		s.readLinks(id, d, gpus, status[id])
		s.known[entity{dcgm.FE_GPU, id}] = *d
		devices = append(devices, located{*d, entity{dcgm.FE_GPU, id}, id})
	}
	for _, in := range t.instances {
		parent, ok := gpus[in.gpu]
		if !ok || in.kind != dcgm.FE_GPU_CI {
			continue
		}
		d, ok := s.mig(in, parent, read[in.entity])
		if !ok {
			s.incomplete = s.incomplete || reachable(status[in.gpu])
			continue
		}
		devices = append(devices, located{d, in.entity, in.gpu})
	}
	slices.SortFunc(devices, func(a, b located) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
	})
	return devices, nil
}

// completeWithin is for how long a GPU's inventory is waited for. After its driver was bound DCGM has its UUID a second
// before the NUMA node.
const completeWithin = 5 * time.Second

// complete gives a GPU that can be reached what this process has known of it before for the fields that are blank, and
// reports whether it can be shown: one that is not known, and lacks a field, is waited for.
func (s *session) complete(now time.Time, id uint, d *health.Device, f *facts) bool {
	var lacks []dcgm.Short
	if f != nil && f.text[fieldUUID] != "" { // otherwise it is who it was altogether
		lacks = slices.DeleteFunc(slices.Clone(f.lacks), func(field dcgm.Short) bool { return !slices.Contains(identity(), field) })
	}
	if len(lacks) == 0 {
		delete(s.waitedSince, id)
		s.ledger.gpus[d.ID] = *d
		return true
	}
	since, waited := s.waitedSince[id]
	if !waited {
		since = now
		s.waitedSince[id] = now
		s.log.Info("waiting for the inventory of a GPU", zap.Uint("dcgm_id", id), zap.Any("fields", lacks))
	}
	wait := !passed(since, now, completeWithin)
	s.waiting = s.waiting || wait
	was, known := s.ledger.gpus[d.ID]
	switch {
	case known:
	case wait:
		return false
	default:
		s.ledger.gpus[d.ID] = *d
		return true
	}
	for _, field := range lacks {
		switch field {
		case fieldName:
			d.Model = was.Model
		case fieldIndex:
			d.Index = was.Index
		case fieldMinor:
			d.Minor = was.Minor
		case fieldPCI:
			d.PCI = was.PCI
		case fieldMIGMode:
			d.MIGMode = was.MIGMode
		case fieldMemory:
			d.Memory = was.Memory
		default:
			d.NUMA = was.NUMA
		}
	}
	return true
}

// mig makes a device of a compute instance. One on a GPU that cannot be reached is what it was.
func (s *session) mig(in instance, parent *health.Device, f *facts) (health.Device, bool) {
	if f == nil || f.text[fieldUUID] == "" {
		d, ok := s.known[in.entity]
		d.MIGIndex = in.index
		return d, ok && d.Parent == parent.ID && d.GI == int(in.gi) && d.CI == int(in.ci)
	}
	d := *parent
	d.ID, d.Parent, d.Kind = health.DeviceID(f.text[fieldUUID]), parent.ID, health.KindMIG
	d.Profile, d.Memory = withAttribute(f.text[fieldName], in.suffix), uint64(f.number[fieldMemory])<<20
	d.GI, d.CI, d.MIGIndex, d.Links, d.MIGMode = int(in.gi), int(in.ci), in.index, nil, false
	s.known[in.entity] = d
	return d, true
}

// gpu makes a device of what was read of a GPU. One that cannot be reached reads blank: it is who it
// was, or who DCGM remembers it to be; without a UUID there is no device.
func (s *session) gpu(id uint, f *facts, status dcgm.EntityStatus) (health.Device, bool) {
	if f == nil || f.text[fieldUUID] == "" {
		if d, ok := s.known[entity{dcgm.FE_GPU, id}]; ok {
			return d, true
		}
		if reachable(status) || !has("dcgmGetDeviceAttributes") {
			return health.Device{}, false
		}
		// For a GPU that is not OK go-dcgm asks for DCGM's attributes only; for others it is slow.
		info, err := dcgm.GetDeviceInfo(id)
		uuid := strings.TrimSpace(info.UUID)
		if err != nil || !strings.HasPrefix(uuid, "GPU-") {
			return health.Device{}, false
		}
		return health.Device{
			ID: health.DeviceID(uuid), Kind: health.KindGPU, Index: int(id), Minor: -1, GI: -1, CI: -1, MIGIndex: -1,
			Model: plain(info.Identifiers.Model), PCI: plain(info.PCI.BusID),
		}, true
	}
	d := health.Device{
		ID: health.DeviceID(f.text[fieldUUID]), Kind: health.KindGPU, Index: int(id), Minor: -1, GI: -1, CI: -1, MIGIndex: -1,
		Model: f.text[fieldName], PCI: f.text[fieldPCI], Memory: uint64(f.number[fieldMemory]) << 20,
		MIGMode: f.number[fieldMIGMode] == 1,
	}
	if n, ok := f.number[fieldIndex]; ok {
		d.Index = int(n)
	}
	if n, ok := f.number[fieldMinor]; ok {
		d.Minor = int(n)
	}
	for word := range 4 {
		mask := uint64(f.number[fieldAffinity+dcgm.Short(word)])
		for ; mask != 0; mask &= mask - 1 {
			d.NUMA = append(d.NUMA, word*64+bits.TrailingZeros64(mask))
		}
	}
	return d, true
}

// plain returns a string of DCGM's attributes, empty if it is a blank.
func plain(s string) string {
	if strings.HasPrefix(s, blankStr) {
		return ""
	}
	return strings.TrimSpace(s)
}

// judgeNameless decides about GPUs without a UUID. If DCGM calls GPUs well and knows none by name, it is
// DCGM that is blind, as after an XID 119 (12), and not the GPUs that are gone.
func (s *session) judgeNameless(nameless []uint, named int, status map[uint]dcgm.EntityStatus) error {
	s.incomplete = slices.ContainsFunc(nameless, func(id uint) bool { return reachable(status[id]) })
	if s.incomplete && named == 0 {
		return errBlind()
	}
	if len(nameless) > 0 && !slices.Equal(nameless, s.saidNameless) {
		s.log.Warn("GPUs that DCGM cannot name are left out", zap.Uints("dcgm_ids", nameless))
	}
	s.saidNameless = nameless
	return nil
}
