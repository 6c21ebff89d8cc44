package judge

import (
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// rows returns a sample's rows as the whole stream, by code and seconds.
func rows(list ...[2]int) func(*health.Sample) {
	return func(s *health.Sample) {
		for _, r := range list {
			s.Rows = append(s.Rows, health.XIDRow{Code: r[0], At: at(r[1]).UnixMicro()})
		}
		s.RowsWhole = true
	}
}

// The source lists its rows again in every read. Each counts once, over reconnects and a restart of the agent. The first read of a process
// without a complete saved state only learns them.
func TestListedRowsCountOnce(t *testing.T) {
	var many [][2]int
	for i := range 1500 {
		many = append(many, [2]int{31, i})
	}
	all := present(rows(many...))
	part := all
	part.Rows, part.RowsWhole = all.Rows[1400:], false
	for _, restored := range []bool{false, true} {
		rc := ReadingContext{XIDHistory: restored, FirstReading: true}
		var devices []health.DeviceState
		judge := func(second int, s health.Sample) uint64 {
			r, now := reading(second, samples{gpu0.ID: s}, gpu0)
			devices = judgeReading(DefaultConfig(), devices, r, rc, now)
			rc.FirstReading = false
			if s := devices[0].Sample; s.Rows != nil || s.RowsWhole {
				t.Fatalf("%d rows are kept", len(s.Rows))
			}
			return devices[0].XIDs.Codes[31].Total
		}
		want := uint64(0)
		if restored {
			want = 1500
		}
		for i, s := range []health.Sample{all, all, all, part, present(), all} {
			if got := judge(i, s); got != want {
				t.Errorf("restored %v, read %d: %d XIDs count, want %d", restored, i, got, want)
			}
		}
		next := all
		next.Rows = append(slices.Clone(all.Rows), health.XIDRow{Code: 31, At: at(-100).UnixMicro()}) // after the clock was set back
		if got := judge(10, next); got != want+1 {
			t.Errorf("restored %v: %d XIDs count with a new row, want %d", restored, got, want+1)
		}
		devices[0] = health.DeviceState{Device: gpu0, XIDs: devices[0].XIDs.Restarted()}
		rc = ReadingContext{XIDHistory: true, FirstReading: true}
		if got := judge(20, next); got != 0 {
			t.Errorf("restored %v: after a restart %d XIDs count again", restored, got)
		}
	}
}

// The old kernel log is from before the agent's start, also when a restarted engine reads it later.
func TestOldRows(t *testing.T) {
	for _, restored := range []bool{false, true} {
		rc := ReadingContext{XIDHistory: restored}
		d := judgeGPU(nil, 0, present(rows()), rc)
		old := present(rows([2]int{79, -3600}))
		old.Rows[0].Old = true
		for i := range 2 {
			d = judgeGPU([]health.DeviceState{d}, i+1, old, rc)
		}
		if got := d.XIDs.Codes[79].Total > 0; got != restored {
			t.Errorf("restored %v: an XID of the old kernel log counts: %v", restored, got)
		}
	}
}

// A new row with XID 79 means that its GPU has fallen off the bus, so its loss is not delayed. A row that is known means nothing.
func TestNewRowOf79IsNotDelayed(t *testing.T) {
	var filter OutageFilter
	r, now := reading(0, samples{gpu0.ID: present(rows([2]int{79, -60})), gpu1.ID: present(rows())}, gpu0, gpu1)
	before := judgeReading(DefaultConfig(), nil, r, ReadingContext{}, now)
	for _, c := range []struct {
		rows [][2]int
		want health.Presence
	}{
		{[][2]int{{79, -60}}, health.PresenceUnknown},
		{[][2]int{{79, -60}, {79, 1}}, health.Lost},
	} {
		gone := func(list ...[2]int) health.Sample {
			return health.Sample{Presence: health.Lost, Rows: present(rows(list...)).Rows}
		}
		r, now := reading(1, samples{gpu0.ID: gone(c.rows...), gpu1.ID: gone()}, gpu0, gpu1)
		if devices, _ := filter.Measure(DefaultConfig(), before, r, ReadingContext{}, now); devices[0].Sample.Presence != c.want {
			t.Errorf("rows %v: GPU-0 is %v, want %v", c.rows, devices[0].Sample.Presence, c.want)
		}
	}
}

// A MIG device that an incomplete inventory lacks may exist: it keeps its verdict and its XIDs until a complete one lacks it.
func TestIncompleteInventory(t *testing.T) {
	all := []health.DeviceID{gpu0.ID, gpu1.ID, mig0.ID, mig1.ID}
	check := func(where string, devices []health.DeviceState, ids ...health.DeviceID) {
		t.Helper()
		var got []health.DeviceID
		for _, d := range devices {
			got = append(got, d.Device.ID)
			if d.Device.ID == mig0.ID && (d.Verdict.State != health.Unhealthy || d.XIDs.Codes[48].Total != 1) {
				t.Errorf("%s: %+v", where, d)
			}
		}
		if slices.Sort(got); !slices.Equal(got, ids) {
			t.Errorf("%s: %v, want %v", where, got, ids)
		}
	}
	unnamed := []health.UnnamedInstance{{Parent: gpu1.ID, GI: mig0.GI}, {Parent: gpu0.ID, GI: mig0.GI}}
	devices := judge(nil, 0, samples{mig0.ID: migXIDs(48)}, gpu0, mig0, mig1, gpu1)
	for i := range 2 {
		r, now := reading(i+1, nil, gpu0, mig1, gpu1)
		r.Unnamed = unnamed
		devices = judgeAndView(DefaultConfig(), devices, r, nil, now)
		check("incomplete", devices, all...)
		if devices[0].Verdict.State != health.Healthy {
			t.Errorf("the GPU has the finding of its MIG device, as if that were destroyed: %v", devices[0].Verdict)
		}
	}
	check("with its name again", judge(devices, 3, nil, gpu0, mig0, mig1, gpu1), all...)
	check("destroyed", judge(devices, 4, nil, gpu0, mig1, gpu1), gpu0.ID, gpu1.ID, mig1.ID)
	r, now := reading(5, samples{gpu0.ID: {Presence: health.Lost}}, gpu0, mig1, gpu1)
	r.Unnamed = unnamed
	check("with a lost GPU", judgeAndView(DefaultConfig(), devices, r, nil, now), all...)
}

// An instance without a name keeps no MIG device that was in another place: that one was destroyed, and leaves its finding to its GPU.
func TestUnnamedInstanceInAnotherPlace(t *testing.T) {
	before := judge(nil, 0, samples{mig0.ID: migXIDs(48)}, gpu0, mig0, mig1, gpu1)
	for name, unnamed := range map[string]health.UnnamedInstance{
		"GPU":              {Parent: gpu1.ID, GI: mig0.GI, CI: mig0.CI},
		"GPU instance":     {Parent: gpu0.ID, GI: 7, CI: mig0.CI},
		"compute instance": {Parent: gpu0.ID, GI: mig0.GI, CI: 1},
	} {
		r, now := reading(1, nil, gpu0, mig1, gpu1)
		r.Unnamed = []health.UnnamedInstance{unnamed}
		devices := judgeAndView(DefaultConfig(), before, r, nil, now)
		if len(devices) != 3 || !devices[0].Memory.UnhealthyBy(health.XIDCause(48)) {
			t.Errorf("another %s: %d devices, and the GPU has %v", name, len(devices), devices[0].Verdict.Causes())
		}
	}
}

// The source lists no rows of a device that the reading lacks. Its debts do not expire, but cause no reads until it is listed again.
func TestOverdueXIDsOfLackedDevices(t *testing.T) {
	all := []health.Device{gpu0, mig0, mig1, gpu1}
	for name, c := range map[string]struct {
		of      health.DeviceID
		left    []health.Device
		unnamed []health.UnnamedInstance
	}{
		"missing GPU":                 {gpu1.ID, []health.Device{gpu0, mig0, mig1}, nil},
		"MIG device of a missing GPU": {mig0.ID, []health.Device{gpu1}, nil},
		"MIG device without a name":   {mig0.ID, []health.Device{gpu0, mig1, gpu1}, []health.UnnamedInstance{{Parent: gpu0.ID, GI: mig0.GI}}},
	} {
		devices := judge(nil, 0, nil, all...)
		i := slices.IndexFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == c.of })
		event := health.Sample{At: at(0), XIDs: []health.XID{{Code: 48, Witness: health.WitnessNVML}}}
		devices[i].XIDs, _, _ = devices[i].XIDs.Take(event, nil, at(0), new(health.SourceProgress))
		expect := func(second int, listed []health.Device, unnamed []health.UnnamedInstance, overdue bool) {
			t.Helper()
			r, now := reading(second, nil, listed...)
			r.Unnamed = unnamed
			devices = judgeAndView(DefaultConfig(), devices, r, nil, now)
			d := stateOf(devices, c.of)
			if got := OverdueXIDs(devices, now); got != overdue || !d.XIDs.OwesSource() {
				t.Errorf("%s, second %d: overdue %v, owed %v", name, second, got, d.XIDs.Owed)
			}
			events := observe(DefaultConfig(), devices, &health.Reading{}, ReadingContext{}, now)
			if OverdueXIDs(events, now) != overdue {
				t.Errorf("%s, second %d: overdue %v after events", name, second, !overdue)
			}
		}
		expect(4, all, nil, true)
		expect(5, c.left, c.unnamed, false)
		expect(3600, c.left, c.unnamed, false)
		expect(3601, all, nil, true)
	}
}

// Field 230 is the newest XID of the device itself, also after the source has lost its samples.
func TestLastXIDOfRows(t *testing.T) {
	var devices []health.DeviceState
	for i, c := range []struct {
		gpu       health.Sample
		mig       []health.Device
		gpuValue  float64
		migSample health.Sample
		migValue  float64
	}{
		{present(value(health.FieldXID, 0), rows()), nil, 0, health.Sample{}, 0},
		{present(value(health.FieldXID, 31), rows([2]int{31, 1})), nil, 31, health.Sample{}, 0},
		{present(value(health.FieldXID, 0)), []health.Device{mig0}, 31, present(value(health.FieldXID, 43), rows([2]int{43, -5})), 0},
		{present(value(health.FieldXID, 31)), []health.Device{mig0}, 31, present(value(health.FieldXID, 43)), 0},
		{
			present(value(health.FieldXID, 48)),
			[]health.Device{mig0},
			48,
			present(value(health.FieldXID, 13), rows([2]int{43, -5}, [2]int{13, 2})), 13,
		},
	} {
		source := c.migSample.Values[health.FieldXID]
		devices = judge(devices, i, samples{gpu0.ID: c.gpu, mig0.ID: c.migSample}, append([]health.Device{gpu0}, c.mig...)...)
		for j, want := range []float64{c.gpuValue, c.migValue}[:len(devices)] {
			if got, ok := devices[j].Sample.Values[health.FieldXID]; got != want || !ok {
				t.Errorf("reading %d: field 230 of %s is %v, want %v", i, devices[j].Device.ID, got, want)
			}
		}
		if c.migSample.Values[health.FieldXID] != source {
			t.Errorf("reading %d: the source's values were modified", i)
		}
	}
	if d := judge(nil, 0, samples{gpu0.ID: present(rows([2]int{31, 1}))}, gpu0)[0]; len(d.Sample.Values) != len(present().Values) {
		t.Errorf("field 230 is not readable, but is %v", d.Sample.Values[health.FieldXID])
	}
}
