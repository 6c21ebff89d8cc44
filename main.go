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

// The linker sets the version and the revision.
//
//nolint:gochecknoglobals // -X sets only package variables
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
		// The process must exit even if standard error is blocked, so that the kubelet restarts it.
		stderr := logsink.New(os.Stderr, nil)
		fmt.Fprintln(stderr, err)
		_ = stderr.Close()
	}
	return err
}

func root() *cobra.Command {
	var loader config.Loader
	line, _, _ := strings.Cut(buildInfo().String(), "\n")
	cmd := &cobra.Command{
		Use:     "gpu-node-agent",
		Version: line,
		Short:   "The GPU agent of a Kubernetes node: device plugin, metrics and health in one process",
		Long: `The GPU agent of a Kubernetes node: device plugin, metrics and health in one process.

Every key of config.yaml is also a flag and an environment variable: source.mode is --source.mode and
GPU_NODE_AGENT_SOURCE_MODE. Flags override environment variables, and these override the file.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return agent.Run(cmd.Context(), loader, buildInfo())
		},
	}
	cmd.SetVersionTemplate("{{.Version}}\n")
	flags := cmd.PersistentFlags()
	flags.StringVar(&loader.File, "config", "", "configuration file (default: config.yaml or /etc/gpu-node-agent/config.yaml, if it exists)")
	config.AddFlags(flags)
	loader.Flags = flags
	cmd.AddCommand(
		&cobra.Command{
			Use: "run", Short: "Run the agent (the default)", Args: cobra.NoArgs, RunE: cmd.RunE,
		},
		&cobra.Command{
			Use: "check-config", Short: "Print the effective configuration, or all errors in it", Args: cobra.NoArgs,
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

// report is the result of a command that prints text or JSON.
type report interface {
	String() string
	JSON() (string, error)
}

// reportCommand makes cmd print a report.
func reportCommand(cmd *cobra.Command, create func(context.Context) report) *cobra.Command {
	var output string
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if output != "text" && output != "json" {
			return fmt.Errorf("--output: expected text or json, got %q", output)
		}
		log.SetOutput(io.Discard) // go-dcgm logs its calls there
		r := create(cmd.Context())
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
	return reportCommand(&cobra.Command{
		Use: "version", Short: "Print the version and the build settings",
	}, func(context.Context) report { return buildInfo() })
}

func fieldsCommand(loader *config.Loader) *cobra.Command {
	return reportCommand(&cobra.Command{
		Use:   "fields",
		Short: "List the fields for metrics.fields, and which of them the source supports",
		Long: `List the fields for metrics.fields, and which of them the source supports.

The command opens the configured source once and does not affect a running agent. If it cannot open the source, it
prints unknown for every field. The exit code is 0 in both cases.`,
	}, func(ctx context.Context) report { return doctor.Fields(ctx, *loader) })
}

func doctorCommand(loader *config.Loader) *cobra.Command {
	var rootDir string
	var result doctor.Report
	cmd := reportCommand(&cobra.Command{
		Use:   "doctor",
		Short: "Check whether the agent can work on this node, and print how to fix what fails",
		Long: `Check whether the agent can work on this node, and print how to fix what fails.

The command changes nothing and does not affect a running agent. The exit code is 1 if a check fails.`,
		PostRunE: func(*cobra.Command, []string) error { return result.Err() },
	}, func(ctx context.Context) report {
		result = doctor.Diagnose(ctx, *loader, rootDir)
		return result
	})
	cmd.Flags().StringVar(&rootDir, "root", "/", "path of the node's root directory, if the command runs in a container that mounts it")
	return cmd
}

// buildInfo describes this binary.
func buildInfo() agent.Build { return agent.ReadBuild(version, revision) }
