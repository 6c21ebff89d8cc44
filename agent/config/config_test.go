package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func write(t testing.TB, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, text string, flags ...string) (Config, error) {
	t.Helper()
	l := Loader{File: filepath.Join(t.TempDir(), "config.yaml")}
	write(t, l.File, text)
	if len(flags) > 0 { // to create the flags is slow, and the fuzz tests need none
		l.Flags = pflag.NewFlagSet("test", pflag.ContinueOnError)
		AddFlags(l.Flags)
		if err := l.Flags.Parse(flags); err != nil {
			t.Fatal(err)
		}
	}
	return l.Load()
}

// mustLoad loads a valid configuration. It checks that the output of check-config loads as the same.
func mustLoad(t *testing.T, text string, flags ...string) Config {
	t.Helper()
	c, err := load(t, text, flags...)
	if err != nil {
		t.Fatalf("%q %q: %v", text, flags, err)
	}
	again, err := load(t, c.String())
	if err != nil || again.String() != c.String() || !reflect.DeepEqual(again.Metrics, c.Metrics) || !slices.Equal(again.Notes, c.Notes) {
		t.Errorf("loaded again as\n%s, notes %q, %v\nwant\n%s, notes %q", again, again.Notes, err, c, c.Notes)
	}
	return c
}

// wantError fails the test unless one of the joined errors starts with the key and contains all parts.
func wantError(t *testing.T, name string, err error, key string, parts ...string) {
	t.Helper()
	for line := range strings.SplitSeq(fmt.Sprint(err), "\n") {
		if strings.HasPrefix(line, key+": ") && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			return
		}
	}
	t.Errorf("%s: no error of %s with %q in\n%v", name, key, parts, err)
}

func TestConfigFileHasDefaults(t *testing.T) {
	c, err := Loader{File: "../../config.yaml"}.Load()
	if err != nil {
		t.Fatal(err)
	}
	if want := DefaultConfig(); c.String() != want.String() {
		t.Errorf("config.yaml differs from the defaults:\n%s\nwant:\n%s", c, want)
	}
	text, err := os.ReadFile("../../config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var tree map[string]any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	for _, s := range new(Config).settings() {
		at := any(tree)
		for part := range strings.SplitSeq(s.key, ".") {
			m, _ := at.(map[string]any)
			var ok bool
			if at, ok = m[part]; !ok {
				t.Errorf("config.yaml lacks %s", s.key)
				break
			}
		}
	}
}

func TestSimulationEvents(t *testing.T) {
	c := mustLoad(t, "source: {mode: sim, sim: {loop: 60s, scenario: [{at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}, "+
		"{at: 7s, gpu: 1, recoveryAction: 512}, {at: 8s, gpu: 1, recoveryAction: reset}], past: [{ago: 10s, gpu: 5, xid: 95}]}}")
	if n := len(c.Source.Sim.Scenario); n != 4 || *c.Source.Sim.Scenario[0].XID != 79 || c.Source.Sim.Scenario[0].At != 5*time.Second {
		t.Errorf("scenario %+v", c.Source.Sim.Scenario)
	} else if *c.Source.Sim.Scenario[2].RecoveryAction != "512" || *c.Source.Sim.Scenario[3].RecoveryAction != "reset" {
		t.Errorf("scenario %+v", c.Source.Sim.Scenario[2:])
	}
	if p := c.Source.Sim.Past; len(p) != 1 || p[0].Ago != 10*time.Second || *p[0].GPU != 5 || *p[0].XID != 95 {
		t.Errorf("past %+v", p)
	}
}

func TestConfigPrecedence(t *testing.T) {
	const file = "source: {mode: sim}\nmetrics: {listen: ':1'}\nhealth: {temperature: 80}"
	t.Setenv("GPU_NODE_AGENT_METRICS_LISTEN", ":2")
	t.Setenv("GPU_NODE_AGENT_PLUGIN_KUBELET_DIR", "/from/env")
	t.Setenv("GPU_NODE_AGENT_SOURCE_SIM_SCENARIO", "[{at: 1s, gpu: 0, xid: 13}]")
	t.Setenv("GPU_NODE_AGENT_SOURCE_SIM_SEED", "7")
	// The kubelet sets such variables for a Service named gpu-node-agent.
	t.Setenv("GPU_NODE_AGENT_SERVICE_HOST", "10.0.0.1")
	t.Setenv("GPU_NODE_AGENT_PORT_9400_TCP", "tcp://10.0.0.1:9400")
	c, err := load(t, file, "--metrics.listen=:3", "--health.recoverAfter=5s")
	if err != nil {
		t.Fatal(err)
	}
	for key, pair := range map[string][2]any{
		"source.mode":         {c.Source.Mode, "sim"},
		"metrics.listen":      {c.Metrics.Listen, ":3"},
		"health.temperature":  {c.Health.Temperature, 80.0},
		"health.recoverAfter": {c.Health.RecoverAfter, 5 * time.Second},
		"plugin.kubeletDir":   {c.Plugin.KubeletDir, "/from/env"},
		"plugin.resource":     {c.Plugin.Resource, "nvidia.com/gpu"},
		"sim.seed":            {c.Source.Sim.Seed, int64(7)},
		"sim.scenario":        {len(c.Source.Sim.Scenario), 1},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v, want %v", key, pair[0], pair[1])
		}
	}
}

func TestNormalizeAddress(t *testing.T) {
	for given, want := range map[string]string{
		"nvidia-dcgm":           "nvidia-dcgm:5555",
		"tcp://nvidia-dcgm":     "nvidia-dcgm:5555",
		"tcp://10.0.0.1:5556":   "10.0.0.1:5556",
		"[::1]:5555":            "[::1]:5555",
		"unix:///run/dcgm.sock": "unix:///run/dcgm.sock",
	} {
		if c, err := load(t, "source: {address: '"+given+"'}"); err != nil || c.Source.Address != want {
			t.Errorf("%s: %q, %v; want %s", given, c.Source.Address, err, want)
		}
	}
}

// A setting that another one replaces is a note.
func TestNotesOnSettingsWithoutEffect(t *testing.T) {
	list := filepath.Join(t.TempDir(), "fields.csv")
	write(t, list, "DCGM_FI_DEV_GPU_TEMP, gauge, x")
	for text, want := range map[string]string{
		"source: {mode: sim}": "", "source: {mode: sim, sim: {profile: l4-1}}": "", "source: {address: a}": "",
		"metrics: {fieldsFile: " + list + "}":                     "",
		"source: {mode: sim, address: a}":                         "source.address: a:5555 has no effect: source.mode is sim",
		"source: {sim: {profile: l4-1}}":                          "source.sim: has no effect: source.mode is not sim",
		"metrics: {fields: [optional], fieldsFile: " + list + "}": "metrics.fields: has no effect: metrics.fieldsFile replaces it",
	} {
		if c := mustLoad(t, text); strings.Join(c.Notes, "; ") != want {
			t.Errorf("%s: notes %q, want %q", text, c.Notes, want)
		}
	}
}

// A file cannot be the state directory: nothing would outlive a restart.
func TestStateDir(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, "")
	for path, want := range map[string]string{"": "", dir: "", dir + "/none": "", "state": "absolute path", file: "a directory"} {
		c, err := Loader{StateDir: path}.Load()
		if c.StateDir != path || (want == "") != (err == nil) {
			t.Errorf("%q: %q, %v", path, c.StateDir, err)
		}
		if want != "" {
			wantError(t, path, err, "--state-dir", want)
		}
	}
	if _, err := (Loader{StateDir: file, Running: true}).Load(); err != nil {
		t.Errorf("while it runs: %v", err)
	}
	if got := DefaultStateDir(); got != "/var/lib/gpu-node-agent" {
		t.Errorf("default %q", got)
	}
	for _, dir := range []string{"/elsewhere", ""} {
		t.Setenv("GPU_NODE_AGENT_STATE_DIR", dir)
		if got := DefaultStateDir(); got != dir {
			t.Errorf("%q, want %q", got, dir)
		}
	}
	if c := mustLoad(t, ""); len(c.Notes) > 0 {
		t.Errorf("notes: %q", c.Notes)
	}
}

// Only an empty list ends every series of DCGM.
func TestFieldsThatSelectNothing(t *testing.T) {
	list := filepath.Join(t.TempDir(), "fields.csv")
	for text, good := range map[string]bool{
		"": false, "DCGM_FI_DEV_GPU_TEMP, no-type, temperature": false, "DCGM_FI_DEV_SERIAL, label, serial": false,
		"nonsense\nDCGM_FI_DEV_GPU_TEMP, gauge, temperature": true,
	} {
		write(t, list, text)
		if _, err := load(t, "metrics: {fieldsFile: "+list+"}"); (err == nil) != good ||
			!good && !strings.Contains(err.Error(), "metrics.fieldsFile: "+list+": ") {
			t.Errorf("%q: %v", text, err)
		}
	}
	for text, good := range map[string]bool{
		"[]": true, "[DCGM_FI_DEV_NEWER]": false, "[DCGM_FI_DEV_SERIAL]": false,
		"[DCGM_FI_DEV_NEWER, default]": true,
	} {
		if _, err := load(t, "metrics: {fields: "+text+"}"); (err == nil) != good || !good && !strings.Contains(err.Error(), "metrics.fields: ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	type list = []string // keys, each with a part of its error after a space
	for text, want := range map[string]list{
		"plugin: {kubeletDirr: /x}":                      {"plugin.kubeletDirr plugin.kubeletDir?"},
		"sourze: {mode: sim}":                            {"sourze"},
		"source: {sim: {scenario: [{at: 1s, gpuu: 1}]}}": {"source.sim.scenario[0].gpuu"},
		"source: {sim: {scenario: [{lost: maybe}, hello, {gpu: x}]}}": {
			"source.sim.scenario[0].lost",
			"source.sim.scenario[1]", "source.sim.scenario[2].gpu",
		},
		"source.mode: sim":                                           {"source.mode source: {mode: …}"},
		"source: {mode: standalone}":                                 {"source.address standalone"},
		"source: {mode: embedded, address: 'a:1'}":                   {"source.address embedded"},
		"source: {address: 'localhost:'}":                            {`source.address "localhost:"`},
		"source: {address: 'unix://run/x'}":                          {`source.address "unix://run/x"`},
		"source: {interval: 5ms, stallAfter: 1ms}":                   {"source.interval 5ms", "source.stallAfter 1ms"},
		"source: {healthSystems: [pcie, gpu]}":                       {`source.healthSystems "gpu"`},
		"source: {healthSystems: []}":                                {"source.healthSystems [all]"},
		"source: {events: on, kernelLogPath: kmsg}":                  {`source.events "on"`, `source.kernelLogPath "kmsg"`},
		"source: {kernelLog: /dev/kmsg, kernelLogPath: ''}":          {`source.kernelLog "/dev/kmsg"`, `source.kernelLogPath ""`},
		"source: {sim: {past: [{ago: 10, gpu: 8, xid: x}]}}":         {"source.sim.past[0].ago 10", `source.sim.past[0].xid "x"`},
		"source: {sim: {past: [{gpu: 8, xid: 95}]}}":                 {"source.sim.past[0].ago 0s", "source.sim.past[0].gpu h100-8"},
		"source: {sim: {scenario: [{gpu: 1, recoveryAction: [a]}]}}": {"source.sim.scenario[0].recoveryAction [a]"},
		"health: {xid: {preset: x, warn: [0]}}":                      {`health.xid.preset "x"`, "health.xid.warn[0] 0"},
		"health: {incidents: {warn: [x]}}":                           {`health.incidents.warn[0] "x"`},
		"health: {flap: {trips: -1}, socket: here, recovery: x}":     {"health.flap.trips -1", `health.socket "here"`, `health.recovery "x"`},
		"log: {level: loud, format: xml}":                            {`log.level "loud"`, `log.format "xml"`},
		"log: nothing":                                               {`log "nothing"`},
		"source: {mode: x, sim: {profile: y}}\nhealth: {temperature: 1, interval: 1}\na: b": {
			"source.mode", "source.sim.profile",
			"health.interval", "a",
		},
		"node: {idle: {after: 30m, evidence: noProcess}}":                            {"node.idle.evidence metrics.processes.enabled"},
		"node: {labels: {output: nfd, file: gpus}}":                                  {`node.labels.output "nfd"`, `node.labels.file "gpus"`},
		"node: {taints: [{when: lost, key: -, value: '!', effect: No}]}":             {`node.taints[0].when "lost"`, `node.taints[0].key "-"`},
		"node: {taints: [{when: cordoned, key: a, value: '!', effect: NoSchedule}]}": {`node.taints[0].value "!"`},
		"node: {taints: [{when: cordoned, key: a}]}":                                 {`node.taints[0].effect ""`},
		"node: {startupTaint: a}":                                                    {"node.startupTaint KEY"},
		"node: {startupTaint: 'a=b:NoSchedule', taints: [&t {when: cordoned, key: a, effect: NoSchedule}, *t]}": {
			"node.taints[1] startupTaint", "node.taints[1] taints[0]",
		},
		"node: {taints: [{when: cordoned, key: node.kubernetes.io/unschedulable, effect: NoSchedule}]}": {
			"node.taints[0].key whose taints Kubernetes",
		},
		"node: {startupTaint: 'node.cloudprovider.kubernetes.io/uninitialized:NoSchedule'}": {"node.startupTaint whose taints Kubernetes"},
		"node: {idle: {after: -1s, evidence: none}}":                                        {"node.idle.after -1s", `node.idle.evidence "none"`},
		"metrics: {listen: nine}":                                                           {`metrics.listen "nine"`},
		"metrics: {attribution: x, window: 1s, compat: {hostnameLabel: host}}": {
			"metrics.attribution", "metrics.window",
			"metrics.compat.hostnameLabel",
		},
		"metrics: {webConfigFile: web.yaml}": {"metrics.webConfigFile web.yaml"},
		"metrics: {fieldsFile: /none.csv}":   {"metrics.fieldsFile /none.csv"},
		"metrics: {fields: [{nam: X}]}":      {"metrics.fields[0].nam"},
		"metrics: {fields: [default, defaults, Profiling]}": {
			`metrics.fields[1].name "defaults"; did you mean default?`,
			"metrics.fields[2].name profiling?",
		},
		"metrics: {fields: [DCMG_FI_DEV_GPU_TEMP, cpu, '', {name: profilin, type: gauge}]}": {
			"metrics.fields[0].name DCGM_FI_DEV_GPU_TEMP?", `metrics.fields[1].name sets default, profiling and optional`,
			`metrics.fields[2].name ""`, "metrics.fields[3].name profiling?",
		},
		"metrics: {fields: [default, {name: DCGM_FI_DEV_FB_FREE, type: gaugee}, {name: optional, help: x}]}": {
			`metrics.fields[1].type "gaugee"`, "metrics.fields[2].name set",
		},
		"metrics: {podLabels: [team, /^a, '^b', 'c.*'], podUID: maybe}": {
			`metrics.podLabels "/^a"`, `metrics.podLabels "^b"`, `metrics.podLabels "c.*"`, "metrics.podUID",
		},
		"plugin: {resource: gpu}": {"plugin.resource"},
		"plugin: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replica: 2}]}}}": {
			"plugin.sharing.timeSlicing.resources[0].replica",
		},
		"sourze: {}\nsource: {mode:sim}": {"sourze did you mean source?", "source.mode:sim mode: sim"},
		"sharing: {}\ncordon: [3]\nmode: sim": {
			"sharing did you mean plugin.sharing?", "cordon did you mean health.cordon?",
			"mode did you mean source.mode?",
		},
		"metrics: {enabled: true}":                  {"metrics.enabled unknown key"}, // two sections have one
		"health: {1: 2}":                            {"health.1 unknown key (in "},   // no suggestion
		"Source: {mode: sim}\nSOURCE: {mode: auto}": {"Source SOURCE"},
		"source: {mode: sim, Mode: auto}":           {"source.mode source.Mode"},
		"source: {address: 5555}":                   {`source.address "5555"`},
		"metrics: {listen: 9400}":                   {`metrics.listen :9400, got "9400"`},
	} {
		_, err := load(t, text)
		for _, w := range want {
			key, part, _ := strings.Cut(w, " ")
			wantError(t, text, err, key, part)
		}
	}
	for _, valid := range []string{
		"node: {startupTaint: 'startup-taint.cluster-autoscaler.kubernetes.io/gpu-node-agent:NoSchedule'}",
		"node: {taints: [{when: cordoned, key: node-role.kubernetes.io/x, effect: NoSchedule}, {when: cordoned, key: " +
			"node-role.kubernetes.io/x, effect: NoExecute}]}",
		"node: {idle: {evidence: noProcess}}", "node: {idle: {after: 30m, evidence: noWork}}",
		"node: {idle: {after: 30m}}", "node: {idle: {after: 30m, evidence: noProcess}}\nmetrics: {processes: {enabled: true}}",
	} {
		if _, err := load(t, valid); err != nil {
			t.Errorf("%s: %v", valid, err)
		}
	}
	if _, err := load(t, "log: {level: info"); err == nil || !strings.Contains(err.Error(), "config.yaml") {
		t.Errorf("invalid YAML: %v", err)
	}
}

func TestImportNVIDIAConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nvidia.yaml")
	write(t, file, "version: v1\nflags: {migStrategy: mixed, gdsEnabled: true}")
	c := mustLoad(t, "plugin: {migStrategy: single, passDeviceSpecs: true, nvidiaConfig: "+file+"}")
	if c.Plugin.MIGStrategy != plugin.MIGMixed || !c.Plugin.PassDeviceSpecs {
		t.Errorf("%+v", c.Plugin)
	}
	if w := c.Notes; len(w) != 1 || !strings.HasPrefix(w[0], file+": flags.gdsEnabled: ") {
		t.Errorf("notes %q", w)
	}
	write(t, file, "flags: {migStrategy: on, plugin: 1}")
	_, err := load(t, "", "--plugin.nvidiaConfig="+file)
	for _, key := range []string{"flags.migStrategy", "flags.plugin"} {
		wantError(t, key, err, "plugin.nvidiaConfig: "+file+": "+key)
	}
	_, err = load(t, "plugin: {nvidiaConfig: /none.yaml}")
	wantError(t, "no file", err, "plugin.nvidiaConfig: /none.yaml")
	if w := DefaultConfig().Notes; w != nil {
		t.Errorf("notes of the defaults: %q", w)
	}
}

func TestFieldSelection(t *testing.T) {
	c := mustLoad(t, "metrics: {fields: [default, DCGM_FI_DEV_FB_TOTAL, {name: DCGM_FI_DEV_GPU_TEMP, help: warm}, DCGM_FI_NEWER], "+
		"idleBelow: 10}")
	m := c.Metrics
	if len(m.Fields) != 4 || m.Fields[2].Help != "warm" || m.IdleBelow != 10 || !slices.Contains(m.Chosen.IDs(), health.FieldFBTotal) {
		t.Errorf("%+v", m)
	}
	if len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], "metrics.fields: DCGM_FI_NEWER: ") {
		t.Errorf("notes %q", c.Notes)
	}
	if m := mustLoad(t, "", "--metrics.fields=[DCGM_FI_DEV_GPU_TEMP]").Metrics; len(m.Chosen.Fields) != 1 {
		t.Errorf("flag: %+v", m)
	}
}

// The file, flags and variables accept the same lists.
func TestPodLabelsConfig(t *testing.T) {
	const list = `[team, '/^app\.kubernetes\.io//', "/^(tier|env){1,2}$/", /.*/]`
	want := metrics.PodLabels{
		Named:    []metrics.PodLabel{{Key: "team", Name: "team"}},
		Patterns: []string{`^app\.kubernetes\.io/`, "^(tier|env){1,2}$", ".*"}, UID: true,
	}
	check := func(text string, flags ...string) {
		t.Helper()
		if got := mustLoad(t, text, flags...).Metrics.SelectedPodLabels(); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	check("metrics: {podUID: true, podLabels: " + list + "}")
	check("", "--metrics.podUID=true", "--metrics.podLabels="+list)
	check("metrics:\n  podUID: true\n  podLabels:\n  - team\n  - /^app\\.kubernetes\\.io//\n  - /^(tier|env){1,2}$/\n  - /.*/\n")
	t.Setenv("GPU_NODE_AGENT_METRICS_POD_UID", "true")
	t.Setenv("GPU_NODE_AGENT_METRICS_POD_LABELS", list)
	check("")
}

// A directory is the same however it is written: a reload refuses another one.
func TestPathsAreClean(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nvidia.yaml")
	write(t, file, "version: v1\nflags: {mpsRoot: /run//mps/}\n")
	for text, want := range map[string]string{
		"kubeletDir: /k/, sharing: {mps: {root: /run/./mps/}}": "/k",
		"kubeletDir: /k/../kubelet, nvidiaConfig: " + file:     "/kubelet",
	} {
		if p := mustLoad(t, "plugin: {"+text+"}\n").Plugin; p.KubeletDir != want || p.Sharing.MPS.Root != "/run/mps" {
			t.Errorf("%s: %s, %s", text, p.KubeletDir, p.Sharing.MPS.Root)
		}
	}
	for _, key := range []string{"kubeletDir", "sharing.mps.root"} {
		_, err := load(t, "", "--plugin."+key+"=")
		wantError(t, key, err, "plugin."+key, `""`)
	}
}

func TestPluginConfig(t *testing.T) {
	p := mustLoad(t, `plugin:
  deviceList: [cdi-cri, envvar]
  include: ["0", "1b:00.0", GPU-1]
  resources: [{pattern: "*H100*", resource: nvidia.com/h100}]
  sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: ["0"], rename: nvidia.com/gpu.shared}]}}
`, "--plugin.exclude=['3']", "--plugin.deviceID=index").Plugin
	want := plugin.SharedResource{Name: "nvidia.com/gpu", Replicas: 4, Devices: []string{"0"}, Rename: "nvidia.com/gpu.shared"}
	if len(p.DeviceList) != 2 || len(p.Include) != 3 || p.Exclude[0] != "3" || p.DeviceID != "index" ||
		p.Resources[0].Resource != "nvidia.com/h100" || !reflect.DeepEqual(p.Sharing.TimeSlicing.Resources[0], want) {
		t.Errorf("%+v", p)
	}
}

func TestResolvedMode(t *testing.T) {
	for _, c := range []struct {
		SourceConfig
		want string
	}{
		{SourceConfig{Mode: ModeAuto}, ModeEmbedded},
		{SourceConfig{Mode: ModeAuto, Address: "localhost:5555"}, ModeStandalone},
		{SourceConfig{Mode: ModeSim}, ModeSim},
		{SourceConfig{Mode: ModeEmbedded}, ModeEmbedded},
	} {
		if got := c.Resolved(); got != c.want {
			t.Errorf("%+v resolves to %s, want %s", c.SourceConfig, got, c.want)
		}
	}
}

// auto turns NVML's events on with DCGM, wherever it runs. A note says what else uses the driver beside a host engine.
func TestEventsReason(t *testing.T) {
	for text, want := range map[string]struct {
		on   bool
		note string
	}{
		"source: {}":                                                      {true, ""},
		"source: {mode: embedded, events: auto}":                          {true, ""},
		"source: {events: nvml}":                                          {true, ""},
		"source: {events: off}":                                           {false, ""},
		"source: {events: false}":                                         {false, ""},
		"source: {address: 'localhost:5555'}":                             {true, ""},
		"source: {address: 'localhost:5555', events: nvml}":               {true, ""},
		"source: {address: 'localhost:5555', events: off}":                {false, ""},
		"source: {mode: sim}":                                             {false, ""},
		"source: {mode: sim, events: nvml}":                               {true, ""},
		"source: {mode: sim, address: 'localhost:5555', events: nvml}":    {true, "source.address: "},
		"source: {address: 'a:1'}\nmetrics: {processes: {enabled: true}}": {true, ""},

		"source: {address: 'a:1', events: off}\nmetrics: {processes: {enabled: true}}": {false, "metrics.processes.enabled: "},
		"metrics: {processes: {enabled: true}}":                                        {true, ""},
	} {
		c := mustLoad(t, text)
		reason := c.Source.EventsReason()
		if (reason == "") != want.on || !want.on && !strings.HasPrefix(reason, "source.events is ") {
			t.Errorf("%s: off because %q, want on: %v", text, reason, want.on)
		}
		if noted := len(c.Notes) > 0; noted != (want.note != "") || noted && !strings.HasPrefix(c.Notes[0], want.note) {
			t.Errorf("%s: notes %q, want %q", text, c.Notes, want.note)
		}
	}
}

func TestSharingNotes(t *testing.T) {
	const shares = "resources: [{name: nvidia.com/gpu, replicas: 2}]"
	for sharing, want := range map[string]string{
		"{mps: {" + shares + "}}":                                            "",
		"{mps: {failRequestsGreaterThanOne: false}}":                         "",
		"{mps: {failRequestsGreaterThanOne: false, " + shares + "}}":         "plugin.sharing.mps.failRequestsGreaterThanOne",
		"{memory: {devices: [0]}}":                                           "plugin.sharing.memory.devices",
		"{memory: {resource: nvidia.com/gpu-memory, devices: [0]}}":          "",
		"{timeSlicing: {failRequestsGreaterThanOne: false, " + shares + "}}": "",
	} {
		var got []string
		for _, n := range mustLoad(t, "plugin: {sharing: "+sharing+"}").Notes {
			key, _, _ := strings.Cut(n, ": ")
			got = append(got, key)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: notes about %q, want %q", sharing, got, want)
		}
	}
}

func TestEventVariables(t *testing.T) {
	t.Setenv("GPU_NODE_AGENT_SOURCE_EVENTS", "off")
	t.Setenv("GPU_NODE_AGENT_SOURCE_KERNEL_LOG", "true")
	t.Setenv("GPU_NODE_AGENT_SOURCE_KERNEL_LOG_PATH", "/host/kmsg")
	s := mustLoad(t, "source: {events: nvml}").Source
	if s.Events != EventsOff || !s.KernelLog || s.KernelLogPath != "/host/kmsg" {
		t.Errorf("%+v", s)
	}
}

func TestMissingFile(t *testing.T) {
	if _, err := (Loader{File: filepath.Join(t.TempDir(), "none.yaml")}).Load(); err == nil || !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("got %v, want an error that names the file", err)
	}
}

// Without --config only the default file counts. The working directory may be another user's, and the configuration names programs
// that mps-daemon runs as root.
func TestWorkingDirectoryIsNotRead(t *testing.T) {
	t.Chdir(t.TempDir())
	write(t, "config.yaml", "no: configuration")
	if p := (Loader{}).Path(); p != "" && p != defaultFile {
		t.Errorf("path %q", p)
	}
	if _, err := (Loader{}).Load(); err != nil {
		t.Errorf("no file: %v", err)
	}
	_, err := (Loader{File: "config.yaml"}).Load()
	wantError(t, "named file", err, "no", "unknown key (in config.yaml, line 1)")
}

// Only a default file that does not exist means the defaults. One that cannot be read is an error of Load.
func TestExisting(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "link.yaml")
	write(t, file, "{}")
	if err := os.Symlink(filepath.Join(dir, "none"), link); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		file:                         file,
		link:                         link,                         // to nothing
		filepath.Join(file, "below"): filepath.Join(file, "below"), // not a directory
		filepath.Join(dir, "none"):   "",
		filepath.Join(dir, "no/dir"): "",
	} {
		if got := existing(path); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

// Helm reads an unquoted off in a values file as false.
func TestLabelsOutputOff(t *testing.T) {
	for _, text := range []string{
		"node: {labels: {output: off}}", "node: {labels: {output: false}}", `node: {labels: {output: "off"}}`,
		"node: {}",
	} {
		if got := mustLoad(t, text).Node.Labels.Output; got != node.LabelsOff {
			t.Errorf("%s: output %q, want %q", text, got, node.LabelsOff)
		}
	}
}
