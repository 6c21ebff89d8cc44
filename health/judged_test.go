package health_test

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

type samples = map[health.DeviceID]health.Sample

var gpu0, gpu1, mig0, mig1 = healthtest.GPU0, healthtest.GPU1, healthtest.MIG0, healthtest.MIG1

// judged judges a reading with the default configuration.
func judged(before []health.DeviceState, seconds int, s samples, devices ...health.Device) []health.DeviceState {
	return healthtest.Judge(judge.DefaultConfig(), before, seconds, nil, s, devices...)
}

// migXIDs returns a sample of a MIG device that reports XIDs.
func migXIDs(codes ...int) health.Sample {
	s := healthtest.Blank(health.Present)
	healthtest.XIDs(codes...)(&s)
	return s
}

func cordoning(refs ...string) judge.Config {
	c := judge.DefaultConfig()
	c.Cordon = refs
	return c
}
