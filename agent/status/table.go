package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
)

// maxTableEvents is the number of events in the table.
const maxTableEvents = 10

// maxTableDevices is the number of devices above which equal MIG devices share a row.
const maxTableDevices = 24

// stateCell returns a state in its colour.
func stateCell(state string) terminal.Cell {
	colours := map[string]terminal.Colour{"healthy": terminal.Green, "degraded": terminal.Yellow, "unhealthy": terminal.Red}
	return terminal.Cell{Text: state, Colour: cmp.Or(colours[state], terminal.Dim)}
}

// printer writes the status for a terminal.
type printer struct{ terminal.Printer }

// line writes a labelled line, or nothing if the text is empty.
func (p *printer) line(label string, colour terminal.Colour, text string) {
	if text != "" {
		p.labelled(label, terminal.Cell{Text: text, Colour: colour})
	}
}

// labelled writes a labelled line.
func (p *printer) labelled(label string, cells ...terminal.Cell) {
	label = fmt.Sprintf("%-9s ", label)
	p.Paragraph(len(label), append([]terminal.Cell{{Text: label}}, cells...)...)
}

// plain returns a text without a colour.
func plain(text string) terminal.Cell { return terminal.Cell{Text: text} }

// Table returns the status for a terminal. wide adds UUIDs, PCI bus IDs, processes, more holders of each device, and how
// each finding clears, and leaves nothing out to fit the width.
func (s Node) Table(wide bool, out terminal.Output) string {
	if wide {
		out.Width = 0
	}
	p := &printer{terminal.Printer{Output: out}}
	p.header(s, wide)
	p.WriteByte('\n')
	p.devices(s, wide)
	p.findings(s, wide)
	p.events(s)
	return p.String()
}

// header writes everything but the devices and events.
func (p *printer) header(s Node, wide bool) {
	colour := map[string]terminal.Colour{"up": terminal.Green, "detached": terminal.Yellow}[s.Source.Status] // a detach is on request
	source := strings.Join(strings.Fields(s.Source.Kind+" "+s.Source.Status+" "+forText(s.Time, s.Source.Since)), " ")
	details := nonEmpty(versionsText(s.Source), formatIf("measured %s ago", ageText(s.Time, s.Source.Measured)))
	if s.Source.Reconnects > 0 {
		details = append(details, Plural(s.Source.Reconnects, "reconnect"))
	}
	p.labelled("node", terminal.Cell{Text: s.Node, Colour: terminal.Bold}, plain("; gpu-node-agent "+s.Version))
	p.labelled(
		"source",
		terminal.Cell{Text: source, Colour: cmp.Or(colour, terminal.Red)},
		plain(formatIf("; %s", strings.Join(details, "; "))),
	)
	for _, i := range s.Source.Incidents {
		p.line("checks", "", incidentText(i))
	}
	p.witnesses(s, wide)
	p.line("gpus", "", strings.Join(nonEmpty(gpusText(s), inUseText(s)), "; "))
	p.line("kubelet", terminal.Dim, formatIf("plugin off: %s", pluginOffText(s)))
	for _, r := range s.Kubelet.Resources {
		state := terminal.Cell{Text: "registered", Colour: terminal.Green}
		if !r.Registered {
			state = terminal.Cell{Text: "not registered", Colour: terminal.Red}
		}
		p.labelled("kubelet", plain(r.Name+" "), state, plain(fmt.Sprintf("; %d of %d healthy; %s", r.Healthy, r.Devices, allocationsText(r))))
	}
	p.dra(s.DRA)
	if s.API.Enabled {
		p.line("api", "", apiText(s.API))
	}
	if s.Object.Enabled {
		p.line("api", "", nodeObjectText(s.Object))
	}
	colours := map[view.Level]terminal.Colour{view.Unready: terminal.Red, view.Warning: terminal.Yellow}
	for _, w := range shownProblems(s.Problems) {
		p.line(w.Part, cmp.Or(colours[w.Level], terminal.Dim), w.Text)
	}
}

// witnesses writes what reports XIDs: the source, then the event sources. wide adds why one is off.
func (p *printer) witnesses(s Node, wide bool) {
	if len(s.Source.Events) == 0 {
		return // there is no snapshot yet
	}
	colours := map[string]terminal.Colour{"up": terminal.Green, "down": terminal.Yellow}
	cells := []terminal.Cell{plain(s.Source.Kind)}
	for _, e := range s.Source.Events {
		cells = append(cells, plain("; "+e.Name+" "), terminal.Cell{Text: e.Status, Colour: cmp.Or(colours[e.Status], terminal.Dim)})
		if e.Status == "down" {
			cells = append(cells, plain(formatIf(" %s", forText(s.Time, e.Since))))
		}
		if e.Status == "off" && wide {
			cells = append(cells, plain(formatIf(": %s", e.Error)))
		}
	}
	p.labelled("xids", cells...)
	p.line("xids", terminal.Yellow, xidGapText(s.Time, s.Source.XIDGap))
}

// formatIf formats a text, or returns "" if the text is empty.
func formatIf(format, text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(format, text)
}

// optionalColumn is a column of the table of devices that is there if a device has a value for it.
type optionalColumn struct {
	terminal.Column
	has  func(Device) bool
	cell func(Device) terminal.Cell
}

func optionalColumns(wide bool) []optionalColumn {
	columns := []optionalColumn{
		{
			terminal.Column{Name: "SHARES", Drop: 1},
			func(d Device) bool { return d.Shares != nil },
			func(d Device) terminal.Cell { return plain(sharesText(d, wide)) },
		},
		{
			terminal.Column{Name: "MPS", Drop: 1},
			func(d Device) bool { return d.MPS != nil },
			func(d Device) terminal.Cell { return mpsCell(d, wide) },
		},
	}
	if !wide {
		return columns
	}
	return append(columns,
		optionalColumn{
			terminal.Column{Name: "MEMORY LIMITS"},
			func(d Device) bool { return d.MemoryLimits != nil },
			func(d Device) terminal.Cell { return plain(strings.Join(memoryLimitTexts(d, maxHolders), "; ")) },
		},
		optionalColumn{
			terminal.Column{Name: "CLAIMS"},
			func(d Device) bool { return claimNames(d) != nil },
			func(d Device) terminal.Cell { return plain(strings.Join(claimNames(d), ", ")) },
		},
		optionalColumn{
			terminal.Column{Name: "PROCESSES"},
			func(d Device) bool { return d.Processes != nil },
			func(d Device) terminal.Cell { return plain(strings.Join(usageTexts(d, maxHolders), "; ")) },
		})
}

func (p *printer) devices(s Node, wide bool) {
	if len(s.GPUs) == 0 {
		p.WriteString("no GPUs\n")
		return
	}
	t := terminal.Table{MinLast: 24, Columns: []terminal.Column{
		{Name: "GPU"},
		{Name: "MODEL", Drop: 7},
		{Name: "STATE"},
		{Name: "FOR", Drop: 5},
		{Name: "CAUSE"},
		{Name: "TEMP", Drop: 3},
		{Name: "POWER", Drop: 4},
		{Name: "UTIL", Drop: 2},
		{Name: "MEMORY", Drop: 1},
		{Name: "XIDS", Drop: 6},
	}}
	holders := 1
	rows := deviceRows(s, !wide && len(allDevices(s)) > maxTableDevices)
	if wide {
		t.Columns = append(t.Columns, terminal.Column{Name: "UUID"}, terminal.Column{Name: "PCI"})
		holders = maxHolders
	}
	var optional []optionalColumn
	for _, c := range optionalColumns(wide) {
		if slices.ContainsFunc(allDevices(s), c.has) {
			optional, t.Columns = append(optional, c), append(t.Columns, c.Column)
		}
	}
	t.Columns = append(t.Columns, terminal.Column{Name: "HELD BY"})
	for _, r := range rows {
		row := deviceCells(s.Time, r)
		if wide {
			row = append(row, plain(string(r.UUID)), plain(r.PCI))
		}
		for _, c := range optional {
			row = append(row, c.cell(r.Device))
		}
		heldBy := strings.Join(heldByTexts(r.Holders, holders), ", ")
		if r.count > 1 && r.held > 0 {
			heldBy = fmt.Sprintf("%d of %d: %s", r.held, r.count, heldBy)
		}
		t.Rows = append(t.Rows, append(row, plain(heldBy)))
	}
	notes := nonEmpty(p.Table(t))
	if text := notMeasuredText(s); text != "" {
		p.Paragraph(0, terminal.Cell{Text: text, Colour: terminal.Dim})
	}
	if len(rows) < len(allDevices(s)) {
		notes = append(notes, "equal MIG devices share a row")
	}
	if len(notes) > 0 {
		p.Paragraph(0, terminal.Cell{Text: strings.Join(notes, "; ") + "; -o wide shows all", Colour: terminal.Dim})
	}
}

// deviceCells returns the cells of the columns that the table of devices always has, up to XIDS.
func deviceCells(now time.Time, r deviceRow) []terminal.Cell {
	d := r.Device
	index, model := indexText(d), d.Model
	if d.GI != nil {
		model = "MIG " + d.Profile
	}
	if r.count > 1 {
		index, model = fmt.Sprintf("%s-%d", index, r.lastIndex), fmt.Sprintf("%d × %s", r.count, model)
	}
	cause := ""
	if len(d.Findings) > 0 {
		cause = d.Findings[0].Cause
		if hidden := len(d.Findings) - 1; hidden > 0 {
			cause += fmt.Sprintf(" +%d", hidden)
		}
	}
	row := terminal.Cells("", index, model, d.State, ageText(now, d.Since), cause,
		celsiusText(d.Values.Temperature), wattsText(d.Values.Power), percentText(d.Values.Utilization),
		memoryText(d.Values), xidsText(d.XIDs))
	row[2] = stateCell(d.State)
	for i, v := range []*float64{d.Values.Temperature, d.Values.Power, d.Values.Utilization, d.Values.MemoryUsed} {
		if cell := &row[5+i]; v == nil {
			*cell = terminal.Cell{Text: cmp.Or(cell.Text, "–"), Colour: terminal.Dim}
		}
	}
	return row
}

// findings writes the findings of the faulty devices. Devices with equal findings are one block, and findings with one action have it once.
func (p *printer) findings(s Node, wide bool) {
	var blocks []string // without the names, in the order of the worst device
	names := make(map[string][]string)
	for _, t := range faultyDevices(s) {
		block := p.block(s.Time, groupFindings(t.Findings), wide)
		if names[block] == nil {
			blocks = append(blocks, block)
		}
		names[block] = append(names[block], t.Device.Name())
	}
	for _, block := range blocks {
		p.WriteByte('\n')
		p.Paragraph(2, terminal.Cell{Text: strings.Join(names[block], ", "), Colour: terminal.Bold})
		p.WriteString(block)
	}
}

// block returns the lines of a device's findings.
func (p *printer) block(now time.Time, groups [][]Finding, wide bool) string {
	b := printer{terminal.Printer{Output: p.Output}}
	for _, g := range groups {
		for _, f := range g {
			b.Paragraph(4, plain("  "), stateCell(f.State), plain(" for "+cmp.Or(ageText(now, f.Since), "-")+": "),
				terminal.Cell{Text: f.Cause, Colour: terminal.Bold}, plain(": "+f.Reason))
			if wide {
				b.Paragraph(6, plain("    "+clearsText(f)))
			}
		}
		b.Paragraph(4, plain("  action: "+g[0].Advice))
	}
	return b.String()
}

func (p *printer) events(s Node) {
	if len(s.Events) == 0 {
		return
	}
	p.WriteByte('\n')
	t := terminal.Table{Columns: []terminal.Column{{Name: "TIME (UTC)"}, {Name: "GPU"}, {Name: "EVENT"}}, Wrap: true}
	for _, e := range s.Events[:min(len(s.Events), maxTableEvents)] {
		t.Rows = append(t.Rows, terminal.Cells("", clockText(s.Time, e.Time), eventIndexText(e), e.Text))
	}
	p.Table(t)
}
