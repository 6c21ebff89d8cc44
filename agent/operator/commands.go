package operator

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// requestTimeout limits the commands that the agent answers at once.
const requestTimeout = 10 * time.Second

// Commands returns the subcommands that talk to a running agent. On a node without an agent, plan returns the labels that one would write.
func Commands(loader *config.Loader, plan planLabels) []*cobra.Command {
	return []*cobra.Command{
		statusCommand(loader), simCommand(loader), clearCommand(loader), detachCommand(loader), attachCommand(loader), mpsCommand(loader),
		draCommand(loader), labelsCommand(loader, plan),
	}
}

func statusCommand(loader *config.Loader) *cobra.Command {
	var address string
	var format *terminal.Format
	var access status.Access
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print the status of this node's GPUs and of the agent",
		Long: `Print the status of this node's GPUs and of the agent, as the status page shows it.

The exit code is 0 if the agent answers, whatever the state of the GPUs. A terminal gets colours unless NO_COLOR is
set, and a table of its width that names what it leaves out. Over TLS, the agent of this node must present the
certificate of metrics.webConfigFile. The password for --user is read from $` + status.PasswordEnv + `.`,
		Example: `  gpu-node-agent status
  gpu-node-agent status --address 10.0.0.7:9400 -o json | jq '.gpus[] | select(.state == "unhealthy")'`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if address == "" {
				c := loadPartial(cmd, loader)
				address = access.Local(c.Metrics.Listen, c.Web.Certificate())
			}
			access.Password = os.Getenv(status.PasswordEnv)
			ctx, cancel := context.WithTimeout(cmd.Context(), requestTimeout)
			defer cancel()
			node, text, err := status.Ask(ctx, address, access)
			if err != nil {
				return err
			}
			if format.String() != terminal.JSON {
				text = []byte(node.Table(format.String() == "wide", terminal.Of(os.Stdout)))
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	format = terminal.AddFormat(cmd.Flags(), "table", "wide", terminal.JSON)
	cmd.Flags().StringVar(&address, "address", "", "HOST:PORT or URL of the agent (default: metrics.listen of its configuration)")
	access.AddFlags(cmd.Flags())
	return cmd
}

func simCommand(loader *config.Loader) *cobra.Command {
	var event sim.Event
	cmd := &cobra.Command{
		Use:   "sim EVENT",
		Short: "Inject an event into an agent with simulated GPUs",
		Example: `  gpu-node-agent sim --config config.yaml '{gpu: 3, xid: 79, lost: true}'
  gpu-node-agent sim --socket /run/gpu-node-agent/sim.sock '{source: stalled}'`,
		Args: func(_ *cobra.Command, args []string) (err error) {
			if len(args) != 1 {
				return fmt.Errorf("expected one event in quotes, got %d arguments; for example: gpu-node-agent sim '{gpu: 3, xid: 79}'", len(args))
			}
			event, err = sim.ParseEvent(args[0])
			return err
		},
	}
	return onSocket(cmd, "source.sim.control", loader, func(c config.Config) string { return c.Source.Sim.Control }, requestTimeout,
		func(ctx context.Context, socket string) (string, error) { return "", sim.Send(ctx, socket, event) })
}

func clearCommand(loader *config.Loader) *cobra.Command {
	var req ClearRequest
	cmd := &cobra.Command{
		Use:   "clear",
		Short: "Clear findings of a GPU, or bind an index in the configuration anew",
		Long: `Clear the findings of a GPU or MIG device. Only root may do so.

Findings that the newest measurement shows stay: a lost GPU stays unhealthy until it is back. A cordon ends when
health.cordon no longer names the GPU. The command prints the findings that remain.

An entry of the configuration that names a GPU by its index stays bound to that GPU when the indexes change. With
--binding, the entries with this text mean the GPU that has the index now.`,
		Example: `  gpu-node-agent clear --gpu GPU-6f1a1b2c-…
  gpu-node-agent clear --gpu 1:0 --cause xid-94
  gpu-node-agent clear --binding 3`,
		PreRunE: func(*cobra.Command, []string) error { return req.validate("--", "gpu") },
	}
	cmd.Flags().StringVar(&req.Device, "gpu", "", "device: a UUID, an index such as 3, a MIG index such as 3:0 or a PCI bus ID")
	cmd.Flags().StringVar(&req.Cause, "cause", "", "finding to clear, such as xid-79 (default: all)")
	cmd.Flags().StringVar(&req.Binding, "binding", "",
		"entry of the configuration, such as 3 or 3:0, that is to mean the GPU with this index now")
	return onAgentSocket[ClearResponse](cmd, loader, requestTimeout, clearRoute, &req)
}

func detachCommand(loader *config.Loader) *cobra.Command {
	var req DetachRequest
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Release the GPU driver, to reset a GPU, change MIG mode or replace the driver",
		Long: `Release the GPU driver while the agent keeps running, so that a GPU can be reset (nvidia-smi -r), its MIG mode changed
or the driver unloaded. Only root may do so.

Until the agent is attached again, the kubelet gives no GPU of the node to new pods. The command returns when the driver
is released, and fails if it is not. A repeated detach prints the current state and restarts the time of --for.`,
		Example: `  gpu-node-agent detach && nvidia-smi -r -i 3; gpu-node-agent attach
  gpu-node-agent detach --for 2h`,
		PreRunE: func(*cobra.Command, []string) error {
			if _, err := req.duration(); err != nil {
				return fmt.Errorf("--%w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&req.For, "for", defaultDetach.String(), "time after which the agent attaches by itself, 1s to 24h")
	cmd.Flags().BoolVar(&req.Force, "force", false, "detach although pods hold GPUs, or the kubelet does not report whether they do")
	return onAgentSocket[DetachResponse](cmd, loader, driverTimeout+requestTimeout, detachRoute, &req)
}

func attachCommand(loader *config.Loader) *cobra.Command {
	return onAgentSocket[AttachResponse](&cobra.Command{
		Use:   "attach",
		Short: "Use the GPU driver again after detach",
		Long: `Use the GPU driver again after detach. Only root may do so.

The command returns when the GPUs are measured again. It fails if they are not; the agent then keeps trying.`,
	}, loader, driverTimeout+requestTimeout, attachRoute, nil)
}

// response is the result of a request.
type response interface {
	text() string // for standard output
	err() error   // why the command fails although the agent accepted the request
}

// socketKey is the key of the operator's socket.
const socketKey = "health.socket"

func healthSocket(c config.Config) string { return c.Health.Socket }

// onAgentSocket makes cmd send a request to health.socket, and print the response.
func onAgentSocket[T response](cmd *cobra.Command, loader *config.Loader, timeout time.Duration, route string, body any) *cobra.Command {
	return onSocket(cmd, socketKey, loader, healthSocket, timeout,
		func(ctx context.Context, socket string) (string, error) {
			res, err := call[T](ctx, socket, route, body)
			if err != nil {
				return "", err
			}
			return res.text(), res.err()
		})
}

// onSocket makes cmd send a request to the socket that a key or --socket names, and print the response.
func onSocket(cmd *cobra.Command, key string, loader *config.Loader, path func(config.Config) string, timeout time.Duration,
	send func(ctx context.Context, socket string) (string, error),
) *cobra.Command {
	var socket string
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if socket == "" {
			c := loadPartial(cmd, loader)
			if socket = path(c); socket == "" {
				return fmt.Errorf("%s is not set; set it or pass --socket", key)
			}
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		text, err := send(ctx, socket)
		if text != "" {
			_, printErr := fmt.Fprintln(cmd.OutOrStdout(), text)
			err = cmp.Or(err, printErr)
		}
		return err
	}
	cmd.Flags().StringVar(&socket, "socket", "", "socket of the agent (default: "+key+" of its configuration)")
	return cmd
}

// loadPartial returns the configuration, or as much of it as is needed to reach the running agent, which does not use an
// invalid one. It warns on standard error.
func loadPartial(cmd *cobra.Command, loader *config.Loader) config.Config {
	c, err := loader.LoadPartial()
	if err != nil {
		cmd.PrintErrln("warning: invalid configuration:", err)
	}
	return c
}
