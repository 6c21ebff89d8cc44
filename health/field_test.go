package health

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// readFieldNames returns the names of DCGM's fields, the newest first, from the list that a test in health/dcgm compares with go-dcgm.
func readFieldNames(t *testing.T) map[Field][]string {
	t.Helper()
	text, err := os.ReadFile("../metrics/fields/dcgm_fields.txt")
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[Field][]string)
	for line := range strings.Lines(string(text)) {
		columns := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(columns) < 3 {
			continue
		}
		id, err := strconv.ParseUint(columns[0], 10, 16)
		if err != nil {
			t.Fatal(err)
		}
		names[Field(id)] = columns[2:]
	}
	return names
}

// Each number belongs to DCGM's name.
func TestFields(t *testing.T) {
	names := readFieldNames(t)
	for name, id := range map[string]Field{
		"DEV_SERIAL": FieldSerial, "DEV_MIG_MODE": FieldMIGMode, "DEV_SM_CLOCK": FieldSMClock, "DEV_MEM_CLOCK": FieldMemClock,
		"DEV_CLOCKS_EVENT_REASONS": FieldClocksEvents, "DEV_MEMORY_TEMP": FieldMemoryTemp, "DEV_GPU_TEMP": FieldGPUTemp,
		"DEV_POWER_USAGE":              FieldPower,
		"DEV_TOTAL_ENERGY_CONSUMPTION": FieldEnergy, "DEV_ENFORCED_POWER_LIMIT": FieldPowerLimit, "DEV_PCIE_REPLAY_COUNTER": FieldPCIeReplays,
		"DEV_GPU_UTIL": FieldGPUUtil, "DEV_MEM_COPY_UTIL": FieldMemCopyUtil, "DEV_ENC_UTIL": FieldEncUtil, "DEV_DEC_UTIL": FieldDecUtil,
		"DEV_XID_ERRORS": FieldXID, "DEV_FB_TOTAL": FieldFBTotal, "DEV_FB_FREE": FieldFBFree, "DEV_FB_USED": FieldFBUsed,
		"DEV_FB_RESERVED":       FieldFBReserved,
		"DEV_ECC_DBE_VOL_TOTAL": FieldDBEVolatile, "DEV_RETIRED_SBE": FieldRetiredSBE, "DEV_RETIRED_DBE": FieldRetiredDBE,
		"DEV_RETIRED_PENDING": FieldRetiredPending, "DEV_UNCORRECTABLE_REMAPPED_ROWS": FieldRemappedUncorr,
		"DEV_CORRECTABLE_REMAPPED_ROWS": FieldRemappedCorr, "DEV_ROW_REMAP_FAILURE": FieldRemapFailed, "DEV_ROW_REMAP_PENDING": FieldRemapPending,
		"DEV_NVLINK_BANDWIDTH_TOTAL": FieldNVLinkBandwidth, "DEV_VGPU_LICENSE_STATUS": FieldVGPULicense,
		"PROF_GR_ENGINE_ACTIVE":        FieldEngineActive,
		"DEV_MEMORY_UNREPAIRABLE_FLAG": FieldUnrepairable, "DEV_GET_GPU_RECOVERY_ACTION": FieldRecoveryAction,
		"DEV_SM_CLOCK_HERTZ": FieldSMClockHertz, "DEV_FB_USED_BYTES": FieldFBUsedBytes,
	} {
		if !slices.Contains(names[id], "DCGM_FI_"+name) {
			t.Errorf("field %d has the names %q, not DCGM_FI_%s", id, names[id], name)
		}
	}
}

// A field in base units follows from the one that measures the same: the names differ in units and in words that DCGM 4.6 renamed.
func TestDerivationsMatchNames(t *testing.T) {
	names := readFieldNames(t)
	quantity := func(id Field) string {
		words := make(map[string]bool)
		for word := range strings.SplitSeq(names[id][0], "_") {
			switch word {
			case "GPU", "BOARD", "TOTAL", "CAPACITY", "CONSUMPTION", "COPY", "CLOCKS", "BYTES", "HERTZ", "SECONDS", "JOULES", "RATIO":
			case "MEM":
				words["MEMORY"] = true
			case "VIOLATION":
				words["THROTTLE"] = true
			default:
				words[word] = true
			}
		}
		return strings.Join(slices.Sorted(maps.Keys(words)), " ")
	}
	for id := Field(1600); id <= 1628; id++ {
		d, ok := DerivationOf(id)
		if !ok || quantity(id) != quantity(d.From) {
			t.Errorf("%q follows from %q, %t", names[id], names[d.From], ok)
		}
		for unit, want := range map[string]Derivation{
			"_BYTES":         {Mul: 1 << 20, Div: 1},          // MiB
			"_HERTZ":         {Mul: 1e6, Div: 1},              // MHz
			"_RATIO":         {Mul: 1, Div: 100},              // percent
			"_SECONDS_TOTAL": {Mul: 1, Div: 1e9},              // ns
			"_JOULES_TOTAL":  {Mul: 1, Div: 1e3, Floor: true}, // mJ; an integer
		} {
			if want.From = d.From; strings.HasSuffix(names[id][0], unit) && d != want {
				t.Errorf("%s: %+v, want %+v", names[id][0], d, want)
			}
		}
	}
}
