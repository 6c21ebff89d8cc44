package status

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

// What is unknown now has no key, so that no reader takes an old idle time for a current one.
func TestIdleOfHolder(t *testing.T) {
	for name, c := range map[string]struct {
		idle       metrics.IdleTime
		want, text string
	}{
		"nothing known": {metrics.IdleTime{NoWork: time.Hour, NoProcess: time.Hour, Observed: 2 * time.Hour}, "null", ""},
		"no work": {
			metrics.IdleTime{NoWork: time.Hour, NoProcess: time.Hour, WorkKnown: true, Observed: 2 * time.Hour, Used: true},
			`{"noWorkSeconds":3600,"observedSeconds":7200}`, ": no work for 60m",
		},
		"has a process": {
			metrics.IdleTime{NoWork: time.Hour, WorkKnown: true, ProcessesKnown: true, Observed: 2 * time.Hour, Used: true},
			`{"noWorkSeconds":3600,"noProcessSeconds":0,"observedSeconds":7200}`, ": no work for 60m",
		},
		"no process": {
			metrics.IdleTime{
				NoWork: 2 * time.Hour, NoProcess: time.Hour, WorkKnown: true, ProcessesKnown: true, Observed: 2 * time.Hour,
				Used: true,
			},
			`{"noWorkSeconds":7200,"noProcessSeconds":3600,"observedSeconds":7200}`, ": no process for 60m",
		},
		"works": {
			metrics.IdleTime{WorkKnown: true, Observed: 2 * time.Hour, Used: true},
			`{"noWorkSeconds":0,"observedSeconds":7200}`, "",
		},
		"never used": {
			metrics.IdleTime{NoProcess: time.Hour, ProcessesKnown: true, Observed: 2 * time.Hour, ObservedFromStart: true},
			`{"noProcessSeconds":3600,"observedSeconds":7200,"neverUsed":true}`, ": never used in 120m",
		},
		"not used while it was observed": {
			metrics.IdleTime{NoProcess: 2 * time.Hour, ProcessesKnown: true, Observed: 2 * time.Hour},
			`{"noProcessSeconds":7200,"observedSeconds":7200}`, ": no process for 120m",
		},
		"idle for a moment": {
			metrics.IdleTime{NoProcess: minIdleShown - 1, ProcessesKnown: true, Observed: time.Hour},
			`{"noProcessSeconds":299.999999999,"observedSeconds":3600}`, "",
		},
	} {
		s := idleStatus(c.idle, node.IdleConfig{})
		if got, err := json.Marshal(s); err != nil || string(got) != c.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, c.want)
		}
		if got := idleText([]Holder{{Idle: s}}); got != c.text {
			t.Errorf("%s: %q, want %q", name, got, c.text)
		}
	}
}

// The text of several MIG devices of one container is about the one that it used last.
func TestIdleTextOfSeveralDevices(t *testing.T) {
	idle := func(d time.Duration) Holder {
		return Holder{Idle: idleStatus(metrics.IdleTime{NoProcess: d, ProcessesKnown: true, Observed: d, Used: true}, node.IdleConfig{})}
	}
	for name, c := range map[string]struct {
		holders []Holder
		want    string
	}{
		"both":    {[]Holder{idle(2 * time.Hour), idle(time.Hour)}, ": no process for 60m"},
		"one":     {[]Holder{idle(2 * time.Hour), idle(0)}, ""},
		"unknown": {[]Holder{idle(2 * time.Hour), {}}, ""},
		"none":    {nil, ""},
	} {
		if got := idleText(c.holders); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestStatusShowsIdleTimes(t *testing.T) {
	k := testInputs()
	k.idle = metrics.IdleTimes{
		{Device: "GPU-0", Namespace: "training", Pod: "llm-0", Container: "torch"}: {
			NoProcess: 2 * time.Hour, ProcessesKnown: true,
			Observed: 3 * time.Hour,
		},
		{Device: "MIG-2-8", Namespace: "nb", Pod: "ada", Container: "main"}: {NoWork: time.Hour, WorkKnown: true, Observed: 3 * time.Hour},
	}
	k.Shares = []plugin.ShareUnits{{
		Resource: "nvidia.com/gpu", Device: "GPU-0", Sharing: plugin.SharingTimeSlicing, Form: deviceid.Form{Kind: deviceid.Replica},
		Total: 4, Free: 1, Largest: 1,
	}}
	page := pageOf(t, k)
	agenttest.MustContain(t, section(t, page, 0), "training/llm-0 (torch) ×2: no process for 120m<", "web/chat-1 (vllm)<")
	agenttest.MustContain(t, section(t, page, 2), "nb/ada (main): no work for 60m")
	s := newNode(k)
	agenttest.MustContain(t, s.Table(true, terminal.Output{}), "training/llm-0 (torch) ×2: no process for 120m, web/chat-1 (vllm)")

	held := s.GPUs[0].Holders
	if len(held) != 3 || *held[0].GPUShare != .25 || *held[1].GPUShare != .25 || *held[2].GPUShare != .25 {
		t.Errorf("%+v", held)
	}
	if held[0].Idle == nil || held[1].Idle == nil || *held[1].Idle.NoProcess != 7200 || held[2].Idle != nil {
		t.Errorf("each unit of a container has its idle time: %+v", held)
	}
	k.idleConfig = node.IdleConfig{After: time.Hour, Evidence: node.EvidenceNoProcess}
	if s := newNode(k); s.GPUs[0].Holders[0].Idle.Evidence != node.EvidenceNoProcess || s.GPUs[2].MIG[1].Holders[0].Idle.Evidence != "" {
		t.Errorf("want evidence of the first only: %+v, %+v", s.GPUs[0].Holders[0].Idle, s.GPUs[2].MIG[1].Holders[0].Idle)
	}
	k.Shares = nil // the units are another plugin's
	text, err := json.Marshal(newNode(k).GPUs[0].Holders)
	if err != nil || strings.Contains(string(text), "gpuShare") {
		t.Errorf("%s, %v", text, err)
	}
}
