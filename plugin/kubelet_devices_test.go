package plugin

import (
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestKubeletDevices(t *testing.T) {
	type ids = []health.DeviceID
	both, none := podresources.Allocatable{IDs: map[string][]string{gpu: {"GPU-0", "GPU-1"}, "other.com/gpu": {"GPU-7"}}},
		podresources.Allocatable{}
	for name, c := range map[string]struct {
		change           func(*Config)
		snap             *health.Snapshot
		answer           *podresources.Allocatable
		offered, counted ids
		known            bool
	}{
		"all":           {func(*Config) {}, withReserved(2), &both, ids{"GPU-0", "GPU-1"}, ids{"GPU-0", "GPU-1"}, true},
		"none counted":  {func(*Config) {}, withReserved(2), &none, ids{"GPU-0", "GPU-1"}, nil, true},
		"one unhealthy": {func(*Config) {}, with(withReserved(2), 0, health.Unhealthy), &both, ids{"GPU-1"}, ids{"GPU-0", "GPU-1"}, true},
		"excluded":      {func(c *Config) { c.Exclude = []string{"0"} }, withReserved(2), &none, ids{"GPU-1"}, nil, true},
		"shared": {
			sharedBy(2), withReserved(1), &podresources.Allocatable{IDs: map[string][]string{gpu: {"GPU-0::0", "GPU-0::1"}}},
			ids{"GPU-0", "GPU-0"},
			ids{"GPU-0", "GPU-0"},
			true,
		},
		"not asked yet":   {func(*Config) {}, withReserved(2), nil, nil, nil, false},
		"not answered":    {func(*Config) {}, withReserved(2), &podresources.Allocatable{Err: "denied"}, nil, nil, false},
		"plugin off":      {func(c *Config) { c.Enabled = false }, withReserved(2), &both, nil, nil, false},
		"nothing offered": {func(c *Config) { c.Exclude = []string{"0"} }, withReserved(1), &both, nil, nil, false},
	} {
		cfg := configured(c.change)
		p := New(&health.Latest[Config]{}, &health.Latest[health.Snapshot]{}, zap.NewNop())
		p.cfg.Store(&cfg)
		p.snapshots.Store(c.snap)
		if c.answer != nil {
			p.pods.Allocatable.Store(c.answer)
		}
		offered, counted, known := p.KubeletDevices()
		if !slices.Equal(offered, c.offered) || !slices.Equal(counted, c.counted) || known != c.known {
			t.Errorf("%s: offered %v, counted %v, known %v; want %v, %v, %v", name, offered, counted, known, c.offered, c.counted, c.known)
		}
	}
}
