// gpu-node-agent is the GPU agent of a Kubernetes node: device plugin, metrics and health in one process.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent"
	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/doctor"
	"github.com/gpu-node-agent/gpu-node-agent/agent/logsink"
	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
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
	var loader config.Loader
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
	config.AddFlags(flags)
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
		fieldsCommand(&loader),
		doctorCommand(&loader),
	)
	cmd.AddCommand(operator.Commands(&loader)...)
	return cmd
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

func fieldsCommand(loader *config.Loader) *cobra.Command {
	return reporting(&cobra.Command{
		Use:   "fields",
		Short: "List the fields that metrics.fields may name, and which of them the source here has",
		Long: `List the fields that metrics.fields may name, and which of them the source here has.

The source of the configuration is asked once, and a running agent is not disturbed. Without a source the column
says unknown, and the exit code is 0 all the same.`,
	}, func(ctx context.Context) report { return doctor.Fields(ctx, *loader) })
}

func doctorCommand(loader *config.Loader) *cobra.Command {
	var rootDir string
	var found doctor.Report
	cmd := reporting(&cobra.Command{
		Use:   "doctor",
		Short: "Say whether the agent could do its job on this node, and what to do about what is not right",
		Long: `Say whether the agent could do its job on this node, and what to do about what is not right.

Nothing is changed, and a running agent is not disturbed. The exit code is 1 if a check fails.`,
		PostRunE: func(*cobra.Command, []string) error { return found.Err() },
	}, func(ctx context.Context) report {
		found = doctor.Diagnose(ctx, *loader, rootDir)
		return found
	})
	cmd.Flags().StringVar(&rootDir, "root", "/", "where the node's root directory is, if this is a container that has it mounted")
	return cmd
}

// build says what this binary is.
func build() agent.Build { return agent.ReadBuild(version, revision) }
