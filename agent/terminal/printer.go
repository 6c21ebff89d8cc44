package terminal

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"

	eastasian "golang.org/x/text/width"
)

// Colour is a colour or a style of text, as a parameter of SGR (ECMA-48).
type Colour string

// The colours.
const (
	Bold   Colour = "1"
	Dim    Colour = "2"
	Red    Colour = "31"
	Green  Colour = "32"
	Yellow Colour = "33"
)

// Cell is a text with its colour, "" for none.
type Cell struct {
	Text   string
	Colour Colour
}

// Cells returns texts in one colour.
func Cells(colour Colour, texts ...string) []Cell {
	row := make([]Cell, len(texts))
	for i, t := range texts {
		row[i] = Cell{t, colour}
	}
	return row
}

// Printer collects text for an Output.
type Printer struct {
	strings.Builder
	Output
}

// paint returns a printable text in a colour.
func (p *Printer) paint(text string, c Colour) string {
	if p.Colour && c != "" && text != "" {
		return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
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

// Paragraph writes cells without space between them. Where they exceed the width, it breaks them at spaces, and indents the
// lines after the first. Text without a space stays whole.
func (p *Printer) Paragraph(indent int, cells ...Cell) {
	p.print(cells, indent, p.breaks(indent, cells))
}

// print writes cells with line breaks at the positions of spaces.
func (p *Printer) print(cells []Cell, indent int, breaks []int) {
	offset := 0
	for _, c := range cells {
		var text strings.Builder
		for _, r := range printable(c.Text) {
			if len(breaks) > 0 && offset == breaks[0] {
				breaks = breaks[1:]
				fmt.Fprintf(&text, "\n%*s", indent, "")
			} else {
				text.WriteRune(r)
			}
			offset++
		}
		p.WriteString(p.paint(text.String(), c.Colour))
	}
	p.WriteByte('\n')
}

// breaks returns the positions of the spaces that line breaks replace.
func (p *Printer) breaks(indent int, cells []Cell) (breaks []int) {
	if p.Width == 0 {
		return nil
	}
	room, first, space := p.Width, indent, -1 // of the line: its width, its first and its last possible break
	position, used, rest := 0, 0, 0           // columns of the line, and of its part from space on
	for _, c := range cells {
		for _, r := range printable(c.Text) {
			if r == ' ' && used >= first {
				space, rest = position, 0
			}
			n := columns(r)
			if used+n > room && space >= 0 {
				breaks = append(breaks, space)
				room, first, space, used = p.Width-indent, 1, -1, rest-1
			}
			position, used, rest = position+1, used+n, rest+n
		}
	}
	return breaks
}

// Column is a column of a table.
type Column struct {
	Name string
	Drop int // where the table is too wide, the column with the highest Drop is left out first; 0: never
}

// Table is rows of cells. The last column has no padding.
type Table struct {
	Columns []Column
	Rows    [][]Cell
	MinLast int  // the width to which the last column is shortened before columns are left out
	Wrap    bool // the last column is continued below, not shortened
}

// Table writes a table, with a dash for each empty text. It returns what it left out to fit the width, or "".
func (p *Printer) Table(t Table) string {
	rows := append([][]Cell{nil}, t.Rows...)
	var names []string
	for _, c := range t.Columns {
		names = append(names, c.Name)
	}
	rows[0] = Cells(Dim, names...)
	widths := make([]int, len(names))
	for _, row := range rows {
		for i := range row {
			row[i].Text = cmp.Or(printable(row[i].Text), "-")
			widths[i] = max(widths[i], textColumns(row[i].Text))
		}
	}
	last := len(names) - 1
	shown, dropped, room := p.fit(t, widths)
	if t.Wrap {
		room = widths[last]
	}
	for _, row := range rows {
		var line []Cell
		indent := 0
		for i, c := range row[:last] {
			if shown[i] {
				line = append(line, c, Cell{Text: strings.Repeat(" ", widths[i]-textColumns(c.Text)+columnGap)})
				indent += widths[i] + columnGap
			}
		}
		if t.Wrap && p.Width > 0 && indent > 0 && p.Width-indent < minWrapped {
			p.print(line[:len(line)-1], 0, nil) // without the gap
			indent = 2 * columnGap
			line = []Cell{{Text: strings.Repeat(" ", indent)}}
		}
		line = append(line, Cell{shorten(row[last].Text, room), row[last].Colour})
		if t.Wrap {
			p.Paragraph(indent, line...)
		} else {
			p.print(line, 0, nil)
		}
	}
	var notes []string
	if len(dropped) > 0 {
		notes = append(notes, fmt.Sprintf("left out to fit %d columns: %s", p.Width, strings.Join(dropped, ", ")))
	}
	if room < widths[last] {
		notes = append(notes, names[last]+" is shortened")
	}
	return strings.Join(notes, "; ")
}

// minWrapped is the least width of a last column that is beside the others. A narrower one is below them.
const minWrapped = 20

// columnGap is the number of spaces between columns.
const columnGap = 2

// fit returns which columns are shown, the names of the others, and the width of the last column.
func (p *Printer) fit(t Table, widths []int) (shown []bool, dropped []string, room int) {
	last := len(widths) - 1
	shown, room = slices.Repeat([]bool{true}, len(widths)), widths[last]
	if p.Width == 0 {
		return shown, nil, room
	}
	for {
		left := p.Width
		next := -1 // the column to leave out
		for i, c := range t.Columns[:last] {
			if !shown[i] {
				continue
			}
			left -= widths[i] + columnGap
			if c.Drop > 0 && (next < 0 || c.Drop > t.Columns[next].Drop) {
				next = i
			}
		}
		if left >= min(room, t.MinLast) || next < 0 {
			return shown, dropped, min(room, max(left, len(t.Columns[last].Name)))
		}
		shown[next] = false
		dropped = append(dropped, t.Columns[next].Name)
	}
}

// shorten returns a text of at most n columns.
func shorten(text string, n int) string {
	if textColumns(text) <= n {
		return text
	}
	used := 1 // the ellipsis
	for i, r := range text {
		if used += columns(r); used > n {
			return text[:i] + "…"
		}
	}
	return text
}

// textColumns returns the number of columns of a printable text.
func textColumns(text string) int {
	n := 0
	for _, r := range text {
		n += columns(r)
	}
	return n
}

// columns returns the number of columns that terminals use for a printable character.
func columns(r rune) int {
	if unicode.In(r, unicode.Mn, unicode.Me) { // it combines with the character before
		return 0
	}
	switch eastasian.LookupRune(r).Kind() {
	case eastasian.EastAsianWide, eastasian.EastAsianFullwidth:
		return 2
	}
	return 1
}
