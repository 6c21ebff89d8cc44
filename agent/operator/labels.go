package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// planLabels returns the labels that an agent with a configuration would write, on a node on which none runs.
type planLabels = func(context.Context, config.Config) (node.Labels, error)

func labelsCommand(loader *config.Loader, plan planLabels) *cobra.Command {
	var socket string
	var format *terminal.Format
	cmd := &cobra.Command{
		Use:   "labels",
		Short: "Print the labels of this node that the agent writes, or would write",
		Long: `Print the labels of this node that the agent writes with node.labels.output, or would write: as NVIDIA's GPU feature
discovery, and the numbers of healthy, degraded and unhealthy GPUs. Only root may ask a running agent.

The command asks the running agent, which needs no API server for it. If no agent runs, the command polls the configured source,
with the findings of --state-dir, and changes nothing. If the source does not answer, it prints the labels that an agent has
saved in --state-dir.`,
		Example: `  gpu-node-agent labels
  gpu-node-agent labels -o json | jq -r '."nvidia.com/gpu.product"'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := askOrPlan(cmd, loader, socket, plan)
			if err != nil {
				return err
			}
			for _, w := range l.Warnings {
				cmd.PrintErrln("warning:", w)
			}
			if len(l.Labels) == 0 {
				cmd.PrintErrln("note: this node has no GPU, and no labels")
			}
			return format.Print(cmd.OutOrStdout(), func() string { return labelsText(l.Labels) }, l.Labels)
		},
	}
	format = terminal.AddFormat(cmd.Flags(), "text", terminal.JSON)
	cmd.Flags().StringVar(&socket, "socket", "", "socket of the agent (default: "+socketKey+" of its configuration)")
	return cmd
}

// askOrPlan asks the agent at a socket for its labels; if none listens there, and --socket is not set, it returns the labels of plan.
func askOrPlan(cmd *cobra.Command, loader *config.Loader, socket string, plan planLabels) (node.Labels, error) {
	ctx := cmd.Context()
	configured := cmp.Or(socket, loadPartial(cmd, loader).Health.Socket)
	if configured != "" {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		answer, err := call[node.Labels](ctx, configured, labelsRoute, nil)
		absent := errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
		if socket != "" || !absent {
			return answer, err
		}
	}
	c, err := loader.Load()
	if err != nil {
		return node.Labels{}, err
	}
	log.SetOutput(io.Discard) // go-dcgm logs there
	return plan(ctx, c)
}

// labelsText returns a line for each label, sorted.
func labelsText(labels map[string]string) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&b, "%s=%s\n", key, labels[key])
	}
	return b.String()
}
