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
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-node-agent/gpu-node-agent/agent"
	"github.com/gpu-node-agent/gpu-node-agent/agent/cleanup"
	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/doctor"
	"github.com/gpu-node-agent/gpu-node-agent/agent/logsink"
	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/agent/reclaim"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// The linker sets the version and the revision.
//
//nolint:gochecknoglobals // the linker can set variables only
var version, revision = "dev", ""

func main() {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	if err := root().ExecuteContext(ctx); err != nil {
		// The process must exit to be restarted, even if standard error is blocked.
		stderr := logsink.New(os.Stderr, nil)
		fmt.Fprintln(stderr, err)
		_ = stderr.Close()
		os.Exit(1)
	}
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
GPU_NODE_AGENT_SOURCE_MODE. Flags override the environment, the environment the file, and the file the defaults.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return agent.Run(cmd.Context(), loader, buildInfo())
		},
	}
	cmd.PersistentPreRunE = refuseEmptyFlags
	cmd.SetVersionTemplate("{{.Version}}\n")
	flags := cmd.PersistentFlags()
	flags.StringVar(&loader.File, "config", "", "configuration file (default: /etc/gpu-node-agent/config.yaml, if it exists)")
	flags.StringVar(&loader.StateDir, config.StateDirFlag, config.DefaultStateDir(),
		`directory that keeps findings, a detach, idle times and the last good configuration across restarts; "" for none`)
	config.AddFlags(flags)
	loader.Flags = flags
	cmd.AddCommand(
		&cobra.Command{
			Use: "run", Short: "Run the agent (the default)", RunE: cmd.RunE,
		},
		&cobra.Command{
			Use: "check-config", Short: "Print the effective configuration, or all errors in it",
			RunE: func(cmd *cobra.Command, _ []string) error {
				c, err := loader.Load()
				if err != nil {
					return err
				}
				log.SetOutput(io.Discard) // go-dcgm logs there
				for _, n := range slices.Concat(c.Notes, c.Metrics.Requirements(), doctor.UnmatchedRefs(cmd.Context(), c)) {
					fmt.Fprintln(cmd.ErrOrStderr(), "note:", n)
				}
				_, err = fmt.Fprint(cmd.OutOrStdout(), c)
				return err
			},
		},
		mpsDaemonCommand(&loader),
		withReport(&cobra.Command{Use: "version", Short: "Print the version and the build settings"},
			func(context.Context) fmt.Stringer { return buildInfo() }),
		fieldsCommand(&loader),
		doctorCommand(&loader),
		reclaim.Command(),
		cleanup.Command(),
	)
	cmd.AddCommand(operator.Commands(&loader, agent.PlanLabels)...)
	refuseArgumentsOf(cmd)
	cmd.SetFlagErrorFunc(explainFlag)
	return cmd
}

// refuseArgumentsOf makes a command and those below it refuse arguments, unless they take some.
func refuseArgumentsOf(cmd *cobra.Command) {
	if cmd.Args == nil {
		cmd.Args = refuseArguments
	}
	for _, c := range cmd.Commands() {
		refuseArgumentsOf(c)
	}
}

// refuseArguments refuses arguments. One may be the value of a boolean flag, one of the root a misspelled command.
func refuseArguments(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case args[0] == "true", args[0] == "false":
		return fmt.Errorf("unexpected argument %q of %s; write the value of a boolean flag with =, such as --plugin.enabled=%s", args[0],
			cmd.Name(), args[0])
	case cmd.HasSubCommands():
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		return unknownError(fmt.Errorf("unknown command %q", args[0]), args[0], "", names)
	}
	return fmt.Errorf("unexpected argument %q of %s, which takes only flags", args[0], cmd.Name())
}

// refuseEmptyFlags refuses a flag of a command with an empty value, such as --cause= with an unset variable: the command would act as
// without the flag. The flags of keys, which are hidden, may be empty.
func refuseEmptyFlags(cmd *cobra.Command, _ []string) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !f.Hidden && f.Value.String() == "" && f.Name != config.StateDirFlag {
			err = fmt.Errorf("--%s: value is empty; leave the flag out for its default", f.Name)
		}
	})
	return err
}

// explainFlag adds advice to an error about a flag. For an unknown flag that is the most similar one, as cobra does for commands; for a
// boolean flag or --output it is the valid values.
func explainFlag(cmd *cobra.Command, err error) error {
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		flag, expected := invalid.GetFlag(), "true or false"
		if f, ok := flag.Value.(*terminal.Format); ok {
			expected = f.Expected()
		} else if flag.Value.Type() != "bool" {
			return err
		}
		return fmt.Errorf("--%s: expected %s, got %q", flag.Name, expected, invalid.GetValue())
	}
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return unknownError(err, unknown.GetSpecifiedName(), "--", names)
}

// unknownError adds the nearest of the names to an error about an unknown one.
func unknownError(err error, unknown, prefix string, names []string) error {
	if nearest := config.Nearest(unknown, names); nearest != "" {
		return fmt.Errorf("%w; did you mean %s%s?", err, prefix, nearest)
	}
	return fmt.Errorf("%w; see gpu-node-agent --help", err)
}

// table is a report that fits a terminal.
type table interface {
	Table(out terminal.Output) string
}

// withReport makes cmd print a report, which has a JSON form too.
func withReport(cmd *cobra.Command, create func(context.Context) fmt.Stringer) *cobra.Command {
	format := terminal.AddFormat(cmd.Flags(), "text", terminal.JSON)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log.SetOutput(io.Discard) // go-dcgm logs there
		r := create(cmd.Context())
		text := r.String
		if t, ok := r.(table); ok {
			text = func() string { return t.Table(terminal.Of(os.Stdout)) }
		}
		return format.Print(cmd.OutOrStdout(), text, r)
	}
	return cmd
}

func mpsDaemonCommand(loader *config.Loader) *cobra.Command {
	var options agent.MPSDaemonOptions
	cmd := &cobra.Command{
		Use:   "mps-daemon",
		Short: "Run the MPS control daemons of the GPUs that plugin.sharing shares by MPS",
		Long: `Run the MPS control daemons of the GPUs that plugin.sharing shares by MPS.

The command runs beside the agent, as root and with the PIDs of the host, and does what the agent asks for in the directory
plugin.sharing.mps.root, which both need at the same path. It runs plugin.sharing.mps.control once per GPU or MIG device,
sets the compute mode of a GPU to EXCLUSIVE_PROCESS before, and restarts what ends.

The daemons survive a restart of the agent. SIGTERM stops them, which ends their clients, and sets the compute modes back. If
mps-daemon crashes, the end of its container, or of its unit of systemd with KillMode=control-group, ends them. One that runs
nevertheless, or that somebody else has started, is the finding mps-foreign. The configuration is read once.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return agent.RunMPSDaemon(cmd.Context(), *loader, buildInfo(), options)
		},
	}
	cmd.Flags().BoolVar(&options.MountShm, "mount-shm", false,
		"mount a tmpfs of half the memory at shm in plugin.sharing.mps.root, and that at /dev/shm of mps-daemon; needs a container")
	return cmd
}

func fieldsCommand(loader *config.Loader) *cobra.Command {
	return withReport(&cobra.Command{
		Use:   "fields",
		Short: "List the fields that metrics.fields may name, and which of them the source has",
		Long: `List the fields that metrics.fields may name, and which of them the source has.

The command polls the configured source once, without an effect on a running agent. If that fails, the column is
"unknown", and the exit code is still 0. "derived" is converted exactly from another field. A set has the fields
that the generation of names in metrics.names has.`,
	}, func(ctx context.Context) fmt.Stringer { return doctor.Fields(ctx, *loader) })
}

func doctorCommand(loader *config.Loader) *cobra.Command {
	var rootDir string
	var result doctor.Report
	cmd := withReport(&cobra.Command{
		Use:   "doctor",
		Short: "Check whether the agent can work on this node, with advice on each problem",
		Long: `Check whether the agent can work on this node, with advice on each problem.

The command changes nothing and has no effect on a running agent. The exit code is 1 if a check fails.`,
		PostRunE: func(*cobra.Command, []string) error { return result.Err() },
	}, func(ctx context.Context) fmt.Stringer {
		result = doctor.Diagnose(ctx, *loader, rootDir, version)
		return result
	})
	cmd.Flags().StringVar(&rootDir, "root", "/", "the node's root directory, if it is mounted in a container")
	return cmd
}

// buildInfo describes this binary.
func buildInfo() agent.Build { return agent.ReadBuild(version, revision) }
