package status

import (
	"context"
	"encoding/json"
	"flag"
	"html/template"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

var update = flag.Bool("update", false, "write the golden table anew")

// aNode has a healthy GPU that is held, a lost one, and a hot one with MIG devices.
func aNode() Inputs {
	snapshot := agenttest.Node()
	before := *snapshot
	before.Devices = slices.Clone(snapshot.Devices)
	before.Devices[1] = agenttest.GPU(1)
	before.At = agenttest.Ago(2 * time.Minute)
	k := Inputs{
		Node: "node-1", Version: "1.2.3", Revision: "abc", Now: agenttest.Now(), NotReady: []string{"plugin nvidia.com/x: the kubelet said no"},
		Reload: metrics.Reload{OK: true, At: agenttest.Ago(time.Hour)}, Snapshot: snapshot,
		Plugin: plugin.Status{AuditErr: "List: denied", Warnings: []string{"GPU 2 is left out"}, Resources: []plugin.ResourceStatus{
			{Name: "nvidia.com/gpu", Registered: true, Devices: 3, Healthy: 2, Allocations: 5, AuditMismatches: 1, AllocationErrors: map[string]uint64{"unknown_device": 4}},
			{Name: "nvidia.com/x", Err: "the kubelet said no"},
		}},
		Holders: agenttest.Holders(),
	}
	k.Kube = kube.Status{Enabled: true, Writes: 12, Events: 4, Dropped: 1, Errors: 2, Event: "events is forbidden"}
	k.StateFile = statefile.Status{Path: "/var/lib/state.json", Err: "/var/lib/state.json: no space left on device", Since: agenttest.Ago(time.Minute)}
	k.Events = newestFirst(newestFirst(nil, eventsBetween(nil, &before)), eventsBetween(&before, snapshot))
	return k
}

func pageOf(t testing.TB, k Inputs) string {
	t.Helper()
	w := httptest.NewRecorder()
	NewPages(func() Node { return New(k) }, zap.NewNop()).
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

func TestPage(t *testing.T) {
	page := pageOf(t, aNode())
	agenttest.MustContain(t, page, "gpu-node-agent 1.2.3", "<h1>node-1</h1>", "<title>node-1, 1 unhealthy, 1 degraded – gpu-node-agent</title>",
		`href="/metrics"`, `href="/readyz"`, `href="/api/v1/snapshot"`, `<noscript><meta http-equiv="refresh" content="5">`,
		"1 unhealthy", "1 degraded", "1 healthy", "for 1d2h", "driver 580.95.05, CUDA 13.0, DCGM 4.6.0", "<dt>reconnects</dt><dd>2</dd>",
		"2 of 3 healthy · 5 allocations, 4 refused: unknown_device · 1 audit mismatch<", "not registered</span> the kubelet said no", `<p class="degraded">GPU 2 is left out</p>`, "List: denied",
		"XID 79: ", "unhealthy, was healthy: lost: the GPU is lost",
		"API server <span class=\"badge degraded\">not told</span>", "12 condition writes, 4 events, 1 event given up, 2 failed requests", "events: events is forbidden",
		"a restart of the agent would forget findings: /var/lib/state.json: no space left on device")
	agenttest.MustContain(t, section(t, page, 0), "51 °C", "312 W", "87 %", `<rect width="87"`, "40.0 / 80.0 GiB", `<rect width="50"`,
		"training/llm-0 (torch) ×2", "web/chat-1 (vllm)", "GPU-0", "00000000:1B:00.0", "NUMA 0")
	lost := section(t, page, 1)
	agenttest.MustContain(t, lost, "unhealthy", "lost</strong>", "for 1m30s", "drain and reboot the node", "31 ×2, 79 ×1", "last 79, 1m35s ago", "nobody", "– / 80.0 GiB")
	for _, zero := range []string{"0 °C", "0 W", "0 %", "<rect"} {
		if strings.Contains(strings.ReplaceAll(lost, "80.0", ""), zero) {
			t.Errorf("%q of a GPU that measures nothing:\n%s", zero, lost)
		}
	}
	mig := section(t, page, 2)
	agenttest.MustContain(t, mig, "2 MIG devices, 1 held by pods", "1g.10gb", `<span class="dim">2:0</span>`, "nb/ada (main)", "1.0 / 10.0 GiB", `<span class="badge">healthy</span>`)
	if n := strings.Count(mig, "check cooling"); n != 1 {
		t.Errorf("the GPU's finding is told %d times:\n%s", n, mig)
	}
}

func TestPageLoadsNothing(t *testing.T) {
	page := pageOf(t, aNode())
	for _, part := range []string{"http://", "https://", "src=", "<link", "@import", "url("} {
		if strings.Contains(page, part) {
			t.Errorf("the page has %q", part)
		}
	}
}

// A page, an answer and a table come of whatever there is.
func TestStatusOfLittle(t *testing.T) {
	for name, k := range map[string]Inputs{
		"nothing": {Now: agenttest.Now()},
		"down":    {Now: agenttest.Now(), Snapshot: &health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}}},
		"empty devices": {Now: agenttest.Now(), Snapshot: &health.Snapshot{Devices: []health.DeviceState{
			{}, {Device: health.Device{Kind: health.KindMIG, Parent: "GPU-unknown"}},
		}}},
		"odd values": {Now: agenttest.Now(), Snapshot: &health.Snapshot{Devices: []health.DeviceState{{
			Sample: health.Sample{Values: map[health.Field]float64{
				health.FieldGPUTemp: math.NaN(), health.FieldGPUUtil: math.Inf(1), health.FieldFBUsed: 5, health.FieldFBTotal: 0, health.FieldPower: -1e300,
			}},
		}}}},
	} {
		t.Run(name, func(t *testing.T) {
			agenttest.MustContain(t, pageOf(t, k), "gpu-node-agent", "–")
			s := New(k)
			if _, err := json.Marshal(s); err != nil {
				t.Error(err)
			}
			if s.Table(true, true) == "" || s.Table(false, false) == "" {
				t.Error("no table")
			}
		})
	}
}

func TestStatusEscapes(t *testing.T) {
	const bad = "<script>alert(1)</script>\"'>&\x1b[31m\n"
	k := aNode()
	k.Node, k.Version, k.Plugin.Err, k.Plugin.Warnings = bad, bad, bad, []string{bad}
	k.Plugin.Resources[1].Err, k.Plugin.Resources[0].Name = bad, bad
	k.Snapshot.Source.Err, k.Snapshot.Source.Versions.Driver, k.Snapshot.Source.Kind = bad, bad, bad
	d := &k.Snapshot.Devices[1]
	d.Device.Model, d.Device.PCI, d.Device.ID = bad, bad, bad
	d.Verdict.Findings[0].Reason, d.Verdict.Findings[0].Cause, d.Verdict.Findings[0].Action = bad, bad, bad
	k.Snapshot.Devices[4].Device.Profile = bad
	k.Kube.Condition, k.Kube.Event, k.StateFile.Err = bad, bad, bad
	k.Holders.By[bad] = []plugin.Holder{{Namespace: bad, Pod: bad, Container: bad}}
	k.Events[0].Text = bad
	if page := pageOf(t, k); strings.Contains(page, "<script>alert") || strings.Contains(page, `"'>`) {
		t.Errorf("not escaped:\n%s", page)
	}
	for _, colour := range []bool{false, true} {
		if table := New(k).Table(true, colour); strings.Contains(table, "&\x1b[31m") || strings.Contains(table, "'>&\n") {
			t.Errorf("control characters reach the terminal:\n%q", table)
		}
	}
}

func TestTable(t *testing.T) {
	const golden = "testdata/table.txt"
	s := New(aNode())
	got := s.Table(false, false) + "\n--- wide\n\n" + s.Table(true, false) + "\n--- colour\n\n" + strings.ReplaceAll(s.Table(false, true), "\x1b", "ESC")
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the table differs from %s (go test ./agent/status -update):\n%s", golden, got)
	}
}

// What is asked for over HTTP is what was known, and says no more than that.
func TestAsk(t *testing.T) {
	want := New(aNode())
	pages := NewPages(func() Node { return want }, zap.NewNop())
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+SnapshotPath, pages.ServeJSON)
	server := httptest.NewServer(mux)
	defer server.Close()
	got, text, err := Ask(t.Context(), strings.TrimPrefix(server.URL, "http://"), Access{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Table(true, true) != want.Table(true, true) {
		t.Errorf("the answer reads as\n%s", got.Table(true, false))
	}
	agenttest.MustContain(t, string(text), `"state":"unhealthy","since":"2026-03-02T11:58:30Z"`, `"cause":"lost"`, `"temperatureCelsius":51`, `"150":51`,
		`"memoryUsedBytes":42949672960`, `"pod":"llm-0"`, `"kind":"xid"`, `"notReady":["plugin nvidia.com/x: the kubelet said no"]`,
		`"apiServer":{"enabled":true,"writes":12,"events":4,"dropped":1,"errors":2,"eventError":"events is forbidden"}`,
		`"memory":{"file":"/var/lib/state.json","error":"/var/lib/state.json: no space left on device","since":"2026-03-02T11:59:00Z"}`)
	var tree struct {
		GPUs []map[string]any `json:"gpus"`
	}
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if values, _ := tree.GPUs[1]["values"].(map[string]any); len(values) != 1 || tree.GPUs[1]["fields"] != nil {
		t.Errorf("a lost GPU has values: %v", tree.GPUs[1])
	}

	req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, server.URL+SnapshotPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK || res.ContentLength != int64(len(text)) || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("HEAD: %s %d %v", res.Status, res.ContentLength, res.Header)
	}
}

func TestAskErrors(t *testing.T) {
	answers := func(code int, text string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = w.Write([]byte(text))
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	tls := httptest.NewUnstartedServer(http.NotFoundHandler())
	tls.Config.ErrorLog = zap.NewStdLog(zap.NewNop())
	tls.StartTLS()
	defer tls.Close()
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for _, c := range []struct{ address, want string }{
		{closed.URL, "no agent answers at 127.0.0.1:"},
		{"nine", `--address: "nine" is not an address`},
		{answers(http.StatusNotFound, ""), "it is no agent of this version"},
		{answers(http.StatusOK, "<html>"), "is not a snapshot"},
		{answers(http.StatusUnauthorized, ""), "a name and a password"},
		{strings.Replace(tls.URL, "https", "http", 1), "speaks TLS"},
	} {
		if _, _, err := Ask(t.Context(), c.address, Access{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.address, err, c.want)
		}
	}
}

func texts(all []Event) string {
	var b strings.Builder
	for _, e := range all {
		b.WriteString(e.Kind + " " + string(e.UUID) + " " + e.Text + "\n")
	}
	return b.String()
}

func TestEvents(t *testing.T) {
	up := health.Source{Kind: "sim", Status: health.SourceUp, Since: agenttest.Ago(time.Hour)}
	snapshot := func(src health.Source, devices ...health.DeviceState) *health.Snapshot {
		return &health.Snapshot{At: agenttest.Ago(time.Minute), Source: src, Devices: devices}
	}
	down := health.Source{Kind: "sim", Status: health.SourceDown, Err: "refused"}
	xids := agenttest.GPU(0)
	xids.XIDCounts, xids.LastXID = map[int]uint64{31: 3}, health.XID{Code: 31, At: agenttest.Ago(2 * time.Minute)}
	gpu, mig := agenttest.Lost(agenttest.GPU(0), agenttest.Ago(0)), agenttest.Lost(agenttest.MIG(0, 7), agenttest.Ago(0))
	other := agenttest.Lost(agenttest.MIG(0, 7), agenttest.Ago(0))
	other.Verdict.Findings[0].Cause = "xid-43"
	for name, c := range map[string]struct {
		before, after *health.Snapshot
		want          string
	}{
		"start":          {nil, snapshot(up, agenttest.GPU(0), agenttest.GPU(1), agenttest.MIG(0, 7)), "source  source sim up\nfound  2 GPUs, 1 MIG device found\n"},
		"remembered":     {nil, &health.Snapshot{Source: health.Source{Kind: "sim"}, Devices: []health.DeviceState{gpu}}, "source  source sim starting\nfound GPU-0 1 GPU remembered from before the start\nstate GPU-0 unhealthy: lost: the GPU is lost: the driver cannot reach it any more\n"},
		"same":           {snapshot(up, agenttest.GPU(0)), snapshot(up, agenttest.GPU(0)), ""},
		"source":         {snapshot(up, agenttest.GPU(0)), snapshot(down, agenttest.GPU(0)), "source  source sim down: refused\n"},
		"XIDs":           {snapshot(up, agenttest.GPU(0)), snapshot(up, xids), "xid GPU-0 XID 31: " + health.LookupXID(31).Name + " (count 3)\n"},
		"gone":           {snapshot(up, agenttest.GPU(0), agenttest.MIG(0, 7)), snapshot(up, agenttest.GPU(0)), "gone MIG-0-7 1 MIG device gone\n"},
		"lost with MIG":  {snapshot(up, agenttest.GPU(0), agenttest.MIG(0, 7)), snapshot(up, gpu, mig), "state GPU-0 unhealthy, was healthy: lost: the GPU is lost: the driver cannot reach it any more\n"},
		"back with MIG":  {snapshot(up, gpu, mig), snapshot(up, agenttest.GPU(0), agenttest.MIG(0, 7)), "state GPU-0 healthy, was unhealthy; cleared: lost\n"},
		"a MIG's own":    {snapshot(up, agenttest.GPU(0), agenttest.MIG(0, 7)), snapshot(up, agenttest.GPU(0), other), "state MIG-0-7 unhealthy, was healthy: xid-43: the GPU is lost: the driver cannot reach it any more\n"},
		"and it is over": {snapshot(up, agenttest.GPU(0), other), snapshot(up, agenttest.GPU(0), agenttest.MIG(0, 7)), "state MIG-0-7 healthy, was unhealthy; cleared: xid-43\n"},
	} {
		if got := texts(eventsBetween(c.before, c.after)); got != c.want {
			t.Errorf("%s:\n%swant\n%s", name, got, c.want)
		}
	}
}

func TestEventsAreBounded(t *testing.T) {
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
		if len(all) != maxEvents || all[0].Text != "source 199 up" || all[maxEvents-1].Text != "source 100 down" {
			t.Errorf("%d events: %s", len(all), texts(all))
		}
	})
}

// When a finding goes is said in the same words on the page and in the table.
func TestClearsText(t *testing.T) {
	if want, got := "clears with a GPU reset", clearsText(Finding{Clears: health.ClearsGPUReset.String()}); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for c := health.ClearsItself; !strings.HasPrefix(c.String(), "%!"); c++ {
		k := aNode()
		k.Snapshot.Devices[1].Verdict.Findings[0].Clears = c // of the lost one
		text := clearsText(Finding{Clears: c.String()})
		if strings.Contains(text, ":") {
			t.Errorf("%v has no words of its own: %q", c, text)
		}
		agenttest.MustContain(t, section(t, pageOf(t, k), 1), " · "+text+"</span>")
		agenttest.MustContain(t, New(k).Table(true, false), "cannot reach it any more\n  action: drain and reboot the node\n  "+text+"\n")
	}
	if got := clearsText(Finding{Clears: "in the spring"}); got != "clears: in the spring" {
		t.Errorf("of a newer agent: %q", got)
	}
}

// That it goes by itself is no reason to leave it.
func TestClearsItselfText(t *testing.T) {
	for cause, want := range map[string]string{health.CauseLost: "clears when it is gone", "xid-63": "clears a while after the last one"} {
		if got := clearsText(Finding{Cause: cause, Clears: health.ClearsItself.String()}); got != want {
			t.Errorf("%s %s, want %s", cause, got, want)
		}
	}
}

// What is wrong with the file is said where it is said that it is bad.
func TestBadConfigIsShown(t *testing.T) {
	long := "source: " + strings.Repeat("ä", 1000)
	for name, c := range map[string]struct{ bad, want string }{
		"one fault":  {"health.confirm: 0 is out of range", "health.confirm: 0 is out of range; the one before it has been in force for 1h"},
		"two faults": {"a: <b>\nc: d", "a: <b> (gpu-node-agent check-config says all of it); the one before"},
		"a long one": {long, long[:8+2*192] + "… (gpu-node-agent check-config says all of it); the one before"},
		"not said":   {"", "see the log, or gpu-node-agent check-config; the one before"},
	} {
		k := aNode()
		k.ConfigError = c.bad
		if s := New(k); s.Config.Error != "" || strings.Contains(s.Table(false, false), "the file is bad") {
			t.Errorf("%s: what is over is shown: %+v", name, s.Config)
		}
		k.Reload.OK = false
		s := New(k)
		if s.Config.Error != c.bad {
			t.Errorf("%s: %q", name, s.Config.Error)
		}
		agenttest.MustContain(t, s.Table(false, false), "config    the file is bad: "+c.want)
		agenttest.MustContain(t, pageOf(t, k), `<span class="badge">bad</span> `+template.HTMLEscapeString(c.want))
	}
	k := aNode()
	k.Reload = metrics.Reload{}
	agenttest.MustContain(t, New(k).Table(false, false), "; the one before it is in force\n")
}

func TestOpenedAgainText(t *testing.T) {
	for n, want := range map[uint64]string{1: "; opened again 1 time\n", 2: "; opened again 2 times\n"} {
		k := aNode()
		k.Snapshot.Source.Reconnects = n
		agenttest.MustContain(t, New(k).Table(false, false), want)
	}
}

func TestAgeText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 59 * time.Second: "59s", 90 * time.Second: "1m30s", 12*time.Minute + time.Second: "12m", 5 * time.Minute: "5m",
		2*time.Hour + 5*time.Minute: "2h5m", 11*time.Hour + time.Minute: "11h", 50 * time.Hour: "2d2h", 1000 * time.Hour: "41d",
	} {
		if got := ageText(agenttest.Now(), agenttest.Ago(d)); got != want {
			t.Errorf("%v is %s, want %s", d, got, want)
		}
	}
}

// bigNode is as large as they come: every GPU partitioned in seven, everything held.
func bigNode() Inputs {
	k := aNode()
	k.Snapshot.Devices, k.Events = nil, nil
	for i := range 32 {
		k.Snapshot.Devices = append(k.Snapshot.Devices, agenttest.Lost(agenttest.GPU(i), agenttest.Ago(time.Minute)))
		for gi := range 7 {
			d := agenttest.MIG(i, gi)
			k.Snapshot.Devices = append(k.Snapshot.Devices, d)
			k.Holders.By[d.Device.ID] = []plugin.Holder{{Namespace: "training", Pod: "llm-70b-worker-" + strconv.Itoa(i), Container: "torch"}}
		}
	}
	for range maxEvents {
		k.Events = append(k.Events, eventsBetween(&health.Snapshot{}, &health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}})...)
	}
	return k
}

func TestBigNodeIsSmall(t *testing.T) {
	page := pageOf(t, bigNode())
	text, err := json.Marshal(New(bigNode()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("page %d KiB, JSON %d KiB", len(page)>>10, len(text)>>10)
	if len(page) > 256<<10 || len(text) > 256<<10 {
		t.Errorf("a page of %d bytes, JSON of %d", len(page), len(text))
	}
}

func BenchmarkStatusPage(b *testing.B) {
	k := bigNode()
	pages := NewPages(func() Node { return New(k) }, zap.NewNop())
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

// A MIG device whose GPU is gone keeps its number, so that a cordon of it stands. One whose number is not known has none.
func TestNumberOfAMissingMIGDevice(t *testing.T) {
	c := health.DefaultConfig()
	before := agenttest.Judge(c, nil, agenttest.MIGReading(), agenttest.Now())
	gone := &health.Reading{Devices: agenttest.MIGReading().Devices[:1], Samples: agenttest.MIGReading().Samples[:1]}
	snapshot := &health.Snapshot{At: agenttest.Now(), Devices: agenttest.Judge(c, before, gone, agenttest.Now().Add(time.Second))}
	s := New(Inputs{Now: agenttest.Now(), Snapshot: snapshot})
	if table := s.Table(false, false); !strings.Contains(table, "1:0") || !strings.Contains(table, "1:1") || strings.Contains(table, "1:-") {
		t.Error(table)
	}
	for i := range snapshot.Devices { // as restored from an older state file
		snapshot.Devices[i].Device.MIGIndex = -1
	}
	s = New(Inputs{Now: agenttest.Now(), Snapshot: snapshot})
	if n := strings.Count(s.Table(false, false), "1:-"); n != 2 {
		t.Errorf("%d MIG devices without a number:\n%s", n, s.Table(false, false))
	}
	text, err := json.Marshal(s)
	if err != nil || strings.Contains(string(text), "migIndex") {
		t.Errorf("%v, %s", err, text)
	}
	if page := pageOf(t, Inputs{Now: agenttest.Now(), Snapshot: snapshot}); strings.Count(page, `<span class="dim">1:-</span>`) != 2 {
		t.Error(page)
	}
}
