package apiserver

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// While the API server is away, all else goes on; when it is back, the newest state is there.
func TestOutage(t *testing.T) {
	const name = "outage"
	theCluster.allow(t, agent)
	n := newNode(t, name, agent)
	n.startAgent(8)
	before := n.becomes(v1.ConditionTrue, "AllHealthy")

	theCluster.stopAPIServer()
	n.inject(`{"gpu":2,"xid":79}`)
	n.goesOn(7, 1)
	n.inject(`{"gpu":5,"recoveryAction":"reboot"}`)
	n.goesOn(6, 2)
	n.admit(n.pod("team", "during-the-outage"))
	n.inject(`{"gpu":5,"recoveryAction":"none"}`)
	n.goesOn(7, 1)
	n.eventually("the outage is noticed", func() error {
		if n.said.count("the node's condition cannot be written") == 0 {
			return errors.New("not said")
		}
		return nil
	})
	end := time.Now()
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	after := n.becomes(v1.ConditionFalse, "Xid79")
	if after.LastTransitionTime.Before(&before.LastTransitionTime) || after.LastTransitionTime.After(end) {
		t.Errorf("the transition is at %v, want between %v and %v, when the GPU broke", after.LastTransitionTime, before.LastTransitionTime, end)
	}
	n.eventually("the events of the outage", func() error {
		return n.events("Node", "default", name, name, "XID", "GPUUnhealthy", "GPUUnhealthy", "GPURecovered")
	})
	if got := n.patches(agent); got != 2 {
		t.Errorf("%d writes, want 2: before and after the outage", got)
	}
	for _, what := range []string{"the node's condition cannot be written", "events cannot be written"} {
		if said := n.said.count(what); said > 3 { // once for each kind of refusal, while the server starts
			t.Errorf("%q was said %d times", what, said)
		}
	}
	n.endAgent()
}

// An API server that takes a request and does not answer is worse than none.
func TestFrozen(t *testing.T) {
	theCluster.allow(t, agent)
	n := newNode(t, "frozen", agent)
	n.startAgent(8)
	n.becomes(v1.ConditionTrue, "AllHealthy")

	theCluster.freeze(t, true)
	n.inject(`{"gpu":2,"xid":79}`)
	n.goesOn(7, 1)
	n.inject(`{"gpu":3,"recoveryAction":"reboot"}`)
	n.goesOn(6, 2)
	n.admit(n.pod("team", "while-it-is-frozen"))
	theCluster.freeze(t, false)
	n.becomes(v1.ConditionFalse, "Xid79")
	n.endAgent()
}

// A user without the role costs the condition and the events, and nothing else.
func TestDenied(t *testing.T) {
	const name = "denied"
	n := newNode(t, name, nobody)
	n.startAgent(8)
	n.inject(`{"gpu":2,"xid":79}`)
	n.goesOn(7, 1)
	n.eventually("several refusals", func() error {
		all, err := theCluster.requests(nobody)
		if err != nil {
			return err
		}
		refused := map[string]int{}
		for _, r := range all {
			refused[r]++
		}
		if refused["get nodes "+name+" 403"] < 3 || refused["create events  403"] < 3 {
			return fmt.Errorf("requests %v", refused)
		}
		return nil
	})
	for _, what := range []string{"the node's condition cannot be written", "events cannot be written"} {
		if said := n.said.count(what); said != 1 {
			t.Errorf("%q was said %d times, want once", what, said)
		}
	}
	n.goesOn(7, 1)

	theCluster.allow(t, nobody)
	n.becomes(v1.ConditionFalse, "Xid79")
	n.eventually("the events that were held back", func() error {
		return n.events("Node", "default", name, types.UID(name), "XID", "GPUUnhealthy")
	})
	n.endAgent()
}

// goesOn checks the kubelet, the probes and the metrics.
func (n *node) goesOn(allocatable, unhealthy int) {
	n.t.Helper()
	n.eventually(fmt.Sprintf("%d GPUs for the kubelet, ready, %d unhealthy in /metrics", allocatable, unhealthy), func() error {
		if err := errors.Join(n.allocatable(allocatable), n.ready()); err != nil {
			return err
		}
		page, err := n.get("/metrics")
		if err != nil {
			return err
		}
		sick := 0
		for line := range strings.Lines(page) {
			if strings.HasPrefix(line, "gpu_node_agent_device_state{") && strings.Contains(line, `state="unhealthy"`) && strings.HasSuffix(line, " 1\n") {
				sick++
			}
		}
		if sick != unhealthy {
			return fmt.Errorf("/metrics has %d unhealthy GPUs, want %d", sick, unhealthy)
		}
		return nil
	})
}
