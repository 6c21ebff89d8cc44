package mps

import (
	"context"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Options configure a Follower. All fields are required.
type Options struct {
	Desired *health.Latest[Desired] // empty until the devices are known: then no daemon is started or stopped
	Holders func() podresources.Holders
	Log     *zap.Logger
}

// Follower is the agent's part: it configures and judges the daemons.
type Follower struct {
	Options
	state health.Latest[health.MPSState]
}

// NewFollower returns a follower, which does nothing before Run.
func NewFollower(o Options) *Follower { return &Follower{Options: o} }

// State returns the state of all daemons, as the Follower saw it last.
func (f *Follower) State() *health.Latest[health.MPSState] { return &f.state }

// Run follows Desired until ctx ends. The daemons continue then, unless the cause of ctx's end is health.ErrDetached: Run then
// stops them first.
func (f *Follower) Run(ctx context.Context) { <-ctx.Done() }
