package apiserver

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The series of a pod's GPU have the pod's UID and only the labels that match an expression of metrics.podLabels.
func TestPodUID(t *testing.T) {
	const user, namespace = "uids", "uids"
	if err := theCluster.pki.User(user, user); err != nil {
		t.Fatal(err)
	}
	n := newMachine(t, "uids", user)
	theCluster.allowPodLabels(t, user)
	n.Configure(fmt.Sprintf(`source: {sim: {profile: h100-8}}
health: {kubernetes: {kubeconfig: %s}}
metrics: {podUID: true, podLabels: ['/^app\.kubernetes\.io//', "/^team-(lead|size)$/"]}
`, theCluster.pki.Kubeconfig(user)))
	n.start(8)
	_, uid := n.runPod(namespace, "train", map[string]string{
		"app.kubernetes.io/name": "llm", "team-lead": "ann", "team": "red", "pod-template-hash": "1", "pod-uid": "mine",
	})
	n.awaitSeries("UID and labels", "train", fmt.Sprintf(`pod_uid="%s"`, uid), `app_kubernetes_io_name="llm"`, `team_lead="ann"`,
		`gpu_node_agent_pod_labels_up 1`)
	n.labelPod(namespace, "train", "app.kubernetes.io/part-of", "chat")
	n.awaitSeries("a new label", "train", `app_kubernetes_io_part_of="chat"`)
	page, err := n.Page("/metrics", http.StatusOK)
	if err != nil {
		t.Fatal(err)
	}
	for _, no := range []string{"pod_template_hash=", "team=", "mine"} {
		if strings.Contains(page, no) {
			t.Errorf("/metrics has %s, which no expression matches", no)
		}
	}

	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), "train", *metav1.NewDeleteOptions(0)); err != nil {
		t.Fatal(err)
	}
	n.Eventually("UID of a deleted pod is removed", func() error {
		line, _, err := n.podSeries("train") // the device manager keeps the allocation
		if err == nil && strings.Contains(line, "pod_uid=") {
			err = fmt.Errorf("unexpected UID: %s", line)
		}
		return err
	})
	n.EndAgent()
}
