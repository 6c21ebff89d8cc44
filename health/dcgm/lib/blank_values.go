//go:build cgo && linux

package lib

import (
	"math"
	"strings"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
)

// The smallest blank of each type. Blank, not found, not supported and not permissioned are consecutive numbers, so one
// comparison detects all of them (dcgm_structs.h: DCGM_INT32_BLANK and following; OBSERVED.md#blanks).
const (
	BlankInt32 = 0x7ffffff0
	BlankInt64 = 0x7ffffffffffffff0
	BlankFP64  = 140737488355328.0
	BlankText  = "<<<" // "<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>"
)

// Float returns a value as a number, in the unit of health.Field; ok is false for a blank.
func Float(v *dcgm.FieldValue_v2) (value float64, ok bool) {
	if v.Status != 0 {
		return 0, false
	}
	switch v.FieldType {
	case dcgm.DCGM_FT_INT64:
		n := v.Int64()
		// Some fields have a 32-bit value, with a 32-bit blank, in 64 bits.
		if n >= BlankInt64 || (n >= BlankInt32 && n <= math.MaxInt32) {
			return 0, false
		}
		return float64(n), true
	case dcgm.DCGM_FT_DOUBLE:
		f := v.Float64()
		if !(f < BlankFP64) || math.IsInf(f, 0) { // NaN is not less
			return 0, false
		}
		return f, true
	}
	return 0, false
}

// NotSupported reports whether the value is the third blank of its type: the GPU does not support the field.
func NotSupported(v *dcgm.FieldValue_v2) bool {
	if v.Status != 0 {
		return v.Status == dcgm.DCGM_ST_NOT_SUPPORTED
	}
	switch v.FieldType {
	case dcgm.DCGM_FT_INT64:
		return v.Int64() == BlankInt64+2 || v.Int64() == BlankInt32+2
	case dcgm.DCGM_FT_DOUBLE:
		return v.Float64() == BlankFP64+2
	case dcgm.DCGM_FT_STRING:
		return v.StringValue != nil && strings.Contains(*v.StringValue, "<<<NOT_SUPPORTED>>>")
	}
	return false
}

// Int returns an integer value exactly; ok is false for a blank and for other types.
func Int(v *dcgm.FieldValue_v2) (value int64, ok bool) {
	if v.Status == 0 && v.FieldType == dcgm.DCGM_FT_INT64 && v.Int64() < BlankInt64 {
		if n := v.Int64(); n < BlankInt32 || n > math.MaxInt32 {
			return n, true // a float64 would lose bits of an affinity mask
		}
	}
	return 0, false
}

// Text returns a text value, or "" for a blank.
func Text(v *dcgm.FieldValue_v2) string {
	if v.Status != 0 || v.FieldType != dcgm.DCGM_FT_STRING || v.StringValue == nil {
		return ""
	}
	s := strings.TrimSpace(*v.StringValue)
	if strings.HasPrefix(s, BlankText) && strings.Contains(s, ">>>") {
		return ""
	}
	return s
}
