package status

import (
	"cmp"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Terminal colours.
const (
	colourRed    = "31"
	colourYellow = "33"
	colourGreen  = "32"
	colourDim    = "2"
	colourBold   = "1"
)

// maxTableEvents is the number of events in the table.
const maxTableEvents = 10

// cell is a text of a table with its colour, "" for none.
type cell struct{ text, colour string }

// stateCell returns a state in its colour.
func stateCell(state string) cell {
	colours := map[string]string{"healthy": colourGreen, "degraded": colourYellow, "unhealthy": colourRed}
	return cell{state, cmp.Or(colours[state], colourDim)}
}

// printer writes text for a terminal.
type printer struct {
	strings.Builder
	colour bool
}

func (p *printer) paint(c cell) string {
	text := printable(c.text)
	if p.colour && c.colour != "" {
		return "\x1b[" + c.colour + "m" + text + "\x1b[0m"
	}
	return text
}

// printable replaces control characters, so that no text controls the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// table writes rows in columns. An empty text is written as a dash. The last column has no padding.
func (p *printer) table(rows [][]cell) {
	var widths []int
	for _, row := range rows {
		for i := range row {
			row[i].text = cmp.Or(row[i].text, "-")
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i].text))
		}
	}
	for _, row := range rows {
		for i, c := range row {
			p.WriteString(p.paint(c))
			if i < len(row)-1 {
				p.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2))
			}
		}
		p.WriteByte('\n')
	}
}

// cells returns a row of texts in one colour.
func cells(colour string, texts ...string) []cell {
	row := make([]cell, len(texts))
	for i, t := range texts {
		row[i] = cell{t, colour}
	}
	return row
}

// line writes a labelled line, or nothing if the text is empty.
func (p *printer) line(label, colour, text string) {
	if text != "" {
		fmt.Fprintf(p, "%-9s %s\n", label, p.paint(cell{text, colour}))
	}
}

// Table returns the status for a terminal. wide adds UUIDs, PCI bus IDs, more holders of each device, and how each
// finding clears.
func (s Node) Table(wide, colour bool) string {
	p := &printer{colour: colour}
	p.header(s)
	p.WriteByte('\n')
	p.devices(s, wide)
	p.findings(s, wide)
	p.events(s)
	return p.String()
}

// header writes everything but the devices and events.
func (p *printer) header(s Node) {
	colour := map[string]string{"up": colourGreen, "detached": colourYellow}[s.Source.Status] // a detach is on request
	source := strings.Join(strings.Fields(s.Source.Kind+" "+s.Source.Status+" "+forText(s.Time, s.Source.Since)), " ")
	parts := nonEmpty(p.paint(cell{source, cmp.Or(colour, colourRed)})+formatIf(": %s", printable(s.Source.Error)),
		printable(versionsText(s.Source)), formatIf("measured %s ago", ageText(s.Time, s.Source.Measured)))
	if s.Source.Reconnects > 0 {
		parts = append(parts, Plural(s.Source.Reconnects, "reconnect"))
	}
	fmt.Fprintf(p, "node      %s; gpu-node-agent %s\n", p.paint(cell{s.Node, colourBold}), printable(s.Version))
	fmt.Fprintf(p, "source    %s\n", strings.Join(parts, "; "))
	p.line("kubelet", colourDim, formatIf("plugin off: %s", pluginOffText(s.Kubelet)))
	p.line("kubelet", colourRed, s.Kubelet.Error)
	for _, r := range s.Kubelet.Resources {
		state := cell{"registered", colourGreen}
		if !r.Registered {
			state = cell{"not registered: " + r.Error, colourRed}
		}
		fmt.Fprintf(p, "kubelet   %s %s; %d of %d healthy; %s; %s\n",
			printable(r.Name), p.paint(state), r.Healthy, r.Devices, allocationsText(r), mismatchesText(r))
	}
	for _, w := range limitTexts(s.Kubelet.Warnings, maxWarnings) {
		p.line("kubelet", colourYellow, w)
	}
	p.line("kubelet", colourYellow, formatIf("not audited: %s", s.Kubelet.AuditError))
	p.line("kubelet", colourYellow, formatIf("holders unknown: %s", s.Kubelet.HoldersError))
	if s.API.Enabled {
		p.line("api", "", apiText(s.API))
		for _, e := range apiErrors(s.API) {
			p.line("api", colourYellow, e)
		}
	}
	p.line("state", colourYellow, stateFileErrorText(s.Memory))
	if !s.Config.OK {
		fmt.Fprintf(p, "config    %s: %s\n", p.paint(cell{"invalid", colourRed}), printable(configErrorText(s.Time, s.Config)))
	}
}

// formatIf formats a text, or returns "" if the text is empty.
func formatIf(format, text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(format, text)
}

func (p *printer) devices(s Node, wide bool) {
	if len(s.GPUs) == 0 {
		p.WriteString("no GPUs\n")
		return
	}
	head := cells(colourDim, "GPU", "MODEL", "STATE", "FOR", "CAUSE", "TEMP", "POWER", "UTIL", "MEMORY", "XIDS")
	if wide {
		head = append(head, cells(colourDim, "UUID", "PCI")...)
	}
	rows := [][]cell{append(head, cells(colourDim, "HELD BY")...)}
	holders := 1
	if wide {
		holders = maxHolders
	}
	for _, d := range allDevices(s) {
		model := d.Model
		if d.GI != nil {
			model = "MIG " + d.Profile
		}
		cause := ""
		if len(d.Findings) > 0 {
			cause = d.Findings[0].Cause
		}
		row := cells("", indexText(d), model, d.State, ageText(s.Time, d.Since), cause,
			celsiusText(d.Values.Temperature), wattsText(d.Values.Power), percentText(d.Values.Utilization),
			memoryText(d.Values), xidsText(d.XIDs))
		row[2] = stateCell(d.State)
		if wide {
			row = append(row, cells("", string(d.UUID), d.PCI)...)
		}
		rows = append(rows, append(row, cell{text: strings.Join(HolderNames(d.Holders, holders), ", ")}))
	}
	p.table(rows)
}

func (p *printer) findings(s Node, wide bool) {
	for _, t := range faultyDevices(s) {
		p.WriteByte('\n')
		for _, f := range t.Findings {
			fmt.Fprintf(p, "%s %s for %s: %s: %s\n", t.Device.Name(), p.paint(stateCell(f.State)),
				cmp.Or(ageText(s.Time, f.Since), "-"), p.paint(cell{f.Cause, colourBold}), printable(f.Reason))
			fmt.Fprintf(p, "  action: %s\n", printable(f.Advice))
			if wide {
				fmt.Fprintf(p, "  %s\n", printable(clearsText(f)))
			}
		}
	}
}

func (p *printer) events(s Node) {
	if len(s.Events) == 0 {
		return
	}
	p.WriteByte('\n')
	rows := [][]cell{cells(colourDim, "TIME (UTC)", "GPU", "EVENT")}
	for _, e := range s.Events[:min(len(s.Events), maxTableEvents)] {
		rows = append(rows, cells("", clockText(s.Time, e.Time), eventIndexText(e), e.Text))
	}
	p.table(rows)
}
