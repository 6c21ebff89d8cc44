//go:build cgo && linux

package dcgm

import (
	"math"
	"strings"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
)

// The least of each type's blanks. Blank, not found, not supported and not permissioned follow each
// other, so that one comparison tells them all from a value (dcgm_structs.h: DCGM_INT32_BLANK and on).
const (
	blankInt32 = 0x7ffffff0
	blankInt64 = 0x7ffffffffffffff0
	blankFP64  = 140737488355328.0
	blankStr   = "<<<" // "<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>"
)

// number returns a value as a number, in the unit of health.Field; false if DCGM has none.
func number(v *dcgm.FieldValue_v2) (float64, bool) {
	if v.Status != 0 {
		return 0, false
	}
	switch v.FieldType {
	case dcgm.DCGM_FT_INT64:
		n := v.Int64()
		// Some fields keep a 32-bit value, with a 32-bit blank, in the 64 bits.
		if n >= blankInt64 || (n >= blankInt32 && n <= math.MaxInt32) {
			return 0, false
		}
		return float64(n), true
	case dcgm.DCGM_FT_DOUBLE:
		f := v.Float64()
		if !(f < blankFP64) || math.IsInf(f, 0) { // NaN is not less than anything
			return 0, false
		}
		return f, true
	}
	return 0, false
}

// notSupported reports whether DCGM says that there never will be a value: the third of each type's blanks.
func notSupported(v *dcgm.FieldValue_v2) bool {
	if v.Status != 0 {
		return v.Status == dcgm.DCGM_ST_NOT_SUPPORTED
	}
	switch v.FieldType {
	case dcgm.DCGM_FT_INT64:
		return v.Int64() == blankInt64+2 || v.Int64() == blankInt32+2
	case dcgm.DCGM_FT_DOUBLE:
		return v.Float64() == blankFP64+2
	case dcgm.DCGM_FT_STRING:
		return v.StringValue != nil && strings.Contains(*v.StringValue, "<<<NOT_SUPPORTED>>>")
	}
	return false
}

// integer is number for a value that is one; a fraction is cut off.
func integer(v *dcgm.FieldValue_v2) (int64, bool) {
	if v.Status == 0 && v.FieldType == dcgm.DCGM_FT_INT64 && v.Int64() < blankInt64 {
		if n := v.Int64(); n < blankInt32 || n > math.MaxInt32 {
			return n, true // exactly: a float64 would lose bits of an affinity mask
		}
	}
	return 0, false
}

// text returns a value as a string; empty if DCGM has none.
func text(v *dcgm.FieldValue_v2) string {
	if v.Status != 0 || v.FieldType != dcgm.DCGM_FT_STRING || v.StringValue == nil {
		return ""
	}
	s := strings.TrimSpace(*v.StringValue)
	if strings.HasPrefix(s, blankStr) && strings.Contains(s, ">>>") {
		return ""
	}
	return s
}
