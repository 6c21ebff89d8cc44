package binarytest

import (
	"net/http"
	"strings"
	"testing"
)

const (
	eventsUp   = `gpu_node_agent_event_source_up{witness="nvml"} 1`
	eventsDown = `gpu_node_agent_event_source_up{witness="nvml"} 0`
)

// An event source that is down is visible everywhere and harmless: the agent is ready, and XIDs come from the source.
func TestEventSourceDown(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, eventsConfig)
	p.awaitMetrics(eventsUp)
	for output, part := range map[string]string{"table": "nvml up; kernel-log off\n", "wide": "nvml up; kernel-log off: source.kernelLog"} {
		if out, _ := run(t, "status", "--config", p.config(), "-o", output); !strings.Contains(out, part) {
			t.Errorf("status -o %s lacks %q:\n%s", output, part, out)
		}
	}

	p.sim("{events: down}")
	p.awaitMetrics(eventsDown, "gpu_node_agent_source_up 1")
	p.awaitPage("/readyz", http.StatusOK, "ok\nxids: event source nvml down: ")
	if s := p.snapshot().Source.Events; len(s) != 2 || s[0].Name != "nvml" || s[0].Status != "down" || s[0].Error == "" ||
		s[0].Since.IsZero() || s[1].Status != "off" || s[1].Error == "" {
		t.Errorf("status %+v", s)
	}
	for command, part := range map[string]string{"status": "nvml down", "doctor": "event source nvml down: "} {
		if out, _ := run(t, command, "--config", p.config()); !strings.Contains(out, part) {
			t.Errorf("%s lacks %q:\n%s", command, part, out)
		}
	}
	p.sim("{gpu: 5, xid: 79}")
	p.awaitAllocatable(k, 7)

	p.sim("{events: up}")
	p.awaitMetrics(eventsUp)
	p.await("/readyz without a warning", func() bool {
		code, text := p.get("/readyz")
		return code == http.StatusOK && text == "ok\n"
	})
	p.await("the events up, down and up of the event source", func() bool { // they follow the snapshot
		var states []string
		for _, e := range p.snapshot().Events {
			if e.Kind == "event-source" {
				states = append(states, e.State)
			}
		}
		return strings.Join(states, " ") == "up down up" // the newest first
	})
}

// A detach ends the event sources, which hold files of the driver. Attach starts them again.
func TestDetachEndsEventSources(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, eventsConfig)
	p.awaitMetrics(eventsUp)
	p.command(0, "detach")
	p.awaitSource("detached")
	if _, page := p.get("/metrics"); strings.Contains(page, "gpu_node_agent_event_source_up{") {
		t.Errorf("the event source is on while detached:\n%s", page)
	}
	if s := p.snapshot().Source.Events; len(s) != 2 || s[0].Status != "off" || !strings.Contains(s[0].Error, "detach") {
		t.Errorf("status %+v", s)
	}
	if _, text := p.get("/readyz"); strings.Contains(text, "event source") {
		t.Errorf("/readyz: %q", text)
	}
	p.command(0, "attach")
	p.awaitMetrics(eventsUp)
	p.awaitAllocatable(k, 8)
}

// A reload of source.events opens the source again and keeps its verdicts and counts.
func TestReloadOfEvents(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	if _, page := p.get("/metrics"); strings.Contains(page, "gpu_node_agent_event_source_up{") {
		t.Errorf("auto is on in a simulation:\n%s", page)
	}
	p.sim("{gpu: 3, xid: 95}")
	p.awaitAllocatable(k, 7)

	p.reload(eventsConfig)
	p.awaitMetrics(eventsUp, `xid="95"} 1`, `cause="xid-95"`)
	p.sim("{gpu: 4, xid: 48}")
	p.awaitAllocatable(k, 6)

	p.reload(strings.Replace(eventsConfig, "events: nvml", "events: off", 1))
	p.await("the end of the series", func() bool {
		_, page := p.get("/metrics")
		return page != "" && !strings.Contains(page, "gpu_node_agent_event_source_up{")
	})
	if s := p.snapshot().Source.Events; len(s) != 2 || s[0].Status != "off" || s[0].Error != "source.events is off" {
		t.Errorf("status %+v", s)
	}
	p.awaitMetrics(`cause="xid-95"`, `cause="xid-48"`, `xid="95"} 1`, `xid="48"} 1`, "gpu_node_agent_source_up 1")
	p.awaitAllocatable(k, 6)
}
