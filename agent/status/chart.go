package status

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
)

// Chart is a chart of the page: a value of a GPU in the last 15 minutes, as a path of SVG.
type Chart struct {
	Name  string
	Value string // the current one, with the memory's size; "" if all of it is unknown
	Known bool   // the current one is known
	Title string // the chart in words
	Path  string // its line; "" if no value is known
}

// chartHeight is the height of a chart in units of its path. A slot is one unit wide.
const chartHeight = 40

// draw adds the charts to the GPUs of a node.
func (h *History) draw(s *Node) {
	tracks := h.tracks()
	var highest [quantities]float64
	for _, t := range tracks {
		for q := range t {
			if t[q].max > highest[q] { // false for NaN
				highest[q] = t[q].max
			}
		}
	}
	for i := range s.GPUs {
		d := &s.GPUs[i]
		t, found := tracks[d.UUID]
		d.Charts = make([]Chart, quantities)
		for q := range charted {
			c, chart := &charted[q], &d.Charts[q]
			chart.Name, chart.Value, chart.Known = c.name, c.current(d.Values), c.value(d.Values) != nil
			chart.Title = c.name + ": unknown in the last 15 minutes"
			if !found || math.IsNaN(t[q].max) {
				continue
			}
			// GPUs without a limit get the same axis, so that their charts can be compared.
			top := max(t[q].max, cmp.Or(max(0, c.limit(*d)), max(1, math.Ceil(highest[q]/c.step))*c.step))
			chart.Title = fmt.Sprintf("%s: %s to %s in the last 15 minutes; the axis ends at %s", c.name, c.text(&t[q].min), c.text(&t[q].max),
				c.text(&top))
			chart.Path = path(t[q].means[:], top)
		}
	}
}

// path returns a line through points, one for each unit of width, with gaps for NaN. It does not go down to the axis at a
// gap: that would be a fall of the value to zero.
func path(points []float64, top float64) string {
	var b []byte
	add := func(command byte, n int) { b = strconv.AppendInt(append(b, command), int64(n), 10) }
	y, flat := 0, 0 // of the line before x; flat is the length of its level end, 0 in a gap
	end := func() {
		if flat > 0 {
			add('h', flat)
			flat = 0
		}
	}
	for x, v := range points {
		if math.IsNaN(v) {
			end()
			continue
		}
		next := chartHeight - int(math.Round(chartHeight*max(0, min(1, v/top))))
		switch {
		case flat == 0:
			add('M', x)
			add(' ', next)
		case next != y: // the slope takes the last unit of the level part
			if flat > 1 {
				add('h', flat-1)
			}
			add('l', 1)
			add(' ', next-y)
			flat = 0
		}
		y = next
		flat++
	}
	end()
	return string(b)
}
