package operator

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

func draCommand(loader *config.Loader) *cobra.Command {
	cmd := &cobra.Command{Use: "dra", Short: "Show what the agent does by dynamic resource allocation (DRA)"}
	cmd.AddCommand(slicesCommand(loader))
	return cmd
}

func slicesCommand(loader *config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slices",
		Short: "Print the ResourceSlices that the agent publishes, or would publish",
		Long: `Print the ResourceSlices that the agent publishes with plugin.api dra, or would publish. Only root may do so.

The command asks the running agent, which needs no API server for it. Standard error says why slices are not published, and what is
left out of them. The API server chooses the names and generations of published slices; the output has others.`,
		Example: `  gpu-node-agent dra slices
  gpu-node-agent dra slices -o json | jq '.items[].spec.devices[] | select(.taints) | {name, taints}'`,
	}
	format := terminal.AddFormat(cmd.Flags(), "table", terminal.JSON)
	return onSocket(cmd, socketKey, loader, healthSocket, requestTimeout, func(ctx context.Context, socket string) (string, error) {
		s, err := call[dra.PublishedSlices](ctx, socket, slicesRoute, nil)
		if err != nil {
			return "", err
		}
		if s.NotPublished != "" {
			cmd.PrintErrln("note: not published:", s.NotPublished)
		}
		for _, w := range s.Warnings {
			cmd.PrintErrln("warning:", w)
		}
		var b strings.Builder
		err = format.Print(&b, func() string { return slicesTable(&s.List, terminal.Of(os.Stdout)) }, s.List)
		return strings.TrimSuffix(b.String(), "\n"), err
	})
}

// slicesTable lists the devices of slices.
func slicesTable(list *resourceapi.ResourceSliceList, out terminal.Output) string {
	p := &terminal.Printer{Output: out}
	t := terminal.Table{Wrap: true, Columns: []terminal.Column{
		{Name: "SLICE"},
		{Name: "DEVICE"},
		{Name: "TYPE"},
		{Name: "PRODUCT"},
		{Name: "PROFILE"},
		{Name: "MEMORY"},
		{Name: "SHARED"},
		{Name: "TAINTS"},
	}}
	for i := range list.Items {
		for _, d := range list.Items[i].Spec.Devices {
			text := func(name string) string {
				if v := d.Attributes[resourceapi.QualifiedName(name)].StringValue; v != nil {
					return *v
				}
				return ""
			}
			memory, shared := "", ""
			if c, ok := d.Capacity["memory"]; ok {
				memory = c.Value.String()
			}
			if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
				shared = "yes"
			}
			var taints []string
			for _, taint := range d.Taints {
				taints = append(taints, taint.Key+":"+string(taint.Effect))
			}
			t.Rows = append(t.Rows, terminal.Cells("", fmt.Sprint(i), d.Name, text("type"), text("productName"), text("profile"), memory, shared,
				strings.Join(taints, ", ")))
		}
	}
	p.Table(t)
	return p.String()
}
