package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestIdlePods(t *testing.T) {
	const long, short = time.Hour, 10 * time.Minute
	snapshot := &health.Snapshot{Devices: []health.DeviceState{
		{Device: health.Device{ID: "GPU-0", Index: 0}},
		{Device: health.Device{ID: "MIG-0-0", Kind: health.KindMIG, Parent: "GPU-0", Index: 0, MIGIndex: 0}},
		{Device: health.Device{ID: "MIG-unknown", Kind: health.KindMIG, Index: -1, MIGIndex: 0}},
		{Device: health.Device{ID: "GPU-1", Index: 1}},
		{Device: health.Device{ID: "GPU-2", Index: 2, MIGMode: true}},
		{Device: health.Device{ID: "MIG-2-1", Kind: health.KindMIG, Parent: "GPU-2", Index: 2, MIGIndex: 1}},
		{Device: health.Device{ID: "MIG-2-9", Kind: health.KindMIG, Parent: "GPU-2", Index: 2, MIGIndex: -1}},
	}}
	type entry struct {
		device         health.DeviceID
		pod, container string
		idle           metrics.IdleTime
	}
	// noProcess is an idle time by both kinds of evidence; noWork is one of a container with a process.
	noProcess := func(d time.Duration) metrics.IdleTime {
		return metrics.IdleTime{NoWork: d, WorkKnown: true, NoProcess: d, ProcessesKnown: true}
	}
	noWork := func(d time.Duration) metrics.IdleTime {
		return metrics.IdleTime{NoWork: d, WorkKnown: true, ProcessesKnown: true}
	}
	for name, c := range map[string]struct {
		entries           []entry
		byProcess, byWork string
	}{
		"idle": {[]entry{{"GPU-0", "a", "c", noProcess(long)}}, "n/a: GPU 0 (1h0m0s) of 1 GPU\n", "n/a: GPU 0 (1h0m0s) of 1 GPU\n"},
		"idle at last": {
			[]entry{{"GPU-0", "a", "c", noProcess(30 * time.Minute)}},
			"n/a: GPU 0 (30m0s) of 1 GPU\n",
			"n/a: GPU 0 (30m0s) of 1 GPU\n",
		},
		"not for long":  {[]entry{{"GPU-0", "a", "c", noProcess(short)}}, "", ""},
		"has a process": {[]entry{{"GPU-0", "a", "c", noWork(long)}}, "", "n/a: GPU 0 (1h0m0s) of 1 GPU\n"},
		"works, but no process is listed": {
			[]entry{{"GPU-0", "a", "c", metrics.IdleTime{WorkKnown: true, NoProcess: long, ProcessesKnown: true}}}, "", "",
		},
		"its work is unknown": {
			[]entry{{"GPU-0", "a", "c", metrics.IdleTime{NoProcess: long, ProcessesKnown: true}}}, "n/a: GPU 0 (1h0m0s) of 1 GPU\n", "",
		},
		"an old time is no evidence": {
			[]entry{{"GPU-0", "a", "c", metrics.IdleTime{NoWork: long, NoProcess: long}}}, "", "",
		},
		"two of four devices": {
			[]entry{
				{"GPU-0", "a", "c", noProcess(long)},
				{"GPU-1", "a", "c", noProcess(short)},
				{"GPU-2", "a", "c", noWork(0)},
				{"MIG-2-1", "a", "c", noProcess(2 * long)},
			},
			"n/a: GPU 0 (1h0m0s), MIG 2:1 (2h0m0s) of 4 device\n", "n/a: GPU 0 (1h0m0s), MIG 2:1 (2h0m0s) of 4 device\n",
		},
		"another container of the pod uses it": {[]entry{{"GPU-0", "a", "c", noProcess(long)}, {"GPU-0", "a", "d", noProcess(0)}}, "", ""},
		"the use of another container is unknown": {
			[]entry{{"GPU-0", "a", "c", noProcess(long)}, {"GPU-0", "a", "d", metrics.IdleTime{}}}, "", "",
		},
		"containers of one pod": {
			[]entry{{"GPU-0", "a", "c", noProcess(2 * long)}, {"GPU-0", "a", "d", noProcess(long)}},
			"n/a: GPU 0 (1h0m0s) of 1 GPU\n", "n/a: GPU 0 (1h0m0s) of 1 GPU\n",
		},
		"several units of a device": {
			[]entry{{"GPU-0", "a", "c", noProcess(long)}, {"GPU-0", "a", "c", noProcess(long)}},
			"n/a: GPU 0 (1h0m0s) of 1 GPU\n", "n/a: GPU 0 (1h0m0s) of 1 GPU\n",
		},
		"another pod uses the shared GPU": {
			[]entry{{"GPU-0", "b", "c", noProcess(long)}, {"GPU-0", "a", "c", noProcess(0)}},
			"n/b: GPU 0 (1h0m0s) of 1 GPU\n", "n/b: GPU 0 (1h0m0s) of 1 GPU\n",
		},
		"first MIG device, and one of an unknown GPU": {
			[]entry{{"MIG-0-0", "a", "c", noProcess(long)}, {"MIG-unknown", "a", "c", noProcess(long)}},
			"n/a: MIG 0:0 (1h0m0s), MIG MIG-unknown (1h0m0s) of 2 MIG device\n", "n/a: MIG 0:0 (1h0m0s), MIG MIG-unknown (1h0m0s) of 2 MIG device\n",
		},
		"MIG devices": {
			[]entry{{"MIG-2-1", "b", "c", noProcess(long)}, {"MIG-2-9", "b", "c", noProcess(long)}, {"GPU-1", "a", "c", noProcess(long)}},
			"n/a: GPU 1 (1h0m0s) of 1 GPU\nn/b: MIG 2:1 (1h0m0s), MIG MIG-2-9 (1h0m0s) of 2 MIG device\n",
			"n/a: GPU 1 (1h0m0s) of 1 GPU\nn/b: MIG 2:1 (1h0m0s), MIG MIG-2-9 (1h0m0s) of 2 MIG device\n",
		},
	} {
		holders, times := podresources.Holders{By: make(map[health.DeviceID][]podresources.Holder)}, make(metrics.IdleTimes)
		for _, e := range c.entries {
			h := podresources.Holder{Namespace: "n", Pod: e.pod, Container: e.container}
			holders.By[e.device] = append(holders.By[e.device], h)
			times[metrics.Held{Device: e.device, Namespace: "n", Pod: e.pod, Container: e.container}] = e.idle
		}
		for evidence, want := range map[string]string{EvidenceNoProcess: c.byProcess, EvidenceNoWork: c.byWork} {
			if got := idleSummary(IdleConfig{After: 30 * time.Minute, Evidence: evidence}, snapshot, holders, times); got != want {
				t.Errorf("%s, %s: got\n%swant\n%s", name, evidence, got, want)
			}
			if got := idleSummary(IdleConfig{Evidence: evidence}, snapshot, holders, times); got != "" {
				t.Errorf("%s, off: got\n%s", name, got)
			}
			if got := idleSummary(IdleConfig{After: 30 * time.Minute, Evidence: evidence}, snapshot, holders, nil); got != "" {
				t.Errorf("%s, idle times unknown: got\n%s", name, got)
			}
		}
	}
	holders, times := podresources.Holders{By: make(map[health.DeviceID][]podresources.Holder)}, make(metrics.IdleTimes)
	want := ""
	for _, namespace := range []string{"a", "b", "c"} { // in order, whatever order the map has
		for _, pod := range []string{"x", "y", "z"} {
			h := podresources.Holder{Namespace: namespace, Pod: pod, Container: "c"}
			holders.By["GPU-0"] = append(holders.By["GPU-0"], h)
			times[metrics.Held{Device: "GPU-0", Namespace: namespace, Pod: pod, Container: "c"}] = noProcess(long)
			want += namespace + "/" + pod + ": GPU 0 (1h0m0s) of 1 GPU\n"
		}
	}
	if got := idleSummary(IdleConfig{After: 30 * time.Minute, Evidence: EvidenceNoWork}, snapshot, holders, times); got != want {
		t.Errorf("many pods: got\n%swant\n%s", got, want)
	}
	if got := idleSummary(IdleConfig{After: 30 * time.Minute, Evidence: EvidenceNoWork}, nil, podresources.Holders{}, nil); got != "" {
		t.Errorf("no snapshot: %s", got)
	}
}

// By auto a loaded model keeps a pod from being idle if processes are measured. The event says what is not known.
func TestIdleEvidence(t *testing.T) {
	snapshot := &health.Snapshot{Devices: []health.DeviceState{{Device: health.Device{ID: "GPU-0", Index: 0}}}}
	h := podresources.Holder{Namespace: "n", Pod: "a", Container: "c"}
	holders := podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-0": {h}}}
	for _, c := range []struct {
		evidence     string
		processes    bool
		text         string
		modelUnknown bool
		loadedIsIdle bool
	}{
		{EvidenceAuto, true, "process", false, false},
		{EvidenceAuto, false, "work", true, true},
		{EvidenceNoProcess, true, "process", false, false},
		{EvidenceNoWork, true, "work", false, true},
		{EvidenceNoWork, false, "work", true, true},
	} {
		loaded := metrics.IdleTime{NoWork: time.Hour, WorkKnown: true, ProcessesKnown: c.processes}
		times := metrics.IdleTimes{{Device: "GPU-0", Namespace: "n", Pod: "a", Container: "c"}: loaded}
		all := IdlePods(IdleConfig{After: time.Minute, Evidence: c.evidence, Processes: c.processes}, snapshot, holders, times)
		if all.Evidence != c.text || all.ModelUnknown != c.modelUnknown || len(all.Pods) == 1 != c.loadedIsIdle || all.After != time.Minute {
			t.Errorf("%+v: %+v", c, all)
		}
	}
}

func idleSummary(c IdleConfig, s *health.Snapshot, holders podresources.Holders, times metrics.IdleTimes) (text string) {
	for _, p := range IdlePods(c, s, holders, times).Pods {
		text += p.Namespace + "/" + p.Name + ": "
		for i, d := range p.Idle {
			if i > 0 {
				text += ", "
			}
			text += fmt.Sprintf("%s (%v)", d.Name, d.For)
		}
		text += fmt.Sprintf(" of %d %s\n", p.Held, p.Kind)
	}
	return text
}
