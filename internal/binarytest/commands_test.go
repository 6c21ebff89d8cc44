package binarytest

import (
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
)

// The page, the JSON and the status command show the same.
func TestStatus(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig, "NODE_NAME=node-7")
	job := p.allocate(k)
	p.sim("{gpu: 3, lost: true}")
	p.awaitPage("/", http.StatusOK, "gpu-node-agent", "<h1>node-7</h1>", "lost</strong>", job.Container.Namespace+"/"+job.Container.Pod,
		"<title>temperature: ", " in the last 15 minutes; ", `<path d="M`)
	p.awaitPage("/api/v1/snapshot", http.StatusOK, `"node":"node-7"`, `"cause":"lost"`, `"registered":true`)
	for output, want := range map[string]string{"table": "lost: ", "wide": "UUID", "json": `"cause":"lost"`} {
		out, code := run(t, "status", "--config", p.config(), "-o", output)
		if code != 0 || !strings.Contains(out, want) || !strings.Contains(out, job.Container.Pod) || strings.Contains(out, "\x1b") {
			t.Errorf("status -o %s: exit code %d:\n%s", output, code, out)
		}
	}
	p.stop()
	if out, code := run(t, "status", "--config", p.config()); code != 1 || !strings.Contains(out, strings.TrimPrefix(p.URL, "http://")) {
		t.Errorf("status without an agent: exit code %d: %s", code, out)
	}
}

func TestCommands(t *testing.T) {
	t.Parallel()
	p := newProcess(t, simConfig)
	p.startKubelet()
	dir := p.Dir
	good, bad := dir+"/good.yaml", dir+"/bad.yaml"
	goodErr := os.WriteFile(good, []byte("source: {mode: sim}"), 0o600)
	badErr := os.WriteFile(bad, []byte("source: {mode: x, intervall: 1s}\nplugin: {resource: gpu}"), 0o600)
	if err := errors.Join(goodErr, badErr); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want []string
	}{
		{[]string{"version"}, 0, []string{"gpu-node-agent ", "go1.", "go-dcgm v1.", "GOOS=linux"}},
		{[]string{"version", "-o", "json"}, 0, []string{`"version": "dev"`, `"modified": `, `"goDCGM": "v1.`, `"GOOS": "linux"`}},
		{[]string{"--version"}, 0, []string{"gpu-node-agent dev", "go1.", "go-dcgm v1."}},
		{[]string{"-v"}, 0, []string{"gpu-node-agent dev", "go1.", "go-dcgm v1."}},
		{[]string{"version", "-o", "xml"}, 1, []string{"--output", `"xml"`}},
		{[]string{"check-config", "--config", good}, 0, []string{"mode: sim", "kubeletDir: /var/lib/kubelet", "interval: 10s"}},
		{[]string{"check-config", "--config", good, "--source.mode=standalone"}, 1, []string{"source.address: "}},
		{[]string{"check-config", "--config", bad}, 1, []string{"source.intervall: ", "source.interval?"}},
		{[]string{"--config", bad}, 1, []string{"source.intervall"}},
		{[]string{"check-config", "--config", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"sim", "--config", good, "{gpu: 1, xid: 79}"}, 1, []string{"source.sim.control"}},
		{[]string{"sim", "--socket", "/nonexistent", "{gpu: 1, xid: 79}"}, 1, []string{"/nonexistent"}},
		{[]string{"sim", "--socket", "/nonexistent", "{gpux: 1}"}, 1, []string{"gpux"}},
		{[]string{"sim"}, 1, []string{"gpu-node-agent sim '{"}},
		{[]string{"clear"}, 1, []string{"--gpu"}},
		{[]string{"clear", "--gpu", "GPU-1", "--socket", "/nonexistent"}, 1, []string{"/nonexistent", "health.socket"}},
		{[]string{"detach", "--socket", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"detach", "--for", "48h", "--socket", "/nonexistent"}, 1, []string{"--for", `"48h"`}},
		{[]string{"detach", "GPU-1"}, 1, []string{"GPU-1"}},
		{[]string{"attach", "--socket", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"attach", "--health.socket="}, 1, []string{"health.socket"}},
		{[]string{"doctor", "--plugin.kubeletDir=/nonexistent"}, 1, []string{"libdcgm.so.4", "fail  kubelet"}}, // an installed DCGM is named too
		{
			[]string{"doctor", "--config", good, "--plugin.kubeletDir", dir, "--metrics.listen=127.0.0.1:0"},
			0,
			[]string{"info  DCGM", "ok    kubelet"},
		},
		{
			[]string{"doctor", "--config", good, "--plugin.kubeletDir", dir, "--metrics.listen=127.0.0.1:0", "-o", "json"},
			0,
			[]string{`"ok": true`},
		},
		{[]string{"doctor", "-o", "yaml"}, 1, []string{"--output", `"yaml"`}},
		{[]string{"fields", "--config", good}, 0, []string{"SUPPORTED", "DCGM_FI_DEV_SERIAL "}},
		{[]string{"fields", "--config", good, "-o", "json"}, 0, []string{`"source": "sim"`, `"supported": "yes"`, `"supported": "no"`}},
		{[]string{"fields", "--config", bad}, 0, []string{"unknown", "source.intervall"}},
		{[]string{"fields", "-o", "yaml"}, 1, []string{"--output", `"yaml"`}},
		{[]string{"status", "-o", "yaml"}, 1, []string{"--output", `"yaml"`}},
		{[]string{"dra", "slices", "-o", "yaml"}, 1, []string{"--output", `"yaml"`}},
		{[]string{"dra", "slices", "--config", good, "--health.socket="}, 1, []string{"health.socket is not set"}},
		{[]string{"nonsense"}, 1, []string{`"nonsense"`, "--help"}},
		{[]string{"stauts"}, 1, []string{`"stauts"`, "did you mean status?"}},
		{[]string{"check-config", "--source.mod", "sim"}, 1, []string{"--source.mod;", "did you mean --source.mode?"}},
		{[]string{"--metric.listen=:1"}, 1, []string{"did you mean --metrics.listen?"}},
		{[]string{"check-config", "--cordon=3"}, 1, []string{"did you mean --health.cordon?"}},
		{[]string{"status", "--cafile", "x"}, 1, []string{"did you mean --ca-file?"}},
		{[]string{"detach", "--for=", "--socket", "/nonexistent"}, 1, []string{"--for: ", "empty"}},
		{[]string{"clear", "--gpu", "3", "--cause=", "--socket", "/nonexistent"}, 1, []string{"--cause: ", "empty"}},
		{[]string{"check-config", "--config="}, 1, []string{"--config: ", "empty"}},
		{[]string{"reclaim", "--policy="}, 1, []string{"--policy: ", "empty"}},
		{[]string{"cleanup", "--context", ""}, 1, []string{"--context: ", "empty"}},
		{[]string{"check-config", "--config", good, "--state-dir="}, 0, []string{"socket:"}},
		{[]string{"check-config", "--config", good, "--state-dir=" + good}, 1, []string{"--state-dir: ", "directory"}},
		{[]string{"check-config", "--state-dir", "state"}, 1, []string{"--state-dir: ", "absolute path"}},
		{[]string{"check-config", "--config", good, "--health.cordon="}, 1, []string{"health.cordon: "}},
		{
			[]string{"check-config", "--config", good, "--metrics.fields=[deflault]"},
			1,
			[]string{"metrics.fields[0].name: ", "did you mean default?"},
		},
		{[]string{"detach", "--force=yes"}, 1, []string{"--force: ", `"yes"`, "true or false"}},
		{[]string{"check-config", "--plugin.passDeviceSpecs", "true"}, 1, []string{`"true"`, "=true"}},
		{[]string{"--plugin.enabled", "false"}, 1, []string{`"false"`, "=false"}},
		{[]string{"check-config", "--health.cordon=[3]", "--plugin.exclude=[1, 0:1]"}, 0, []string{`"3"`, `"1"`, `"0:1"`}},
		{[]string{"--help"}, 0, []string{"--config", "check-config", "--source.mode"}},
	} {
		out, code := run(t, c.args...)
		if code != c.code {
			t.Errorf("%v: exit code %d, want %d: %s", c.args, code, c.code, out)
		}
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("%v: got %q, want %q in it", c.args, out, w)
			}
		}
	}
}
