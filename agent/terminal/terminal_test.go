package terminal

import (
	"errors"
	"os"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestWidth(t *testing.T) {
	for name, c := range map[string]struct {
		columns string
		size    int
		err     error
		want    int
	}{
		"terminal":          {"", 120, nil, 120},
		"COLUMNS":           {"80", 120, nil, 80},
		"invalid COLUMNS":   {"wide", 120, nil, 120},
		"COLUMNS is 0":      {"0", 120, nil, 120},
		"negative COLUMNS":  {"-1", 120, nil, 120},
		"serial line":       {"", 0, nil, 0},
		"unknown":           {"", 0, errors.New("not a terminal"), 0},
		"error and a value": {"", 5, errors.New("not a terminal"), 0},
	} {
		if got := width(c.columns, func() (int, int, error) { return c.size, 24, c.err }); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestPipeHasNoLimit(t *testing.T) {
	t.Setenv("COLUMNS", "80")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	if got := Of(w); got != (Output{}) {
		t.Errorf("%+v", got)
	}
}

func TestParagraph(t *testing.T) {
	label := Cell{Text: "source    "}
	for name, c := range map[string]struct {
		width int
		cells []Cell
		want  string
	}{
		"no limit":            {0, []Cell{label, {Text: strings.Repeat("word ", 50)}}, "source    " + strings.Repeat("word ", 50) + "\n"},
		"fits exactly":        {15, []Cell{label, {Text: "abcde"}}, "source    abcde\n"},
		"one too long":        {15, []Cell{label, {Text: "abc def"}}, "source    abc\n          def\n"},
		"space at the end":    {13, []Cell{label, {Text: "abc def"}}, "source    abc\n          def\n"},
		"three lines":         {15, []Cell{label, {Text: "ab cd ef gh ij"}}, "source    ab cd\n          ef gh\n          ij\n"},
		"no break in a label": {12, []Cell{{Text: "a b c     "}, {Text: "abcdef gh"}}, "a b c     abcdef\n          gh\n"},
		"word of two cells":   {14, []Cell{label, {Text: "ab c"}, {Text: "de"}}, "source    ab\n          cde\n"},
		"word too long":       {14, []Cell{label, {Text: "/var/lib/state.json ab"}}, "source    /var/lib/state.json\n          ab\n"},
		"narrower than label": {5, []Cell{label, {Text: "ab cd"}}, "source    ab\n          cd\n"},
		"several bytes":       {13, []Cell{label, {Text: "äöü äöü"}}, "source    äöü\n          äöü\n"},
		"two columns":         {16, []Cell{label, {Text: "显卡 一 二"}}, "source    显卡\n          一 二\n"},
		"no columns":          {13, []Cell{label, {Text: "a\u0308b c d"}}, "source    a\u0308b\n          c d\n"},
		"control characters":  {0, []Cell{label, {Text: "a\x1b[31m\nb"}}, "source    a [31m b\n"},
		"empty":               {10, nil, "\n"},
	} {
		p := Printer{Output: Output{Width: c.width}}
		p.Paragraph(10, c.cells...)
		if p.String() != c.want {
			t.Errorf("%s:\n%q, want\n%q", name, p.String(), c.want)
		}
	}
	p := Printer{Output: Output{Width: 13, Colour: true}}
	p.Paragraph(10, label, Cell{Text: "abc def", Colour: Red}, Cell{Text: "", Colour: Red})
	if want := "source    \x1b[31mabc\n          def\x1b[0m\n"; p.String() != want {
		t.Errorf("%q, want %q", p.String(), want)
	}
}

func TestTableFitsWidth(t *testing.T) {
	table := func() Table {
		return Table{
			MinLast: 8,
			Columns: []Column{{Name: "GPU"}, {Name: "MODEL", Drop: 2}, {Name: "STATE"}, {Name: "UTIL", Drop: 1}, {Name: "HELD BY"}},
			Rows:    [][]Cell{Cells("", "0", "NVIDIA H100", "healthy", "87 %", "training/llm-0"), Cells("", "1", "NVIDIA H100", "lost", "", "")},
		}
	}
	for name, c := range map[string]struct {
		width     int
		note      string
		last, row string
	}{
		"no limit":     {0, "", "HELD BY", "0    NVIDIA H100  healthy  87 %  training/llm-0"},
		"fits exactly": {47, "", "HELD BY", "0    NVIDIA H100  healthy  87 %  training/llm-0"},
		"shortened":    {46, "HELD BY is shortened", "HELD BY", "0    NVIDIA H100  healthy  87 %  training/llm…"},
		"at least 8":   {41, "HELD BY is shortened", "HELD BY", "0    NVIDIA H100  healthy  87 %  trainin…"},
		"one dropped":  {40, "left out to fit 40 columns: MODEL", "HELD BY", "0    healthy  87 %  training/llm-0"},
		"two dropped":  {27, "left out to fit 27 columns: MODEL, UTIL; HELD BY is shortened", "HELD BY", "0    healthy  training/llm…"},
		"too narrow":   {10, "left out to fit 10 columns: MODEL, UTIL; HELD BY is shortened", "HELD BY", "0    healthy  traini…"},
	} {
		p := Printer{Output: Output{Width: c.width}}
		note := p.Table(table())
		lines := strings.Split(p.String(), "\n")
		if note != c.note || len(lines) < 3 || lines[1] != c.row || !strings.HasSuffix(lines[0], c.last) {
			t.Errorf("%s: %q\n%s", name, note, p.String())
		}
		if name != "too narrow" {
			mustFit(t, p.String(), c.width)
		}
	}
	wide := table()
	wide.Rows[0][1].Text, wide.Rows[1][4].Text = "显卡", "训练训练训练"
	p := Printer{Output: Output{Width: 41}}
	if note := p.Table(wide); note != "HELD BY is shortened" {
		t.Error(note)
	}
	if lines := strings.Split(p.String(), "\n"); lines[1] != "0    显卡         healthy  87 %  trainin…" ||
		lines[2] != "1    NVIDIA H100  lost     -     训练训…" {
		t.Errorf("\n%s", p.String())
	}
	narrow := table()
	narrow.Wrap = true
	narrow.Rows[0][4].Text = "training/llm-0 and 5 more"
	p = Printer{Output: Output{Width: 30}}
	if p.Table(narrow); !strings.Contains(p.String(), "\n    training/llm-0 and 5 more\n") {
		t.Errorf("\n%s", p.String())
	}
	wrapped := table()
	wrapped.Wrap = true
	wrapped.Rows[0][4].Text = "training/llm-0 (torch) and 5 more"
	p = Printer{Output: Output{Width: 50}}
	if note := p.Table(wrapped); note != "" {
		t.Errorf("wrapped, but %q", note)
	}
	mustFit(t, p.String(), 50)
	if text := strings.Join(strings.Fields(p.String()), " "); !strings.Contains(text, "training/llm-0 (torch) and 5 more") {
		t.Errorf("not complete:\n%s", p.String())
	}
}

func TestTextColumns(t *testing.T) {
	for text, want := range map[string]int{"": 0, "H100 °C ×…": 10, "显卡。": 6, "グラボ": 6, "그래픽": 6, "ＧＰＵ": 6, "ｸﾞﾗﾎﾞ": 5, "🔥": 2, "a\u0308": 1} {
		if got := textColumns(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

func mustFit(t *testing.T, text string, width int) {
	t.Helper()
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); width > 0 && n > width {
			t.Errorf("%d columns of %d: %q", n, width, line)
		}
	}
}
