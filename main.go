// gpu-node-agent is the GPU agent of a Kubernetes node: device plugin, metrics and health in one process.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent"
	"github.com/gpu-node-agent/gpu-node-agent/agent/logsink"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// Set by the linker.
//
//nolint:gochecknoglobals // the linker can set nothing else
var version, revision = "dev", ""

func main() {
	if err := execute(); err != nil {
		os.Exit(1)
	}
}

func execute() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := root().ExecuteContext(ctx)
	if err != nil {
		// An agent that has failed must end, so that it is started again, even if standard error is blocked.
		stderr := logsink.New(os.Stderr, nil)
		fmt.Fprintln(stderr, err)
		_ = stderr.Close()
	}
	return err
}

func root() *cobra.Command {
	var loader agent.Loader
	line, _, _ := strings.Cut(build().String(), "\n")
	cmd := &cobra.Command{
		Use:     "gpu-node-agent",
		Version: line,
		Short:   "The GPU agent of a Kubernetes node: device plugin, metrics and health in one process",
		Long: `The GPU agent of a Kubernetes node: device plugin, metrics and health in one process.

Every key of config.yaml is a flag and an environment variable too: source.mode is --source.mode and
GPU_NODE_AGENT_SOURCE_MODE. Flags win over the environment, that over the file, that over the defaults.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return agent.Run(cmd.Context(), loader, build())
		},
	}
	cmd.SetVersionTemplate("{{.Version}}\n")
	flags := cmd.PersistentFlags()
	flags.StringVar(&loader.File, "config", "", "configuration file (default: config.yaml, then /etc/gpu-node-agent/config.yaml, if there)")
	agent.AddFlags(flags)
	loader.Flags = flags
	cmd.AddCommand(
		&cobra.Command{
			Use: "run", Short: "Run the agent (the default)", Args: cobra.NoArgs, RunE: cmd.RunE,
		},
		&cobra.Command{
			Use: "check-config", Short: "Print the effective configuration, or every error in it", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				c, err := loader.Load()
				if err != nil {
					return err
				}
				for _, n := range c.Notes {
					fmt.Fprintln(cmd.ErrOrStderr(), "note:", n)
				}
				_, err = fmt.Fprint(cmd.OutOrStdout(), c)
				return err
			},
		},
		versionCommand(),
		statusCommand(&loader),
		fieldsCommand(&loader),
		doctorCommand(&loader),
		simCommand(&loader),
	)
	cmd.AddCommand(agent.OperatorCommands(&loader)...)
	return cmd
}

func statusCommand(loader *agent.Loader) *cobra.Command {
	var output, address string
	var access agent.Access
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print what the running agent knows of this node's GPUs",
		Long: `Print what the running agent knows of this node's GPUs: the status page, in a terminal.

The exit code is 0 if the agent has answered, however the GPUs are. In a terminal there are colours, unless
NO_COLOR is set. This node's agent is believed if its certificate is that of metrics.webConfigFile; the password
for --user is in $` + agent.PasswordEnv + `.`,
		Example: `  gpu-node-agent status
  gpu-node-agent status --address 10.0.0.7:9400 -o json | jq '.gpus[] | select(.state == "unhealthy")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "wide" && output != "json" {
				return fmt.Errorf("--output: %q is not known; use table, wide or json", output)
			}
			if address == "" {
				c, err := loader.Load()
				if err != nil {
					return err
				}
				address = access.Here(c)
			}
			access.Password = os.Getenv(agent.PasswordEnv)
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			status, text, err := agent.AskStatus(ctx, address, access)
			if err != nil {
				return err
			}
			if output != "json" {
				text = []byte(status.Table(output == "wide", colours()))
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table, wide or json")
	cmd.Flags().StringVar(&address, "address", "", "HOST:PORT or URL of the agent (default: metrics.listen of its configuration)")
	cmd.Flags().StringVar(&access.CAFile, "ca-file", "", "PEM file of who signed the agent's certificate (default: who this host trusts)")
	cmd.Flags().StringVar(&access.CertFile, "cert-file", "", "PEM file of a certificate for an agent that asks for one")
	cmd.Flags().StringVar(&access.KeyFile, "key-file", "", "PEM file of its key")
	cmd.Flags().BoolVar(&access.Insecure, "insecure", false, "believe any certificate of the agent")
	cmd.Flags().StringVar(&access.User, "user", "", "name for an agent that wants a password")
	return cmd
}

// colours reports whether whoever reads the output is likely to see colours.
func colours() bool {
	info, err := os.Stdout.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// report is what a command finds out and prints.
type report interface {
	String() string
	JSON() (string, error)
}

// reporting makes cmd print a report, as text or JSON.
func reporting(cmd *cobra.Command, look func(context.Context) report) *cobra.Command {
	var output string
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if output != "text" && output != "json" {
			return fmt.Errorf("--output: %q is not known; use text or json", output)
		}
		log.SetOutput(io.Discard) // go-dcgm says there what it does
		r := look(cmd.Context())
		text := r.String()
		if output == "json" {
			var err error
			if text, err = r.JSON(); err != nil {
				return err
			}
		}
		_, err := fmt.Fprint(cmd.OutOrStdout(), text)
		return err
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func versionCommand() *cobra.Command {
	return reporting(&cobra.Command{
		Use: "version", Short: "Print the version, and how this binary was built",
	}, func(context.Context) report { return build() })
}

func fieldsCommand(loader *agent.Loader) *cobra.Command {
	return reporting(&cobra.Command{
		Use:   "fields",
		Short: "List the fields that metrics.fields may name, and which of them the source here has",
		Long: `List the fields that metrics.fields may name, and which of them the source here has.

The source of the configuration is asked once, and a running agent is not disturbed. Without a source the column
says unknown, and the exit code is 0 all the same.`,
	}, func(ctx context.Context) report { return agent.Fields(ctx, *loader) })
}

func doctorCommand(loader *agent.Loader) *cobra.Command {
	var rootDir string
	var found agent.Report
	cmd := reporting(&cobra.Command{
		Use:   "doctor",
		Short: "Say whether the agent could do its job on this node, and what to do about what is not right",
		Long: `Say whether the agent could do its job on this node, and what to do about what is not right.

Nothing is changed, and a running agent is not disturbed. The exit code is 1 if a check fails.`,
		PostRunE: func(*cobra.Command, []string) error { return found.Err() },
	}, func(ctx context.Context) report {
		found = agent.Diagnose(ctx, *loader, rootDir)
		return found
	})
	cmd.Flags().StringVar(&rootDir, "root", "/", "where the node's root directory is, if this is a container that has it mounted")
	return cmd
}

func simCommand(loader *agent.Loader) *cobra.Command {
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

// build says what this binary is.
func build() agent.Build { return agent.ReadBuild(version, revision) }
