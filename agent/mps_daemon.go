package agent

import (
	"cmp"
	"context"
	"os"
	"os/signal"
	"syscall"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// MPSDaemonOptions are the options of the command mps-daemon.
type MPSDaemonOptions struct {
	MountShm bool // mount what the daemons and their clients have at /dev/shm
}

// RunMPSDaemon loads the configuration and runs MPS control daemons until ctx ends. It reads the configuration once: which daemons
// run is up to the agent.
func RunMPSDaemon(ctx context.Context, loader config.Loader, build Build, o MPSDaemonOptions) error {
	// The log may lose its reader. To ignore the signal would make the daemons ignore it too.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	c, rejection, err := loader.LoadOrLastGood()
	if err != nil {
		return err
	}
	log, sink := newLogger(os.Stderr, c.Log, zap.NewAtomicLevelAt(logLevel(c.Log)))
	defer func() { _ = sink.Close() }() // there is nowhere to report that the log cannot be written
	log = log.Named("mps-daemon")
	log.Info("starting", zap.String("version", build.Version), zap.String("revision", build.Revision),
		zap.String("config", cmp.Or(loader.Path(), "none: defaults")), zap.String("root", c.Plugin.Sharing.MPS.Root))
	if rejection != nil {
		log.Error("invalid configuration; using the last good one", zap.Error(rejection.Err), zap.Time("since", rejection.Since))
	}
	sharing := c.Plugin.Sharing.MPS
	s := mps.Supervisor{Root: mps.Root(sharing.Root), Control: sharing.Control, Version: build.Version, MountShm: o.MountShm, Log: log}
	if c.Source.Resolved() != config.ModeSim {
		s.ComputeModes = &mps.ComputeModes{Get: nvml.ComputeMode, Set: nvml.SetComputeMode}
	}
	err = s.Run(ctx)
	log.Info("stopped")
	return err
}
