package judge

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

func TestRowsFromBeforeStart(t *testing.T) {
	old, away := [2]int{95, -60}, [2]int{95, -10}
	known := func(list ...[2]int) []health.DeviceState {
		d := health.DeviceState{Device: gpu0}
		for _, r := range present(rows(list...)).Rows {
			d.XIDs.Rows = append(d.XIDs.Rows, health.LedgerRow{XIDRow: r})
		}
		return []health.DeviceState{d}
	}
	restart := ReadingContext{XIDHistory: true, FirstReading: true}
	for name, c := range map[string]struct {
		before []health.DeviceState
		rc     ReadingContext
		rows   [][2]int
		count  uint64
	}{
		"a known row is not new":             {known(old), restart, [][2]int{old}, 0},
		"another one is":                     {known(old), restart, [][2]int{old, away}, 1},
		"and so is one of a new device":      {nil, restart, [][2]int{away}, 1},
		"without saved state all are old":    {nil, ReadingContext{FirstReading: true}, [][2]int{old, away}, 0},
		"the kernel log repeats with a time": {known([2]int{79, -60}), restart, [][2]int{{79, -58}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := judgeGPU(c.before, 0, present(rows(c.rows...)), c.rc)
			want := health.Healthy
			if c.count > 0 {
				want = health.Unhealthy
			}
			if d.XIDs.Codes[95].Total != c.count || len(d.XIDs.Codes) != int(c.count) || d.Verdict.State != want {
				t.Errorf("counted %v, %v; want %d, %v", d.XIDs.Codes, d.Verdict.State, c.count, want)
			}
			again := judgeGPU([]health.DeviceState{{Device: gpu0, XIDs: d.XIDs.Restarted()}}, 1, present(rows(c.rows...)), restart)
			if len(again.XIDs.Codes) != 0 || !slices.Equal(again.XIDs.Rows, d.XIDs.Rows) {
				t.Errorf("after another restart it counts %v, rows %+v", again.XIDs.Codes, again.XIDs.Rows)
			}
		})
	}
}

// The rows that DCGM lists for a new MIG device may be of an earlier one with the same number.
func TestRowsOfNewMIGDevice(t *testing.T) {
	read := present(rows())
	r, now := reading(1, samples{mig0.ID: present(rows([2]int{48, 0}))}, gpu0, mig0)
	for name, c := range map[string]struct {
		before []health.DeviceState
		count  uint64
	}{
		"first reading":                 {nil, 1},
		"listed late, with its GPU":     {judge(nil, 0, samples{gpu1.ID: read}, gpu1), 1},
		"created later than its GPU":    {judge(nil, 0, samples{gpu0.ID: read}, gpu0), 0},
		"created while others remained": {judge(nil, 0, samples{gpu0.ID: read, mig1.ID: read}, gpu0, mig1), 0},
	} {
		devices := judgeReading(DefaultConfig(), c.before, r, ReadingContext{XIDHistory: true}, now)
		count := func() uint64 {
			i := slices.IndexFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == mig0.ID })
			return devices[i].XIDs.Codes[48].Total
		}
		if got := count(); got != c.count {
			t.Errorf("%s: counted %d, want %d", name, got, c.count)
		}
		devices = judge(devices, 2, samples{mig0.ID: present(rows([2]int{48, 0}, [2]int{48, 1}))}, gpu0, mig0)
		if got := count(); got != c.count+1 {
			t.Errorf("%s: counted %d with one of its own, want %d", name, got, c.count+1)
		}
	}
}

// After a first start, the XID behind a reset request is unknown unless the source delivers it.
func TestRecoveryActionFromBeforeStart(t *testing.T) {
	reset, none := present(value(health.FieldRecoveryAction, 1)), present()
	first, restart := ReadingContext{}, ReadingContext{XIDHistory: true, FirstReading: true}
	type poll struct {
		at     int
		sample health.Sample
		want   health.State
	}
	for name, c := range map[string]struct {
		rc    ReadingContext // of the first poll
		polls []poll
	}{
		"set at the first start": {first, []poll{
			{0, reset, health.Unhealthy},
			{1, reset, health.Unhealthy},
			{100, present(without(health.FieldRecoveryAction)), health.Unhealthy},
			{200, reset, health.Unhealthy},
			{201, none, health.Healthy},
			{202, reset, health.Degraded},
		}},
		"measured late": {first, []poll{
			{0, blank(health.PresenceUnknown), health.Unknown},
			{1, present(without(health.FieldRecoveryAction)), health.Healthy},
			{2, reset, health.Unhealthy},
		}},
		"set after the start": {first, []poll{{0, none, health.Healthy}, {1, reset, health.Degraded}}},
		"with its XID": {first, []poll{
			{0, present(value(health.FieldRecoveryAction, 1), xids(63)), health.Degraded},
			{1, reset, health.Degraded},
		}},
		"with the report of the action": {first, []poll{{0, present(value(health.FieldRecoveryAction, 1), xids(154)), health.Unhealthy}}},
		"with an XID of an application": {
			first,
			[]poll{{0, present(value(health.FieldRecoveryAction, 1), xids(13), rows([2]int{95, -10})), health.Unhealthy}},
		},
		"with another application's XID": {
			first,
			[]poll{{0, present(value(health.FieldRecoveryAction, 1), xids(43), rows([2]int{95, -10})), health.Unhealthy}},
		},
		"drain and reset": {first, []poll{
			{0, present(value(health.FieldRecoveryAction, 4)), health.Unhealthy},
			{1, reset, health.Unhealthy},
			{2, none, health.Healthy},
		}},
		"set while the agent was down": {restart, []poll{{0, reset, health.Unhealthy}, {1, reset, health.Unhealthy}, {2, none, health.Healthy}}},
		"with its XID, while it was down": {
			restart,
			[]poll{{0, present(value(health.FieldRecoveryAction, 1), rows([2]int{63, -9})), health.Degraded}, {1, reset, health.Degraded}},
		},
		"set before the agent's restart": {ReadingContext{XIDHistory: true}, []poll{{0, reset, health.Degraded}, {1, reset, health.Degraded}}},
	} {
		t.Run(name, func(t *testing.T) {
			var before []health.DeviceState
			for _, p := range c.polls {
				d := judgeGPU(before, p.at, p.sample, c.rc)
				if d.Verdict.State != p.want {
					t.Fatalf("at %d s: %v %v, want %v", p.at, d.Verdict.State, d.Verdict.Causes(), p.want)
				}
				before, c.rc.FirstReading = []health.DeviceState{d}, name == "set before the agent's restart"
			}
		})
	}
}

// The driver's clock may differ from the agent's: recoverAfter counts from the XID's arrival.
func TestXIDWithOtherClock(t *testing.T) {
	rc := ReadingContext{XIDHistory: true}
	for _, offset := range []time.Duration{0, time.Second, 5 * time.Hour, -time.Second, -5 * time.Hour} {
		s := present()
		s.Rows = []health.XIDRow{{Code: 999, At: at(0).Add(offset).UnixMicro()}}
		d := judgeGPU(nil, 0, s, rc)
		if d.Verdict.State != health.Degraded || d.XIDs.Newest().At.After(at(0)) || d.Verdict.Findings[0].Since.After(at(0)) ||
			d.Verdict.Findings[0].Since.Before(at(-600)) {
			t.Errorf("%v: %+v, last XID %+v", offset, d.Verdict.Findings, d.XIDs.Newest())
		}
		for seconds, want := range []health.State{59: health.Degraded, 60: health.Healthy} {
			if want == health.Unknown {
				continue
			}
			d = judgeGPU([]health.DeviceState{d}, seconds, present(), rc)
			if d.Verdict.State != want {
				t.Errorf("%v: %v after %d s, want %v", offset, d.Verdict.State, seconds, want)
			}
		}
		if len(d.XIDs.Rows) != 1 || d.XIDs.Rows[0].XIDRow != s.Rows[0] {
			t.Errorf("the ledger lost the stream's own time: %+v", d.XIDs.Rows)
		}
	}

	s := present()
	s.XIDs = []health.XID{{Code: 144, At: at(0).Add(-5 * time.Hour)}}
	d := judgeGPU([]health.DeviceState{judgeGPU(nil, 0, s, rc)}, 2, present(value(health.FieldRecoveryAction, 1)), rc)
	if d.Verdict.State != health.Unhealthy {
		t.Errorf("the recovery action does not decide the severity: %v", d.Verdict.Causes())
	}
}

// The last XID of a verdict is the XID of its newest own finding.
func TestLastXID(t *testing.T) {
	devices := judge(nil, 0, samples{gpu0.ID: present(value(health.FieldGPUTemp, 99))}, gpu0, mig0)
	if got := devices[0].Verdict.LastXID(); got != 0 {
		t.Errorf("without an XID: %d", got)
	}
	for i, code := range []int{95, 48} {
		devices = judge(devices, 1+i, samples{gpu0.ID: present(xids(code))}, gpu0, mig0)
		if got := devices[0].Verdict.LastXID(); got != code {
			t.Errorf("%d, want %d", got, code)
		}
	}
	if got := devices[1].Verdict.LastXID(); got != 0 {
		t.Errorf("the MIG device inherits XID %d", got)
	}
}

func TestXIDOverrides(t *testing.T) {
	c := DefaultConfig()
	c.XID = catalog.XIDConfig{Preset: catalog.XIDPresetNone, Unhealthy: []int{45}, Warn: []int{109}}
	devices := runSteps(t, c, []step{
		{0, present(xids(48, 79, 999)), health.Healthy, nil},
		{1, present(xids(109)), health.Degraded, []string{"xid-109"}},
		{2, present(xids(45)), health.Unhealthy, []string{"xid-45", "xid-109"}},
		{62, present(), health.Unhealthy, []string{"xid-45"}},
		{63, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-45"}},
		{64, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-45"}},
		{65, present(), health.Healthy, nil},
	})
	if n := devices[0].XIDs.Codes[48].Total; n != 1 {
		t.Errorf("an ignored XID is counted %d times, want 1", n)
	}
}
