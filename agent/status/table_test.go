package status

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestTableFitsTerminal(t *testing.T) {
	inputs := map[string]func() inputs{
		"faults": testInputs, "largest node": maxInputs,
		"no GPUs": func() inputs { return inputs{View: view.View{At: agenttest.Now()}} },
	}
	for name, k := range inputs {
		for _, width := range []int{80, 100, 120, 200} {
			s := newNode(k())
			for line := range strings.Lines(s.Table(false, terminal.Output{Width: width})) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > width {
					t.Errorf("%s: %d columns of %d: %q", name, n, width, line)
				}
			}
			if wide := s.Table(true, terminal.Output{Width: width}); wide != s.Table(true, terminal.Output{}) {
				t.Errorf("%s: the wide table depends on the width:\n%s", name, wide)
			}
		}
	}
	narrow := newNode(testInputs()).Table(false, terminal.Output{Width: 80})
	agenttest.MustContain(t, narrow, "MODEL", "left out", "-o wide")
	if strings.Contains(newNode(testInputs()).Table(false, terminal.Output{}), "-o wide") {
		t.Error("a pipe gets a note about omitted columns")
	}
}

// partitioned returns a node of many GPUs with seven MIG devices each.
func partitioned(change func(index, mig int, d *health.DeviceState)) Node {
	k := testInputs()
	k.Snapshot.Devices = nil
	for i := range 4 {
		k.Snapshot.Devices = append(k.Snapshot.Devices, agenttest.GPU(i))
		for mig := range 7 {
			d := agenttest.MIG(i, mig)
			change(i, mig, &d)
			k.Snapshot.Devices = append(k.Snapshot.Devices, d)
			if mig < 2 {
				k.Holders.By[d.Device.ID] = []podresources.Holder{{Namespace: "nb", Pod: "ada", Container: "main"}}
			}
		}
	}
	return newNode(k)
}

func TestEqualMIGDevicesShareRow(t *testing.T) {
	s := partitioned(func(index, mig int, d *health.DeviceState) {
		switch {
		case index == 1 && mig == 3:
			*d = agenttest.Lost(*d, agenttest.Ago(time.Minute))
		case index == 2 && mig == 0:
			d.XIDs = healthtest.Counted(map[int]uint64{31: 1}, health.XID{})
		case index == 2 && mig == 6:
			d.Verdict.Since = agenttest.Ago(time.Minute)
		case index == 3 && mig == 6:
			d.Device.Profile = "2g.20gb"
		}
	})
	var got []string
	table := s.Table(false, terminal.Output{})
	for line := range strings.Lines(table) {
		if index := strings.Fields(line); len(index) > 0 && strings.Contains(index[0], ":") && len(index[0]) < 6 {
			got = append(got, index[0])
		}
	}
	want := []string{"0:0-6", "1:0-2", "1:3", "1:4-6", "2:0", "2:1-6", "3:0-5", "3:6"}
	if !slices.Equal(got, want) {
		t.Errorf("rows %q, want %q\n%s", got, want, table)
	}
	agenttest.MustContain(t, table, "7 × MIG 1g.10gb", "7.0 / 70.0 GiB", "2 of 7: nb/ada (main) ×2", "2 of 3: ", "-o wide")
	rows := deviceRows(s, true)
	if i := slices.IndexFunc(rows, func(r deviceRow) bool { return r.Index == 2 && r.count == 6 }); i < 0 || !rows[i].Since.IsZero() {
		t.Errorf("a shared row has a time that its devices do not share: %+v", rows)
	}
	if n := strings.Count(s.Table(true, terminal.Output{}), "MIG 1g.10gb "); n != 27 {
		t.Errorf("the wide table has %d rows of 1g.10gb", n)
	}
	unknown := partitioned(func(_, _ int, d *health.DeviceState) { d.Device.MIGIndex = -1 })
	if rows := deviceRows(unknown, true); len(rows) != 4*8 {
		t.Errorf("MIG devices without an index share rows: %d", len(rows))
	}
}

// Devices with equal findings share them, and findings with one action share that.
func TestTableDoesNotRepeatFindings(t *testing.T) {
	k := testInputs()
	k.Snapshot.Devices = nil
	for i := range 3 {
		d := agenttest.Lost(agenttest.GPU(i), agenttest.Ago(time.Minute))
		d.Verdict.Findings = append(d.Verdict.Findings, health.Finding{
			Cause: "xid-79", State: health.Unhealthy, Reason: "XID 79", Action: d.Verdict.Findings[0].Action, Clears: health.ClearsGPUReset,
			Since: agenttest.Ago(time.Minute),
		})
		k.Snapshot.Devices = append(k.Snapshot.Devices, d)
	}
	k.Snapshot.Devices[1] = agenttest.Hot(agenttest.GPU(1), agenttest.Ago(time.Minute))
	table := newNode(k).Table(false, terminal.Output{})
	agenttest.MustContain(t, table, "\nGPU 0, GPU 2\n", "\nGPU 1\n", "  lost +1  ")
	if n := strings.Count(table, health.ActionRebootNode.Advice()); n != 1 {
		t.Errorf("the action is shown %d times:\n%s", n, table)
	}
	page := pageOf(t, k)
	if n := strings.Count(section(t, page, 0), health.ActionRebootNode.Advice()); n != 1 {
		t.Errorf("the card shows the action %d times", n)
	}
	if n := strings.Count(page, health.ActionRebootNode.Advice()); n != 1+2 { // at the top, and on two cards
		t.Errorf("the page shows the action %d times", n)
	}
	agenttest.MustContain(t, page, `<a id="to-GPU-0" href="#gpu-0">GPU 0</a> <a id="to-GPU-2" href="#gpu-2">GPU 2</a> <span`)
}

func TestFaultGroupsAreBounded(t *testing.T) {
	k := testInputs()
	k.Snapshot.Devices = nil
	for i := range 20 {
		k.Snapshot.Devices = append(k.Snapshot.Devices, agenttest.Lost(agenttest.GPU(i), agenttest.Ago(time.Minute)))
	}
	groups := faultGroups(newNode(k))
	if len(groups) != 1 || len(groups[0].Devices) != maxFaultyDevices || groups[0].More != 20-maxFaultyDevices {
		t.Errorf("%d groups: %+v", len(groups), groups)
	}
	agenttest.MustContain(t, pageOf(t, k), "and 12 more")
	for i := range k.Snapshot.Devices {
		k.Snapshot.Devices[i].Verdict.Findings[0].Cause = "cause-" + string(rune('a'+i))
	}
	if groups := faultGroups(newNode(k)); len(groups) != 20 || groups[0].More != 0 {
		t.Errorf("%d groups: %+v", len(groups), groups)
	}
	if top, _, _ := strings.Cut(pageOf(t, k), `id="gpu-0"`); strings.Count(top, health.ActionRebootNode.Advice()) != maxFaultGroups {
		t.Errorf("%s", top)
	}
}

func TestKubeletTextsAreNotRepeated(t *testing.T) {
	const err = "no kubelet"
	k := testInputs()
	k.Plugin.AuditErr, k.Holders.Err = err, err
	for i := range k.Plugin.Resources {
		k.Plugin.Resources[i].Registered, k.Plugin.Resources[i].Err = false, err
	}
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if n := strings.Count(text, err); n != 2 { // of the registration, and of the pod resources
			t.Errorf("%s: %d times:\n%s", form, n, text)
		}
		agenttest.MustContain(t, text, "nvidia.com/gpu", "nvidia.com/x", "not audited, holders unknown")
	}
	k.Holders.Err, k.Plugin.Resources[1].Err = "other", "other"
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if strings.Count(text, err) != 2 || strings.Count(text, "other") != 2 {
			t.Errorf("%s:\n%s", form, text)
		}
	}
}

func TestSourceErrorIsNotRepeated(t *testing.T) {
	const err = "cannot load libdcgm.so.4"
	k := testInputs()
	k.events, k.Snapshot.Source.Status, k.Snapshot.Source.Err, k.Plugin.Err = nil, health.SourceDown, err, "no poll: "+err
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if strings.Count(text, err) != 1 || !strings.Contains(text, "no poll") || strings.Contains(text, "no poll:") {
			t.Errorf("%s:\n%s", form, text)
		}
	}
	k.Snapshot.Source.Err = ""
	agenttest.MustContain(t, newNode(k).Table(false, terminal.Output{}), "no poll: "+err)
	agenttest.MustContain(t, pageOf(t, k), "no poll: "+err)
}

func TestHealthChecksAreShown(t *testing.T) {
	k := testInputs()
	const reason, incident = "API version mismatch (libdcgm 4.7.1, host engine 4.6.0)", "IMEX daemon is not ready"
	k.Snapshot.Source.Checks = health.Checks{Status: health.ChecksUp}
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if strings.Contains(text, "checks") {
			t.Errorf("%s: working checks are shown\n%s", form, text)
		}
	}
	k.Snapshot.Source.Checks = health.Checks{Status: health.ChecksDown, Err: reason, Since: agenttest.Ago(time.Hour)}
	k.Snapshot.Source.Incidents = []health.Incident{{System: "imex", Code: 122, Severity: health.SeverityFail, Message: incident}}
	for _, text := range []string{newNode(k).Table(false, terminal.Output{}), pageOf(t, k)} {
		agenttest.MustContain(t, text, "checks", "down", reason, incident, "DCGM_FR_IMEX_UNHEALTHY", "imex")
	}
	s := newNode(k).Source
	if c := (Checks{"down", agenttest.Ago(time.Hour).UTC(), reason}); s.Checks != c {
		t.Errorf("checks %+v, want %+v", s.Checks, c)
	}
	if i := s.Incidents; len(i) != 1 || i[0].Severity != "fail" || i[0].Action != health.ActionRecoverIMEX {
		t.Errorf("incidents %+v", i)
	}
}

func TestEventSourcesAreShown(t *testing.T) {
	const off, broken = "source.events is off", "cannot load libnvidia-ml.so.1"
	forms := func(k inputs) map[string]string {
		return map[string]string{
			"table": newNode(k).Table(false, terminal.Output{}), "wide table": newNode(k).Table(true, terminal.Output{}),
			"page": pageOf(t, k),
		}
	}
	k := testInputs()
	for form, text := range forms(k) { // a snapshot of before the first event source
		if strings.Contains(text, "kernel-log") {
			t.Errorf("%s:\n%s", form, text)
		}
	}
	k.Snapshot.Source.Events = []health.EventSourceState{
		{Witness: health.WitnessNVML, Err: off}, {
			Witness: health.WitnessKernelLog, Status: health.EventsDown, Err: broken,
			Since: agenttest.Ago(time.Hour),
		},
	}
	for form, text := range forms(k) {
		agenttest.MustContain(t, text, "nvml", "kernel-log", "down", broken)
		if shown := strings.Contains(text, off); shown == (form == "table") {
			t.Errorf("%s: reason of one that is off: %v\n%s", form, shown, text)
		}
	}
	const lacks = "1 of 8 GPUs report no events"
	partial := testInputs()
	partial.Snapshot.Source.Events = []health.EventSourceState{{Witness: health.WitnessNVML, Status: health.EventsUp, Err: lacks}}
	for _, text := range forms(partial) {
		agenttest.MustContain(t, text, "up", lacks)
	}
	want := []EventSource{{Name: "nvml", Status: "off", Error: off}, {"kernel-log", "down", agenttest.Ago(time.Hour).UTC(), broken}}
	if s := newNode(k).Source.Events; !slices.Equal(s, want) {
		t.Errorf("%+v, want %+v", s, want)
	}
}

func TestXIDGapIsShown(t *testing.T) {
	for want, g := range map[string]health.XIDGap{
		"":                                   {},
		"not seen for 95s; some may be lost": {Since: agenttest.Ago(35 * time.Second), Total: time.Minute},
		"not seen for 40s until 5m ago; some may be lost": {
			Since: agenttest.Ago(time.Hour), Until: agenttest.Ago(5 * time.Minute),
			Total: 40 * time.Second,
		},
	} {
		k := testInputs()
		k.Snapshot.Source.Events = []health.EventSourceState{{Witness: health.WitnessNVML}}
		k.Snapshot.Source.XIDGap = g
		for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
			if shown := strings.Contains(text, "may be lost"); shown != (want != "") || !strings.Contains(text, want) {
				t.Errorf("%s lacks %q:\n%s", form, want, text)
			}
		}
	}
}

func TestHoldersAreNotCountedWhileUnknown(t *testing.T) {
	k := testInputs()
	k.Holders.At = time.Time{}
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if strings.Contains(text, "held by pods") {
			t.Errorf("%s:\n%s", form, text)
		}
	}
}

// With the names of dcgm-exporter 4.9, DCGM 4.7 measures other fields; the status has the same values.
func TestValuesInBaseUnits(t *testing.T) {
	older := map[health.Field]float64{health.FieldSMClock: 1980, health.FieldFBUsed: 40960, health.FieldGPUTemp: 51}
	newer := map[health.Field]float64{health.FieldSMClockHertz: 1980e6, health.FieldFBUsedBytes: 40960 << 20, health.FieldGPUTemp: 51}
	if a, b := valuesStatus(older, 80<<30), valuesStatus(newer, 80<<30); !reflect.DeepEqual(a, b) || a.SMClock == nil || a.MemoryUsed == nil {
		t.Errorf("got %+v and %+v", a, b)
	}
}

func TestUtilizationOfPartitionedGPU(t *testing.T) {
	k := testInputs()
	for i := range k.Snapshot.Devices {
		if v := k.Snapshot.Devices[i].Sample.Values; v != nil {
			v[health.FieldEngineActive] = 0.25
		}
	}
	s := newNode(k)
	if v := s.GPUs[0].Values.Utilization; v == nil || *v != 87 {
		t.Errorf("GPU 0: %v, want the driver's", v)
	}
	if v := s.GPUs[2].MIG[0].Values.Utilization; v == nil || *v != 25 {
		t.Errorf("MIG device: %v, want the engine's activity", v)
	}
}

// TestProcessesAreShown checks the processes in the JSON, on the page and in the wide table.
func TestProcessesAreShown(t *testing.T) {
	const hidden = "the driver has not listed the processes within 10s"
	k := testInputs()
	for form, text := range map[string]string{"table": newNode(k).Table(true, terminal.Output{}), "page": pageOf(t, k)} {
		if strings.Contains(strings.ToLower(text), "processes") {
			t.Errorf("%s shows processes that are not measured:\n%s", form, text)
		}
	}
	if d := newNode(k).GPUs[0]; d.Processes != nil {
		t.Errorf("%+v", d.Processes)
	}

	llm := processes.Container{Namespace: "training", Pod: "llm-0", Name: "torch"}
	k.Processes = &processes.Snapshot{
		ProcessReading: driver.ProcessReading{Measured: []health.DeviceID{"GPU-0", "GPU-2", "MIG-2-7", "MIG-2-8"}},
		Usage: []processes.Usage{
			{Device: "GPU-0", Processes: 2},
			{Device: "GPU-0", Container: llm, Processes: 1, Memory: 20 << 30, HasMemory: true, SM: .875, HasSM: true},
			{Device: "GPU-0", Container: processes.Container{Namespace: "web", Pod: "chat-1"}, Processes: 1, SM: 0, HasSM: true},
			{Device: "GPU-0", Container: processes.Container{Name: processes.Other}, Processes: 3},
		},
	}
	s := newNode(k)
	if p := s.GPUs[0].Processes; p == nil || len(*p) != 4 || (*p)[0].Memory != nil || (*p)[1].Pod != "llm-0" || *(*p)[1].Memory != 20<<30 ||
		*(*p)[1].SM != 87.5 || *(*p)[2].SM != 0 {
		t.Errorf("GPU 0: %+v", p)
	}
	if p := s.GPUs[2]; s.GPUs[1].Processes != nil || p.Processes != nil && p.MIGMode || p.MIG[0].Processes == nil ||
		len(*p.MIG[0].Processes) != 0 {
		t.Errorf("GPU 1: %+v, GPU 2: %+v", s.GPUs[1].Processes, p)
	}
	const first, named = "no pod: 2 processes", "training/llm-0 (torch): 1 process, 20.0 GiB, SM 88 %"
	page := pageOf(t, k)
	agenttest.MustContain(t, section(t, page, 0), first, named, "web/chat-1: 1 process, SM 0 %", "others: 3 processes")
	agenttest.MustContain(t, section(t, page, 2), "processes none")
	agenttest.MustContain(t, s.Table(true, terminal.Output{}), "PROCESSES",
		first+"; "+named+"; web/chat-1: 1 process, SM 0 %; others: 3 processes", "none")
	if text := s.Table(false, terminal.Output{}); strings.Contains(text, "PROCESSES") {
		t.Errorf("narrow table:\n%s", text)
	}

	k.Processes = &processes.Snapshot{Err: hidden}
	for form, text := range map[string]string{"table": newNode(k).Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		if !strings.Contains(text, hidden) {
			t.Errorf("%s lacks the error:\n%s", form, text)
		}
	}
}

// Of each part and level, the table and the page show some problems, and how many more there are.
func TestProblemsAreBounded(t *testing.T) {
	k := testInputs()
	k.Plugin.Warnings = nil
	for i := range maxProblems + 3 {
		k.Plugin.Warnings = append(k.Plugin.Warnings, fmt.Sprintf("warning %d of the plugin", i))
	}
	k.Notes = []string{"a note"}
	s := newNode(k)
	if n := len(s.Problems); n < maxProblems+5 {
		t.Fatalf("%d problems", n)
	}
	for form, text := range map[string]string{"table": s.Table(false, terminal.Output{}), "page": pageOf(t, k)} {
		agenttest.MustContain(t, text, "and 4 more", "a note")
		if n := strings.Count(text, " of the plugin"); n != maxProblems {
			t.Errorf("%s: %d warnings:\n%s", form, n, text)
		}
	}
}
