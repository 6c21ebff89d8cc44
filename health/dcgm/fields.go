//go:build cgo && linux

package dcgm

import (
	"fmt"
	"maps"
	"slices"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// fieldXID is the field whose samples are XIDs (dcgm_fields.h: DCGM_FI_DEV_XID_ERROR).
const fieldXID = dcgm.Short(health.FieldXID)

const fieldRecoveryAction = dcgm.Short(health.FieldRecoveryAction)

// Fields of the inventory (dcgm_fields.h; for instances as observed on DCGM 4.6).
const (
	fieldDriver   dcgm.Short = 1
	fieldCUDA     dcgm.Short = 5
	fieldName     dcgm.Short = 50 // of a compute instance: its profile
	fieldIndex    dcgm.Short = 52
	fieldUUID     dcgm.Short = 54
	fieldMinor    dcgm.Short = 55
	fieldPCI      dcgm.Short = 57
	fieldCompute  dcgm.Short = 63 // compute capability: the major version in the upper 16 bits of 32, the minor in the lower
	fieldMIGMode             = dcgm.Short(health.FieldMIGMode)
	fieldAffinity dcgm.Short = 86 // to 89: bit masks of the GPU's NUMA nodes, 64 nodes each
	fieldMemory              = dcgm.Short(health.FieldFBTotal)
	fieldReserved            = dcgm.Short(health.FieldFBReserved)
)

// healthFields returns the fields that a GPU is judged by. They are sampled once a second and read in every poll: DCGM's
// health check ignores some and takes up to 30 s for the others (OBSERVED.md#health-check-interval).
func healthFields() []dcgm.Short {
	var fields []dcgm.Short
	for _, f := range judge.JudgedFields() {
		if f := dcgm.Short(f); f != fieldXID && !slices.Contains(fields, f) {
			fields = append(fields, f)
		}
	}
	return fields
}

// inventoryFields returns the inventory fields of a GPU, instanceInventoryFields the inventory fields of a compute instance.
func inventoryFields() []dcgm.Short {
	return append(requiredFields(), fieldUUID, fieldDriver, fieldCUDA)
}

// requiredFields returns the inventory fields that a new GPU must have before it is listed, if it supports them.
func requiredFields() []dcgm.Short {
	return []dcgm.Short{
		fieldName, fieldIndex, fieldMinor, fieldPCI, fieldCompute, fieldMIGMode, fieldMemory, fieldReserved,
		fieldAffinity, fieldAffinity + 1, fieldAffinity + 2, fieldAffinity + 3,
	}
}

func instanceInventoryFields() []dcgm.Short {
	return []dcgm.Short{fieldUUID, fieldName, fieldMemory}
}

// omittedField is a field that is not measured, and why.
type omittedField struct {
	field  dcgm.Short
	reason string
}

func (o omittedField) String() string { return fmt.Sprintf("%d (%s)", o.field, o.reason) }

// splitByType returns the number fields and the text fields that the library supports.
func (s *session) splitByType(fields []dcgm.Short) (numbers, texts []dcgm.Short, omitted []omittedField) {
	for _, f := range fields {
		meta, err := dcgm.FieldGetByID(f)
		if err != nil {
			omitted = append(omitted, unknownField(f, "this DCGM", s.versions.DCGM))
			continue
		}
		switch uint(meta.FieldType) {
		case dcgm.DCGM_FT_INT64, dcgm.DCGM_FT_DOUBLE:
			numbers = append(numbers, f)
		case dcgm.DCGM_FT_STRING:
			texts = append(texts, f)
		default:
			omitted = append(omitted, omittedField{f, meta.Tag + " is neither a number nor a text"})
		}
	}
	return numbers, texts, omitted
}

// unknownField omits a field that the library or the engine does not know. For a field in base units the reason names the
// DCGM that has it.
func unknownField(f dcgm.Short, who, version string) omittedField {
	reason := "unknown to " + who
	if version != "" {
		reason += " " + version
	}
	if since := health.AddedIn(health.Field(f)); since != "" {
		reason += "; DCGM " + since + " has it"
	}
	return omittedField{f, reason}
}

// supportedByEngine returns the fields that the engine supports. It may be older than the library, and refuses a group
// with one unknown field (OBSERVED.md#older-engines).
func (s *session) supportedByEngine(fields []dcgm.Short) (kept []dcgm.Short, omitted []omittedField, refused error) {
	try := func(fields ...dcgm.Short) error {
		group, err := dcgm.FieldGroupCreate(s.groupName("trial"), fields)
		if err != nil {
			return err
		}
		return dcgm.FieldGroupDestroy(group)
	}
	for chunk := range slices.Chunk(fields, maxFields) {
		err := try(chunk...)
		if err == nil {
			kept = append(kept, chunk...)
			continue
		}
		if connectionLost(err) {
			return nil, nil, err
		}
		refused = err
		for _, f := range chunk {
			if try(f) == nil {
				kept = append(kept, f)
			} else {
				omitted = append(omitted, unknownField(f, "the engine", s.versions.Engine))
			}
		}
	}
	if len(kept) == 0 {
		return nil, nil, refused // the cause is not a field
	}
	return kept, omitted, nil
}

// selectedFields are the fields of a session, each in one list.
type selectedFields struct {
	health  []dcgm.Short
	metrics []dcgm.Short // other numbers
	texts   []dcgm.Short // part of the inventory
}

// selectFields returns the health fields, and the fields of Config.Fields that library and engine support. An unknown field in base units
// is replaced by the older field that it follows from (health.DerivationOf). It logs the omitted fields once per session.
func (s *session) selectFields() (selected selectedFields, err error) {
	requested := append(healthFields(), fieldMIGMode)
	for _, f := range s.cfg.Fields {
		if f := dcgm.Short(f); f != fieldXID && !slices.Contains(requested, f) {
			requested = append(requested, f)
		}
	}
	older := map[dcgm.Short]dcgm.Short{} // by the older field: the field in base units that follows from it
	for _, f := range requested {
		if d, ok := health.DerivationOf(health.Field(f)); ok && !slices.Contains(requested, dcgm.Short(d.From)) {
			older[dcgm.Short(d.From)] = f
		}
	}
	numbers, texts, unknown := s.splitByType(slices.Concat(requested, slices.Sorted(maps.Keys(older))))
	supported, refused, err := s.supportedByEngine(slices.Concat(numbers, texts))
	if err != nil {
		return selected, err
	}
	redundant := func(f dcgm.Short) bool {
		base, ok := older[f]
		return ok && slices.Contains(supported, base)
	}
	derived := func(f dcgm.Short) bool {
		d, ok := health.DerivationOf(health.Field(f))
		return ok && slices.Contains(supported, dcgm.Short(d.From))
	}
	var omitted []omittedField
	for _, o := range append(unknown, refused...) {
		if !redundant(o.field) && !derived(o.field) {
			omitted = append(omitted, o)
		}
	}
	if len(omitted) > 0 && !s.loggedFields {
		s.loggedFields = true
		s.log.Warn("omitting fields that DCGM does not support", zap.Stringers("fields", omitted))
	}
	for _, f := range supported {
		switch {
		case redundant(f):
		case slices.Contains(texts, f):
			selected.texts = append(selected.texts, f)
		case slices.Contains(healthFields(), f):
			selected.health = append(selected.health, f)
		default:
			selected.metrics = append(selected.metrics, f)
		}
	}
	return selected, nil
}

// instanceFields returns the fields that DCGM measures on MIG instances. For other fields, such as 55 and 57, DCGM returns the parent's
// value, and a GPU's power is not the power of each of its MIG devices.
func instanceFields(fields []dcgm.Short) (measured []dcgm.Short) {
	for _, f := range fields {
		meta, err := dcgm.FieldGetByID(f)
		if err == nil && (meta.EntityLevel == dcgm.FE_GPU_I || meta.EntityLevel == dcgm.FE_GPU_CI) {
			measured = append(measured, f)
		}
	}
	return measured
}
