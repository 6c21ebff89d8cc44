package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// row is a row of the table.
type row struct {
	What  string   `json:"what"`
	N     int      `json:"n,omitempty"`   // number of measurements
	P50   *float64 `json:"p50,omitempty"` // in Unit
	P99   *float64 `json:"p99,omitempty"`
	Value *float64 `json:"value,omitempty"` // of a single measurement
	Unit  string   `json:"unit"`
	Aim   *float64 `json:"aim,omitempty"` // upper limit of P99 or Value, or of P50 if OfP50
	OfP50 bool     `json:"aimOfP50,omitempty"`
	Note  string   `json:"note,omitempty"`
}

// table is the result of a run.
type table struct {
	Rows     []row        `json:"rows"`
	Compared []comparison `json:"compared,omitempty"`
	Left     []string     `json:"notMeasured,omitempty"`
	Quick    bool         `json:"quick,omitempty"`
	Machine  string       `json:"machine"`
}

// noAim is the aim of a row without one.
const noAim = 0

func aimed(aim float64) *float64 {
	if aim == noAim {
		return nil
	}
	return &aim
}

// addDurations adds a row with the percentiles of durations, in milliseconds.
func (t *table) addDurations(what string, took []time.Duration, aim float64) {
	if len(took) == 0 {
		t.notMeasured("%s: no measurements", what)
		return
	}
	p50, p99 := percentile(took, 50), percentile(took, 99)
	t.Rows = append(t.Rows, row{What: what, N: len(took), P50: &p50, P99: &p99, Unit: "ms", Aim: aimed(aim)})
}

// addRatio adds a row with the percentiles of durations divided by the percentiles of others. There must be some of both.
func (t *table) addRatio(what string, took, others []time.Duration) {
	p50, p99 := percentile(took, 50)/percentile(others, 50), percentile(took, 99)/percentile(others, 99)
	t.Rows = append(t.Rows, row{What: what, N: len(took), P50: &p50, P99: &p99, Unit: "times"})
}

// percentile returns the smallest duration in milliseconds that p percent do not exceed.
func percentile(took []time.Duration, p int) float64 {
	took = slices.Sorted(slices.Values(took))
	return float64(took[max(0, (len(took)*p+99)/100-1)]) / float64(time.Millisecond)
}

// addMedian adds a row like spread, whose aim is for p50.
func (t *table) addMedian(what string, took []time.Duration, aim float64) {
	t.addDurations(what, took, aim)
	if len(took) > 0 {
		t.Rows[len(t.Rows)-1].OfP50 = true
	}
}

// addValue adds a row with one value.
func (t *table) addValue(what string, v float64, unit string, aim float64, note string) {
	t.Rows = append(t.Rows, row{What: what, Value: &v, Unit: unit, Aim: aimed(aim), Note: note})
}

// notMeasured records what is not measured, and why.
func (t *table) notMeasured(format string, args ...any) {
	t.Left = append(t.Left, fmt.Sprintf(format, args...))
}

func (t *table) String() string {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	if len(t.Rows) > 0 {
		fmt.Fprintln(w, "what\tn\tp50\tp99\tunit\taim\t")
	}
	for _, r := range t.Rows {
		n, p50, p99, aim := "", "", "", ""
		if r.N > 0 {
			n = fmt.Sprint(r.N)
		}
		worst := r.P99
		if r.Value != nil {
			p50, worst = short(*r.Value), r.Value
		} else {
			p50, p99 = short(*r.P50), short(*r.P99)
		}
		if r.OfP50 {
			worst, aim = r.P50, "p50 "
		}
		if r.Aim != nil {
			aim += "< " + short(*r.Aim)
			if *worst >= *r.Aim {
				aim += " missed"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.What, n, p50, p99, r.Unit, aim, r.Note)
	}
	writeComparisons(w, t.Compared)
	_ = w.Flush() // a strings.Builder never fails
	for _, l := range t.Left {
		fmt.Fprintln(&out, "not measured:", l)
	}
	if t.Quick {
		fmt.Fprintln(&out, "quick: too few measurements to rely on")
	}
	fmt.Fprintln(&out, t.Machine)
	return out.String()
}

// short formats a value with three significant digits.
func short(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// machine describes the hardware and the Go version.
func machine() string {
	model := "unknown CPU"
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer func() { _ = f.Close() }()
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			if name, v, found := strings.Cut(lines.Text(), ":"); found && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(v)
				break
			}
		}
	}
	return fmt.Sprintf("machine: %s, %d cores, %s, %s/%s", model, runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
