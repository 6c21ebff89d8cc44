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

func plain(text string) cell { return cell{text: text} }

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

func headings(texts ...string) []cell {
	row := make([]cell, len(texts))
	for i, t := range texts {
		row[i] = cell{t, colourDim}
	}
	return row
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
	source := strings.TrimSpace(s.Source.Kind + " " + s.Source.Status)
	source = strings.TrimSpace(source + " " + forText(s.Time, s.Source.Since))
	first := cell{source, colourGreen}
	switch s.Source.Status {
	case "up":
	case "detached": // on request
		first.colour = colourYellow
	default:
		first.colour = colourRed
	}
	line := []string{p.paint(first)}
	if s.Source.Error != "" {
		line[0] += ": " + printable(s.Source.Error)
	}
	for _, more := range []string{versionsText(s.Source), formatIf("measured %s ago", ageText(s.Time, s.Source.Measured))} {
		if more != "" {
			line = append(line, printable(more))
		}
	}
	if s.Source.Reconnects > 0 {
		line = append(line, counted(s.Source.Reconnects, "reconnect", "reconnects"))
	}
	fmt.Fprintf(p, "node      %s; gpu-node-agent %s\n", p.paint(cell{s.Node, colourBold}), printable(s.Version))
	fmt.Fprintf(p, "source    %s\n", strings.Join(line, "; "))
	if off := pluginOffText(s.Kubelet); off != "" {
		fmt.Fprintf(p, "kubelet   %s: %s\n", p.paint(cell{"plugin off", colourDim}), off)
	}
	if s.Kubelet.Error != "" {
		fmt.Fprintf(p, "kubelet   %s\n", p.paint(cell{s.Kubelet.Error, colourRed}))
	}
	for _, r := range s.Kubelet.Resources {
		state := cell{"registered", colourGreen}
		if !r.Registered {
			state = cell{"not registered: " + r.Error, colourRed}
		}
		fmt.Fprintf(p, "kubelet   %s %s; %d of %d healthy; %s; %s\n",
			printable(r.Name), p.paint(state), r.Healthy, r.Devices, allocationsText(r), mismatchesText(r))
	}
	for _, w := range limitTexts(s.Kubelet.Warnings, maxWarnings) {
		fmt.Fprintf(p, "kubelet   %s\n", p.paint(cell{w, colourYellow}))
	}
	for _, e := range []string{formatIf("not audited: %s", s.Kubelet.AuditError), formatIf("holders unknown: %s", s.Kubelet.HoldersError)} {
		if e != "" {
			fmt.Fprintf(p, "kubelet   %s\n", p.paint(cell{e, colourYellow}))
		}
	}
	if s.API.Enabled {
		fmt.Fprintf(p, "api       %s\n", printable(apiText(s.API)))
		for _, e := range apiErrors(s.API) {
			fmt.Fprintf(p, "api       %s\n", p.paint(cell{e, colourYellow}))
		}
	}
	if s.Memory.Error != "" {
		fmt.Fprintf(p, "state     %s\n", p.paint(cell{stateFileErrorText(s.Memory), colourYellow}))
	}
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
	head := headings("GPU", "MODEL", "STATE", "FOR", "CAUSE", "TEMP", "POWER", "UTIL", "MEMORY", "XIDS")
	if wide {
		head = append(head, headings("UUID", "PCI")...)
	}
	rows := [][]cell{append(head, headings("HELD BY")...)}
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
		row := []cell{
			plain(indexText(d)), plain(model), stateCell(d.State), plain(ageText(s.Time, d.Since)), plain(cause),
			plain(celsiusText(d.Values.Temperature)), plain(wattsText(d.Values.Power)), plain(percentText(d.Values.Utilization)),
			plain(memoryText(d.Values)), plain(xidsText(d.XIDs)),
		}
		if wide {
			row = append(row, plain(string(d.UUID)), plain(d.PCI))
		}
		rows = append(rows, append(row, plain(strings.Join(HolderNames(d.Holders, holders), ", "))))
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
	rows := [][]cell{headings("TIME (UTC)", "GPU", "EVENT")}
	for _, e := range s.Events[:min(len(s.Events), maxTableEvents)] {
		rows = append(rows, []cell{plain(clockText(s.Time, e.Time)), plain(eventIndexText(e)), plain(e.Text)})
	}
	p.table(rows)
}
