package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// UnmatchedRefs returns a note for each key with device references that match no device of this node. If the configuration has references,
// it polls the source once, without an effect on a running agent; if that fails, the note says so.
func UnmatchedRefs(ctx context.Context, c config.Config) (notes []string) {
	all := config.UnmatchedRefs(c.Health, c.Plugin, nil, nil)
	if len(all) == 0 {
		return nil
	}
	reading, err := callWithTimeout(ctx, dcgmTimeout, func(ctx context.Context) (*health.Reading, error) {
		r, _, err := pollOnce(ctx, c.Source, nil)
		return r, err
	})
	if err != nil {
		keys := make([]string, len(all))
		for i, u := range all {
			keys[i] = u.Key
		}
		return []string{fmt.Sprintf("%s: not compared with the devices of this node: source %s: %v", strings.Join(keys, ", "),
			c.Source.Resolved(), err)}
	}
	return unmatchedRefs(c, reading)
}

func unmatchedRefs(c config.Config, r *health.Reading) (notes []string) {
	devices := make([]health.DeviceState, len(r.Devices))
	for i, d := range r.Devices {
		devices[i].Device = d
	}
	for _, u := range config.UnmatchedRefs(c.Health, c.Plugin, nil, devices) {
		notes = append(notes, u.String())
	}
	return notes
}
