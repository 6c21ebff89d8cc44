package operator

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

func statusCommand(loader *config.Loader) *cobra.Command {
	var output, address string
	var access status.Access
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print what the running agent knows of this node's GPUs",
		Long: `Print what the running agent knows of this node's GPUs: the status page, in a terminal.

The exit code is 0 if the agent has answered, however the GPUs are. In a terminal there are colours, unless
NO_COLOR is set. This node's agent is believed if its certificate is that of metrics.webConfigFile; the password
for --user is in $` + status.PasswordEnv + `.`,
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
				address = access.Local(c.Metrics.Listen, c.Web.Certificate())
			}
			access.Password = os.Getenv(status.PasswordEnv)
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			node, text, err := status.Ask(ctx, address, access)
			if err != nil {
				return err
			}
			if output != "json" {
				text = []byte(node.Table(output == "wide", colours()))
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
