package operator

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
)

// plan returns what an agent with a configuration would answer, on a node on which none runs.
type plan[T any] = func(context.Context, config.Config) (T, error)

// askOrPlan asks the agent at a socket; without --socket, if no agent listens there, it returns what one would answer.
func askOrPlan[T any](cmd *cobra.Command, loader *config.Loader, socket string, req request, plan plan[T]) (T, error) {
	ctx := cmd.Context()
	configured := cmp.Or(socket, loadPartial(cmd, loader).Health.Socket)
	if configured != "" {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		answer, err := call[T](ctx, configured, req)
		absent := errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
		if socket != "" || !absent {
			return answer, err
		}
	}
	c, err := loader.Load()
	if err != nil {
		var none T
		return none, err
	}
	log.SetOutput(io.Discard) // go-dcgm logs there
	return plan(ctx, c)
}
