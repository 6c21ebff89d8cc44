package agent

import (
	"context"
	"os"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// RunMPSDaemon loads the configuration and runs MPS control daemons until ctx ends.
func RunMPSDaemon(ctx context.Context, loader config.Loader) error {
	c, err := loader.Load()
	if err != nil {
		return err
	}
	sink := newSink(os.Stderr, c.Log)
	defer func() { _ = sink.Close() }() // there is nowhere to report that the log cannot be written
	log := newLogger(sink, c.Log, zap.NewAtomicLevelAt(logLevel(c.Log)))
	s := mps.Supervisor{Root: mps.Root(c.Plugin.Sharing.MPS.Root), Log: log.Named("mps")}
	return s.Run(ctx)
}
