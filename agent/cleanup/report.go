package cleanup

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// Report is what a run removed, or would remove.
type Report struct {
	Time   time.Time `json:"time"`
	DryRun bool      `json:"dryRun"`
	Nodes  []Item    `json:"nodes"`  // with something to remove, by name
	Errors []string  `json:"errors"` // what could not be read or written, except the errors of nodes
}

// err returns an error if something could not be read or written.
func (r Report) err() error {
	failed := 0
	for _, i := range r.Nodes {
		if i.Error != "" {
			failed++
		}
	}
	switch {
	case failed > 0:
		return fmt.Errorf("%s failed", status.Plural(failed, "node"))
	case len(r.Errors) > 0:
		return fmt.Errorf("%s", strings.Join(r.Errors, "; "))
	}
	return nil
}

// Table returns the report for people.
func (r Report) Table(out terminal.Output) string {
	p := &terminal.Printer{Output: out}
	if len(r.Nodes) > 0 {
		t := terminal.Table{Wrap: true}
		for _, name := range []string{"NODE", "LEFT BY AGENTS", "ACTION"} {
			t.Columns = append(t.Columns, terminal.Column{Name: name})
		}
		for _, i := range r.Nodes {
			t.Rows = append(t.Rows, append(terminal.Cells("", i.Node, i.String()), i.action()))
		}
		p.Table(t)
		p.WriteByte('\n')
	}
	p.Paragraph(0, terminal.Cell{Text: r.summary(), Colour: terminal.Bold})
	for _, e := range r.Errors {
		p.Paragraph(2, terminal.Cell{Text: "error: " + e, Colour: terminal.Yellow})
	}
	return p.String()
}

// action returns what is, or was, done to a node.
func (i Item) action() terminal.Cell {
	switch {
	case i.Done && i.Error != "":
		return terminal.Cell{Text: "removed, but " + i.Error, Colour: terminal.Yellow}
	case i.Done:
		return terminal.Cell{Text: "removed", Colour: terminal.Green}
	case i.Error != "":
		return terminal.Cell{Text: "failed: " + i.Error, Colour: terminal.Red}
	case i.Waits != "":
		return terminal.Cell{Text: "waits: " + i.Waits, Colour: terminal.Yellow}
	case i.Unknown != "":
		return terminal.Cell{Text: "none: " + i.Unknown, Colour: terminal.Yellow}
	}
	return terminal.Cell{Text: "remove"}
}

// summary returns what the run did, and the command that does the rest.
func (r Report) summary() string {
	left := 0
	for _, i := range r.Nodes {
		if !i.Done {
			left++
		}
	}
	removable := len(slices.DeleteFunc(slices.Clone(r.Nodes), func(i Item) bool { return i.Waits != "" || i.Unknown != "" }))
	switch {
	case len(r.Nodes) == 0 && len(r.Errors) > 0:
		return "unknown what agents have left; " + kube.CleanupCommand + " removes it later"
	case len(r.Nodes) == 0:
		return "nothing is left by agents"
	case r.DryRun:
		return fmt.Sprintf("dry run: %s of %s can be cleaned now; --apply does it", status.Plural(removable, "node"),
			status.Plural(len(r.Nodes), "node"))
	case left == 0:
		return "cleaned " + status.Plural(len(r.Nodes), "node")
	}
	return fmt.Sprintf("cleaned %d of %s; this removes the rest later: %s", len(r.Nodes)-left, status.Plural(len(r.Nodes), "node"),
		kube.CleanupCommand)
}
