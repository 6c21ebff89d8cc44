// Package terminal writes text that fits a terminal, or JSON.
package terminal

import (
	"os"
	"strconv"

	"golang.org/x/term"
)

// Output is what text is written to. The zero Output is a file or a pipe: it has no colours and lines of any length.
type Output struct {
	Colour bool
	Width  int // the number of columns; 0 if there is no limit
}

// Is reports whether a file is a terminal.
func Is(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// Of returns what a file is. COLUMNS overrides the width of a terminal.
func Of(f *os.File) Output {
	if !Is(f) {
		return Output{}
	}
	return Output{
		Colour: os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb",
		Width:  width(os.Getenv("COLUMNS"), func() (int, int, error) { return term.GetSize(int(f.Fd())) }),
	}
}

// width returns the number of columns, or 0 if it is unknown, as on a serial line.
func width(columns string, size func() (width, height int, err error)) int {
	if n, err := strconv.Atoi(columns); err == nil && n > 0 {
		return n
	}
	n, _, err := size()
	if err != nil {
		return 0
	}
	return max(0, n)
}
