package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Commands returns the subcommands that talk to a running agent.
func Commands(loader *config.Loader) []*cobra.Command {
	return []*cobra.Command{statusCommand(loader), simCommand(loader), clearCommand(loader), detachCommand(loader), attachCommand(loader)}
}

// speaking makes cmd one that asks the agent something on its socket, for at most that long, and prints what it says.
func speaking(cmd *cobra.Command, loader *config.Loader, within time.Duration, say func(ctx context.Context, socket string) (string, error)) *cobra.Command {
	var socket string
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if socket == "" {
			c, err := loader.Load()
			if err != nil {
				return err
			}
			socket = c.Health.Socket
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), within)
		defer cancel()
		text, err := say(ctx, socket)
		if text != "" {
			_, printErr := fmt.Fprintln(cmd.OutOrStdout(), text)
			err = cmp.Or(err, printErr)
		}
		return err
	}
	cmd.Flags().StringVar(&socket, "socket", "", "socket of the agent (default: health.socket of its configuration)")
	return cmd
}

func clearCommand(loader *config.Loader) *cobra.Command {
	var c Clear
	cmd := speaking(&cobra.Command{
		Use:   "clear",
		Short: "Tell the agent that a GPU is well again",
		Long: `Tell the agent that a GPU is well again: an operator's word, for root only.

What the newest measurement shows to stand is not cleared: a GPU that is lost stays so until it is back. Neither is what
was decided: cordoned ends with health.cordon. All that stands on it afterwards is printed.`,
		Example: `  gpu-node-agent clear --gpu GPU-6f1a1b2c-…
  gpu-node-agent clear --gpu 1:0 --cause xid-94`,
		PreRunE: func(*cobra.Command, []string) error {
			if c.Device == "" {
				return errors.New("--gpu is not set: use a UUID, an index such as 3 or 3:0 (a MIG device), or a PCI bus id, as gpu-node-agent status shows them")
			}
			return nil
		},
	}, loader, 10*time.Second, func(ctx context.Context, socket string) (string, error) {
		answer, err := ask[Cleared](ctx, socket, question{Clear: &c})
		if err != nil {
			return "", err
		}
		return answer.text(), nil
	})
	cmd.Flags().StringVar((*string)(&c.Device), "gpu", "", "the device: a UUID, an index such as 3 or 3:0 (a MIG device), or a PCI bus id")
	cmd.Flags().StringVar(&c.Cause, "cause", "", "the finding to clear, such as xid-79 (default: all)")
	return cmd
}

func detachCommand(loader *config.Loader) *cobra.Command {
	var d Detach
	cmd := speaking(&cobra.Command{
		Use:   "detach",
		Short: "Have the agent let go of the GPUs' driver: for a reset, another MIG mode, another driver",
		Long: `Have the agent let go of the GPUs' driver, so that a GPU can be reset (nvidia-smi -r), its MIG mode changed, or the
driver unloaded, without an end of the agent: an operator's word, for root only.

All GPUs of the node are kept from new pods meanwhile. It returns when the driver is let go of, and fails if it is not.
Said again it says how it is, and the time counts from then.`,
		Example: `  gpu-node-agent detach && nvidia-smi -r -i 3; gpu-node-agent attach
  gpu-node-agent detach --for 2h`,
	}, loader, driverWithin+10*time.Second, func(ctx context.Context, socket string) (string, error) {
		if _, err := d.duration(); err != nil {
			return "", fmt.Errorf("--%w", err)
		}
		answer, err := ask[Detached](ctx, socket, question{Detach: &d})
		if err != nil {
			return "", err
		}
		return answer.text(), answer.err()
	})
	cmd.Flags().StringVar(&d.For, "for", DefaultDetach.String(), "after which time the agent takes the driver back by itself, 1s to 24h")
	cmd.Flags().BoolVar(&d.Force, "force", false, "let go although pods hold GPUs, or the kubelet does not say whether they do")
	return cmd
}

func attachCommand(loader *config.Loader) *cobra.Command {
	return speaking(&cobra.Command{
		Use:   "attach",
		Short: "Have the agent take the GPUs' driver back after detach",
		Long: `Have the agent take the GPUs' driver back after detach: an operator's word, for root only.

It returns when the GPUs are measured again, and fails if they are not: the agent then tries again by itself.`,
	}, loader, driverWithin+10*time.Second, func(ctx context.Context, socket string) (string, error) {
		answer, err := ask[Attached](ctx, socket, question{Attach: new(Attach)})
		if err != nil {
			return "", err
		}
		return answer.text(), answer.err()
	})
}

func (d Detached) text() string {
	since := d.Since.Format(time.RFC3339)
	first := "the driver is let go of since " + since
	if d.Already {
		first = "the driver was let go of already, since " + since
	}
	if len(d.Open) == 0 && d.Unknown == "" {
		first += "; the agent has no file of it open"
	}
	lines := []string{first, fmt.Sprintf("the agent takes it back at %s, or when you say: gpu-node-agent attach", d.Until.Format(time.RFC3339))}
	if d.Engine != "" {
		lines = append(lines, fmt.Sprintf("the host engine at %s was not asked, for there was no connection: stop it if it runs", d.Engine))
	}
	return strings.Join(lines, "\n")
}

// err is what keeps the driver from being let go of, as far as the agent sees.
func (d Detached) err() error {
	switch {
	case d.Unknown != "":
		return fmt.Errorf("whether the agent has files of the driver open is not known: %s", d.Unknown)
	case len(d.Open) > 0:
		return fmt.Errorf("the agent's process still has %s open: what you want will fail; say attach, and delete the agent's pod instead",
			strings.Join(d.Open, ", "))
	}
	return nil
}

func (a Attached) text() string {
	text := "the driver is back, and the GPUs are measured"
	switch {
	case a.Source != health.SourceUp.String():
		return ""
	case a.Already:
		text = "the driver was not let go of; the GPUs are measured"
	}
	for _, s := range a.Standing {
		text += fmt.Sprintf("\nGPU %d still has %s, and no reset of it was seen; if it was reset, say: gpu-node-agent clear --gpu %s --cause %s",
			s.GPU, s.Cause, s.Device, s.Cause)
	}
	for _, s := range a.Broken {
		text += fmt.Sprintf("\nGPU %d is unhealthy: %s; see gpu-node-agent status", s.GPU, s.Cause)
	}
	return text
}

func (a Attached) err() error {
	if a.Source == health.SourceUp.String() {
		return nil
	}
	return fmt.Errorf("the source is %s: %s; the agent tries again by itself, see gpu-node-agent status", a.Source, a.Error)
}
