package metrics

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

func TestExposition(t *testing.T) {
	got := render(t, collectorOf(testSources(testNode())))
	golden.Check(t, "testdata/exposition.txt", got)
}

// The fields under both generations of names.
func TestExpositionOfBothNames(t *testing.T) {
	src := configuredSources(testNode(), namedConfig(both, fields.SetDefault))
	var dcgm strings.Builder
	for line := range strings.Lines(render(t, collectorOf(src))) {
		if strings.HasPrefix(strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE "), "DCGM_") {
			dcgm.WriteString(line)
		}
	}
	golden.Check(t, "testdata/exposition-both-names.txt", dcgm.String())
}

// Describe lists exactly the metrics of a page that are not fields, with the labels of their series.
func TestDescribe(t *testing.T) {
	src := configuredSources(testNode(), testConfig())
	src.PodLabels = func(string, string) []Label { return []Label{label(podUIDLabel, "0f4b")} }
	p, done := collectorOf(src).collect()
	defer done()
	src.Lock = nodelock.State{Waits: true, Holder: &nodelock.Holder{Pod: "gpu-node-agent-x7k2p"}}
	waiting, done := collectorOf(src).collect()
	defer done()
	described := make(map[string]MetricInfo)
	for _, m := range Describe() {
		described[m.Name] = m
	}
	for _, f := range p.Families() {
		labels := make(map[string]bool)
		for _, m := range f.Metric {
			for _, l := range m.Label {
				labels[l.GetName()] = true
			}
			if m.Summary != nil {
				labels["quantile"] = true
			}
		}
		m := described[f.GetName()]
		if m.Help != f.GetHelp() || !strings.EqualFold(m.Type, f.GetType().String()) ||
			!slices.Equal(slices.Sorted(slices.Values(m.Labels)), slices.Sorted(maps.Keys(labels))) {
			t.Errorf("%s: described as %+v, exported as %s with labels %v and help %q", f.GetName(), m, f.GetType(), labels, f.GetHelp())
		}
		delete(described, f.GetName())
	}
	for _, f := range waiting.Families() { // the families of no other page
		delete(described, f.GetName())
	}
	if len(described) > 0 {
		t.Errorf("described but not exported: %v", slices.Sorted(maps.Keys(described)))
	}
}

// An agent that waits for the holder of the node exports its own series only: every sum over the devices would count the node twice, and
// every alert about them would fire twice.
func TestExpositionWhileWaiting(t *testing.T) {
	src := testSources(testNode())
	for name, c := range map[string]struct {
		holder string
		waits  bool
		lines  []string
	}{
		"serving":           {"", false, []string{"waits_for_holder 0"}},
		"waiting":           {"gpu-node-agent-x7k2p", true, []string{"waits_for_holder 1", `holder_info{holder="gpu-node-agent-x7k2p"} 1`}},
		"an unknown holder": {"", true, []string{"waits_for_holder 1"}},
	} {
		src.Lock = nodelock.State{Waits: c.waits, Holder: &nodelock.Holder{Pod: c.holder}}
		page := render(t, collectorOf(src))
		for _, line := range c.lines {
			if !strings.Contains(page, "\n"+namespace+line+"\n") {
				t.Errorf("%s: missing %s", name, line)
			}
		}
		if strings.Contains(page, "holder_info") != (c.holder != "") {
			t.Errorf("%s: holder_info", name)
		}
		for line := range strings.Lines(page) {
			name, _, _ := strings.Cut(strings.TrimPrefix(line, namespace), " ")
			name, _, _ = strings.Cut(name, "{")
			own := strings.HasPrefix(line, "#") || strings.HasPrefix(line, "go_") || strings.HasPrefix(line, "process_") || slices.Contains([]string{
				"build_info", "config_last_reload_successful", "config_last_reload_success_timestamp_seconds", "fields_unknown", "holder_info",
				"http_connections_dropped_total", "log_dropped_total", "waits_for_holder",
			}, name)
			if c.waits && !own {
				t.Errorf("a waiting agent exports %s", line)
			}
		}
	}
}

// The agent's own metrics follow Prometheus' conventions; dcgm-exporter's names are given.
func TestMetricNames(t *testing.T) {
	p, done := collectorOf(testSources(testNode())).collect()
	defer done()
	problems, err := promlint.NewWithMetricFamilies(p.Families()).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, namespace) {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

func TestExpositionBeforeFirstPoll(t *testing.T) {
	for name, s := range map[string]*health.Snapshot{
		"no snapshot": nil,
		"source down": {Source: health.Source{Status: health.SourceDown, Err: "refused"}},
	} {
		page := render(t, collectorOf(testSources(s)))
		for _, unwanted := range []string{"DCGM_", namespace + "device_", namespace + "snapshot_age"} {
			if strings.Contains(page, "\n"+unwanted) {
				t.Errorf("%s: the page has %s metrics:\n%s", name, unwanted, page)
			}
		}
		for _, wanted := range []string{"plugin_registered", "build_info", "config_last_reload_successful"} {
			expectSeries(t, page, 1, namespace+wanted)
		}
		if s != nil {
			expectSeries(t, page, 1, namespace+"source_up", " 0")
		}
	}
}

func TestSourceStatus(t *testing.T) {
	for status, want := range map[health.SourceStatus][]string{
		health.SourceUp:       {"source_up 1", "source_detached 0", "source_stalled 0"},
		health.SourceDown:     {"source_up 0", "source_detached 0", "source_stalled 0"},
		health.SourceDetached: {"source_up 0", "source_detached 1", "source_stalled 0"},
		health.SourceStalled:  {"source_up 0", "source_detached 0", "source_stalled 1"},
	} {
		s := testNode()
		s.Source.Status = status
		page := render(t, collectorOf(testSources(s)))
		for _, line := range want {
			if !strings.Contains(page, "\n"+namespace+line+"\n") {
				t.Errorf("%v: missing %s", status, line)
			}
		}
	}
}

func TestSourceChecks(t *testing.T) {
	for status, want := range map[health.ChecksStatus]string{
		health.ChecksUp: "1", health.ChecksDown: "0", health.ChecksOff: "",
		health.ChecksUnknown: "",
	} {
		for _, source := range []health.SourceStatus{health.SourceUp, health.SourceDown} {
			s := testNode()
			s.Source.Checks.Status, s.Source.Status = status, source
			page := render(t, collectorOf(testSources(s)))
			_, rest, found := strings.Cut(page, "\n"+namespace+"source_checks_up ")
			if value, _, _ := strings.Cut(rest, "\n"); value != want || found != (want != "") {
				t.Errorf("checks %v, source %v: %q, want %q", status, source, value, want)
			}
		}
	}
}

func TestEventSources(t *testing.T) {
	for status, want := range map[health.EventSourceStatus]string{
		health.EventsOff: "", health.EventsStarting: "0", health.EventsUp: "1", health.EventsDown: "0",
	} {
		s := testNode()
		s.Source.Events = []health.EventSourceState{
			{Witness: health.WitnessNVML, Status: health.EventsUp},
			{Witness: health.WitnessKernelLog, Status: status},
		}
		page := render(t, collectorOf(testSources(s)))
		expectSeries(t, page, 1, namespace+"event_source_up", `{witness="nvml"} 1`)
		_, rest, found := strings.Cut(page, "\n"+namespace+`event_source_up{witness="kernel-log"} `)
		if value, _, _ := strings.Cut(rest, "\n"); value != want || found != (want != "") {
			t.Errorf("%v: %q, want %q", status, value, want)
		}
	}
}

// Without a source, measurements end after a minute; states stay.
func TestMeasurementsExpireWithoutSource(t *testing.T) {
	for age, want := range map[time.Duration]int{59 * time.Second: 2, time.Minute: 0} {
		s := testNode()
		s.Source.Status, s.At = health.SourceStalled, now.Add(-age)
		page := render(t, collectorOf(testSources(s)))
		expectSeries(t, page, want, "DCGM_FI_DEV_GPU_TEMP")
		expectSeries(t, page, 1, namespace+"device_state", `state="unhealthy"} 1`)
	}
}

func TestDisabledPartsHaveNoSeries(t *testing.T) {
	src := testSources(testNode())
	src.PodLabelsStatus, src.StateDir = view.PodLabels{Up: true}, statefile.Status{Unread: now}
	src.Kube.Enabled, src.NodeObject.Enabled = false, false
	page := render(t, collectorOf(src))
	for _, unwanted := range []string{
		"_kubernetes_", "_node_writes", "_node_errors", "_node_leftovers", "_pod_labels_up", "_state_file_read", "_file_unwritten",
	} {
		if strings.Contains(page, unwanted) {
			t.Errorf("the page has %s", unwanted)
		}
	}
}

func TestCollectorFollowsConfig(t *testing.T) {
	src := testSources(testNode())
	c := collectorOf(src)
	expectSeries(t, render(t, c), 1, "DCGM_FI_DEV_SM_CLOCK")
	src.Config.Store(testConfig("DCGM_FI_DEV_GPU_TEMP", "nonsense"))
	page := render(t, c)
	expectSeries(t, page, 0, "DCGM_FI_DEV_SM_CLOCK")
	expectSeries(t, page, 2, "DCGM_FI_DEV_GPU_TEMP")
	expectSeries(t, page, 1, namespace+"fields_unknown", " 1")
}

func TestHostnameLabel(t *testing.T) {
	c := *testConfig(fields.SetDefault)
	c.Compat.HostnameLabel = "Hostname"
	page := render(t, collectorOf(configuredSources(testNode(), &c)))
	if strings.Contains(page, `hostname="`) {
		t.Errorf("the page has the label hostname:\n%s", page)
	}
	expectSeries(t, page, 2, "DCGM_FI_DEV_GPU_TEMP", `Hostname="node-1"`)
}

// The series of a scrape do not change before it is done, whatever other scrapes do.
func TestScrapesAreIndependent(t *testing.T) {
	src := testSources(testNode())
	c := collectorOf(src)
	first, done := c.collect()
	want := pageText(t, first)
	src.Snapshot = fullNode()
	src.Config.Store(testConfig(fields.SetDefault, fields.SetOptional))
	second, secondDone := c.collect()
	if got := pageText(t, first); got != want {
		t.Errorf("the second scrape has changed the first one to:\n%s", got)
	}
	if pageText(t, second) == want {
		t.Error("the second scrape has the series of the first one")
	}
	done()
	secondDone()
	src.Snapshot = &health.Snapshot{At: now, Devices: testNode().Devices[:1]}
	if page := render(t, c); strings.Contains(page, "GPU-b") || strings.Contains(page, "MIG-") {
		t.Errorf("the page has devices of another scrape:\n%s", page)
	}
}

// Scrapes, polls and reloads in parallel, for the race detector.
func TestParallelScrapes(t *testing.T) {
	src := testSources(fullNode())
	views := new(health.Latest[view.View])
	views.Store(src.View)
	src.Sources.View = views.Load
	c := collectorOf(src)
	done := make(chan struct{})
	for range 8 {
		go func() {
			for range 20 {
				p, release := c.collect()
				if len(p.Families()) == 0 {
					t.Error("empty page")
				}
				release()
			}
			done <- struct{}{}
		}()
	}
	for _, sets := range [][]string{{fields.SetDefault}, {fields.SetOptional}, {fields.SetDefault, fields.SetOptional}} {
		src.Config.Store(testConfig(sets...))
		next := fullNode()
		next.At = next.At.Add(time.Second)
		v := *src.View
		v.Snapshot = next
		views.Store(&v)
		src.Totals.update(next)
	}
	for range 8 {
		<-done
	}
}

// A scrape that finds the memory of an earlier one allocates little more than the labels of each device. Not every scrape finds it: the
// race detector makes sync.Pool drop a quarter of what it gets.
func TestScrapeAllocations(t *testing.T) {
	s, held := fleet(8, 7, 0)
	src := testSources(s)
	src.Holders = held()
	c := collectorOf(src)
	least := math.Inf(1)
	for range 20 {
		least = min(least, testing.AllocsPerRun(1, func() {
			p, done := c.collect()
			p.Families()
			done()
		}))
	}
	if limit := 200 + 10*float64(len(s.Devices)); least > limit {
		t.Errorf("%v allocations for %d devices, want at most %v", least, len(s.Devices), limit)
	}
}

// The DRA driver has series while it is enabled only; before its first failure the counters are 0.
func TestDRA(t *testing.T) {
	src := testSources(testNode())
	page := func(s dra.Status) string {
		src.DRA = s
		return render(t, collectorOf(src))
	}
	if got := page(dra.Status{}); strings.Contains(got, namespace+"dra_") {
		t.Errorf("series of a driver that is off:\n%s", got)
	}
	waiting := page(dra.Status{Enabled: true, Handover: true, HandoverSince: now.Add(-time.Hour)})
	for _, reason := range dra.PublishErrors() {
		expectSeries(t, waiting, 1, namespace+"dra_publish_errors_total", `reason="`+reason+`"`, " 0")
	}
	for _, reason := range dra.PrepareErrors() {
		expectSeries(t, waiting, 1, namespace+"dra_prepare_errors_total", `reason="`+reason+`"`, " 0")
	}
	expectSeries(t, waiting, 1, namespace+"dra_handover", " 1")
	expectSeries(t, waiting, 1, namespace+"dra_handover_seconds", " 3600")
	// the clock was set back
	expectSeries(t, page(dra.Status{Enabled: true, Handover: true, HandoverSince: now.Add(time.Hour)}), 1, namespace+"dra_handover_seconds",
		" 0")
	for name, c := range map[string]struct {
		status dra.Status
		want   string
	}{
		"never published": {dra.Status{}, " 0"},
		"up to date":      {dra.Status{Published: now}, " 1"},
		"behind":          {dra.Status{Published: now, Behind: true}, " 0"},
	} {
		c.status.Enabled = true
		if got := series(page(c.status), namespace+"dra_published"); len(got) != 1 || !strings.HasSuffix(got[0], c.want) {
			t.Errorf("%s: %q, want the value%s", name, got, c.want)
		}
	}
}
