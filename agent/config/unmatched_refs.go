package config

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// UnmatchedRefs returns the device references of all sections that match no device of this node.
func UnmatchedRefs(h judge.Config, p plugin.Config, b health.Bindings, devices []health.DeviceState) []health.UnmatchedRefs {
	return slices.Concat(h.UnmatchedCordons(b, devices), p.UnmatchedRefs(b, devices))
}
