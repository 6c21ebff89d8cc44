package config

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// unknownVariables ignores what the kubelet sets for Services.
func TestUnknownVariables(t *testing.T) {
	notes := unknownVariables([]string{
		"GPU_NODE_AGENT_SOURCE_MOED=sim", "GPU_NODE_AGENT_SOURCE_MODE=sim", "GPU_NODE_AGENT_HEALTH_RECOVER_AFTER=x",
		"GPU_NODE_AGENT_HEALTH_RECOVERAFTER=x",
		"GPU_NODE_AGENT_METRICS_SERVICE_HOST=10.0.0.1", "GPU_NODE_AGENT_METRICS_PORT=tcp://10.0.0.1:9400",
		"GPU_NODE_AGENT_METRICS_PORT_9400_TCP=x",
		"GPU_NODE_AGENT_OTHER_KEY=x", "GPU_NODE_AGENT=x", "PATH=x",
	}, []string{"source.mode", "health.recoverAfter"})
	if len(notes) != 2 || !strings.HasPrefix(notes[0], "GPU_NODE_AGENT_HEALTH_RECOVERAFTER: ") ||
		!strings.HasSuffix(notes[0], "GPU_NODE_AGENT_HEALTH_RECOVER_AFTER?") || !strings.HasPrefix(notes[1], "GPU_NODE_AGENT_SOURCE_MOED: ") ||
		!strings.HasSuffix(notes[1], "GPU_NODE_AGENT_SOURCE_MODE?") {
		t.Errorf("%q", notes)
	}
}

func TestNVIDIAHealthCheckVariables(t *testing.T) {
	t.Setenv("DP_DISABLE_HEALTHCHECKS", "48,oops")
	t.Setenv("DP_ENABLE_HEALTHCHECKS", "109")
	c := mustLoad(t, "")
	if x := c.Health.XID; x.Effect(48) != catalog.EffectIgnore || x.Effect(109) != catalog.EffectUnhealthy ||
		x.Effect(79) != catalog.EffectUnhealthy {
		t.Errorf("XIDs %+v", x)
	}
	if len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "oops") {
		t.Errorf("notes %q", c.Notes)
	}
}

// The agent does not read environment variables of the programs it replaces; it notes when one is set.
func TestForeignVariables(t *testing.T) {
	keys := make(map[string]bool)
	for _, s := range new(Config).settings() {
		keys[s.key] = true
	}
	for name, key := range foreignKeys {
		if !keys[key] {
			t.Errorf("%s: no key %s", name, key)
		}
	}
	notes := foreignVariables([]string{
		"MIG_STRATEGY=mixed", "DEVICE_LIST_STRATEGY=envvar", "PASS_DEVICE_SPECS=", "FAIL_ON_INIT_ERROR=false", "PATH=/bin",
		"DCGM_EXPORTER_LISTEN=:9400", "DCGM_EXPORTER_SERVICE_HOST=10.0.0.1", "DCGM_EXPORTER_PORT=tcp://10.0.0.1:9400",
	}, origins{"plugin.deviceList": {"config.yaml", "[envvar]"}})
	if len(notes) != 2 || !strings.HasPrefix(notes[0], "DCGM_EXPORTER_LISTEN: ") ||
		!strings.Contains(notes[0], "metrics.listen or GPU_NODE_AGENT_METRICS_LISTEN") ||
		!strings.HasPrefix(notes[1], "MIG_STRATEGY: ") || !strings.Contains(notes[1],
		"plugin.migStrategy or GPU_NODE_AGENT_PLUGIN_MIG_STRATEGY") {
		t.Errorf("%q", notes)
	}
	t.Setenv("MIG_STRATEGY", "mixed")
	if c, err := load(t, ""); err != nil || len(c.Notes) != 1 || c.Notes[0] != notes[1] || c.Plugin.MIGStrategy != "none" {
		t.Errorf("%q, %s, %v", c.Notes, c.Plugin.MIGStrategy, err)
	}
	if c, err := load(t, "plugin: {migStrategy: mixed}"); err != nil || len(c.Notes) != 0 {
		t.Errorf("key set: %q, %v", c.Notes, err)
	}
}
