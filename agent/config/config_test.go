package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func load(t *testing.T, text string, flags ...string) (Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	return Loader{File: file, Flags: fs}.Load()
}

func TestConfigFileIsTheDefaults(t *testing.T) {
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
	var c0 Config
	for _, leaf := range leavesOf(reflect.ValueOf(&c0).Elem(), "") {
		key := leaf.key
		at := any(tree)
		for part := range strings.SplitSeq(key, ".") {
			m, _ := at.(map[string]any)
			var ok bool
			if at, ok = m[part]; !ok {
				t.Errorf("config.yaml lacks %s", key)
				break
			}
		}
	}
}

func TestConfigRoundTrip(t *testing.T) {
	c, err := load(t, "source: {mode: sim, sim: {loop: 60s, scenario: [{at: 5s, gpu: 3, xid: 79}, {at: 6s, gpu: 3, lost: true}, "+
		"{at: 7s, gpu: 1, recoveryAction: 512}, {at: 8s, gpu: 1, recoveryAction: reset}], past: [{ago: 10s, gpu: 5, xid: 95}]}}")
	if err != nil {
		t.Fatal(err)
	}
	again, err := load(t, c.String())
	if err != nil {
		t.Fatal(err)
	}
	again.Sum = c.Sum // of another file
	if !reflect.DeepEqual(c, again) {
		t.Errorf("check-config's output reads as\n%s\nwant\n%s", again, c)
	}
	if n := len(c.Source.Sim.Scenario); n != 4 || *c.Source.Sim.Scenario[0].XID != 79 || c.Source.Sim.Scenario[0].At != 5*time.Second {
		t.Errorf("scenario %+v", c.Source.Sim.Scenario)
	} else if *c.Source.Sim.Scenario[2].RecoveryAction != "512" || *c.Source.Sim.Scenario[3].RecoveryAction != "reset" {
		t.Errorf("scenario %+v", c.Source.Sim.Scenario[2:])
	}
	if p := c.Source.Sim.Past; len(p) != 1 || p[0].Ago != 10*time.Second || *p[0].GPU != 5 || *p[0].XID != 95 {
		t.Errorf("past %+v", p)
	}
}

func TestConfigOrder(t *testing.T) {
	const file = "source: {mode: sim}\nmetrics: {listen: ':1'}\nhealth: {temperature: 80}"
	t.Setenv("GPU_NODE_AGENT_METRICS_LISTEN", ":2")
	t.Setenv("GPU_NODE_AGENT_PLUGIN_KUBELET_DIR", "/from/env")
	t.Setenv("GPU_NODE_AGENT_SOURCE_SIM_SCENARIO", "[{at: 1s, gpu: 0, xid: 13}]")
	t.Setenv("GPU_NODE_AGENT_SOURCE_SIM_SEED", "7")
	// A Service of this name makes the kubelet set such variables. They are no typos.
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

// The address of a host engine as DCGM's users write it.
func TestAddress(t *testing.T) {
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

// A list of fields that is cut off takes no series away.
func TestReloadOfAnEmptyList(t *testing.T) {
	dir := t.TempDir()
	l := Loader{File: filepath.Join(dir, "config.yaml")}
	list := filepath.Join(dir, "fields.csv")
	if err := errors.Join(os.WriteFile(l.File, []byte("metrics: {fieldsFile: "+list+"}"), 0o600), os.WriteFile(list, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Load(); err != nil {
		t.Errorf("at the start the plugin is worth more: %v", err)
	}
	l.Running = true
	if _, err := l.Load(); err != nil {
		t.Errorf("a list that shows nothing, as before: %v", err)
	}
	l.FieldsShown = true
	for text, good := range map[string]bool{
		"": false, "DCGM_FI_DEV_GPU_TEMP, no-type, temperature": false,
		"nonsense\nDCGM_FI_DEV_GPU_TEMP, gauge, temperature": true,
	} {
		if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Load(); (err == nil) != good || !good && !strings.Contains(err.Error(), "metrics.fieldsFile: "+list+": ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A variable with a typo is said, and what the kubelet makes of a Service's name is not.
func TestStrayEnv(t *testing.T) {
	notes := strayEnv([]string{
		"GPU_NODE_AGENT_SOURCE_MOED=sim", "GPU_NODE_AGENT_SOURCE_MODE=sim", "GPU_NODE_AGENT_HEALTH_STATE_FILE=x", "GPU_NODE_AGENT_HEALTH_STATEFILE=x",
		"GPU_NODE_AGENT_METRICS_SERVICE_HOST=10.0.0.1", "GPU_NODE_AGENT_METRICS_PORT=tcp://10.0.0.1:9400", "GPU_NODE_AGENT_METRICS_PORT_9400_TCP=x",
		"GPU_NODE_AGENT_OTHER_THING=x", "GPU_NODE_AGENT=x", "PATH=x",
	}, []string{"source.mode", "health.stateFile"})
	if len(notes) != 1 || notes[0] != "GPU_NODE_AGENT_SOURCE_MOED: no key has this name, and nothing is set; did you mean GPU_NODE_AGENT_SOURCE_MODE?" {
		t.Errorf("%q", notes)
	}
}

func TestNVIDIAsVariables(t *testing.T) {
	t.Setenv("DP_DISABLE_HEALTHCHECKS", "48,oops")
	t.Setenv("DP_ENABLE_HEALTHCHECKS", "109")
	c, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if x := c.Health.XID; x.Effect(48) != health.EffectIgnore || x.Effect(109) != health.EffectUnhealthy || x.Effect(79) != health.EffectUnhealthy {
		t.Errorf("XIDs %+v", x)
	}
	if len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "oops") {
		t.Errorf("notes %q", c.Notes)
	}
}

func TestSimConfigErrorsNameTheKey(t *testing.T) {
	for text, want := range map[string]string{
		"scenario: [{gpu: 1, recoveryAction: [7]}]": "scenario[0].recoveryAction: [7] is not a text",
		"scenario: [{gpu: 1, recoveryAction: -7}]":  `scenario[0].recoveryAction: "-7" is not known; use a number from 0 to 2147483647 or one of none, reset`,
		"past: [{gpu: 5, xid: 95}]":                 "past[0].ago: 0s is not before the start; use more than 0s",
		"past: [{ago: 10, gpu: 5, xid: 95}]":        "past[0].ago: 10 is not a duration",
		"past: [{ago: 10s, gpu: 5, xid: x}]":        `past[0].xid: "x" is not a whole number`,
		"past: [{ago: 10s, gpu: 8, xid: 95}]":       "past[0].gpu: 8 is not a GPU of profile h100-8, which has 0 to 7",
		"past: [{ago: 10s, gpu: 5}]":                "past[0].xid: is missing",
		"past: [{at: 10s, gpu: 5, xid: 95}]":        "past[0].at: unknown key",
	} {
		if _, err := load(t, "source: {mode: sim, sim: {"+text+"}}"); err == nil || !strings.Contains(err.Error(), "source.sim."+want) {
			t.Errorf("%s:\ngot  %v\nwant %s", text, err, want)
		}
	}
}

func TestConfigErrorsNameTheKey(t *testing.T) {
	for text, want := range map[string][]string{
		"plugin: {kubeletDirr: /x}":                                   {"plugin.kubeletDirr: unknown key; did you mean plugin.kubeletDir?"},
		"sourze: {mode: sim}":                                         {"sourze: unknown key"},
		"source: {sim: {scenario: [{at: 1s, gpuu: 1}]}}":              {"source.sim.scenario[0].gpuu: unknown key"},
		"source: {sim: {scenario: [{lost: maybe}, hello, {gpu: x}]}}": {"scenario[0].lost: ", "scenario[1]: ", "source.sim.scenario[2].gpu: "},
		"source.mode: sim":                                            {"source.mode: unknown key; a dot makes no section: write source: {mode: …}"},
		"health: {cordon: 5}":                                         {"health.cordon: 5 is not a list"},
		"plugin: {sharing: {timeSlicing: {resources: [5]}}}":          {"plugin.sharing.timeSlicing.resources[0]: 5 is not keys and values"},
		"source: {mode: simulated}":                                   {`source.mode: "simulated" is not known`},
		"source: {mode: standalone}":                                  {"source.address: mode standalone needs"},
		"source: {mode: embedded, address: 'a:1'}":                    {"source.address: mode embedded"},
		"source: {address: 'localhost:'}":                             {`source.address: "localhost:" is not an address`},
		"source: {address: 'unix://run/x'}":                           {"source.address:", "unix:///path"},
		"source: {interval: 10}":                                      {"source.interval: 10 is not a duration; use a number with a unit"},
		"source: {interval: soon, stallAfter: 1ms}":                   {`source.interval: "soon" is not a duration`},
		"source: {interval: 5ms, stallAfter: 1ms}":                    {"source.interval: 5ms is out of range", "source.stallAfter: 1ms is out of range"},
		"source: {healthSystems: [pcie, gpu]}":                        {`source.healthSystems: "gpu" is not known; use all, none, pcie, nvlink`},
		"source: {healthSystems: []}":                                 {"source.healthSystems: is empty; use [all]"},
		"source: {sim: {profile: b200}}":                              {"source.sim.profile:"},
		"source: {sim: {seed: 1.5}}":                                  {"source.sim.seed:"},
		"source: {sim: {scenario: [{at: 1s, gpu: many}]}}":            {"source.sim.scenario[0].gpu:"},
		"source: {sim: {scenario: [{at: 1s, gpu: 99, xid: 79}]}}":     {"source.sim.scenario[0].gpu:"},
		"health: {temperature: hot}":                                  {"health.temperature: \"hot\" is not a number"},
		"health: {xid: {preset: x, warn: [0]}}":                       {`health.xid.preset: "x"`, "health.xid.warn: 0 is not an XID"},
		"health: {incidents: {warn: [x]}}":                            {`health.incidents.warn: "x"`},
		"health: {flap: {trips: -1}, socket: here, recovery: x}":      {"health.flap.trips: -1", `health.socket: "here"`, `health.recovery: "x"`},
		"health: {interval: 0s}":                                      {"health.interval: 0s is out of range"},
		"log: {level: loud, format: xml}":                             {`log.level: "loud"`, `log.format: "xml"`},
		"metrics: {listen: 9400}":                                     {"metrics.listen: 9400 is not a text; put it in quotes"},
		"log: nothing":                                                {"log: is not a section"},
		"source: {mode: x, sim: {profile: y}}\nhealth: {temperature: 1, interval: 1}\na: b": {"source.mode", "source.sim.profile", "health.interval", "a: unknown key"},
		"metrics: {listen: nine}": {`metrics.listen: `},
		"metrics: {attribution: x, window: 1s, compat: {hostnameLabel: host}}": {"metrics.attribution:", "metrics.window:", "metrics.compat.hostnameLabel:"},
		"metrics: {webConfigFile: web.yaml}":                                   {"metrics.webConfigFile: ", "absolute path"},
		"metrics: {fieldsFile: /none.csv}":                                     {"metrics.fieldsFile: open /none.csv"},
		"metrics: {fields: [{nam: X}]}":                                        {"metrics.fields[0].nam: unknown key"},
		"metrics: {podLabels: [team, /^a, '^b', 'c.*'], podUID: maybe}": {
			`metrics.podLabels: "/^a": `, `metrics.podLabels: "^b": `, `metrics.podLabels: "c.*": `, "metrics.podUID: ",
		},
		"metrics: {podLabels: team-*}": {`metrics.podLabels: "team-*" is not a list`},
		"plugin: {resource: gpu}":      {"plugin.resource:"},
		"plugin: {include: [0]}":       {"plugin.include[0]: 0 is not a text; put it in quotes"},
		"plugin: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replica: 2}]}}}": {"plugin.sharing.timeSlicing.resources[0].replica: unknown key"},
		"plugin: {deviceList: envvar}":                  {`plugin.deviceList: "envvar" is not a list`},
		"plugin: [a]":                                   {"plugin"},
		"log: {level: a}\nhealth: {interval: 0s}\nx: 1": {"x: unknown key"},
		"log: {level: info":                             {"config.yaml"},
	} {
		_, err := load(t, text)
		if err == nil {
			t.Errorf("%s: no error", text)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s:\ngot  %v\nwant %s", text, err, w)
			}
		}
	}
}

func TestConfigOfNVIDIA(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nvidia.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("version: v1\nflags: {migStrategy: mixed, gdsEnabled: true}")
	c, err := load(t, "plugin: {migStrategy: single, passDeviceSpecs: true, nvidiaConfig: "+file+"}")
	if err != nil {
		t.Fatal(err)
	}
	if c.Plugin.MIGStrategy != plugin.MIGMixed || !c.Plugin.PassDeviceSpecs {
		t.Errorf("%+v", c.Plugin)
	}
	if w := c.Notes; len(w) != 1 || w[0] != file+": flags.gdsEnabled: is not supported" {
		t.Errorf("warnings %q", w)
	}
	write("flags: {migStrategy: on, plugin: 1}")
	_, err = load(t, "", "--plugin.nvidiaConfig="+file)
	for _, want := range []string{": flags.migStrategy: on is not known", ": flags.plugin: is not a section"} {
		if err == nil || !strings.Contains(err.Error(), "plugin.nvidiaConfig: "+file+want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if _, err = load(t, "plugin: {nvidiaConfig: /none.yaml}"); err == nil || !strings.Contains(err.Error(), "plugin.nvidiaConfig: /none.yaml") {
		t.Errorf("%v", err)
	}
	if w := DefaultConfig().Notes; w != nil {
		t.Errorf("warnings %q", w)
	}
}

func TestConfigOfMetrics(t *testing.T) {
	c, err := load(t, "metrics: {fields: [default, DCGM_FI_DEV_FB_TOTAL, {name: DCGM_FI_DEV_GPU_TEMP, help: warm}, nonsense], idleBelow: 10}")
	if err != nil {
		t.Fatal(err)
	}
	m := c.Metrics
	if len(m.Fields) != 4 || m.Fields[2].Help != "warm" || m.IdleBelow != 10 || !slices.Contains(m.Chosen.IDs(), health.FieldFBTotal) {
		t.Errorf("%+v", m)
	}
	if len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], "metrics.fields: nonsense: ") {
		t.Errorf("notes %q", c.Notes)
	}
	again, err := load(t, c.String())
	if err != nil || !reflect.DeepEqual(m, again.Metrics) {
		t.Errorf("read back as %+v, want %+v, %v", again.Metrics, m, err)
	}
	if c, err = load(t, "", "--metrics.fields=[DCGM_FI_DEV_GPU_TEMP]"); err != nil || len(c.Metrics.Chosen.Fields) != 1 {
		t.Errorf("a flag: %+v, %v", c.Metrics, err)
	}
}

// What of pods is shown can be said in each way that a list can, and means the same.
func TestConfigOfPods(t *testing.T) {
	const list = `[team, app.kubernetes.io/*, "/^(tier|env){1,2}$/", '*']`
	want := metrics.PodLabels{
		Named:    []metrics.PodLabel{{Key: "team", Name: "team"}},
		Patterns: []string{`^app\.kubernetes\.io/.*$`, "^(tier|env){1,2}$", "^.*$"}, UID: true,
	}
	check := func(how string, c Config, err error) {
		t.Helper()
		if got := c.Metrics.ShownPodLabels(); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", how, got, err, want)
		}
	}
	c, err := load(t, "metrics: {podUID: true, podLabels: "+list+"}")
	check("file", c, err)
	c, err = load(t, c.String())
	check("read back", c, err)
	c, err = load(t, "", "--metrics.podUID=true", "--metrics.podLabels="+list)
	check("flags", c, err)
	c, err = load(t, "metrics:\n  podUID: true\n  podLabels:\n  - team\n  - app.kubernetes.io/*\n  - /^(tier|env){1,2}$/\n  - '*'\n")
	check("lines", c, err)
	t.Setenv("GPU_NODE_AGENT_METRICS_PODUID", "true")
	t.Setenv("GPU_NODE_AGENT_METRICS_POD_LABELS", list)
	c, err = load(t, "")
	check("environment", c, err)
}

func TestConfigOfPlugin(t *testing.T) {
	c, err := load(t, `plugin:
  deviceList: [cdi-cri, envvar]
  include: ["0", "1b:00.0", GPU-1]
  resources: [{pattern: "*H100*", resource: nvidia.com/h100}]
  sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: ["0"], rename: nvidia.com/gpu.shared}]}}
`, "--plugin.exclude=['3']", "--plugin.deviceID=index")
	if err != nil {
		t.Fatal(err)
	}
	want := plugin.SharedResource{Name: "nvidia.com/gpu", Replicas: 4, Devices: []string{"0"}, Rename: "nvidia.com/gpu.shared"}
	p := c.Plugin
	if len(p.DeviceList) != 2 || len(p.Include) != 3 || p.Exclude[0] != "3" || p.DeviceID != "index" ||
		p.Resources[0].Resource != "nvidia.com/h100" || !reflect.DeepEqual(p.Sharing.TimeSlicing.Resources[0], want) {
		t.Errorf("%+v", p)
	}
	again, err := load(t, c.String())
	if err != nil || !reflect.DeepEqual(p, again.Plugin) {
		t.Errorf("read back as %+v, want %+v, %v", again.Plugin, p, err)
	}
}

func TestResolved(t *testing.T) {
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

func TestMissingFile(t *testing.T) {
	if _, err := (Loader{File: filepath.Join(t.TempDir(), "none.yaml")}).Load(); err == nil || !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("got %v, want an error that names the file", err)
	}
	t.Chdir(t.TempDir())
	if p := (Loader{}).Path(); p != "" && p != "/etc/gpu-node-agent/config.yaml" {
		t.Errorf("path %q", p)
	}
	if _, err := (Loader{}).Load(); err != nil {
		t.Errorf("no file at all: %v", err)
	}
}
