package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestPodLabels checks that metrics.podLabels adds labels to the series of a pod's GPU, and an outage of the API server does not remove
// them.
func TestPodLabels(t *testing.T) {
	const user, namespace = "labels", "labelled"
	if err := theCluster.pki.User(user, user); err != nil {
		t.Fatal(err)
	}
	n := newMachine(t, "labels", user)
	n.configure(user, false, "team", "app.kubernetes.io/name")
	n.start(8)
	n.runPod(namespace, "train", map[string]string{"team": "red", "app.kubernetes.io/name": "llm", "pod-template-hash": "1"})

	// Without the right to read pods, only the labels are missing.
	n.awaitSeries("without a role", "train", `gpu_node_agent_pod_labels_up 0`)
	n.loggedOnce("pods")
	n.awaitUnaffected(8, 0)

	theCluster.allowPodLabels(t, user)
	n.awaitSeries("with a role", "train", `team="red"`, `app_kubernetes_io_name="llm"`, `gpu_node_agent_pod_labels_up 1`)
	if page, err := n.Page("/metrics", http.StatusOK); err != nil || strings.Contains(page, "pod_template_hash") {
		t.Errorf("/metrics has a label that metrics.podLabels does not name, or %v", err)
	}
	n.labelPod(namespace, "train", "team", "blue")
	n.awaitSeries("a change", "train", `team="blue"`)

	theCluster.stopAPIServer()
	n.awaitSeries("an outage", "train", `team="blue"`, `gpu_node_agent_pod_labels_up 0`)
	n.awaitUnaffected(8, 0)
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	n.labelPod(namespace, "train", "team", "green")
	n.awaitSeries("after the outage", "train", `team="green"`, `gpu_node_agent_pod_labels_up 1`)

	theCluster.freeze(t, true)
	n.awaitSeries("a frozen API server", "train", `team="green"`)
	theCluster.freeze(t, false)

	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), "train", *metav1.NewDeleteOptions(0)); err != nil {
		t.Fatal(err)
	}
	n.Eventually("labels of a deleted pod are removed", func() error {
		line, _, err := n.podSeries("train") // the device manager keeps the allocation
		if err == nil && strings.Contains(line, "team=") {
			err = errors.New(line)
		}
		return err
	})

	n.loggedOnce("pods")
	n.EndAgent()
}

// The series of a pod's GPU have the pod's UID and only the labels that match an expression of metrics.podLabels.
func TestPodUID(t *testing.T) {
	t.Parallel()
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

func (n machine) labelPod(namespace, pod, key, value string) {
	n.T.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, key, value)
	_, err := theCluster.client.CoreV1().Pods(namespace).Patch(n.T.Context(), pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		n.T.Fatal(err)
	}
}

// podSeries returns the temperature series of the GPU that a pod holds, and the page.
func (n machine) podSeries(pod string) (line, page string, err error) {
	if page, err = n.Page("/metrics", http.StatusOK); err != nil {
		return "", "", err
	}
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "DCGM_FI_DEV_GPU_TEMP{") && strings.Contains(line, `pod="`+pod+`"`) {
			return line, page, nil
		}
	}
	return "", page, errors.New("no GPU held by pod " + pod)
}

// awaitSeries waits until the series of a pod's GPU, or the page, contain all of want.
func (n machine) awaitSeries(what, pod string, want ...string) {
	n.T.Helper()
	n.Eventually("/metrics: "+what, func() error {
		line, page, err := n.podSeries(pod)
		if err != nil {
			return err
		}
		for _, w := range want {
			if strings.HasPrefix(w, "gpu_node_agent_") && strings.Contains(page, "\n"+w+"\n") || strings.Contains(line, w) {
				continue
			}
			return fmt.Errorf("no %s in %s", w, line)
		}
		return nil
	})
}

// allowPodLabels grants a user the rights that docs/metrics.md lists for metrics.podLabels.
func (c *cluster) allowPodLabels(t *testing.T, user string) {
	t.Helper()
	c.grantRules(t, user, "gpu-node-agent-pod-labels-"+user,
		rbac.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}})
}
