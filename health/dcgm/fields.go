//go:build cgo && linux

package dcgm

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// fieldXID is the field whose samples are XIDs, one a sample (dcgm_fields.h: DCGM_FI_DEV_XID_ERROR).
const fieldXID = dcgm.Short(health.FieldXID)

// Fields that the inventory is read from (dcgm_fields.h; what an instance answers was seen on DCGM 4.6).
const (
	fieldDriver   dcgm.Short = 1
	fieldCUDA     dcgm.Short = 5
	fieldName     dcgm.Short = 50 // of a compute instance: its profile
	fieldIndex    dcgm.Short = 52
	fieldUUID     dcgm.Short = 54
	fieldMinor    dcgm.Short = 55
	fieldPCI      dcgm.Short = 57
	fieldMIGMode             = dcgm.Short(health.FieldMIGMode)
	fieldAffinity dcgm.Short = 86 // to 89: bit masks of the NUMA nodes next to the GPU, 64 nodes each
	fieldMemory              = dcgm.Short(health.FieldFBTotal)
)

// healthFields are what a GPU is judged by: read at every poll, sampled once a second. DCGM's health
// check leaves some out and sees the others within 30 s only.
func healthFields() []dcgm.Short {
	var fields []dcgm.Short
	for _, f := range health.JudgedFields() {
		if f := dcgm.Short(f); f != fieldXID && !slices.Contains(fields, f) {
			fields = append(fields, f)
		}
	}
	return fields
}

// inventoryFields are read of every GPU; of a compute instance, those that instanceInventory names.
func inventoryFields() []dcgm.Short {
	return []dcgm.Short{
		fieldUUID, fieldName, fieldIndex, fieldMinor, fieldPCI, fieldMIGMode, fieldMemory,
		fieldAffinity, fieldAffinity + 1, fieldAffinity + 2, fieldAffinity + 3, fieldDriver, fieldCUDA,
	}
}

// identity returns those of the inventory without which a GPU is not shown if it is to have them.
func identity() []dcgm.Short {
	return []dcgm.Short{
		fieldName, fieldIndex, fieldMinor, fieldPCI, fieldMIGMode, fieldMemory,
		fieldAffinity, fieldAffinity + 1, fieldAffinity + 2, fieldAffinity + 3,
	}
}

func instanceInventory() []dcgm.Short { return []dcgm.Short{fieldUUID, fieldName, fieldMemory} }

// known returns the fields that this DCGM has as numbers, then those that it has as texts, and why it left out
// the others.
func known(fields []dcgm.Short) (numbers, texts []dcgm.Short, left []string) {
	for _, f := range fields {
		meta, err := dcgm.FieldGetByID(f)
		if err != nil {
			left = append(left, fmt.Sprintf("%d (unknown to this DCGM)", f))
			continue
		}
		switch uint(meta.FieldType) {
		case dcgm.DCGM_FT_INT64, dcgm.DCGM_FT_DOUBLE:
			numbers = append(numbers, f)
		case dcgm.DCGM_FT_STRING:
			texts = append(texts, f)
		default:
			left = append(left, fmt.Sprintf("%d (%s is neither a number nor a text)", f, meta.Tag))
		}
	}
	return numbers, texts, left
}

// agreed returns the fields that the engine knows too: it may be older than the library here, and refuses
// a group with one field that it does not know.
func (s *session) agreed(fields []dcgm.Short) (kept []dcgm.Short, left []string, refused error) {
	try := func(fields ...dcgm.Short) error {
		group, err := dcgm.FieldGroupCreate(s.name("trial"), fields)
		if err != nil {
			return err
		}
		return dcgm.FieldGroupDestroy(group)
	}
	for some := range slices.Chunk(fields, maxFields) {
		err := try(some...)
		if err == nil {
			kept = append(kept, some...)
			continue
		}
		if dead(err) {
			return nil, nil, err
		}
		refused = err
		for _, f := range some {
			if try(f) == nil {
				kept = append(kept, f)
			} else {
				left = append(left, fmt.Sprintf("%d (unknown to the engine)", f))
			}
		}
	}
	if len(kept) == 0 {
		return nil, nil, refused // it is not the fields
	}
	return kept, left, nil
}

// chosen are the fields that a session has to do with, no field twice.
type chosen struct {
	judged  []dcgm.Short // those of health
	metrics []dcgm.Short // other numbers
	texts   []dcgm.Short // which do not change, and belong to the inventory
}

// fields returns the fields of health and those of metrics that this DCGM has. What is left out is said once a
// session.
func (s *session) fields() (c chosen, err error) {
	first := healthFields()
	wanted := append(healthFields(), fieldMIGMode)
	for _, f := range s.cfg.Fields {
		if f := dcgm.Short(f); f != fieldXID && !slices.Contains(wanted, f) {
			wanted = append(wanted, f)
		}
	}
	numbers, texts, unknown := known(wanted)
	have, refused, err := s.agreed(slices.Concat(numbers, texts))
	if err != nil {
		return c, err
	}
	if left := append(unknown, refused...); len(left) > 0 && !s.saidLeft {
		s.saidLeft = true
		s.log.Warn("fields that cannot be watched are left out", zap.Strings("fields", left))
	}
	for _, f := range have {
		switch {
		case slices.Contains(texts, f):
			c.texts = append(c.texts, f)
		case slices.Contains(first, f):
			c.judged = append(c.judged, f)
		default:
			c.metrics = append(c.metrics, f)
		}
	}
	return c, nil
}

// perInstance returns the fields that a MIG instance has of its own. DCGM answers with the parent's
// value where it has none (55 and 57 of an instance are its parent's), and the power of a whole
// GPU is not that of each of its seven parts.
func perInstance(fields []dcgm.Short) (own []dcgm.Short) {
	for _, f := range fields {
		meta, err := dcgm.FieldGetByID(f)
		if err == nil && (meta.EntityLevel == dcgm.FE_GPU_I || meta.EntityLevel == dcgm.FE_GPU_CI) {
			own = append(own, f)
		}
	}
	return own
}
