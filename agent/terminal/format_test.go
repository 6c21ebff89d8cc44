package terminal

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestFormat(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string // what is printed; empty if the format is refused
	}{
		{nil, "text\n"},
		{[]string{"-o", "table"}, "text\n"},
		{[]string{"--output", "wide"}, "text\n"},
		{[]string{"-o=json"}, "{\n  \"a\": 1\n}\n"},
		{[]string{"-o", "yaml"}, ""},
		{[]string{"-o", ""}, ""},
		{[]string{"-o", "JSON"}, ""},
	} {
		flags := pflag.NewFlagSet("command", pflag.ContinueOnError)
		f := AddFormat(flags, "table", "wide", JSON)
		err := flags.Parse(c.args)
		if _, refused := errors.AsType[*pflag.InvalidValueError](err); refused != (c.want == "") {
			t.Errorf("%q: %v", c.args, err)
			continue
		}
		if err != nil {
			if !strings.HasSuffix(err.Error(), "expected table, wide or json") {
				t.Errorf("%q: %v", c.args, err)
			}
			continue
		}
		var b strings.Builder
		if err := f.Print(&b, func() string { return "text\n" }, map[string]int{"a": 1}); err != nil || b.String() != c.want {
			t.Errorf("%q: %q, %v; want %q", c.args, &b, err, c.want)
		}
	}
}
