package agent

import (
	"context"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestPropertiesOfSource(t *testing.T) {
	up := health.Source{Status: health.SourceUp}
	for name, test := range map[string]struct {
		mode, address string
		source        *health.Source // nil before the first snapshot
		read          bool
	}{
		"embedded engine":    {config.ModeEmbedded, "", &up, true},
		"engine of the node": {config.ModeStandalone, "localhost:5555", &up, true},
		"another host":       {config.ModeStandalone, "10.0.0.1:5555", &up, false},
		"simulated":          {config.ModeSim, "", &up, false},
		"no snapshot":        {config.ModeEmbedded, "", nil, false},
		"source down":        {config.ModeEmbedded, "", &health.Source{Status: health.SourceDown}, false},
		"detached": {
			config.ModeEmbedded, "", &health.Source{Status: health.SourceUp, Detachment: health.Detachment{Since: time.Now()}},
			false,
		},
	} {
		var source health.Latest[sourceConfig]
		var snapshots health.Latest[health.Snapshot]
		c := sourceConfig{SourceConfig: config.DefaultConfig().Source}
		c.Mode, c.Address = test.mode, test.address
		source.Store(&c)
		if test.source != nil {
			snapshots.Store(&health.Snapshot{Source: *test.source})
		}
		want := map[health.DeviceID]*health.Properties{"GPU-0": {}}
		got := propertiesOf(&source, &snapshots, func(_ context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
			if len(devices) != 1 {
				t.Errorf("%s: %d devices", name, len(devices))
			}
			return want
		})(t.Context(), []health.Device{{ID: "GPU-0"}})
		if (len(got) == 1) != test.read {
			t.Errorf("%s: %v, want a reading: %v", name, got, test.read)
		}
	}
}
