package metrics

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// What is not measured is absent, and a device without a process is not a device whose processes are unknown.
func TestProcessSeries(t *testing.T) {
	page := render(t, collectorOf(testSources(testNode())))
	const memory, sm, number = namespace + "process_memory_bytes", namespace + "process_sm_utilization_ratio", namespace + "processes"
	for _, test := range []struct {
		name  string
		parts []string
		want  string // "" for no series
	}{
		{memory, []string{`UUID="GPU-a"`, `namespace="team"`, `pod="train-0"`, `container="main"`}, "7.516192768e+10"},
		{memory, []string{`UUID="GPU-a"`, `pod=""`, `container=""`}, "3.145728e+08"},
		{memory, []string{`UUID="GPU-a"`, `pod=""`, `container="other"`}, ""},
		{sm, []string{`UUID="GPU-a"`, `pod="train-0"`}, "0.875"},
		{sm, []string{`UUID="GPU-a"`, `pod=""`, `container=""`}, "0"},
		{sm, []string{`UUID="MIG-1"`}, ""},
		{number, []string{`UUID="GPU-a"`, `pod="train-0"`}, "8"},
		{number, []string{`UUID="GPU-a"`, `pod=""`, `container="other"`}, "3"},
		{number, []string{`UUID="MIG-1"`, `pod="web"`}, "1"},
		{number, []string{`UUID="MIG-1"`, `pod=""`}, "0"},
		{number, []string{`UUID="MIG-2"`, `pod=""`}, "0"},
		{number, []string{`UUID="GPU-b"`}, ""}, // not measured
		{number, []string{`UUID="GPU-c"`}, ""}, // in MIG mode
		{namespace + "processes_up", nil, "1"},
		{namespace + "processes_without_pod", []string{`reason="not_holder"`}, "1"},
		{namespace + "processes_without_pod", []string{`reason="unreadable"`}, "0"},
	} {
		found := series(page, test.name, test.parts...)
		if test.want == "" {
			if len(found) > 0 {
				t.Errorf("%s %v: %q", test.name, test.parts, found)
			}
			continue
		}
		if len(found) != 1 || !strings.HasSuffix(found[0], " "+test.want) {
			t.Errorf("%s %v: %q, want %s", test.name, test.parts, found, test.want)
		}
	}
}

func TestProcessSeriesWhileNotMeasured(t *testing.T) {
	src := testSources(testNode())
	for name, test := range map[string]struct {
		processes *processes.Snapshot
		up        int
	}{"off": {nil, 0}, "failed": {&processes.Snapshot{Err: "the driver hangs"}, 1}} {
		src.Processes = test.processes
		page := render(t, collectorOf(src))
		expectSeries(t, page, test.up, namespace+"processes_up", " 0")
		for _, metric := range []string{"processes", "process_memory_bytes", "process_sm_utilization_ratio", "processes_without_pod"} {
			expectSeries(t, page, 0, namespace+metric)
		}
		if t.Failed() {
			t.Fatal(name)
		}
	}
}
