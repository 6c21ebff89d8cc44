package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

var update = flag.Bool("update", false, "write the golden report anew")

// files are a node's: a text is a file's content, one that begins with "->" a link, "/" a directory.
type files map[string]string

// with returns these files and others; an empty text takes one away.
func (f files) with(others files) files {
	all := files{}
	for _, from := range []files{f, others} {
		for name, text := range from {
			if all[name] = text; text == "" {
				delete(all, name)
			}
		}
	}
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

const moduleText = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)  Tue Sep 23 10:11:41 UTC 2025\n" +
	"GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"

// goodNode has two GPUs, and all that they need.
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
		// The GPU's own sound device has the same vendor.
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

// goodReading is what DCGM says of the good node.
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
		r.Devices = append(r.Devices, health.Device{ID: health.DeviceID(fmt.Sprint("MIG-", gi)), Parent: "GPU-0", Kind: health.KindMIG, Profile: profile, GI: gi})
	}
	return r
}

func goodDoctor(h host, loader config.Loader, r *health.Reading) doctor {
	return doctor{
		loader: loader, host: h, engine: "unix:///nonexistent/engine.sock",
		library: func() (string, error) { return "/usr/lib/libdcgm.so.4", nil },
		survey: func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error) {
			return r, nil, nil
		},
	}
}

// wanted is a line as a test writes it: status, and parts of what is found and of the fix.
type wanted struct {
	status     CheckStatus
	found, fix string
}

func expect(t *testing.T, got []Check, want ...wanted) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d lines, want %d:\n%s", len(got), len(want), Report{Checks: got})
		return
	}
	for i, w := range want {
		g := got[i]
		if g.Status != w.status || !strings.Contains(g.Found, w.found) || !strings.Contains(g.Fix, w.fix) || (w.fix == "") != (g.Fix == "") {
			t.Errorf("line %d: got %q %q, fix %q; want %q %q, fix %q", i, g.Status, g.Found, g.Fix, w.status, w.found, w.fix)
		}
	}
}

func TestDoctorOnAGoodNode(t *testing.T) {
	kubelet := agenttest.SocketDir(t)
	k, err := kubelettest.Start(kubelet)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	file := filepath.Join(kubelet, "config.yaml")
	text := fmt.Sprintf("plugin: {kubeletDir: %[1]s}\nhealth: {stateFile: %[1]s/state.json, socket: ''}\nmetrics: {listen: '127.0.0.1:0'}\n", kubelet)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d := goodDoctor(goodNode().with(files{"/dev/char/195:1": ""}).root(t), config.Loader{File: file}, migReading())
	report := d.run(t.Context())
	if !report.OK || report.Err() != nil {
		t.Errorf("not good: %v", report.Err())
	}

	got := strings.NewReplacer(kubelet, "/var/lib/kubelet").Replace(report.String())
	const golden = "testdata/report.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the report differs from %s (go test ./agent/doctor -update):\n%s", golden, got)
	}

	text, err = report.JSON()
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal([]byte(text), &back); err != nil || !reflect.DeepEqual(back, report) {
		t.Errorf("the JSON says another thing: %v\n%s", err, text)
	}
	for _, key := range []string{`"checks"`, `"name"`, `"status"`, `"found"`, `"fix"`, `"ok": true`} {
		if !strings.Contains(text, key) {
			t.Errorf("the JSON lacks %s:\n%s", key, text)
		}
	}
}

func TestDoctorNamesWhatFails(t *testing.T) {
	r := Report{Checks: []Check{{Name: "a", Status: CheckFail}, {Name: "a", Status: CheckFail}, {Name: "b"}, {Name: "c", Status: CheckFail}}}
	if err := r.Err(); err == nil || !strings.HasSuffix(err.Error(), "see a, c") {
		t.Errorf("got %v", err)
	}
}

func TestDoctorOnABadConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("source: {mode: x, intervall: 1s}"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, checks := doctor{loader: config.Loader{File: file}}.configuration()
	expect(t, checks,
		wanted{CheckFail, "the lines below are for the defaults", "correct"},
		wanted{CheckFail, "source.intervall: unknown key", "did you mean source.interval?"},
		wanted{CheckFail, `source.mode: "x" is not known`, "use one of auto"})
	if c.Validate() != nil {
		t.Error("not the defaults")
	}
}

func TestDoctorSource(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	const nobody = "unix:///nonexistent/engine.sock"
	missing := errors.New("libdcgm.so.4 cannot be loaded: no such file; install it")
	lost := migReading()
	lost.Samples[1].Presence = health.Lost
	for name, c := range map[string]struct {
		address    string
		libraryErr error
		surveyErr  error
		reading    *health.Reading
		want       []wanted
	}{
		"all well":   {"", nil, nil, goodReading(), []wanted{{CheckOK, "4.6.0 in /usr/lib/libdcgm.so.4", ""}, {CheckInfo, "none is needed", ""}, {CheckOK, "2 GPUs, NVIDIA H100 80GB HBM3, driver 580.95.05, CUDA 13.0", ""}}},
		"no library": {"", missing, nil, nil, []wanted{{CheckFail, "no such file", "install it"}, {CheckInfo, "none", ""}, {CheckInfo, "not tried", ""}}},
		"an engine":  {listener.Addr().String(), nil, nil, goodReading(), []wanted{{CheckOK, "4.6.0", ""}, {CheckOK, "answers at 127", ""}, {CheckOK, "2 GPUs", ""}}},
		"no engine":  {nobody, nil, nil, goodReading(), []wanted{{CheckOK, "unknown version", ""}, {CheckFail, "nobody answers", "start nv-hostengine"}, {CheckInfo, "not tried without the host engine", ""}}},
		"no NVML": {
			"", nil, errors.New("start DCGM in this process: DCGM initialization error"), nil,
			[]wanted{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckFail, "initialization error", "nvidia-smi"}},
		},
		"blind":   {"", nil, errors.New("DCGM has gone blind; restart its host engine"), nil, []wanted{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckFail, "blind", "restart its host engine"}}},
		"no GPUs": {"", nil, nil, &health.Reading{}, []wanted{{CheckOK, "", ""}, {CheckInfo, "", ""}, {CheckFail, "no GPU", "NVIDIA_VISIBLE_DEVICES"}}},
	} {
		t.Run(name, func(t *testing.T) {
			d := goodDoctor("/nonexistent", config.Loader{}, c.reading)
			if c.libraryErr != nil {
				d.library = func() (string, error) { return "", c.libraryErr }
			}
			d.survey = func(_ context.Context, dc dcgm.Config, _ *zap.Logger) (*health.Reading, []health.Field, error) {
				if dc.Address != c.address || len(dc.Fields) > 0 {
					t.Errorf("asked %q for the fields %v", dc.Address, dc.Fields)
				}
				return c.reading, nil, c.surveyErr
			}
			source := config.DefaultConfig().Source
			source.Address = c.address
			expect(t, d.probe(t.Context(), source).checks(), c.want...)
		})
	}
}

// A hung DCGM costs no more than its limit, and the rest of the report is there.
func TestDoctorDoesNotHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		defer close(stuck)
		d := goodDoctor("/nonexistent", config.Loader{}, nil)
		d.survey = func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error) {
			<-stuck
			return nil, nil, errors.New("late")
		}
		begin := time.Now()
		checks := d.probe(t.Context(), config.DefaultConfig().Source).checks()
		if took := time.Since(begin); took != dcgmLimit {
			t.Errorf("took %v", took)
		}
		expect(t, checks, wanted{CheckOK, "", ""}, wanted{CheckInfo, "", ""}, wanted{CheckFail, "does not answer within 30s", "dmesg"})

		got := runSteps(t.Context(), []step{
			{"stuck", func(context.Context) []Check { <-stuck; return nil }},
			{"good", simulated},
		})
		expect(t, got, wanted{CheckWarn, "no answer within 5s", "dmesg"}, wanted{CheckInfo, "simulated", ""})
		if names := []string{got[0].Name, got[1].Name}; !slices.Equal(names, []string{"stuck", "good"}) {
			t.Errorf("names %q", names)
		}
	})
}

// TestDoctorWhenOff: what only a device plugin needs is not missed.
func TestDoctorWhenOff(t *testing.T) {
	dir := agenttest.SocketDir(t)
	file := filepath.Join(dir, "config.yaml")
	text := fmt.Sprintf("plugin: {kubeletDir: %[1]s, enabled: false, deviceList: [cdi-cri]}\n"+
		"health: {stateFile: %[1]s/state.json, socket: ''}\nmetrics: {listen: '127.0.0.1:0'}\n", dir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	report := goodDoctor(goodNode().root(t), config.Loader{File: file}, goodReading()).run(t.Context())
	var off, missed []string
	for _, c := range report.Checks {
		switch {
		case strings.Contains(c.Found, "not needed: the plugin is off (plugin.enabled)"):
			off = append(off, c.Name)
		case c.Status != CheckOK && c.Status != CheckInfo:
			missed = append(missed, c.Name)
		}
	}
	if want := []string{"container runtime", "CDI specs", "kubelet"}; !slices.Equal(off, want) || !report.OK {
		t.Errorf("not needed: %v, want %v:\n%s", off, want, report)
	}
	// Metrics have no pods without it.
	if !slices.Equal(missed, []string{"pod resources"}) {
		t.Errorf("missed: %v:\n%s", missed, report)
	}
}
