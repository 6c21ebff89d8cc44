package reclaim

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// newReport returns a report without actions.
func newReport(now time.Time) Report {
	return Report{Time: now.UTC(), DryRun: true, Actions: []Action{}, Skipped: []Skipped{}, Errors: []string{}}
}

// sum sets what the actions give back, or take again. Failed actions give back nothing.
func (r *Report) sum() {
	r.GPUs, r.GPUHours, r.Announced, r.Restored = 0, 0, 0, 0
	for _, a := range r.Actions {
		if a.failed() {
			continue
		}
		if a.Kind == ActionRestore || a.Kind == ActionResume {
			r.Restored += a.GPUs
			continue
		}
		r.GPUs += a.GPUs
		r.GPUHours += a.GPUHours
		if a.Kind == ActionNotify {
			r.Announced += a.GPUs
		}
	}
	r.GPUs, r.GPUHours, r.Announced, r.Restored = rounded(r.GPUs), rounded(r.GPUHours), rounded(r.Announced), rounded(r.Restored)
}

// failed reports whether the change was not made.
func (a Action) failed() bool { return a.Error != "" && !a.Done }

// skips reports whether an object is left alone for a reason.
func (r Report) skips(reason Reason) bool {
	return slices.ContainsFunc(r.Skipped, func(s Skipped) bool { return s.Reason == reason })
}

// rounded returns GPUs or GPU-hours without the error of a sum of parts.
func rounded(v float64) float64 { return math.Round(v*1e6) / 1e6 }

// number returns GPUs or GPU-hours for people.
func number(v float64) string { return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) }

// Table returns the report for people.
func (r Report) Table(out terminal.Output) string {
	p := &terminal.Printer{Output: out}
	if len(r.Actions) > 0 {
		t := reportTable("ACTION", "OBJECT", "GPUS", "GPU-HOURS", "WHY")
		for _, a := range r.Actions {
			why := terminal.Cell{Text: a.Reason}
			switch {
			case a.failed():
				why = terminal.Cell{Text: "failed: " + a.Error, Colour: terminal.Red}
			case a.Error != "":
				why = terminal.Cell{Text: "done, but " + a.Error, Colour: terminal.Yellow}
			case a.Done:
				why = terminal.Cell{Text: "done: " + a.Reason, Colour: terminal.Green}
			}
			t.Rows = append(t.Rows, append(terminal.Cells("", string(a.Kind), a.String(), number(a.GPUs), number(a.GPUHours)), why))
		}
		p.Table(t)
		p.WriteByte('\n')
	}
	p.Paragraph(0, terminal.Cell{Text: r.summary(), Colour: terminal.Bold})
	if len(r.Skipped) > 0 {
		p.WriteByte('\n')
		t := reportTable("LEFT ALONE", "OBJECT", "GPUS", "WHY")
		for _, s := range r.Skipped {
			t.Rows = append(t.Rows, terminal.Cells("", string(s.Reason), s.String(), number(s.GPUs), s.Text))
		}
		p.Table(t)
	}
	for i, e := range r.Errors {
		if i == 0 {
			p.WriteByte('\n')
		}
		p.Paragraph(2, terminal.Cell{Text: "error: " + e, Colour: terminal.Yellow})
	}
	return p.String()
}

// reportTable returns a table whose last column is continued below: it has the reason of each row.
func reportTable(columns ...string) terminal.Table {
	t := terminal.Table{Wrap: true}
	for _, c := range columns {
		t.Columns = append(t.Columns, terminal.Column{Name: c})
	}
	return t
}

// gpus returns a text like "1 GPU" or "0.25 GPUs".
func gpus(n float64) string {
	if n == 1 {
		return "1 GPU"
	}
	return number(n) + " GPUs"
}

// summary returns what the run does, or did.
func (r Report) summary() string {
	restored, failed := 0, 0
	for _, a := range r.Actions {
		switch {
		case a.failed():
			failed++
		case a.Kind == ActionRestore, a.Kind == ActionResume:
			restored++
		}
	}
	var parts []string
	if taken := rounded(r.GPUs - r.Announced); taken > 0 {
		parts = append(parts, "gives back "+gpus(taken))
	}
	if r.Announced > 0 {
		parts = append(parts, "announces "+gpus(r.Announced))
	}
	if r.GPUHours > 0 {
		parts = append(parts, "idle for "+number(r.GPUHours)+" GPU-hours")
	}
	if restored > 0 {
		parts = append(parts, "restores "+status.Plural(restored, "object")+" with "+gpus(r.Restored))
	}
	if failed > 0 {
		parts = append(parts, fmt.Sprintf("%d of %s failed", failed, status.Plural(len(r.Actions), "action")))
	}
	text := cmp.Or(strings.Join(parts, ", "), "nothing to do")
	if r.DryRun {
		return "dry run: " + text
	}
	return text
}
