package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

// files are the files of a node by path: the content, a link target after "->", or "/" for a directory.
type files map[string]string

// with returns these files and others. An empty content removes a file.
func (f files) with(others files) files {
	all := maps.Clone(f)
	maps.Copy(all, others)
	maps.DeleteFunc(all, func(_, text string) bool { return text == "" })
	return all
}

func (f files) root(t *testing.T) host {
	t.Helper()
	root := t.TempDir()
	for name, text := range f {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		target, isLink := strings.CutPrefix(text, "->")
		switch {
		case err != nil:
		case isLink:
			err = os.Symlink(target, path)
		case text == "/":
			err = os.MkdirAll(path, 0o700)
		default:
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return host(root)
}

const moduleText = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)  Tue Sep 23 10:11:41 UTC " +
	"2025\n" +
	"GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"

// goodNode returns the files of a node with two GPUs on which every check succeeds.
func goodNode() files {
	f := files{
		"/proc/driver/nvidia/version":                 moduleText,
		"/sys/module/nvidia/version":                  "580.95.05\n",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->libnvidia-ml.so.580.95.05",
		"/dev/nvidiactl":                              "node", "/dev/nvidia-uvm": "node",
		"/dev/char/195:255":                 "->../nvidiactl",
		"/usr/bin/nvidia-container-runtime": "program",
		"/usr/bin/nvidia-ctk":               "program",
		"/etc/containerd/config.toml": "version = 2\n[plugins.cri.containerd]\n  default_runtime_name = \"nvidia\"\n" +
			"  [plugins.cri.containerd.runtimes.nvidia]\n",
		"/sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
		"/sys/bus/pci/devices/0000:00:02.0/class":  "0x030000\n",
		// The GPU's audio device has the same vendor.
		"/sys/bus/pci/devices/0000:1b:00.1/vendor": "0x10de\n",
		"/sys/bus/pci/devices/0000:1b:00.1/class":  "0x040300\n",
	}
	for i, id := range []string{"0000:1b:00.0", "0000:1c:00.0"} {
		f["/sys/bus/pci/devices/"+id+"/vendor"] = "0x10de\n"
		f["/sys/bus/pci/devices/"+id+"/class"] = "0x030200\n"
		f["/sys/bus/pci/devices/"+id+"/driver"] = "->../../../bus/pci/drivers/nvidia"
		f["/proc/driver/nvidia/gpus/"+id+"/information"] = fmt.Sprintf("Model: \t\t NVIDIA H100\nDevice Minor: \t %d\n", i)
		f[fmt.Sprint("/dev/nvidia", i)] = "node"
		f[fmt.Sprint("/dev/char/195:", i)] = fmt.Sprint("->../nvidia", i)
	}
	return f
}

// goodReading is DCGM's reading of goodNode.
func goodReading() *health.Reading {
	r := &health.Reading{Versions: health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.0"}}
	for i, id := range []string{"00000000:1B:00.0", "00000000:1C:00.0"} {
		uuid := health.DeviceID(fmt.Sprint("GPU-", i))
		r.Devices = append(r.Devices, health.Device{ID: uuid, Index: i, Minor: i, PCI: id, Model: "NVIDIA H100 80GB HBM3", GI: -1, CI: -1})
		r.Samples = append(r.Samples, health.Sample{Device: uuid, Presence: health.Present})
	}
	return r
}

func migReading() *health.Reading {
	r := goodReading()
	r.Devices[0].MIGMode = true
	for gi, profile := range []string{"1g.10gb", "3g.40gb", "1g.10gb"} {
		r.Devices = append(r.Devices, health.Device{
			ID: health.DeviceID(fmt.Sprint("MIG-", gi)), Parent: "GPU-0", Kind: health.KindMIG,
			Profile: profile, GI: gi,
		})
	}
	return r
}

func goodDoctor(h host, loader config.Loader, r *health.Reading) doctor {
	return doctor{
		loader: loader, host: h, engine: "unix:///nonexistent/engine.sock",
		library: func() (string, error) { return "/usr/lib/libdcgm.so.4", nil },
		nvml:    func() (string, error) { return "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", nil },
		survey: func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error) {
			return r, nil, nil
		},
	}
}

// want is an expected check: its status, and parts of found and fix. An empty fix means none.
type want struct {
	status     CheckStatus
	found, fix string
}

func expect(t *testing.T, got []Check, wants ...want) {
	t.Helper()
	if len(got) != len(wants) {
		t.Errorf("%d checks, want %d:\n%s", len(got), len(wants), Report{Checks: got})
		return
	}
	for i, w := range wants {
		g := got[i]
		if g.Status != w.status || !strings.Contains(g.Found, w.found) || !strings.Contains(g.Fix, w.fix) || (w.fix == "") != (g.Fix == "") {
			t.Errorf("check %d: got %q %q, fix %q; want %q %q, fix %q", i, g.Status, g.Found, g.Fix, w.status, w.found, w.fix)
		}
	}
}

func TestReportOfGoodNode(t *testing.T) {
	kubelet := agenttest.SocketDir(t)
	agenttest.StartKubelet(t, kubelet)
	file := agenttest.WriteFile(t, kubelet, "config.yaml",
		fmt.Sprintf("plugin: {kubeletDir: %[1]s}\nhealth: {socket: ''}\nmetrics: {listen: '127.0.0.1:0'}\n",
			kubelet))
	d := goodDoctor(goodNode().with(files{"/dev/char/195:1": ""}).root(t), config.Loader{File: file, StateDir: kubelet}, migReading())
	report := d.run(t.Context())
	if !report.OK || report.Err() != nil {
		t.Errorf("failed: %v", report.Err())
	}

	golden.Check(t, "testdata/report.txt", strings.ReplaceAll(report.String(), kubelet, "/var/lib/kubelet"))

	document, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(document, &back); err != nil || !reflect.DeepEqual(back, report) {
		t.Errorf("the JSON differs: %v\n%s", err, document)
	}
	for _, key := range []string{`"checks"`, `"name"`, `"status"`, `"found"`, `"fix"`, `"ok": true`} {
		if !strings.Contains(string(document), key) {
			t.Errorf("the JSON lacks %s:\n%s", key, document)
		}
	}
}

func TestReportErrorNamesFailedChecks(t *testing.T) {
	r := Report{Checks: []Check{{Name: "a", Status: CheckFail}, {Name: "a", Status: CheckFail}, {Name: "b"}, {Name: "c", Status: CheckFail}}}
	if err := r.Err(); err == nil || !strings.HasSuffix(err.Error(), ": a, c") {
		t.Errorf("got %v", err)
	}
}

func TestCheckConfigurationListsErrors(t *testing.T) {
	dir := t.TempDir()
	file := agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: x, intervall: 1s}\n")
	c, checks := doctor{loader: config.Loader{File: file, StateDir: dir}}.checkConfiguration()
	expect(t, checks,
		want{CheckFail, file, "correct"},
		want{CheckFail, "source.intervall: ", "source.interval?"},
		want{CheckFail, `source.mode: `, "correct"})
	if c.Validate() != nil {
		t.Error("not the defaults")
	}
}

// With a last good configuration the other checks use it.
func TestCheckConfigurationUsesLastGood(t *testing.T) {
	dir := t.TempDir()
	file := agenttest.WriteFile(t, dir, "config.yaml", "health: {temperature: 77}")
	loader := config.Loader{File: file, StateDir: dir}
	c, err := loader.Load()
	if err != nil {
		t.Fatal(err)
	}
	saved := agenttest.WriteFile(t, dir, "last-good-config.json", string(c.LastGood))
	agenttest.WriteFile(t, dir, "config.yaml", "health: {temperature: hot}")
	c, checks := doctor{loader: loader}.checkConfiguration()
	expect(t, checks, want{CheckFail, saved, "last good"}, want{CheckFail, "health.temperature: ", "correct"})
	if c.Health.Temperature != 77 {
		t.Errorf("%v °C", c.Health.Temperature)
	}
}

func TestCheckSource(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	const noEngine = "unix:///nonexistent/engine.sock"
	missing := errors.New("libdcgm.so.4 cannot be loaded: no such file; install it")
	lost := migReading()
	lost.Samples[1].Presence = health.Lost
	withChecks := func(engine string, checks health.Checks) *health.Reading {
		r := goodReading()
		r.Versions.Engine, r.Checks = engine, checks
		return r
	}
	for name, c := range map[string]struct {
		address    string
		libraryErr error
		surveyErr  error
		reading    *health.Reading
		want       []want
	}{
		"all well": {"", nil, nil, goodReading(), []want{
			{CheckOK, "4.6.0 in /usr/lib/libdcgm.so.4", ""},
			{CheckInfo, noEngine, ""},
			{CheckOK, "2 GPUs, NVIDIA H100 80GB HBM3, driver 580.95.05, CUDA 13.0", ""},
		}},
		"no library": {"", missing, nil, nil, []want{
			{CheckFail, "no such file", "install it"},
			{CheckInfo, noEngine, ""},
			{CheckInfo, "libdcgm", ""},
		}},
		"an engine": {
			listener.Addr().String(), nil, nil, goodReading(),
			[]want{{CheckOK, "4.6.0", ""}, {CheckOK, listener.Addr().String(), ""}, {CheckOK, "2 GPUs", ""}},
		},
		"no engine": {noEngine, nil, nil, goodReading(), []want{
			{CheckOK, "", ""},
			{CheckFail, "no such file", "nv-hostengine"},
			{CheckInfo, "host engine", ""},
		}},
		"no NVML": {
			"", nil, errors.New("start DCGM in this process: DCGM initialization error"), nil,
			[]want{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckFail, "initialization error", "nvidia-smi"}},
		},
		"advice in the error": {
			"", nil, errors.New("no fields; restart its host engine"), nil,
			[]want{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckFail, "no fields", "restart its host engine"}},
		},
		"checks work": {
			"", nil, nil, withChecks("", health.Checks{Status: health.ChecksUp}),
			[]want{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckOK, "2 GPUs", ""}, {CheckOK, "", ""}},
		},
		"checks off": {
			"", nil, nil, withChecks("", health.Checks{Status: health.ChecksOff}),
			[]want{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckOK, "2 GPUs", ""}, {CheckInfo, "source.healthSystems", ""}},
		},
		"checks down, versions differ": {
			listener.Addr().String(), nil, nil,
			withChecks("4.7.0", health.Checks{Status: health.ChecksDown, Err: "version mismatch; install the same"}),
			[]want{
				{CheckOK, "", ""},
				{CheckWarn, "4.7.0", "source.address"},
				{CheckOK, "2 GPUs", ""},
				{CheckWarn, "version mismatch", "install the same"},
			},
		},
		"no GPUs": {"", nil, nil, &health.Reading{}, []want{
			{CheckOK, "", ""},
			{CheckInfo, "", ""},
			{CheckFail, "libnvidia-ml.so.1", "NVIDIA_VISIBLE_DEVICES"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := goodDoctor("/nonexistent", config.Loader{}, c.reading)
			if c.libraryErr != nil {
				d.library = func() (string, error) { return "", c.libraryErr }
			}
			d.survey = func(_ context.Context, dc dcgm.Config, _ *zap.Logger) (*health.Reading, []health.Field, error) {
				if dc.Address != c.address || len(dc.Fields) > 0 || !slices.Equal(dc.HealthSystems, []string{dcgm.AllHealthSystems}) {
					t.Errorf("polled %q for the fields %v and the health systems %v", dc.Address, dc.Fields, dc.HealthSystems)
				}
				return c.reading, nil, c.surveyErr
			}
			source := config.DefaultConfig().Source
			source.Address = c.address
			expect(t, d.surveyDCGM(t.Context(), source).checks(), c.want...)
		})
	}
}

// A check that hangs ends with its timeout, and the other checks are reported.
func TestHungCheckTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		defer close(stuck)
		d := goodDoctor("/nonexistent", config.Loader{}, nil)
		d.survey = func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error) {
			<-stuck
			return nil, nil, errors.New("too late")
		}
		begin := time.Now()
		checks := d.surveyDCGM(t.Context(), config.DefaultConfig().Source).checks()
		if took := time.Since(begin); took != dcgmTimeout {
			t.Errorf("took %v", took)
		}
		expect(t, checks, want{CheckOK, "", ""}, want{CheckInfo, "", ""}, want{CheckFail, "30s", "dmesg"})

		got := runSteps(t.Context(), []step{
			{"stuck", func(context.Context) []Check { <-stuck; return nil }},
			{"good", simulated},
		})
		expect(t, got, want{CheckWarn, "5s", "dmesg"}, want{CheckInfo, "simulated", ""})
		if names := []string{got[0].Name, got[1].Name}; !slices.Equal(names, []string{"stuck", "good"}) {
			t.Errorf("names %q", names)
		}
	})
}

// With plugin.enabled false, the checks of what only the plugin needs are skipped.
func TestPluginChecksAreSkippedWhenOff(t *testing.T) {
	dir := agenttest.SocketDir(t)
	file := agenttest.WriteFile(t, dir, "config.yaml", fmt.Sprintf("plugin: {kubeletDir: %[1]s, enabled: false, deviceList: [cdi-cri]}\n"+
		"health: {socket: ''}\nmetrics: {listen: '127.0.0.1:0'}\n", dir))
	report := goodDoctor(goodNode().root(t), config.Loader{File: file, StateDir: dir}, goodReading()).run(t.Context())
	var skipped, failed []string
	for _, c := range report.Checks {
		switch {
		case c.Status == CheckInfo && strings.Contains(c.Found, "plugin.enabled"):
			skipped = append(skipped, c.Name)
		case c.Status != CheckOK && c.Status != CheckInfo:
			failed = append(failed, c.Name)
		}
	}
	if want := []string{"container runtime", "CDI specs", "kubelet", "other plugins"}; !slices.Equal(skipped, want) || !report.OK {
		t.Errorf("skipped %v, want %v:\n%s", skipped, want, report)
	}
	// The metrics need it for the pods.
	if !slices.Equal(failed, []string{"pod resources"}) {
		t.Errorf("failed: %v:\n%s", failed, report)
	}
}
