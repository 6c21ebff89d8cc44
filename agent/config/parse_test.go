package config

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseText(t *testing.T) {
	t.Setenv("GPU_NODE_AGENT_NODE_LABELS_OUTPUT", "file") // of this process, not of the agent whose file it is
	for name, c := range map[string]struct {
		text   string
		change func(*Config)
		err    string
	}{
		"empty":           {"", func(*Config) {}, ""},
		"an empty map":    {"{}", func(*Config) {}, ""},
		"labels":          {"node: {labels: {output: api}}", func(c *Config) { c.Node.Labels.Output = "api" }, ""},
		"off of Helm":     {"node: {labels: {output: false}}", func(*Config) {}, ""},
		"another case":    {"Health: {Kubernetes: {ENABLED: true}}", func(c *Config) { c.Health.Kubernetes.Enabled = true }, ""},
		"null":            {"node: {taints: null}\nhealth:", func(*Config) {}, ""},
		"an absent file":  {"plugin: {nvidiaConfig: /absent}", func(c *Config) { c.Plugin.NVIDIAConfig = "/absent" }, ""},
		"an unknown key":  {"node: {labels: {outputs: api}}", nil, "node.labels.outputs: unknown key"},
		"a wrong value":   {"plugin: {enabled: 3}", nil, "plugin.enabled"},
		"a refused value": {"node: {labels: {output: nfd}}", nil, "node.labels.output: expected one of"},
		"no YAML":         {"node: {", nil, "line 1"},
		"a list":          {"[1]", nil, "expected sections"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Parse([]byte(c.text))
			if c.change == nil {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("error %v, want %q", err, c.err)
				}
				return
			}
			want := DefaultConfig()
			c.change(&want)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%v; %+v", err, got.Node)
			}
		})
	}
}
