package metrics

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

type contractLine struct{ set, name, typ, help string }

// contract is what dcgm-exporter shows.
func contract(t *testing.T) []contractLine {
	t.Helper()
	text, err := os.ReadFile("testdata/dcgm-exporter.csv")
	if err != nil {
		t.Fatal(err)
	}
	var lines []contractLine
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		p := strings.SplitN(strings.TrimSpace(line), ",", 4)
		if len(p) != 4 {
			t.Fatalf("%q", line)
		}
		lines = append(lines, contractLine{p[0], p[1], p[2], p[3]})
	}
	return lines
}

// everything is a node on which all of the table can be measured.
func everything() *health.Snapshot {
	s := node()
	values := make(map[health.Field]float64)
	for _, k := range fieldTable {
		values[k.id] = float64(k.id)
	}
	d := &s.Devices[0]
	d.Sample.Values = values
	d.Sample.XIDs = []health.XID{{Code: 31, At: now}}
	d.Sample.Checked = true
	d.Sample.Incidents = []health.Incident{
		{System: "memory", Code: 4, Severity: health.SeverityFail},
		{System: "memory", Code: 6, Severity: health.SeverityWarn},
		{System: "xid", Code: 99, Severity: health.SeverityWarn},
	}
	return s
}

// pollAgain has another poll come.
func pollAgain(src Sources, s *health.Snapshot) {
	s.At = src.Snapshots.Load().At.Add(time.Second)
	src.Snapshots.Store(s)
	src.Totals.fold(s)
}

func TestContract(t *testing.T) {
	before := everything()
	before.Devices[0].Sample.Values[health.FieldClocksEvents] = 0
	src := sourcesOf(before, config(SetDefault, SetProfiling, SetOptional))
	pollAgain(src, everything())
	page := exposition(t, NewGatherer(src))
	listed := make(map[string]int)
	for _, l := range contract(t) {
		listed[l.set]++
		k, err := lookupField(l.name)
		if err != nil || k.set != l.set || k.typ != l.typ || k.help != l.help || k.name != l.name {
			t.Errorf("the table has %+v, dcgm-exporter has %+v", k, l)
			continue
		}
		if l.typ == TypeLabel {
			continue
		}
		for _, want := range []string{"# HELP " + l.name + " " + l.help + "\n", "# TYPE " + l.name + " " + l.typ + "\n", "\n" + l.name + "{"} {
			if !strings.Contains(page, want) {
				t.Errorf("the page lacks %q", want)
			}
		}
	}
	have := make(map[string]int)
	for _, k := range fieldTable {
		if k.set != setOther {
			have[k.set]++
		}
	}
	for _, set := range []string{SetDefault, SetProfiling, SetOptional} {
		if have[set] != listed[set] {
			t.Errorf("set %s has %d fields, dcgm-exporter %d", set, have[set], listed[set])
		}
	}
	if !strings.Contains(page, `DCGM_FI_DRIVER_VERSION="580.95.05"`) {
		t.Error("the driver's version is no label")
	}
}

// What Grafana's dashboard 12239 asks for has one series of each GPU, under its labels gpu and instance.
func TestGrafana12239(t *testing.T) {
	s := everything()
	for i := range s.Devices {
		s.Devices[i].Sample.Values = s.Devices[0].Sample.Values
	}
	s.Devices = s.Devices[:3]
	page := exposition(t, NewGatherer(sourcesOf(s, config(SetDefault, SetProfiling))))
	for _, name := range []string{
		"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED",
		"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
	} {
		for _, gpu := range []string{"0", "1", "2"} {
			if n := len(series(page, name, `gpu="`+gpu+`"`)); n != 1 {
				t.Errorf("%s has %d series of GPU %s", name, n, gpu)
			}
		}
	}
}

// series returns the lines of a metric that hold all these parts.
func series(page, name string, parts ...string) []string {
	var found []string
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, name+"{") && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

func TestProfilingOnlyIfAskedFor(t *testing.T) {
	for _, id := range chosen(SetDefault).IDs() {
		if id >= 1001 && id <= 1099 {
			t.Errorf("field %d is measured", id)
		}
	}
	if !slices.Contains(chosen(SetDefault, SetProfiling).IDs(), 1004) {
		t.Error("1004 is not measured")
	}
	for _, id := range chosen("DCGM_FI_DEV_SM_CLOCK").IDs() {
		if id != health.FieldSMClock && id != health.FieldGPUUtil {
			t.Errorf("field %d is measured", id)
		}
	}
}

func TestMadeSeries(t *testing.T) {
	c := config(expXIDs, expClocks, expHealth, expP2P, expXIDTotal, expClockTotal)
	s := everything()
	s.Devices[0].Sample.Values = map[health.Field]float64{health.FieldClocksEvents: 1 | 8}
	src := sourcesOf(s, c)
	page := exposition(t, NewGatherer(src))
	for name, want := range map[string][]string{
		expXIDs:   {`xid="31"} 1`, `UUID="GPU-b"`, `window_size_in_ms="300000"`},
		expClocks: {`clock_event="gpu_idle"`, `clock_event="hw_slowdown"`},
		expHealth: {
			`health_error_code="DCGM_FR_VOLATILE_DBE_DETECTED",health_watch="MEM"`, `health_watch="MEM",hostname="node-1",modelName="NVIDIA H100 80GB HBM3",namespace="team"`,
			`health_error_code="",health_watch="PCIE"`, `health_watch="ALL"`,
		},
		expP2P: {`link_status="OK"`, `link_status="Unknown"`, `peer_gpu="1"`},
	} {
		for _, w := range want {
			if len(series(page, name, w)) == 0 {
				t.Errorf("%s without %s:\n%s", name, w, strings.Join(series(page, name), "\n"))
			}
		}
	}
	if n := len(series(page, expXIDTotal)); n != 1 || len(series(page, expXIDTotal, `UUID="GPU-a"`, `xid="31"`)) != 1 {
		t.Errorf("XIDs in all: %q", series(page, expXIDTotal))
	}
	if got := series(page, expClockTotal); len(got) != 0 {
		t.Errorf("clock events that began before the agent: %q", got)
	}
	next := everything()
	next.Devices[0].Sample.Values = map[health.Field]float64{health.FieldClocksEvents: 1 | 4}
	pollAgain(src, next)
	later := exposition(t, NewGatherer(src))
	got := series(later, expClockTotal)
	if len(got) != 1 || !strings.Contains(got[0], `clock_event="power_cap"`) || !strings.Contains(got[0], `UUID="GPU-a"`) ||
		!strings.HasSuffix(got[0], " 1") || strings.Contains(got[0], "window") {
		t.Errorf("clock events that began: %q", got)
	}
	if !strings.Contains(later, "# TYPE "+expClockTotal+" counter\n") {
		t.Error("it is no counter")
	}
	if n := len(series(page, expHealth, `health_watch="MEM"`)); n != 2 {
		t.Errorf("%d series of two incidents", n)
	}
	if n := len(series(page, expHealth, `UUID="GPU-b"`)); n != 0 {
		t.Errorf("%d series of a GPU that was never checked", n)
	}
}

func TestHostnameLabel(t *testing.T) {
	c := *config(SetDefault)
	c.Compat.HostnameLabel = "Hostname"
	page := exposition(t, NewGatherer(sourcesOf(node(), &c)))
	if strings.Contains(page, `hostname="`) || len(series(page, "DCGM_FI_DEV_GPU_TEMP", `Hostname="node-1"`)) != 2 {
		t.Errorf("the label is not Hostname:\n%s", page)
	}
}

// A configuration that changes is seen by the next scrape.
func TestConfigIsFollowed(t *testing.T) {
	src := sources(node())
	c := NewGatherer(src)
	if !strings.Contains(exposition(t, c), "DCGM_FI_DEV_SM_CLOCK") {
		t.Fatal("no SM clock")
	}
	src.Config.Store(config("DCGM_FI_DEV_GPU_TEMP", "nonsense"))
	page := exposition(t, c)
	if strings.Contains(page, "DCGM_FI_DEV_SM_CLOCK") || !strings.Contains(page, "DCGM_FI_DEV_GPU_TEMP") {
		t.Error("the old fields are shown")
	}
	if !strings.Contains(page, namespace+"_fields_unknown 1\n") {
		t.Error("the unknown field is not counted")
	}
}

func TestAttribution(t *testing.T) {
	s := node()
	for i := range s.Devices {
		s.Devices[i].Sample.Values = map[health.Field]float64{health.FieldFBUsed: 1}
	}
	const name = "DCGM_FI_DEV_FB_USED"
	page := exposition(t, NewGatherer(sources(s)))
	count := func(want int, parts ...string) {
		t.Helper()
		if got := series(page, name, parts...); len(got) != want {
			t.Errorf("%d series with %q, want %d:\n%s", len(got), parts, want, strings.Join(got, "\n"))
		}
	}
	count(5)
	count(1, `UUID="GPU-a"`, `container="main"`, `namespace="team"`, `pod="train-0"`)
	count(2, `pod=`)
	count(1, `GPU_I_ID="1"`, `pod="web"`)
	count(1, `device="nvidia2"`, `modelName="a `)

	c := *config(SetDefault)
	c.Attribution = AttributePerPod
	page = exposition(t, NewGatherer(sourcesOf(s, &c)))
	count(8)
	count(1, `UUID="GPU-a"`)
	count(4, `modelName="a `)
	count(1, `pod="nb-1"`, `vgpu="0"`)
	count(1, `pod="nb-1"`, `vgpu="2"`)
	count(1, `pod="nb-2"`, `vgpu="1"`)
	count(3, `vgpu=`)
}

// When a pod has gone, so has its label at the next scrape. When the kubelet does not answer, the devices'
// series stay.
func TestHoldersGo(t *testing.T) {
	src := sources(node())
	held := holders()
	src.Holders = func() plugin.Holders { return held }
	c := NewGatherer(src)
	if !strings.Contains(exposition(t, c), `pod="train-0"`) {
		t.Fatal("nobody holds anything")
	}
	held = plugin.Holders{At: now.Add(-time.Hour), Err: "the socket is not there"}
	page := exposition(t, c)
	if strings.Contains(page, `pod=`) {
		t.Error("a pod is still there")
	}
	if len(series(page, "DCGM_FI_DEV_GPU_TEMP")) != 2 {
		t.Error("a device's series have gone with the kubelet")
	}
	for _, want := range []string{"_pod_resources_up 0\n", "_pod_resources_age_seconds 3600\n"} {
		if !strings.Contains(page, namespace+want) {
			t.Errorf("no %s", want)
		}
	}
}

func TestPartOf(t *testing.T) {
	for id, want := range map[string]string{
		"GPU-1": "", "GPU-1::3": "3", "MIG-1::10": "10", "nvidia0": "", "nvidia0/gi1": "", "nvidia0/gi1/vgpu2": "2", "0::1": "1",
	} {
		if got := partOf(id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
}
