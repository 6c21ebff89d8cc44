package prometheus

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// The sizes of Grafana 12.2 in pixels. A window of 1440 pixels must show titles, one of 1600 tables.
const (
	titleWindow  = 1440
	tableWindow  = 1600
	windowMargin = 32
	titleMargin  = 67 // of the panel, and the icon of its description
	tableMargin  = 26
	titleLetter  = 7.4
	headerLetter = 7
	headerMargin = 12
)

// drawingFaults returns what Grafana 12.2 would draw wrongly of a panel, although it accepts the panel.
func drawingFaults(p panel) (faults []string) {
	bad := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	f := p.FieldConfig.Defaults
	if width := float64(p.Position.W) * (titleWindow - windowMargin) / 24; titleLetter*float64(len(p.Title)) > width-titleMargin {
		bad("its title of %d letters is cut off at width %d", len(p.Title), p.Position.W)
	}
	if f.NoValue != "" && !strings.HasPrefix(f.NoValue, "No data") {
		bad("without data it shows %q, also if the agent is down; begin with No data", f.NoValue)
	}
	for _, q := range p.Targets {
		// A subquery with a constant step evaluates ten thousands of steps over days.
		if strings.Contains(q.Expr, "[$__range:") && !strings.Contains(q.Expr, "[$__range:$__interval]") {
			bad("query %s: the step of the subquery does not grow with the time range", q.RefID)
		}
		if p.Type == "timeseries" && strings.Contains(q.Expr, "increase(") {
			bad("query %s: the windows of increase overlap; subtract the value of the previous point", q.RefID)
		}
	}
	switch p.Type {
	case "stat", "bargauge", "gauge":
		for _, q := range p.Targets {
			if !q.Instant { // the last value of a range may be hours old
				bad("query %s must be instant, because the panel shows the present", q.RefID)
			}
		}
		if p.Type == "stat" && p.Options.GraphMode != "none" {
			bad("the graph runs through the number: graphMode %q, want none", p.Options.GraphMode)
		}
		if !f.mapsNull() {
			bad("without data it has the color of the lowest threshold: map null to grey No data")
		}
	case "state-timeline":
		// mergeValues merges by threshold, and the legend lists thresholds.
		if f.Color.Mode != "fixed" {
			bad("color mode %q hides the mappings; use fixed", f.Color.Mode)
		}
		if !f.mapsNull() || p.Options.PerPage == 0 || p.Options.PerPage*12 > 30*p.Position.H {
			bad("expected a mapping of null and pages of rows of at least 12 pixels, got perPage %d of height %d", p.Options.PerPage, p.Position.H)
		}
	case "timeseries":
		faults = append(faults, seriesFaults(p)...)
	case "table":
		faults = append(faults, tableFaults(p)...)
	}
	return faults
}

func (f field) mapsNull() bool {
	return slices.ContainsFunc(f.Mappings, func(m mapping) bool {
		return m.Type == "special" && m.Options.Match == "null+nan" && m.Options.Result.Text == "No data" && m.Options.Result.Color == "#808080"
	})
}

func seriesFaults(p panel) (faults []string) {
	f, legend := p.FieldConfig.Defaults, p.Options.Legend
	sorts := []string{"Name"} // the columns of the legend
	for _, calc := range legend.Calcs {
		title, ok := map[string]string{"lastNotNull": "Last *", "max": "Max", "min": "Min", "mean": "Mean"}[calc]
		if sorts = append(sorts, title); !ok {
			faults = append(faults, fmt.Sprintf("the legend's %q depends on the step; show an exact number with an instant query", calc))
		}
	}
	if len(legend.Calcs) > 0 && (!slices.Contains(sorts, legend.SortBy) || legend.SortDesc != (legend.SortBy != "Name")) {
		faults = append(faults, fmt.Sprintf("legend sorted by %q, descending %v; expected one of %q, values descending", legend.SortBy,
			legend.SortDesc, sorts))
	}
	bars := f.Custom.DrawStyle == "bars"
	if bars && p.Interval == "" {
		faults = append(faults, "bars without a minimal interval are thinner than a pixel")
	}
	if f.Unit == "none" && (f.Decimals == nil || *f.Decimals != 0 || !bars && f.Custom.Line != "stepAfter") {
		faults = append(faults, "a count has no decimals and no slopes: decimals 0, lineInterpolation stepAfter")
	}
	if strings.HasPrefix(f.Unit, "percent") && f.Decimals == nil {
		faults = append(faults, "a share without decimals is shown as 0.00494 %")
	}
	return faults
}

func tableFaults(p panel) (faults []string) {
	f := p.FieldConfig.Defaults
	if f.Custom.Filterable == nil || *f.Custom.Filterable || f.Custom.MinWidth == 0 {
		faults = append(faults, "the headers need space for icons, or columns have 150 pixels: want filterable false and minWidth")
	}
	if f.Unit != "string" {
		faults = append(faults, "another default unit than string turns the label 13.0 into 13")
	}
	columns, numbers := p.columns()
	width, wraps, err := columnStyles(p, numbers)
	if err != nil {
		faults = append(faults, err.Error())
	}
	if len(numbers) > 0 {
		faults = append(faults, fmt.Sprintf("columns of numbers without a unit: %v", slices.Sorted(maps.Keys(numbers))))
	}
	if sentence := "What to do"; slices.Contains(columns, sentence) && !wraps[sentence] {
		faults = append(faults, fmt.Sprintf("column %q is cut off after a few words: want wrapText", sentence))
	}
	// The other columns share what is left (computeColWidths of Grafana's TableNG).
	left, others := float64(p.Position.W)*(tableWindow-windowMargin)/24-tableMargin, 0.0
	for _, c := range columns {
		if left -= width[c]; width[c] == 0 {
			others++
		}
	}
	if others > 0 {
		left /= others
	}
	for _, c := range columns {
		w := width[c]
		if w == 0 {
			w = left
		}
		if need := max(60, headerMargin+headerLetter*float64(len(c))); w < need {
			faults = append(faults, fmt.Sprintf("column %q has %.0f pixels, needs %.0f", c, w, need))
		}
	}
	for _, s := range p.Options.SortBy {
		if !slices.Contains(columns, s.DisplayName) {
			faults = append(faults, fmt.Sprintf("sorted by %q, which is no column", s.DisplayName))
		}
	}
	return faults
}

// columnStyles returns what the overrides of a table set, by column. It removes columns with a unit from numbers.
func columnStyles(p panel, numbers map[string]bool) (width map[string]float64, wraps map[string]bool, err error) {
	width, wraps = make(map[string]float64), make(map[string]bool)
	for _, o := range p.FieldConfig.Overrides {
		for _, property := range o.Properties {
			switch property.ID {
			case "custom.width":
				var w float64
				err = errors.Join(err, json.Unmarshal(property.Value, &w))
				width[o.Matcher.Options] = w
			case "custom.cellOptions":
				var cell struct {
					WrapText bool `json:"wrapText"`
				}
				err = errors.Join(err, json.Unmarshal(property.Value, &cell))
				wraps[o.Matcher.Options] = cell.WrapText
			case "unit":
				delete(numbers, o.Matcher.Options)
			}
		}
	}
	return width, wraps, err
}

// columns returns the names of all columns that a table may show, and those among them with a query's values.
func (p panel) columns() (columns []string, numbers map[string]bool) {
	numbers = make(map[string]bool)
	for _, t := range p.Transformations {
		for from := range t.Options.Index {
			if t.Options.Exclude[from] {
				continue
			}
			name := from
			if to, renamed := t.Options.Rename[from]; renamed {
				name = to
			}
			columns = append(columns, name)
			if strings.HasPrefix(from, "Value") {
				numbers[name] = true
			}
		}
	}
	slices.Sort(columns)
	return columns, numbers
}

// TestDrawingFaults checks that each fault that a real Grafana showed is found.
func TestDrawingFaults(t *testing.T) {
	for name, text := range map[string]string{
		"stat with a range query": `{"type": "stat", "targets": [{"instant": false}], "options": {"graphMode": "none"},
			"fieldConfig": {"defaults": {"mappings": [NULL]}}}`,
		"stat without mapping": `{"type": "stat", "targets": [{"instant": true}], "options": {"graphMode": "none"},
			"fieldConfig": {"defaults": {}}}`,
		"stat with graph": `{"type": "stat", "targets": [{"instant": true}],
			"fieldConfig": {"defaults": {"mappings": [NULL]}}}`,
		"title":                `{"type": "text", "title": "Allocated and idle", "gridPos": {"w": 3}}`,
		"nothing is wrong":     `{"type": "text", "fieldConfig": {"defaults": {"noValue": "No XID"}}}`,
		"subquery":             `{"type": "text", "targets": [{"expr": "max_over_time(up[$__range:15s])"}]}`,
		"overlapping increase": `{"type": "timeseries", "targets": [{"expr": "increase(up[$__rate_interval])"}]}`,
		"timeline by thresholds": `{"type": "state-timeline", "options": {"perPage": 2}, "gridPos": {"h": 1},
			"fieldConfig": {"defaults": {"color": {"mode": "thresholds"}, "mappings": [NULL]}}}`,
		"timeline with gaps": `{"type": "state-timeline", "options": {"perPage": 2}, "gridPos": {"h": 1},
			"fieldConfig": {"defaults": {"color": {"mode": "fixed"}}}}`,
		"timeline too dense": `{"type": "state-timeline", "options": {"perPage": 9}, "gridPos": {"h": 1},
			"fieldConfig": {"defaults": {"color": {"mode": "fixed"}, "mappings": [NULL]}}}`,
		"legend with a sum":       `{"type": "timeseries", "options": {"legend": {"calcs": ["sum"], "sortBy": "Name"}}}`,
		"unsorted legend":         `{"type": "timeseries", "options": {"legend": {"calcs": ["max"]}}}`,
		"legend sorted ascending": `{"type": "timeseries", "options": {"legend": {"calcs": ["max"], "sortBy": "Max"}}}`,
		"legend without column":   `{"type": "timeseries", "options": {"legend": {"calcs": ["max"], "sortBy": "Mean", "sortDesc": true}}}`,
		"slopes":                  `{"type": "timeseries", "fieldConfig": {"defaults": {"unit": "none", "decimals": 0}}}`,
		"8.0 devices": `{"type": "timeseries",
			"fieldConfig": {"defaults": {"unit": "none", "decimals": 1, "custom": {"lineInterpolation": "stepAfter"}}}}`,
		"0.00494 %": `{"type": "timeseries", "fieldConfig": {"defaults": {"unit": "percentunit"}}}`,
		"thin bars": `{"type": "timeseries",
			"fieldConfig": {"defaults": {"unit": "none", "decimals": 0, "custom": {"drawStyle": "bars"}}}}`,
		"table with wide columns": `{"type": "table", "gridPos": {"w": 9}, "fieldConfig": {"defaults": {"unit": "string"}}}`,
		"table with filters": `{"type": "table", "gridPos": {"w": 9},
			"fieldConfig": {"defaults": {"unit": "string", "custom": {"minWidth": 60, "filterable": true}}}}`,
		"CUDA 13": `{"type": "table", "gridPos": {"w": 9}, "fieldConfig": {"defaults": {"unit": "none", TABLE}}}`,
		"number as a string": `{"type": "table", "gridPos": {"w": 9},
			"fieldConfig": {"defaults": {"unit": "string", TABLE}},
			"transformations": [{"options": {"indexByName": {"Value": 0}, "renameByName": {"Value": "GPUs"}}}]}`,
		"header cut off": `{"type": "table", "gridPos": {"w": 2},
			"fieldConfig": {"defaults": {"unit": "string", TABLE}},
			"transformations": [{"options": {"indexByName": {"Uncorrectable errors": 0}}}]}`,
		"advice cut off": `{"type": "table", "gridPos": {"w": 9},
			"fieldConfig": {"defaults": {"unit": "string", TABLE}},
			"transformations": [{"options": {"indexByName": {"What to do": 0}}}]}`,
		"sorted by nothing": `{"type": "table", "gridPos": {"w": 9},
			"fieldConfig": {"defaults": {"unit": "string", TABLE}}, "options": {"sortBy": [{"displayName": "GPU"}]}}`,
	} {
		text = strings.NewReplacer("NULL",
			`{"type": "special", "options": {"match": "null+nan", "result": {"text": "No data", "color": "#808080"}}}`,
			"TABLE", `"custom": {"minWidth": 60, "filterable": false}`).Replace(text)
		var p panel
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if p.Position.W == 0 {
			p.Position.W = 24
		}
		if faults := drawingFaults(p); len(faults) != 1 {
			t.Errorf("%s: expected one fault, got %q", name, faults)
		}
	}
}
