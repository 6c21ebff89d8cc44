package terminal

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// JSON is the format that Format.Print encodes.
const JSON = "json"

// Format is the value of the flag --output: what a command prints.
type Format struct {
	value string
	all   []string
}

// AddFormat adds the flag --output. The first format is the default.
func AddFormat(flags *pflag.FlagSet, all ...string) *Format {
	f := &Format{value: all[0], all: all}
	flags.VarP(f, "output", "o", f.Expected())
	return f
}

// String returns the format.
func (f *Format) String() string { return f.value }

// Type returns the type that the help shows.
func (f *Format) Type() string { return "string" }

// Set sets the format, or returns which ones are valid.
func (f *Format) Set(value string) error {
	if !slices.Contains(f.all, value) {
		return fmt.Errorf("expected %s", f.Expected())
	}
	f.value = value
	return nil
}

// Expected lists the formats.
func (f *Format) Expected() string {
	last := len(f.all) - 1
	return strings.Join(f.all[:last], ", ") + " or " + f.all[last]
}

// Print writes document if the format is JSON, otherwise the text.
func (f *Format) Print(w io.Writer, text func() string, document any) error {
	if f.value != JSON {
		_, err := io.WriteString(w, text())
		return err
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(document)
}
