package health_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestXIDGapOf(t *testing.T) {
	for name, c := range map[string]struct {
		gap   health.XIDGap
		lasts bool
		total time.Duration // 100 s after the epoch
	}{
		"none":               {health.XIDGap{}, false, 0},
		"lasts":              {health.XIDGap{Since: healthtest.At(40), Total: time.Second}, true, 61 * time.Second},
		"over":               {health.XIDGap{Since: healthtest.At(40), Until: healthtest.At(45), Total: 5 * time.Second}, false, 5 * time.Second},
		"begins in a moment": {health.XIDGap{Since: healthtest.At(101), Total: time.Second}, true, time.Second},
	} {
		if got := c.gap.Of(healthtest.At(100)); c.gap.Lasts() != c.lasts || got != c.total {
			t.Errorf("%s: lasts %v, in total %v", name, c.gap.Lasts(), got)
		}
	}
}

func TestDetachmentInForce(t *testing.T) {
	for _, c := range []struct {
		d    health.Detachment
		want bool
	}{
		{health.Detachment{}, false},
		{health.Detachment{Since: healthtest.At(0), Until: healthtest.At(9)}, true},
		{health.Detachment{Undecided: true}, true},
		{health.Detachment{Over: true}, false},
	} {
		if got := c.d.InForce(); got != c.want {
			t.Errorf("%+v in force: %v", c.d, got)
		}
	}
}

// The values count while the source is up, and for a while after the last poll.
func TestValuesCount(t *testing.T) {
	if (*health.Snapshot)(nil).Polled() || (&health.Snapshot{}).Polled() || !(&health.Snapshot{At: healthtest.At(0)}).Polled() {
		t.Error("a snapshot is polled if it has the time of a poll")
	}
	for _, c := range []struct {
		status health.SourceStatus
		at     int
		want   bool
	}{
		{health.SourceUp, 9999, true},
		{health.SourceDown, 59, true},
		{health.SourceDown, 60, false},
		{health.SourceStalled, 60, false},
		{health.SourceDetached, 30, true},
	} {
		s := health.Snapshot{At: healthtest.At(0), Source: health.Source{Status: c.status}}
		if got := s.ValuesCount(healthtest.At(c.at)); got != c.want {
			t.Errorf("%v, %d s after the poll: %v", c.status, c.at, got)
		}
	}
	s := health.Snapshot{Devices: judged(nil, 0, nil, gpu0, mig0, gpu1)}
	if got := s.DeviceIDs(); !slices.Equal(got, []health.DeviceID{"GPU-0", "GPU-1", "MIG-0"}) {
		t.Errorf("devices %v", got)
	}
}

// A device without an index, because another GPU has it, is named by its UUID.
func TestDeviceNames(t *testing.T) {
	unindexed, ofUnindexed, unnumbered := gpu1, mig1, mig1
	unindexed.Index, ofUnindexed.Index, unnumbered.MIGIndex = -1, -1, -1
	for _, c := range []struct {
		device           health.Device
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
	sorted := []health.Device{gpu0, gpu1, {Index: 2}, unindexed}
	for i := range sorted {
		for j := range sorted {
			if got := health.CompareIndex(&sorted[i], &sorted[j]); (got < 0) != (i < j) || (got == 0) != (i == j) {
				t.Errorf("%d to %d: %d", sorted[i].Index, sorted[j].Index, got)
			}
		}
	}
}

// An index names one GPU: the present one, else the one that the driver lists. The others, and their MIG devices, have none and come last.
func TestIndexIsOfOneGPU(t *testing.T) {
	zero := func(id health.DeviceID) health.Device { return health.Device{ID: id, Kind: health.KindGPU} }
	devices := judged(nil, 0, nil, gpu0, mig0, gpu1)
	for name, c := range map[string]struct {
		samples samples
		listed  []health.Device
		indexes map[health.DeviceID]int
	}{
		"present and lost": {
			samples{"GPU-b": healthtest.Blank(health.Lost)},
			[]health.Device{gpu0, mig0, zero("GPU-b"), gpu1},
			map[health.DeviceID]int{"GPU-0": 0, "MIG-0": 0, "GPU-b": -1, "GPU-1": 1},
		},
		"lost and present": {
			samples{"GPU-0": healthtest.Blank(health.Lost), "MIG-0": healthtest.Blank(health.Lost)},
			[]health.Device{gpu0, mig0, zero("GPU-b"), gpu1},
			map[health.DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"missing and lost": {
			samples{"GPU-b": healthtest.Blank(health.Lost)},
			[]health.Device{zero("GPU-b"), gpu1},
			map[health.DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"missing and unread": {
			samples{"GPU-b": healthtest.Blank(health.PresenceUnknown)},
			[]health.Device{zero("GPU-b"), gpu1},
			map[health.DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": 0, "GPU-1": 1},
		},
		"lost, and another is new": {
			samples{"GPU-0": healthtest.Blank(health.Lost), "MIG-0": healthtest.Blank(health.Lost), "GPU-b": healthtest.Blank(health.Lost)},
			[]health.Device{gpu0, mig0, zero("GPU-b"), zero("GPU-c"), gpu1},
			map[health.DeviceID]int{"GPU-0": -1, "MIG-0": -1, "GPU-b": -1, "GPU-c": 0, "GPU-1": 1},
		},
	} {
		after := judged(devices, 1, c.samples, c.listed...)
		var order []health.DeviceID
		for _, d := range after {
			if d.Device.Index != c.indexes[d.Device.ID] {
				t.Errorf("%s: %s has the index %d", name, d.Device.ID, d.Device.Index)
			}
			if d.Device.Kind == health.KindGPU {
				order = append(order, d.Device.ID)
			}
		}
		if len(after) != len(c.indexes) {
			t.Errorf("%s: %d devices", name, len(after))
		}
		if !slices.IsSortedFunc(order, func(a, b health.DeviceID) int { return min(c.indexes[b], 0) - min(c.indexes[a], 0) }) {
			t.Errorf("%s: GPUs without an index are not the last: %v", name, order)
		}
	}
}
