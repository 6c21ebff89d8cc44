package config

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Of a text that is not YAML, all valid sections are read, and the valid start of the others.
func TestParsePartial(t *testing.T) {
	const metrics, both = "metrics: {listen: ':9500'}\n", "map[log:map[level:debug] metrics:map[listen::9500]]"
	for text, want := range map[string]string{
		metrics + "log: {level: debug}\n":                       both,
		"log: {level: debug}\n" + metrics + "metrics: {x: 1}\n": both,
		"log:\n  level: debug\n\tformat: json\n" + metrics:      both,
		"log:\n  level: debug\n  format: [\n# x\n" + metrics:    both,
		"log:\n  level: debug\n  level: info\n" + metrics:       both,
		"log:\r\n  level: debug\r\n  format: }\r\n" + metrics:   both,
		metrics + "log:\n  level: debug\n  format: \"json":      both,
		metrics + "health: {\nlog: {level: debug}\n}":           both,
		"# x\n\n" + metrics + "---\nlog: {level: debug}\n":      both,
		"- log":    "map[]",
		"\xff\xfe": "map[]",
		"":         "map[]",
		metrics + "#" + strings.Repeat("x", maxPartial): "map[]",
	} {
		if got := fmt.Sprint(treeOf(parsePartial([]byte(text)))); got != want {
			t.Errorf("%.100q: %s, want %s", text, got, want)
		}
	}
}

// treeOf returns the sections of a file as values of Go.
func treeOf(sections *yaml.Node) any {
	if sections == nil {
		return map[string]any{}
	}
	return valueOf(sections)
}

// BenchmarkParsePartial reads the largest text without the end of a list that begins in its first line.
func BenchmarkParsePartial(b *testing.B) {
	text := []byte("metrics: [\n" + strings.Repeat("  {name: DCGM_FI_DEV_GPU_TEMP, help: temperature},\n", maxPartial/60))
	for b.Loop() {
		parsePartial(text)
	}
}

func TestParse(t *testing.T) {
	for _, text := range []string{
		"log: {level: debug}", "---\nlog: {level: debug}\n...\n", "log: {level: debug}\n---\n# nothing\n---\n",
		"", "# nothing", "---\n---\n",
	} {
		tree, err := parse([]byte(text))
		want := map[bool]string{true: "map[log:map[level:debug]]", false: "map[]"}[strings.Contains(text, "log")]
		if got := fmt.Sprint(treeOf(tree)); err != nil || got != want {
			t.Errorf("%q: %s, %v, want %s", text, got, err, want)
		}
	}
	if _, err := parse([]byte("log:\n\tlevel: info")); err == nil || !strings.Contains(err.Error(), "tabs") {
		t.Errorf("a tab: %v", err)
	}
	for _, text := range []string{
		"log: {level: debug}\n---\nplugin: {}", "---\n# nothing\n---\nlog: {level: debug}", "log: {level: debug}\n---\n{",
		"5", "[log]", "log: {level: info}\nlog: {level: warn}", "log: {level: debug}\n---\nx: *a",
	} {
		if tree, err := parse([]byte(text)); err == nil {
			t.Errorf("%q: %v, want an error", text, treeOf(tree))
		}
	}
}

// Each error names the file, variable or flag whose value was used.
func TestErrorsNameOrigin(t *testing.T) {
	t.Setenv("GPU_NODE_AGENT_HEALTH_FLAP_TRIPS", "-1")
	t.Setenv("GPU_NODE_AGENT_HEALTH_RECOVER_AFTER", "-1s")
	t.Setenv("GPU_NODE_AGENT_PLUGIN_RESOURCE", "") // counts as unset
	file := filepath.Join(t.TempDir(), "config.yaml")
	nvidia := filepath.Join(filepath.Dir(file), "nvidia.yaml")
	text := "sourze: {}\nhealth: {confirm: 200, temperature: 0, temprature: 1}\nsource: {mode: standalone}\n" +
		"plugin: {resource: gpu, include: [a, '-1'], nvidiaConfig: " + nvidia + "}\n"
	write(t, file, text)
	write(t, nvidia, "version: v2")
	l := Loader{File: file}
	_, err := l.Load()
	for key, origin := range map[string]string{
		"sourze": file + ", line 1", "health.temprature": file + ", line 2", "health.confirm": file, "plugin.resource": file,
		"plugin.include[1]": file,
		"health.flap.trips": "GPU_NODE_AGENT_HEALTH_FLAP_TRIPS", "health.recoverAfter": "GPU_NODE_AGENT_HEALTH_RECOVER_AFTER",
	} {
		wantError(t, "file and variables", err, key, " (in "+origin+")")
	}
	wantError(t, "unknown key", err, "health.temprature", "health.temperature?")
	for line := range strings.SplitSeq(fmt.Sprint(err), "\n") {
		// The first error is in the file that the key names, and the second key is not set.
		if (strings.HasPrefix(line, "plugin.nvidiaConfig: ") || strings.HasPrefix(line, "source.address: ")) && strings.Contains(line, "(in ") {
			t.Errorf("unexpected origin: %s", line)
		}
	}
	wantError(t, "key in another file", err, "plugin.nvidiaConfig: "+nvidia+": version")
	wantError(t, "key that is not set", err, "source.address")
	_, err = load(t, "health: {flap: {trips: 2}}", "--health.flap.trips=-2", "--health.recoverAfter=1m")
	wantError(t, "flag over variable and file", err, "health.flap.trips", "(in --health.flap.trips)")
}

// A kubeconfig that cannot be used is a note and no error: it may appear later.
func TestKubeconfigNote(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	notes := func() []string {
		return mustLoad(t, "health: {kubernetes: {enabled: true, kubeconfig: "+file+"}}").Notes
	}
	const key = "health.kubernetes.kubeconfig: "
	if n := notes(); len(n) != 1 || !strings.HasPrefix(n[0], key) || !strings.Contains(n[0], file) {
		t.Errorf("no file: %q", n)
	}
	write(t, file, "{")
	if n := notes(); len(n) != 1 || !strings.HasPrefix(n[0], key) {
		t.Errorf("invalid file: %q", n)
	}
	write(t, file, "clusters: [{name: a, cluster: {server: 'https://localhost:1'}}]\ncontexts: [{name: a, context: {cluster: "+
		"a}}]\ncurrent-context: a\n")
	if n := notes(); len(n) != 0 {
		t.Errorf("valid file: %q", n)
	}
}

// An empty file gives the defaults at the start, and is an error at a reload.
func TestEmptyFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	for _, text := range []string{"", "\n \n"} {
		write(t, file, text)
		if _, err := (Loader{File: file}).Load(); err != nil {
			t.Errorf("%q at the start: %v", text, err)
		}
		if _, err := (Loader{File: file, Running: true}).Load(); err == nil || !strings.HasPrefix(err.Error(), file+": ") {
			t.Errorf("%q at a reload: %v", text, err)
		}
	}
}
