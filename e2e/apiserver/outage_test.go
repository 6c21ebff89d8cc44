package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// An outage of the API server does not affect the kubelet or metrics. After the outage the agent writes the newest
// state.
func TestOutage(t *testing.T) {
	const name = "outage"
	theCluster.grantDocumentedRole(t, agent)
	n := newMachine(t, name, agent)
	n.start(8)
	before := n.awaitCondition(v1.ConditionTrue, "AllHealthy")

	theCluster.stopAPIServer()
	n.Inject(`{"gpu":2,"xid":79}`)
	n.awaitUnaffected(7, 1)
	n.Inject(`{"gpu":5,"recoveryAction":"reboot"}`)
	n.awaitUnaffected(6, 2)
	n.Admit(n.Bind(node.Pod("team", "during-the-outage", node.GPU, 1)))
	n.Inject(`{"gpu":5,"recoveryAction":"none"}`)
	n.awaitUnaffected(7, 1)
	n.loggedOnce("nodes/status")
	n.loggedOnce("events")
	end := time.Now()
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	after := n.awaitCondition(v1.ConditionFalse, "Xid79")
	if after.LastTransitionTime.Before(&before.LastTransitionTime) || after.LastTransitionTime.After(end) {
		t.Errorf("transition at %v, want between %v and %v, when the GPU failed", after.LastTransitionTime, before.LastTransitionTime, end)
	}
	n.Eventually("events of the outage", func() error {
		return n.checkEvents("Node", "default", name, name, "XID", "GPUUnhealthy", "GPUUnhealthy", "GPURecovered")
	})
	n.awaitWrites(agent, 2) // before and after the outage
	n.loggedOnce("nodes/status")
	n.loggedOnce("events")
	n.EndAgent()
}

// An API server that accepts requests and does not respond does not affect the kubelet or metrics.
func TestFrozen(t *testing.T) {
	theCluster.grantDocumentedRole(t, agent)
	n := newMachine(t, "frozen", agent)
	n.start(8)
	n.awaitCondition(v1.ConditionTrue, "AllHealthy")

	theCluster.freeze(t, true)
	n.Inject(`{"gpu":2,"xid":79}`)
	n.awaitUnaffected(7, 1)
	n.Inject(`{"gpu":3,"recoveryAction":"reboot"}`)
	n.awaitUnaffected(6, 2)
	n.Admit(n.Bind(node.Pod("team", "while-it-is-frozen", node.GPU, 1)))
	theCluster.freeze(t, false)
	n.awaitCondition(v1.ConditionFalse, "Xid79")
	n.EndAgent()
}

// Without the cluster role only the condition and the events are missing.
func TestDenied(t *testing.T) {
	const name = "denied"
	n := newMachine(t, name, unprivileged)
	n.start(8)
	n.Inject(`{"gpu":2,"xid":79}`)
	n.awaitUnaffected(7, 1)
	n.Eventually("several denied requests", func() error {
		all, err := theCluster.requests(unprivileged)
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
	n.loggedOnce("nodes/status")
	n.loggedOnce("events")
	n.awaitUnaffected(7, 1)

	theCluster.grantDocumentedRole(t, unprivileged)
	n.awaitCondition(v1.ConditionFalse, "Xid79")
	n.Eventually("delayed events", func() error {
		return n.checkEvents("Node", "default", name, types.UID(name), "XID", "GPUUnhealthy")
	})
	n.EndAgent()
}

// awaitUnaffected checks the kubelet, the readiness probe and the metrics.
func (n machine) awaitUnaffected(allocatable, unhealthy int) {
	n.T.Helper()
	n.Eventually(fmt.Sprintf("%d allocatable GPUs, ready, %d unhealthy in /metrics", allocatable, unhealthy), func() error {
		_, err := n.Page("/readyz", http.StatusOK)
		if err := errors.Join(n.KubeletHas(node.GPU, 8, allocatable), err); err != nil {
			return err
		}
		return n.hasUnhealthy(unhealthy)
	})
}
