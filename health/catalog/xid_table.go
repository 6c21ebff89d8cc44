// Package catalog describes XIDs and the incidents of DCGM's health checks: their meaning, effect, action and what clears them. The
// configuration changes their effects.
package catalog

import (
	"cmp"
	_ "embed"
	"encoding/csv"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Effect is the effect of an XID or a DCGM incident on the device that reported it.
type Effect uint8

// The effects, in the order of their severity.
const (
	EffectIgnore    Effect = iota // counted, nothing else
	EffectWarn                    // Degraded for a while
	EffectUnhealthy               // Unhealthy until there is evidence of a cure
)

//nolint:gochecknoglobals // a table of constants
var effectNames = [...]string{"ignore", "warn", "unhealthy"}

func (e Effect) String() string { return health.EnumName(effectNames[:], int(e)) }

// State returns the state of a finding with that effect, Healthy if there is none.
func (e Effect) State() health.State {
	switch e {
	case EffectWarn:
		return health.Degraded
	case EffectUnhealthy:
		return health.Unhealthy
	case EffectIgnore:
	}
	return health.Healthy
}

// XIDInfo describes an XID: its meaning, default effect, action and what clears it.
type XIDInfo struct {
	Code   int
	Name   string // its meaning
	Effect Effect
	Action health.Action
	Clears health.Clears

	// FollowsRecoveryAction means that the driver's recovery action decides how bad the XID is: if the driver asks for a reset,
	// the XID is Unhealthy until the GPU has been reset.
	FollowsRecoveryAction bool
	// WholeGPU means that an XID which a MIG device reports affects the whole GPU. Other XIDs affect only the MIG device.
	WholeGPU bool
}

// LookupXID returns the description of an XID. An XID that is not in the table is a warning.
func LookupXID(code int) XIDInfo { return lookupXID(code).XIDInfo }

// xidRow is a row of xids.csv without what only people read.
type xidRow struct {
	XIDInfo
	effects [len(xidPresets)]Effect // by preset
}

func lookupXID(code int) xidRow {
	rows := xidRows()
	if code > 0 && code < len(rows) {
		return rows[code]
	}
	row := rows[0]
	row.Code, row.Name = code, "XID "+strconv.Itoa(code)
	return row
}

// xidTable describes every XID, by number; row 0 is any other XID. docs/health.md shows it. The catalogue is NVIDIA's, for Ampere and
// later (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, 2025-10-29). The rule:
//
//   - An XID for which the catalogue requires a reset or a restart is unhealthy. Any other unhealthy row has a reason.
//   - The application errors that NVIDIA's device plugin ignores, the XIDs for which the catalogue requires no action at all,
//     and reports of a recovery or of the recovery action are ignored.
//   - All other XIDs warn. That includes the numbers that the catalogue calls unused: older GPUs and drivers use some of them.
//     If the sources disagree and the XID may be a fault, the driver's recovery action decides.
//
// TestXIDRules compares the table with the catalogue, and TestXIDDeviations with what other programs do. The columns:
//
//   - symbol: NVIDIA's name without ROBUST_CHANNEL_; from the driver's header if the catalogue does not list the XID.
//   - name: its meaning.
//   - default, nvidia-device-plugin, gke, aws: its effect with that preset; empty: as row 0.
//   - action, clears: of a finding with the default effect.
//   - scope: gpu if the XID affects the whole GPU, also when a MIG device reports it. A failure of the driver, a micro-controller or a link
//     affects every instance. Instances have their own memory and engines, and share the rest (NVIDIA MIG user guide).
//   - follows: yes if the driver's recovery action decides the effect.
//   - catalogue: the catalogue's immediate action; empty if it has no resolution.
//   - sources: other sources of the effect. DCGM: its own health checks call the XID a failure of the whole GPU.
//   - differs: the sources that judge the XID otherwise, such as "NVIDIA's catalogue, gpud"; reason: why the row differs from them.
//
//go:embed xids.csv
var xidTable string

//nolint:gochecknoglobals // a table of constants
var xidRows = sync.OnceValue(func() []xidRow {
	table := tableRows(xidTable)
	rows := make([]xidRow, len(table))
	for code, cells := range table {
		row := &rows[code]
		for i, preset := range xidPresets {
			row.effects[i] = effectNamed(cmp.Or(cells[preset], table[0][preset], EffectIgnore.String())) // "none" has no column
		}
		clears, _ := health.ParseClears(cells["clears"])
		row.XIDInfo = XIDInfo{
			Code: code, Name: cells["name"], Effect: row.effects[0], Action: health.Action(cells["action"]), Clears: clears,
			FollowsRecoveryAction: cells["follows"] == "yes", WholeGPU: cells["scope"] == "gpu",
		}
	}
	return rows
})

func effectNamed(name string) Effect { return Effect(slices.Index(effectNames[:], name)) }

// tableRows returns the rows of an embedded table, each by the names of its columns. TestXIDTable and TestIncidentTable check every cell.
func tableRows(table string) []map[string]string {
	lines, err := csv.NewReader(strings.NewReader(table)).ReadAll()
	if err != nil {
		panic(err)
	}
	all := make([]map[string]string, len(lines)-1)
	for i := range all {
		all[i] = make(map[string]string, len(lines[0]))
		for j, column := range lines[0] {
			all[i][column] = lines[i+1][j]
		}
	}
	return all
}

// Advice returns the action of a finding of the XID as an imperative sentence.
func (i XIDInfo) Advice() string { return health.Finding{Action: i.Action, Clears: i.Clears}.Advice() }
