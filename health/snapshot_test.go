package health

import (
	"slices"
	"testing"
	"time"
)

func TestXIDGapOf(t *testing.T) {
	for name, c := range map[string]struct {
		gap   XIDGap
		lasts bool
		total time.Duration // 100 s after the epoch
	}{
		"none":               {XIDGap{}, false, 0},
		"lasts":              {XIDGap{Since: at(40), Total: time.Second}, true, 61 * time.Second},
		"over":               {XIDGap{Since: at(40), Until: at(45), Total: 5 * time.Second}, false, 5 * time.Second},
		"begins in a moment": {XIDGap{Since: at(101), Total: time.Second}, true, time.Second},
	} {
		if got := c.gap.Of(at(100)); c.gap.Lasts() != c.lasts || got != c.total {
			t.Errorf("%s: lasts %v, in total %v", name, c.gap.Lasts(), got)
		}
	}
}

func TestDetachmentInForce(t *testing.T) {
	for _, c := range []struct {
		d    Detachment
		want bool
	}{
		{Detachment{}, false},
		{Detachment{Since: at(0), Until: at(9)}, true},
		{Detachment{Undecided: true}, true},
		{Detachment{Over: true}, false},
	} {
		if got := c.d.InForce(); got != c.want {
			t.Errorf("%+v in force: %v", c.d, got)
		}
	}
}

// The values count while the source is up, and for a while after the last poll.
func TestValuesCount(t *testing.T) {
	if (*Snapshot)(nil).Polled() || (&Snapshot{}).Polled() || !(&Snapshot{At: at(0)}).Polled() {
		t.Error("a snapshot is polled if it has the time of a poll")
	}
	for _, c := range []struct {
		status SourceStatus
		at     int
		want   bool
	}{{SourceUp, 9999, true}, {SourceDown, 59, true}, {SourceDown, 60, false}, {SourceStalled, 60, false}, {SourceDetached, 30, true}} {
		s := Snapshot{At: at(0), Source: Source{Status: c.status}}
		if got := s.ValuesCount(at(c.at)); got != c.want {
			t.Errorf("%v, %d s after the poll: %v", c.status, c.at, got)
		}
	}
	s := Snapshot{Devices: judge(nil, 0, nil, gpu0, mig0, gpu1)}
	if got := s.DeviceIDs(); !slices.Equal(got, []DeviceID{"GPU-0", "GPU-1", "MIG-0"}) {
		t.Errorf("devices %v", got)
	}
}

// A device without an index, because another GPU has it, is named by its UUID.
func TestDeviceNames(t *testing.T) {
	unindexed, ofUnindexed, unnumbered := gpu1, mig1, mig1
	unindexed.Index, ofUnindexed.Index, unnumbered.MIGIndex = -1, -1, -1
	for _, c := range []struct {
		device           Device
		name, gpu, index string
	}{
		{gpu0, "GPU 0 (GPU-0)", "GPU 0", "0"},
		{gpu1, "GPU 1 (GPU-1)", "GPU 1", "1"},
		{unindexed, "GPU-1", "GPU-1", ""},
		{mig0, "MIG device 0:0 (MIG-0)", "GPU 0", "0"},
		{mig1, "MIG device 0:1 (MIG-1)", "GPU 0", "0"},
		{ofUnindexed, "MIG device MIG-1 of GPU-0", "GPU-0", ""},
		{unnumbered, "MIG device MIG-1 of GPU 0", "GPU 0", "0"},
	} {
		if d := c.device; d.Name() != c.name || d.GPUName() != c.gpu || d.IndexText() != c.index {
			t.Errorf("%+v: %q, %q, %q", d, d.Name(), d.GPUName(), d.IndexText())
		}
	}
	sorted := []Device{gpu0, gpu1, {Index: 2}, unindexed}
	for i := range sorted {
		for j := range sorted {
			if got := CompareIndex(&sorted[i], &sorted[j]); (got < 0) != (i < j) || (got == 0) != (i == j) {
				t.Errorf("%d to %d: %d", sorted[i].Index, sorted[j].Index, got)
			}
		}
	}
}

// An index names one GPU: the present one, else the one that the driver lists. The others, and their MIG devices, have none and come last.
func TestIndexIsOfOneGPU(t *testing.T) {
	zero := func(id DeviceID) Device { return Device{ID: id, Kind: KindGPU} }
	devices := judge(nil, 0, nil, gpu0, mig0, gpu1)
	for name, c := range map[string]struct {
		samples samples
		listed  []Device
		indexes map[DeviceID]int
	}{
		"present and lost": {
			samples{"GPU-b": blank(Lost)},
			[]Device{gpu0, mig0, zero("GPU-b"), gpu1},
			map[DeviceID]int{"GPU-0": 0, "MIG-0": 0, "GPU-b": -1, "GPU-1": 1},
		},
		"lost and present": {
			samples{"GPU-0": blank(Lost), "MIG-0": blank(Lost)},
			[]Device{gpu0, mig0, zero("GPU-b"), gpu1},
			map[DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"missing and lost": {
			samples{"GPU-b": blank(Lost)},
			[]Device{zero("GPU-b"), gpu1},
			map[DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"missing and unread": {
			samples{"GPU-b": blank(PresenceUnknown)},
			[]Device{zero("GPU-b"), gpu1},
			map[DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"lost, and another is new": {
			samples{"GPU-0": blank(Lost), "MIG-0": blank(Lost), "GPU-b": blank(Lost)},
			[]Device{gpu0, mig0, zero("GPU-b"), zero("GPU-c"), gpu1},
			map[DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": -1, "GPU-c": 0, "GPU-1": 1},
		},
	} {
		after := judge(devices, 1, c.samples, c.listed...)
		var order []DeviceID
		for _, d := range after {
			if d.Device.Index != c.indexes[d.Device.ID] {
				t.Errorf("%s: %s has the index %d", name, d.Device.ID, d.Device.Index)
			}
			if d.Device.Kind == KindGPU {
				order = append(order, d.Device.ID)
			}
		}
		if len(after) != len(c.indexes) {
			t.Errorf("%s: %d devices", name, len(after))
		}
		if !slices.IsSortedFunc(order, func(a, b DeviceID) int { return min(c.indexes[b], 0) - min(c.indexes[a], 0) }) {
			t.Errorf("%s: GPUs without an index are not the last: %v", name, order)
		}
	}
}
