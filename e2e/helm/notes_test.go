package helm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// notes returns the notes that helm install prints.
func notes(t *testing.T, args ...string) string {
	t.Helper()
	text, err := helm(t, append([]string{"install", "gna", chart, "-n", "gpu-node-agent", "--dry-run=client"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(text, "\nNOTES:\n")
	if !found {
		t.Fatalf("no notes in:\n%s", text)
	}
	return text
}

// TestNotesWidth checks that the notes fit a terminal of 80 columns.
func TestNotesWidth(t *testing.T) {
	args := [][]string{
		{"--set", "config.source.mode=sim,config.plugin.enabled=false,nodeSelector.pool=gpu,dashboards.enabled=true"},
		{"--set", "rbac.cleanupHook=false"},
		{"--set", "rbac.create=false"},
		{"--set", "config.plugin.migStrategy=mixed,sysAdmin=never,config.health.kubernetes.enabled=true,affinity=null"},
	}
	for _, file := range valuesFiles(t) {
		args = append(args, []string{"-f", file})
	}
	for _, args := range args {
		for line := range strings.Lines(notes(t, args...)) {
			if line = strings.TrimSuffix(line, "\n"); utf8.RuneCountInString(line) > 80 || strings.HasSuffix(line, " ") {
				t.Errorf("%v: line is longer than 80 columns, or ends with a space: %q", args, line)
			}
		}
	}
}

// TestNotesRecordingRules checks that the notes name the value that dashboards need, unless it is set.
func TestNotesRecordingRules(t *testing.T) {
	for set, want := range map[string]bool{
		"dashboards.enabled=true":                             true,
		"dashboards.enabled=true,prometheusRule.enabled=true": false,
		"prometheusRule.enabled=true":                         false,
		"dashboards=null":                                     false,
	} {
		if got := strings.Contains(notes(t, "--set", set), "prometheusRule.enabled"); got != want {
			t.Errorf("%s: the notes name prometheusRule.enabled: %v, want %v", set, got, want)
		}
	}
}

// TestNotesUninstall checks when the notes have the command that removes what agents left: if an agent writes something, or if the chart
// has no hook for it. The documents must have the same command. e2e/cluster checks its effect.
func TestNotesUninstall(t *testing.T) {
	const want = "gpu-node-agent cleanup --context NAME"
	for set, reason := range map[string]string{
		"service.port=9400":                                    "",
		"config.health.kubernetes.enabled=true":                "a Job\nremoves the labels",
		"nodeConfigs.a.health.kubernetes.enabled=true":         "a Job\nremoves the labels",
		"config.node.labels.output=api":                        "a Job\nremoves the labels",
		"rbac.cleanupHook=false":                               "rbac.cleanupHook is false",
		"rbac.create=false":                                    "rbac.create is false",
		"rbac.create=false,config.node.labels.output=api":      "rbac.create is false",
		"rbac.cleanupHook=false,config.node.labels.output=api": "rbac.cleanupHook is false",
	} {
		text := notes(t, "--set", set)
		if strings.Contains(text, want) != (reason != "") || !strings.Contains(text, reason) {
			t.Errorf("%s: want the command for the reason %q:\n%s", set, reason, text)
		}
	}
	for _, file := range []string{filepath.Join(chart, "README.md"), filepath.Join("..", "..", "docs", "install.md")} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), want) {
			t.Errorf("%s has no %q", file, want)
		}
	}
}
