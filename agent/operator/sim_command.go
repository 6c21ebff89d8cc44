package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

func simCommand(loader *config.Loader) *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:   "sim EVENT",
		Short: "Send an event to an agent with simulated GPUs: fault injection",
		Example: `  gpu-node-agent sim --config config.yaml '{gpu: 3, xid: 79, lost: true}'
  gpu-node-agent sim --socket /run/gpu-node-agent/sim.sock '{source: stalled}'`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			event, err := sim.ParseEvent(args[0])
			if err != nil {
				return err
			}
			if socket == "" {
				c, err := loader.Load()
				if err != nil {
					return err
				}
				socket = c.Source.Sim.Control
			}
			if socket == "" {
				return errors.New("source.sim.control: not set, so the agent takes no events; set it to the path of a unix socket, or use --socket")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			reply, err := sim.Send(ctx, socket, event)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), reply)
			return err
		},
	}
	cmd.Flags().StringVar(&socket, "socket", "", "control socket of the agent (default: source.sim.control of its configuration)")
	return cmd
}
