package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, text := range []string{
		"log: {level: debug}", "---\nlog: {level: debug}\n...\n", "log: {level: debug}\n---\n# nothing\n---\n",
		"", "# nothing", "---\n---\n",
	} {
		tree, err := parse([]byte(text))
		want := map[bool]string{true: "map[log:map[level:debug]]", false: "map[]"}[strings.Contains(text, "log")]
		if got := fmt.Sprint(tree); err != nil || got != want {
			t.Errorf("%q: %v, %v, want %s", text, tree, err, want)
		}
	}
	for text, want := range map[string]string{
		"log: {level: debug}\n---\nplugin: {}":     "has a second document behind ---",
		"---\n# nothing\n---\nlog: {level: debug}": "has a second document behind ---",
		"log: {level: debug}\n---\n{":              "yaml: ",
		"5":                                        "is not a configuration; write sections, such as log: {level: info}",
		"[log]":                                    "is not a configuration",
		"log: {level: info}\nlog: {level: warn}":   `mapping key "log" already defined`,
		"log: {level: debug}\n---\nx: *a":          "yaml: ",
	} {
		if _, err := parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// Where a key is set wrongly is told with its error: in the last place of those that set it.
func TestOrigins(t *testing.T) {
	t.Setenv("GPU_NODE_AGENT_HEALTH_FLAP_TRIPS", "-1")
	t.Setenv("GPU_NODE_AGENT_HEALTH_STATEFILE", "here")
	t.Setenv("GPU_NODE_AGENT_PLUGIN_RESOURCE", "") // as if it were not there
	file := filepath.Join(t.TempDir(), "config.yaml")
	nvidia := filepath.Join(filepath.Dir(file), "nvidia.yaml")
	text := "sourze: {}\nhealth: {confirm: 200, temperature: 0, temprature: 1}\nsource: {mode: standalone}\n" +
		"plugin: {resource: gpu, include: [a, '-1'], nvidiaConfig: " + nvidia + "}\n"
	if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), os.WriteFile(nvidia, []byte("version: v2"), 0o600)); err != nil {
		t.Fatal(err)
	}
	l := Loader{File: file}
	_, err := l.Load()
	lines := strings.Split(fmt.Sprint(err), "\n")
	for start, end := range map[string]string{
		"sourze: unknown key":                      " (in " + file + ")",
		"health.temprature: unknown key":           "did you mean health.temperature? (in " + file + ")",
		"health.confirm: 200":                      " (in " + file + ")",
		"health.flap.trips: -1":                    " (in GPU_NODE_AGENT_HEALTH_FLAP_TRIPS)",
		"health.stateFile: ":                       " (in GPU_NODE_AGENT_HEALTH_STATEFILE)",
		"plugin.resource: ":                        " (in " + file + ")",
		"plugin.include[1]: ":                      " (in " + file + ")",
		"plugin.nvidiaConfig: " + nvidia + ": ver": "use v1",                 // which is in that file
		"source.address: ":                         "such as localhost:5555", // which nobody has set
	} {
		if !slices.ContainsFunc(lines, func(s string) bool { return strings.HasPrefix(s, start) && strings.HasSuffix(s, end) }) {
			t.Errorf("no line %s…%s in\n%v", start, end, err)
		}
	}
	if _, err := load(t, "health: {flap: {trips: 2}}", "--health.flap.trips=-2", "--health.stateFile=/s"); err == nil ||
		!strings.HasSuffix(err.Error(), "(in --health.flap.trips)") {
		t.Errorf("the flag wins: %v", err)
	}
}

// Variables of the programs that the agent takes the place of are not read, and that is told.
func TestOthersVariables(t *testing.T) {
	var c Config
	known := make(map[string]bool)
	for _, l := range leavesOf(reflect.ValueOf(&c).Elem(), "") {
		known[l.key] = true
	}
	for name, key := range othersVariables {
		if !known[key] {
			t.Errorf("%s: no key %s", name, key)
		}
	}
	notes := othersEnv([]string{
		"MIG_STRATEGY=mixed", "DEVICE_LIST_STRATEGY=envvar", "PASS_DEVICE_SPECS=", "FAIL_ON_INIT_ERROR=false", "PATH=/bin",
		"DCGM_EXPORTER_LISTEN=:9400", "DCGM_EXPORTER_SERVICE_HOST=10.0.0.1", "DCGM_EXPORTER_PORT=tcp://10.0.0.1:9400",
	}, origins{"plugin.deviceList": {"config.yaml", "[envvar]"}})
	want := []string{
		"DCGM_EXPORTER_LISTEN: is not read here; use metrics.listen or GPU_NODE_AGENT_METRICS_LISTEN",
		"MIG_STRATEGY: is not read here; use plugin.migStrategy or GPU_NODE_AGENT_PLUGIN_MIG_STRATEGY",
	}
	if !slices.Equal(notes, want) {
		t.Errorf("%q, want %q", notes, want)
	}
	t.Setenv("MIG_STRATEGY", "mixed")
	if c, err := load(t, ""); err != nil || len(c.Notes) != 1 || c.Notes[0] != want[1] || c.Plugin.MIGStrategy != "none" {
		t.Errorf("%q, %s, %v", c.Notes, c.Plugin.MIGStrategy, err)
	}
	if c, err := load(t, "plugin: {migStrategy: mixed}"); err != nil || len(c.Notes) != 0 {
		t.Errorf("with the key: %q, %v", c.Notes, err)
	}
}

// A kubeconfig that is not there is told, and ends nothing: it may come.
func TestKubeconfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	for text, want := range map[string]string{
		"":  "health.kubernetes.kubeconfig: stat " + file,
		"{": "health.kubernetes.kubeconfig: ",
		"clusters: [{name: a, cluster: {server: 'https://localhost:1'}}]\ncontexts: [{name: a, context: {cluster: a}}]\ncurrent-context: a\n": "",
	} {
		if text != "" {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c, err := load(t, "health: {kubernetes: {enabled: true, kubeconfig: "+file+"}}")
		switch {
		case err != nil:
			t.Errorf("%q: %v", text, err)
		case want == "" && len(c.Notes) > 0, want != "" && (len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], want)):
			t.Errorf("%q: notes %q, want %q", text, c.Notes, want)
		}
		if err := os.Remove(file); err != nil && text != "" {
			t.Fatal(err)
		}
	}
}

// An empty file is the defaults for an agent that starts. For one that runs it is a file that is being written.
func TestEmptyFileIsNoReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	for _, text := range []string{"", "\n \n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := (Loader{File: file}).Load(); err != nil {
			t.Errorf("%q at the start: %v", text, err)
		}
		if _, err := (Loader{File: file, Running: true}).Load(); err == nil || !strings.Contains(err.Error(), file+": is empty") {
			t.Errorf("%q at a reload: %v", text, err)
		}
	}
}
