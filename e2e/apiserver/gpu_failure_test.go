package apiserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A GPU fails, the agent restarts, and the GPU recovers. The API server counts every write.
func TestGPUFailure(t *testing.T) {
	theCluster.grantDocumentedRole(t, agent)
	n := newMachine(t, "story", agent)
	n.start(8)
	if c := n.awaitCondition(v1.ConditionTrue, "AllHealthy"); !strings.Contains(c.Message, "8") {
		t.Errorf("message %q", c.Message)
	}
	gpu, uid := n.runPod("team", "train", nil)
	index := n.index(gpu)
	nodeEvents := func(reasons ...string) func() error {
		return func() error { return n.checkEvents("Node", "default", n.name, types.UID(n.name), reasons...) }
	}
	podEvents := func(reasons ...string) func() error {
		return func() error { return n.checkEvents("Pod", "team", "train", uid, reasons...) }
	}
	// An application's XID leaves the GPU healthy. The agent reads the holders soon after an allocation, so the first
	// XID may come too early for the pod's event.
	n.Eventually("the pod has the event of its application's XID", func() error {
		n.Inject(`{"gpu":%s,"xid":31}`, index)
		return podEvents("XID")()
	})

	n.Inject(`{"gpu":%s,"xid":79}`, index)
	failed := n.awaitCondition(v1.ConditionFalse, "Xid79")
	for _, want := range []string{index, gpu, "xid-79", "1 free nvidia.com/gpu cannot be scheduled", "team/train"} {
		if !strings.Contains(failed.Message, want) {
			t.Errorf("message %q lacks %q", failed.Message, want)
		}
	}
	n.Eventually("the node's events", nodeEvents("XID", "XID", "GPUUnhealthy"))
	n.Eventually("the pod's events", podEvents("XID", "XID", "GPUUnhealthy"))

	// After a restart the agent writes only a heartbeat that is due.
	n.EndAgent()
	n.awaitWrites(agent, 2) // healthy, unhealthy
	n.ageHeartbeat(failed)
	n.start(7)
	n.Eventually("a heartbeat after the restart", func() error {
		c, err := n.condition(v1.ConditionFalse, "Xid79")
		if err == nil && time.Since(c.LastHeartbeatTime.Time) > time.Minute {
			err = fmt.Errorf("heartbeat at %v", c.LastHeartbeatTime)
		}
		if err == nil && !c.LastTransitionTime.Equal(&failed.LastTransitionTime) {
			t.Fatalf("the transition moved from %v to %v", failed.LastTransitionTime, c.LastTransitionTime)
		}
		return err
	})
	n.EndAgent()

	// The next agent writes nothing until the GPU recovers.
	n.start(7)
	n.clearFindings(gpu)
	recovered := n.awaitCondition(v1.ConditionTrue, "AllHealthy")
	if !recovered.LastTransitionTime.After(failed.LastTransitionTime.Time) {
		t.Errorf("recovered at %v, broken at %v", recovered.LastTransitionTime, failed.LastTransitionTime)
	}
	n.Eventually("the node's events after the recovery", nodeEvents("XID", "XID", "GPUUnhealthy", "GPURecovered"))
	n.Eventually("the pod's events after the recovery", podEvents("XID", "XID", "GPUUnhealthy", "GPURecovered"))
	n.awaitWrites(agent, 4) // plus the heartbeat and healthy

	// When health.kubernetes is disabled, the agent deletes its condition and no other.
	n.configure(agent, false)
	n.Eventually("the disabled condition is deleted", func() error {
		object, err := theCluster.client.CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
		if err == nil && (len(object.Status.Conditions) != 1 || object.Status.Conditions[0].Type != v1.NodeReady) {
			err = fmt.Errorf("conditions %+v", object.Status.Conditions)
		}
		return err
	})
	n.EndAgent()
}

// ageHeartbeat sets the last heartbeat to ten minutes ago.
func (n machine) ageHeartbeat(c v1.NodeCondition) {
	n.T.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"lastHeartbeatTime":%q}]}}`, c.Type,
		time.Now().Add(-10*time.Minute).UTC().Format(time.RFC3339))
	_, err := theCluster.client.CoreV1().Nodes().Patch(n.T.Context(), n.name, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{}, "status")
	if err != nil {
		n.T.Fatal(err)
	}
}
