package status

import (
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// inputs are the inputs of New.
type inputs struct {
	view.View
	idle       metrics.IdleTimes
	idleConfig node.IdleConfig
	events     []Event
}

func newNode(k inputs) Node { return New(&k.View, k.idle, k.idleConfig, k.events) }

// testInputs returns the inputs of agenttest.Node.
func testInputs() inputs {
	snapshot := agenttest.Node()
	before := *snapshot
	before.Devices = slices.Clone(snapshot.Devices)
	before.Devices[1] = agenttest.GPU(1)
	before.At = agenttest.Ago(2 * time.Minute)
	return inputs{
		View: view.View{
			At: agenttest.Now(), Node: "node-1", Version: "1.2.3", Revision: "abc", MaxAge: time.Minute,
			Reload: view.Reload{OK: true, At: agenttest.Ago(time.Hour)}, PluginConfig: plugin.Config{Enabled: true}, StartupTaint: true,
			Snapshot: snapshot,
			Plugin: plugin.Status{AuditErr: "List: denied", Warnings: []string{"GPU 2 is left out"}, Resources: []plugin.ResourceStatus{
				{
					Name: "nvidia.com/gpu", Registered: true, Audited: true, Devices: 3, Healthy: 2, Allocations: 5, AuditMismatches: 1,
					AllocationErrors: map[string]uint64{"unknown_device": 4},
				},
				{Name: "nvidia.com/x", Err: "registration refused"},
			}},
			Holders:    agenttest.Holders(),
			Kube:       kube.Status{Enabled: true, Writes: 12, Events: 4, Dropped: 1, Errors: 2, EventErr: "events is forbidden"},
			NodeObject: kube.NodeStatus{Enabled: true, Writes: 2, Errors: 1, LabelsErr: "nodes is forbidden"},
			StateDir: statefile.Status{
				Path: "/var/lib/state.json", Err: "/var/lib/state.json: no space left on device", Since: agenttest.Ago(time.Minute),
			},
			StateLoss: "the directory mounted at /var/lib was deleted",
		},
		events: prependEvents(prependEvents(nil, eventsBetween(nil, &before)), eventsBetween(&before, snapshot)),
	}
}

func pageOf(t testing.TB, k inputs) string {
	t.Helper()
	return pageWith(t, k, &History{})
}

func pageWith(t testing.TB, k inputs, h *History) string {
	t.Helper()
	w := httptest.NewRecorder()
	NewPages(func() Node { return newNode(k) }, h, zap.NewNop()).
		ServeHTML(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// section returns the page's card of a GPU.
func section(t *testing.T, page string, index int) string {
	t.Helper()
	_, rest, found := strings.Cut(page, `id="gpu-`+strconv.Itoa(index)+`"`)
	card, _, ended := strings.Cut(rest, "</section>")
	if !found || !ended {
		t.Fatalf("no GPU %d in\n%s", index, page)
	}
	return card
}

func TestPageShowsNode(t *testing.T) {
	page := pageOf(t, testInputs())
	agenttest.MustContain(t, page, "gpu-node-agent 1.2.3", "<h1>node-1</h1>",
		"<title>1 unhealthy, 1 degraded, not registered – node-1 – gpu-node-agent</title>",
		`href="/metrics"`, `href="/readyz"`, `href="/api/v1/snapshot"`, `<noscript><meta http-equiv="refresh" content="5">`,
		"1 unhealthy", "1 degraded", "1 healthy", "for 26h", "driver 580.95.05, CUDA 13.0, DCGM 4.6.0", "<dt>reconnects</dt><dd>2</dd>",
		"2 of 4 devices held by pods",
		"2 of 3 healthy · 5 allocations, 4 refused: unknown_device, 1 audit mismatch<", "registration refused",
		`<dt>plugin</dt><dd class="degraded"><span class="badge">warning</span> GPU 2 is left out</dd>`, "List: denied",
		"XID 79: ", "unhealthy, was healthy: lost: the GPU is lost", "events is forbidden", "2 writes of labels and taints, 1 failed try<",
		"labels: nodes is forbidden", "/var/lib/state.json: no space left on device",
		"the directory mounted at /var/lib was deleted")
	agenttest.MustContain(t, section(t, page, 0), "51 °C", "312 W", "87 %", "1980 MHz", "40.0 / 80.0 GiB",
		"training/llm-0 (torch) ×2", "web/chat-1 (vllm)", "GPU-0", "00000000:1B:00.0", "NUMA 0")
	lost := section(t, page, 1)
	agenttest.MustContain(t, lost, "unhealthy", "lost</strong>", "for 90s", health.ActionRebootNode.Advice(), "31 ×2, 79 ×1",
		"last 79, 95s ago", "– / 80.0 GiB")
	for _, zero := range []string{"0 °C", "0 W", "0 %", "<rect"} {
		if strings.Contains(strings.ReplaceAll(lost, "80.0", ""), zero) {
			t.Errorf("GPU without values has %q:\n%s", zero, lost)
		}
	}
	mig := section(t, page, 2)
	agenttest.MustContain(t, mig, "2 MIG devices, 1 held by pods", "1g.10gb", `<span class="dim">2:0</span>`, "nb/ada (main)",
		"1.0 / 10.0 GiB", `<span class="badge">healthy</span>`)
	if n := strings.Count(mig, health.ActionCheckCooling.Advice()); n != 1 {
		t.Errorf("the GPU's finding is shown %d times:\n%s", n, mig)
	}
	for _, reference := range []string{"http://", "https://", "src=", "<link", "@import", "url("} {
		if strings.Contains(page, reference) {
			t.Errorf("the page refers to another host: %q", reference)
		}
	}
}

// Where /metrics has no value, neither has the status; TestMeasurementsExpireWithoutSource in metrics has the same boundary.
func TestOldValuesAreNotShown(t *testing.T) {
	for _, c := range []struct {
		status health.SourceStatus
		age    time.Duration
		shown  bool
	}{
		{health.SourceUp, 5 * time.Minute, true}, // with such an interval
		{health.SourceStalled, 59 * time.Second, true},
		{health.SourceStalled, time.Minute, false},
		{health.SourceDown, 210 * time.Second, false},
		{health.SourceDetached, 210 * time.Second, false},
		{health.SourceStarting, 210 * time.Second, false},
	} {
		k := testInputs()
		k.Snapshot.Source.Status, k.Snapshot.At = c.status, agenttest.Ago(c.age)
		s := newNode(k)
		document, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		page, table, coloured := pageOf(t, k), s.Table(false, terminal.Output{}), s.Table(false, terminal.Output{Colour: true})
		for what, text := range map[string]string{"page": page, "table": table, "JSON": string(document)} {
			for _, value := range []string{"312 W", "87 %", "51 °C", "1980 MHz", "40.0 / ", "1.0 / 10.0", `"155":`, "powerWatts", "memoryUsed"} {
				if strings.Contains(text, value) && !c.shown {
					t.Errorf("%v for %v: the %s has %q:\n%s", c.status, c.age, what, value, text)
				}
			}
		}
		if c.shown {
			agenttest.MustContain(t, page, "312 W", "1.0 / 10.0 GiB")
			agenttest.MustContain(t, table, "312 W", "87 %")
			agenttest.MustContain(t, string(document), "powerWatts", `"155":`)
		} else {
			age := "not measured for " + durationText(c.age)
			agenttest.MustContain(t, section(t, page, 0), age, `<b class="dim">–</b>`, `<b class="dim">– / 80.0 GiB</b>`)
			agenttest.MustContain(t, table, "lost    ", "– / 80.0 GiB", "\n"+age+"\n")
			agenttest.MustContain(t, coloured, "\x1b[2m–\x1b[0m", "\x1b[2m– / 80.0 GiB\x1b[0m", "\x1b[2m"+age+"\x1b[0m")
			agenttest.MustContain(t, string(document), `"outdated":true`)
		}
		if strings.Contains(page+table, "not measured for") == c.shown || strings.Contains(string(document), "outdated") == c.shown {
			t.Errorf("%v for %v: shown %v, but\n%s", c.status, c.age, c.shown, table)
		}
		if k.Snapshot.Devices[0].Sample.Values == nil {
			t.Fatal("the snapshot was changed")
		}
	}
}

func TestTitleNamesProblems(t *testing.T) {
	registered := Kubelet{Resources: []Resource{{Registered: true}, {Registered: true}}}
	up, gpus := Source{Status: "up"}, []Device{{State: "healthy"}, {State: "healthy"}}
	for want, s := range map[string]Node{
		"n – gpu-node-agent":                   {Node: "n", Source: up, Kubelet: registered, GPUs: gpus},
		"gpu-node-agent":                       {Source: up},
		"source starting – n – gpu-node-agent": {Node: "n", Source: Source{Status: "starting"}},
		"source stalled – n – gpu-node-agent":  {Node: "n", Source: Source{Status: "stalled"}, Kubelet: registered, GPUs: gpus},
		"not registered – n – gpu-node-agent": {
			Node: "n", Source: up, Kubelet: Kubelet{Resources: []Resource{{Registered: true}, {}}},
			GPUs: gpus,
		},
		"not registered – served – gpu-node-agent": {Node: "served", Source: up, Kubelet: Kubelet{Error: "no GPU"}},
		"not registered – d – gpu-node-agent":      {Node: "d", Source: up, DRA: &DRA{Driver: "gpu.example.com"}},
		"d – gpu-node-agent":                       {Node: "d", Source: up, DRA: &DRA{Driver: "gpu.example.com", Registered: true}},
		"off – gpu-node-agent":                     {Node: "off", Source: up, DRA: &DRA{}, Kubelet: Kubelet{Plugin: pluginOff}},
		"2 unhealthy, 1 unknown, source down – n – gpu-node-agent": {
			Node: "n", Source: Source{Status: "down"},
			GPUs: []Device{{State: "unknown"}, {State: "unhealthy"}, {State: "healthy"}, {State: "unhealthy"}},
		},
	} {
		if got := titleText(s); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestStatusWithMissingInputs(t *testing.T) {
	for name, v := range map[string]view.View{
		"none": {},
		"down": {Snapshot: &health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}}},
		"empty devices": {Snapshot: &health.Snapshot{Devices: []health.DeviceState{
			{}, {Device: health.Device{Kind: health.KindMIG, Parent: "GPU-unknown"}},
		}}},
		"odd values": {Snapshot: &health.Snapshot{Devices: []health.DeviceState{{
			Sample: health.Sample{Values: map[health.Field]float64{
				health.FieldGPUTemp: math.NaN(), health.FieldGPUUtil: math.Inf(1), health.FieldFBUsed: 5, health.FieldFBTotal: 0,
				health.FieldPower: -1e300,
			}},
		}}}},
	} {
		t.Run(name, func(t *testing.T) {
			v.At = agenttest.Now()
			k := inputs{View: v}
			agenttest.MustContain(t, pageOf(t, k), "gpu-node-agent", "–")
			s := newNode(k)
			if _, err := json.Marshal(s); err != nil {
				t.Error(err)
			}
			if s.Table(true, terminal.Output{Colour: true}) == "" || s.Table(false, terminal.Output{}) == "" {
				t.Error("no table")
			}
		})
	}
}

func TestStatusEscapesText(t *testing.T) {
	const bad = "<script>alert(1)</script>\"'>&\x1b[31m\n"
	k := testInputs()
	k.Node, k.Version, k.Plugin.Err, k.Plugin.Warnings = bad, bad, bad, []string{bad}
	k.Plugin.Resources[1].Err, k.Plugin.Resources[0].Name, k.Plugin.Resources[0].Audited = bad, bad, false // for the startup taint
	k.Snapshot.Source.Err, k.Snapshot.Source.Versions.Driver, k.Snapshot.Source.Kind = bad, bad, bad
	d := &k.Snapshot.Devices[1]
	d.Device.Model, d.Device.PCI, d.Device.ID = bad, bad, bad
	d.Verdict.Findings[0].Reason, d.Verdict.Findings[0].Cause, d.Verdict.Findings[0].Action = bad, bad, bad
	k.Snapshot.Devices[4].Device.Profile = bad
	k.Kube.ConditionErr, k.Kube.EventErr, k.StateDir.Err, k.StateLoss, k.NodeObject.TaintsErr = bad, bad, bad, bad, bad
	k.Holders.By[bad] = []podresources.Holder{{Namespace: bad, Pod: bad, Container: bad}}
	k.events[0].Text = bad
	if page := pageOf(t, k); strings.Contains(page, "<script>alert") || strings.Contains(page, `"'>`) {
		t.Errorf("not escaped:\n%s", page)
	}
	for _, colour := range []bool{false, true} {
		if table := newNode(k).Table(true, terminal.Output{Colour: colour}); strings.Contains(table, "&\x1b[31m") ||
			strings.Contains(table, "'>&\n") {
			t.Errorf("control characters reach the terminal:\n%q", table)
		}
	}
}

func TestTableMatchesGoldenFile(t *testing.T) {
	s := newNode(testInputs())
	s.GPUs[1].Findings[0].Advice, s.GPUs[2].Findings[0].Advice = "reboot advice", "cooling advice" // independent of health's texts
	golden.Check(t, "testdata/table.txt", s.Table(false, terminal.Output{})+"\n--- wide\n\n"+s.Table(true, terminal.Output{})+
		"\n--- colour\n\n"+strings.ReplaceAll(s.Table(false, terminal.Output{Colour: true}), "\x1b", "ESC"))
}

func TestAskReturnsStatus(t *testing.T) {
	want := newNode(testInputs())
	server := serve(t, "")
	got, text, err := Ask(t.Context(), server.Address(), Access{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Table(true, terminal.Output{Colour: true}) != want.Table(true, terminal.Output{Colour: true}) {
		t.Errorf("received\n%s", got.Table(true, terminal.Output{}))
	}
	agenttest.MustContain(t, string(text), `"state":"unhealthy","since":"2026-03-02T11:58:30Z"`, `"cause":"lost"`, `"temperatureCelsius":51`,
		`"150":51`,
		`"memoryUsedBytes":42949672960`, `"pod":"llm-0"`, `"kind":"xid"`, `"notReady":["plugin: nvidia.com/x: registration refused"]`,
		`"apiServer":{"enabled":true,"writes":12,"events":4,"dropped":1,"errors":2,"eventError":"events is forbidden"}`,
		`"nodeObject":{"enabled":true,"writes":2,"errors":1,"labelsError":"nodes is forbidden",`+
			`"startupTaint":["plugin: nvidia.com/x: registration refused"]}`,
		`"memory":{"path":"/var/lib/state.json","error":"/var/lib/state.json: no space left on device",`+
			`"since":"2026-03-02T11:59:00Z","loss":"the directory mounted at /var/lib was deleted"}`)
	var tree struct {
		GPUs []map[string]any `json:"gpus"`
	}
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if values, _ := tree.GPUs[1]["values"].(map[string]any); len(values) != 1 || tree.GPUs[1]["fields"] != nil {
		t.Errorf("a lost GPU has values: %v", tree.GPUs[1])
	}

	res, err := http.Head("http://" + server.Address() + SnapshotPath)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK || res.ContentLength != int64(len(text)) || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("HEAD: %s %d %v", res.Status, res.ContentLength, res.Header)
	}
}

func TestAskErrors(t *testing.T) {
	respond := func(code int, text string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = w.Write([]byte(text))
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for _, c := range []struct{ address, want string }{
		{closed.URL, strings.TrimPrefix(closed.URL, "http://")},
		{"nine", `"nine"`},
		{respond(http.StatusNotFound, ""), "404"},
		{respond(http.StatusOK, "<html>"), "'<'"},
	} {
		if _, _, err := Ask(t.Context(), c.address, Access{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.address, err, c.want)
		}
	}
}

// summary returns the machine-readable parts of events, one line for each.
func summary(events []Event) string {
	var b strings.Builder
	for _, e := range events {
		line := fmt.Sprint(e.Kind, " ", e.UUID, " ", e.Was, " ", e.State, " ", e.Cause, " ", e.XID)
		b.WriteString(strings.TrimSuffix(strings.Join(strings.Fields(line), " "), " 0") + "\n")
	}
	return b.String()
}

func TestEventsBetweenSnapshots(t *testing.T) {
	up := health.Source{Kind: "sim", Status: health.SourceUp, Since: agenttest.Ago(time.Hour)}
	down := health.Source{Kind: "sim", Status: health.SourceDown, Err: "refused"}
	unchecked := up
	unchecked.Checks = health.Checks{Status: health.ChecksDown, Err: "version mismatch", Since: agenttest.Ago(time.Minute)}
	pushed, unpushed := up, up
	pushed.Events = []health.EventSourceState{
		{Witness: health.WitnessNVML, Status: health.EventsUp, Since: agenttest.Ago(time.Hour)},
		{Witness: health.WitnessKernelLog},
	}
	unpushed.Events = []health.EventSourceState{{
		Witness: health.WitnessNVML, Status: health.EventsDown, Err: "no driver",
		Since: agenttest.Ago(time.Minute),
	}, {Witness: health.WitnessKernelLog}}
	snapshot := func(src health.Source, devices ...health.DeviceState) *health.Snapshot {
		return &health.Snapshot{At: agenttest.Ago(time.Minute), Source: src, Devices: devices}
	}
	gpu, mig := agenttest.GPU(0), agenttest.MIG(0, 7)
	xids := agenttest.GPU(0)
	xids.XIDs = healthtest.Counted(map[int]uint64{31: 3},
		health.XID{Code: 31, At: agenttest.Ago(2 * time.Minute), Witness: health.WitnessNVML})
	lostGPU, lostMIG := agenttest.Lost(gpu, agenttest.Ago(0)), agenttest.Lost(mig, agenttest.Ago(0))
	faultyMIG := agenttest.Lost(mig, agenttest.Ago(0))
	faultyMIG.Verdict.Findings[0].Cause = "xid-43"
	other := agenttest.MIG(0, 8)
	faultyOther := agenttest.Lost(other, agenttest.Ago(0))
	faultyOther.Verdict.Findings[0].Cause = "xid-43"
	for name, c := range map[string]struct {
		before, after *health.Snapshot
		want          string
		text          []string // in the text of the last event
	}{
		"first snapshot": {nil, snapshot(up, gpu, agenttest.GPU(1), mig), "source up\nfound\n", []string{"2 GPUs, 1 MIG device"}},
		"restored snapshot": {
			nil, &health.Snapshot{Source: health.Source{Kind: "sim"}, Devices: []health.DeviceState{lostGPU}},
			"source starting\nfound GPU-0\nstate GPU-0 unknown unhealthy lost\n", nil,
		},
		"no change":          {snapshot(up, gpu), snapshot(up, gpu), "", nil},
		"source goes down":   {snapshot(up, gpu), snapshot(down, gpu), "source up down\n", []string{"sim", "refused"}},
		"checks go down":     {snapshot(up, gpu), snapshot(unchecked, gpu), "checks unknown down\n", []string{"version mismatch"}},
		"checks stay down":   {snapshot(unchecked, gpu), snapshot(unchecked, gpu), "", nil},
		"events go up":       {snapshot(up, gpu), snapshot(pushed, gpu), "event-source off up\n", []string{"nvml"}},
		"events go down":     {snapshot(pushed, gpu), snapshot(unpushed, gpu), "event-source up down\n", []string{"nvml", "no driver"}},
		"events stay down":   {snapshot(unpushed, gpu), snapshot(unpushed, gpu), "", nil},
		"XIDs":               {snapshot(up, gpu), snapshot(up, xids), "xid GPU-0 31\n", []string{"XID 31", catalog.LookupXID(31).Name, "3)"}},
		"MIG device removed": {snapshot(up, gpu, mig), snapshot(up, gpu), "gone MIG-0-7\n", nil},
		"GPU and MIG lost": {
			snapshot(up, gpu, mig), snapshot(up, lostGPU, lostMIG), "state GPU-0 healthy unhealthy lost\n",
			[]string{"was healthy", "lost", lostGPU.Verdict.Findings[0].Reason},
		},
		"GPU and MIG back": {
			snapshot(up, lostGPU, lostMIG), snapshot(up, gpu, mig), "state GPU-0 unhealthy healthy\n",
			[]string{"was unhealthy", "cleared: lost"},
		},
		"fault of MIG only": {snapshot(up, gpu, mig), snapshot(up, gpu, faultyMIG), "state MIG-0-7 healthy unhealthy xid-43\n", nil},
		"fault of two MIGs": {
			snapshot(up, gpu, mig, other), snapshot(up, gpu, faultyMIG, faultyOther), "state GPU-0 healthy unhealthy xid-43\n",
			[]string{"(2 MIG devices)"},
		},
		"MIG recovers": {snapshot(up, gpu, faultyMIG), snapshot(up, gpu, mig), "state MIG-0-7 unhealthy healthy\n", nil},
	} {
		events := eventsBetween(c.before, c.after)
		if got := summary(events); got != c.want {
			t.Errorf("%s:\n%swant\n%s", name, got, c.want)
		} else if len(events) > 0 {
			agenttest.MustContain(t, events[len(events)-1].Text, c.text...)
		}
	}
}

// While the source is stalled, the last poll is old. An XID of an event source changes a verdict after it.
func TestEventsBetweenPollsHaveTheirTime(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{time.Hour: time.Minute, time.Second: time.Second} {
		polled := agenttest.Ago(age)
		before := health.Snapshot{At: polled, Devices: []health.DeviceState{agenttest.GPU(0)}}
		after := health.Snapshot{At: polled, Devices: []health.DeviceState{agenttest.Lost(agenttest.GPU(0), agenttest.Ago(time.Minute))}}
		if e := eventsBetween(&before, &after); len(e) != 1 || !e[0].Time.Equal(agenttest.Ago(want)) {
			t.Errorf("polled %v ago: %+v, want one of %v ago", age, e, want)
		}
	}
}

// What reported an XID first is in the device's XIDs and in the event.
func TestSourceOfXIDs(t *testing.T) {
	for witness, want := range map[health.Witness]string{
		health.WitnessSource: "dcgm", health.WitnessNVML: "nvml",
		health.WitnessKernelLog: "kernel-log",
	} {
		before, d := agenttest.GPU(0), agenttest.GPU(0)
		d.XIDs = healthtest.Counted(map[int]uint64{31: 3}, health.XID{Code: 31, At: agenttest.Ago(time.Minute), Witness: witness})
		src := health.Source{Kind: "dcgm", Status: health.SourceUp}
		after := &health.Snapshot{At: agenttest.Ago(0), Source: src, Devices: []health.DeviceState{d}}
		s := newNode(inputs{View: view.View{Snapshot: after}}).GPUs[0]
		events := eventsBetween(&health.Snapshot{At: agenttest.Ago(1), Source: src, Devices: []health.DeviceState{before}}, after)
		if s.LastXID.Source != want || s.XIDs[0].Source != want || len(events) != 1 || events[0].Source != want {
			t.Errorf("%v: %+v, %+v, %+v", witness, s.LastXID, s.XIDs, events)
		}
	}
}

func TestEventsDropsOldest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var snapshots health.Latest[health.Snapshot]
		var e Events
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Follow(ctx, &snapshots) }()
		for i := range 2 * maxEvents {
			status := health.SourceUp
			if i%2 == 0 {
				status = health.SourceDown
			}
			snapshots.Store(&health.Snapshot{Source: health.Source{Kind: strconv.Itoa(i), Status: status}})
			synctest.Wait()
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		all := e.Latest()
		if len(all) != maxEvents || all[0].State != "up" || !strings.Contains(all[0].Text, "199") ||
			!strings.Contains(all[maxEvents-1].Text, "100") {
			t.Errorf("%d events: %+v", len(all), all)
		}
	})
}

func TestClearsTextIsShown(t *testing.T) {
	texts := make(map[string]health.Clears)
	for c := health.ClearsItself; c <= health.ClearsRestart; c++ {
		k := testInputs()
		k.Snapshot.Devices[1].Verdict.Findings[0].Clears = c // of the lost one
		text := clearsText(Finding{Clears: c.String()})
		if other, ok := texts[text]; ok || strings.Contains(text, c.String()+":") {
			t.Errorf("%v and %v: %q", c, other, text)
		}
		texts[text] = c
		agenttest.MustContain(t, section(t, pageOf(t, k), 1), text)
		agenttest.MustContain(t, newNode(k).Table(true, terminal.Output{}), "\n    "+text+"\n")
	}
	if got := clearsText(Finding{Clears: "in-the-spring"}); !strings.Contains(got, "in-the-spring") {
		t.Errorf("value of a newer agent: %q", got)
	}
	ofXID := clearsText(Finding{Cause: "xid-63", Clears: health.ClearsItself.String()})
	if _, ok := texts[ofXID]; ok {
		t.Errorf("an XID has no condition that ends, but %q", ofXID)
	}
}

func TestConfigErrorIsShown(t *testing.T) {
	long := "source: " + strings.Repeat("ä", 1000)
	for name, c := range map[string]struct {
		err   string
		want  string
		hints bool // check-config shows more
	}{
		"one error":  {"health.confirm: 0 is out of range", "health.confirm: 0 is out of range; ", false},
		"two errors": {"a: <b>\nc: d", "a: <b> (", true},
		"long error": {long, long[:8+2*192] + "… (", true},
		"no text":    {"", "", true},
	} {
		k := testInputs()
		if s := newNode(k); s.Config.Error != "" || strings.Contains(s.Table(false, terminal.Output{}), "\nconfig ") {
			t.Errorf("%s: shown while the configuration is valid: %+v", name, s.Config)
		}
		k.Reload.OK, k.Reload.Err = false, c.err
		s := newNode(k)
		if s.Config.Error != c.err {
			t.Errorf("%s: %q", name, s.Config.Error)
		}
		table := s.Table(false, terminal.Output{})
		agenttest.MustContain(t, table, "\nconfig ", c.want, " for 60m")
		if strings.Contains(table, "check-config") != c.hints {
			t.Errorf("%s: %s", name, table)
		}
		agenttest.MustContain(t, pageOf(t, k), template.HTMLEscapeString(c.want))
	}
}

func TestAgeText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 59 * time.Second: "59s", 50 * time.Hour: "2d2h",
	} {
		if got := ageText(agenttest.Now(), agenttest.Ago(d)); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// maxInputs returns the inputs of a node of the largest size: 32 GPUs with 7 MIG devices each, all held.
func maxInputs() inputs {
	k := testInputs()
	k.Snapshot.Devices, k.events = nil, nil
	for i := range 32 {
		k.Snapshot.Devices = append(k.Snapshot.Devices, agenttest.Lost(agenttest.GPU(i), agenttest.Ago(time.Minute)))
		for gi := range 7 {
			d := agenttest.MIG(i, gi)
			k.Snapshot.Devices = append(k.Snapshot.Devices, d)
			k.Holders.By[d.Device.ID] = []podresources.Holder{
				{Namespace: "training", Pod: "llm-70b-worker-" + strconv.Itoa(i), Container: "torch"},
			}
		}
	}
	for range maxEvents {
		k.events = append(k.events, eventsBetween(&health.Snapshot{},
			&health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}})...)
	}
	return k
}

func TestStatusSizeOfLargestNode(t *testing.T) {
	k := maxInputs()
	page := pageWith(t, k, maxHistory(k.Snapshot.Devices))
	text, err := json.Marshal(newNode(maxInputs()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("page %d KiB, JSON %d KiB", len(page)>>10, len(text)>>10)
	if len(page) > 256<<10 || len(text) > 256<<10 {
		t.Errorf("page has %d bytes, JSON %d", len(page), len(text))
	}
}

func BenchmarkStatusPage(b *testing.B) {
	k := maxInputs()
	pages := NewPages(func() Node { return newNode(k) }, maxHistory(k.Snapshot.Devices), zap.NewNop())
	for name, serve := range map[string]http.HandlerFunc{"html": pages.ServeHTML, "json": pages.ServeJSON} {
		b.Run(name, func(b *testing.B) {
			req := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/", nil)
			b.ReportAllocs()
			for b.Loop() {
				serve(httptest.NewRecorder(), req)
			}
		})
	}
}

// A missing MIG device keeps its index, so that a cordon still matches it.
func TestMissingMIGDeviceKeepsIndex(t *testing.T) {
	c := judge.DefaultConfig()
	before := agenttest.Judge(c, nil, agenttest.MIGReading(), agenttest.Now())
	withoutMIG := &health.Reading{Devices: agenttest.MIGReading().Devices[:1], Samples: agenttest.MIGReading().Samples[:1]}
	snapshot := &health.Snapshot{At: agenttest.Now(), Devices: agenttest.Judge(c, before, withoutMIG, agenttest.Now().Add(time.Second))}
	s := newNode(inputs{View: view.View{At: agenttest.Now(), Snapshot: snapshot}})
	if table := s.Table(false, terminal.Output{}); !strings.Contains(table, "1:0") || !strings.Contains(table, "1:1") ||
		strings.Contains(table, "1:-") {
		t.Error(table)
	}
	for i := range snapshot.Devices { // unknown
		snapshot.Devices[i].Device.MIGIndex = -1
	}
	s = newNode(inputs{View: view.View{At: agenttest.Now(), Snapshot: snapshot}})
	if n := strings.Count(s.Table(false, terminal.Output{}), "1:-"); n != 2 {
		t.Errorf("%d MIG devices without an index:\n%s", n, s.Table(false, terminal.Output{}))
	}
	text, err := json.Marshal(s)
	if err != nil || strings.Contains(string(text), "migIndex") {
		t.Errorf("%v, %s", err, text)
	}
	if page := pageOf(t, inputs{View: view.View{At: agenttest.Now(), Snapshot: snapshot}}); strings.Count(
		page,
		`<span class="dim">1:-</span>`,
	) != 2 {
		t.Error(page)
	}
}
