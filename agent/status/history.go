package status

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// A History spans historySlots slots. A slot is about a pixel and a half wide on the page.
const (
	historySlots = 90
	slotWidth    = 10 * time.Second
)

// quantities is the number of values that a History records.
const quantities = 4

// quantity is a value of a GPU that the page has a chart of.
type quantity struct {
	name    string
	value   func(Values) *float64
	text    func(*float64) string // of a value, with its unit
	current func(Values) string   // the text of the newest value
	limit   func(Device) float64  // the end of the axis; 0 if it is unknown
	step    float64               // an axis without a limit ends at a multiple of it
}

//nolint:gochecknoglobals // a table of constants
var charted = [quantities]quantity{
	{
		"utilization", func(v Values) *float64 { return v.Utilization }, percentText,
		func(v Values) string { return percentText(v.Utilization) }, func(Device) float64 { return 100 }, 100,
	},
	{"memory", func(v Values) *float64 { return v.MemoryUsed }, gibText, memoryText, memoryLimit, gib},
	{
		"temperature", func(v Values) *float64 { return v.Temperature }, celsiusText,
		func(v Values) string { return celsiusText(v.Temperature) }, func(Device) float64 { return 100 }, 100,
	},
	{"power", func(v Values) *float64 { return v.Power }, wattsText, func(v Values) string { return wattsText(v.Power) }, powerLimit, 100},
}

func memoryLimit(d Device) float64 {
	if d.Values.MemoryTotal == nil {
		return 0
	}
	return *d.Values.MemoryTotal
}

// powerLimit returns the enforced limit if metrics.fields selects that field.
func powerLimit(d Device) float64 { return d.Fields[health.FieldPowerLimit] }

// History stores the values of each GPU of the last 15 minutes, for the charts of the page. It measures time with the
// monotonic clock, so a step of the wall clock does not shift the charts. The zero History is empty.
type History struct {
	mu    sync.Mutex // guards the fields below: Follow writes them, pages read them
	start time.Time  // of the first slot; zero before the first poll
	rings map[health.DeviceID]*ring
}

// ring has the newest slots of a GPU. The index of slot n is n % historySlots.
type ring struct {
	newest int // the slot of the last poll that had the GPU
	slots  [historySlots][quantities]slot
}

// slot aggregates the values that were polled in one slotWidth.
type slot struct {
	sum, min, max float32
	count         uint16 // of known values
	hold          uint16 // the slots after this one until the next poll; 0: not polled, else at least 1
}

func (s *slot) add(v *float64, hold uint16) {
	s.hold = hold
	if v == nil || math.Abs(*v) > math.MaxFloat32 || s.count == math.MaxUint16 {
		return
	}
	x := float32(*v)
	if s.count == 0 {
		s.min, s.max = x, x
	}
	s.sum, s.min, s.max = s.sum+x, min(s.min, x), max(s.max, x)
	s.count++
}

// Follow records each poll until ctx ends. interval returns the time between two polls.
func (h *History) Follow(ctx context.Context, snapshots *health.Latest[health.Snapshot], interval func() time.Duration) error {
	var recorded time.Time
	for {
		s, changed := snapshots.Watch()
		if s.Polled() && !s.At.Equal(recorded) { // else the snapshot has the values of an earlier poll
			recorded = s.At
			h.record(s.Devices, time.Now(), interval())
		}
		if !wait.For(ctx, changed) {
			return nil
		}
	}
}

func (h *History) record(devices []health.DeviceState, now time.Time, interval time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rings == nil {
		h.start, h.rings = now, make(map[health.DeviceID]*ring)
	}
	n := h.slotAt(now)
	hold := uint16(1 + interval/slotWidth) // the next poll may be in the slot after
	for i := range devices {
		d := &devices[i]
		if d.Device.Kind != health.KindGPU { // only a GPU has charts
			continue
		}
		r := h.rings[d.Device.ID]
		if r == nil {
			r = &ring{newest: n - historySlots}
			h.rings[d.Device.ID] = r
		}
		current := r.advance(n)
		values := valuesStatus(finite(d.Sample.Values), d.Device.Memory)
		for q := range charted {
			current[q].add(charted[q].value(values), hold)
		}
	}
	for id, r := range h.rings {
		if n-r.newest >= historySlots { // the GPU was removed
			delete(h.rings, id)
		}
	}
}

// slotAt returns the slot of a time. It is at least historySlots, so that all slots of a ring have positive numbers.
func (h *History) slotAt(now time.Time) int { return historySlots + int(now.Sub(h.start)/slotWidth) }

// advance empties the slots between the last poll and slot n, and returns slot n.
func (r *ring) advance(n int) *[quantities]slot {
	for i := max(r.newest+1, n-historySlots+1); i <= n; i++ {
		r.slots[i%historySlots] = [quantities]slot{}
	}
	r.newest = n
	return &r.slots[n%historySlots]
}

// track is what a chart shows: the mean of each slot, oldest first, NaN where the value is unknown; and the extremes of
// the values, NaN without values.
type track struct {
	means    [historySlots]float64
	min, max float64
}

// track returns a track that ends at slot now. A value applies until the next poll, at most for the interval at its time.
func (r *ring) track(q, now int) track {
	t := track{min: math.NaN(), max: math.NaN()}
	last, hold := math.NaN(), uint16(0)
	for i := range t.means {
		n := now - historySlots + 1 + i
		var s slot
		if n <= r.newest {
			s = r.slots[n%historySlots][q]
		}
		switch {
		case s.count > 0:
			last, hold = float64(s.sum)/float64(s.count), s.hold
			if math.IsNaN(t.min) {
				t.min, t.max = float64(s.min), float64(s.max)
			}
			t.min, t.max = min(t.min, float64(s.min)), max(t.max, float64(s.max))
		case s.hold > 0 || hold == 0:
			last, hold = math.NaN(), 0
		default:
			hold--
		}
		t.means[i] = last
	}
	return t
}

// tracks returns the tracks of each GPU by quantity.
func (h *History) tracks() map[health.DeviceID][quantities]track {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.slotAt(time.Now()) // under the lock, so that no ring has a newer slot
	all := make(map[health.DeviceID][quantities]track, len(h.rings))
	for id, r := range h.rings {
		var tracks [quantities]track
		for q := range tracks {
			tracks[q] = r.track(q, n)
		}
		all[id] = tracks
	}
	return all
}
