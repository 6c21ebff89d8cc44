package apiserver

import (
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Pod labels that metrics.podLabels names are on the series of the pod's GPU, whatever happens to the API server.
func TestPodLabels(t *testing.T) {
	const user, namespace = "labels", "labelled"
	if err := theCluster.pki.issue(user, pkix.Name{CommonName: user}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(theCluster.kubeconfig(user), []byte(theCluster.pki.kubeconfig(user, theCluster.port)), 0o600); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, "labels", user)
	n.showPodLabels(user, "team", "app.kubernetes.io/name")
	n.startAgent(8)
	n.runLabelled(namespace, "train", map[string]string{"team": "red", "app.kubernetes.io/name": "llm", "pod-template-hash": "1"})

	// Without the right to, there are none, and nothing else is missing.
	n.shows("without a role", "train", `gpu_node_agent_pod_labels_up 0`)
	n.eventually("the refusal is said", func() error {
		if n.said.count("the labels of pods cannot be read") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	n.goesOn(8, 0)

	theCluster.allowPodLabels(t, user)
	n.shows("with a role", "train", `team="red"`, `app_kubernetes_io_name="llm"`, `gpu_node_agent_pod_labels_up 1`)
	if page, err := n.get("/metrics"); err != nil || strings.Contains(page, "pod_template_hash") {
		t.Errorf("a label that nobody asked for is shown, or %v", err)
	}
	n.label(namespace, "train", "team", "blue")
	n.shows("a change", "train", `team="blue"`)

	theCluster.stopAPIServer()
	n.shows("an outage", "train", `team="blue"`, `gpu_node_agent_pod_labels_up 0`)
	n.goesOn(8, 0)
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	n.label(namespace, "train", "team", "green")
	n.shows("after the outage", "train", `team="green"`, `gpu_node_agent_pod_labels_up 1`)

	theCluster.freeze(t, true)
	n.shows("a server that does not answer", "train", `team="green"`)
	theCluster.freeze(t, false)

	zero := int64(0)
	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), "train", metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	n.eventually("the labels of a pod that is gone are gone", func() error {
		line, _, err := n.held("train") // the kubelet of this test keeps it
		if err == nil && strings.Contains(line, "team=") {
			err = errors.New(line)
		}
		return err
	})

	if said := n.said.count("the labels of pods cannot be read"); said > 5 { // once for each kind of refusal
		t.Errorf("it was said %d times", said)
	}
	n.endAgent()
}

// showPodLabels writes a configuration with which only the labels of pods need the API server.
func (n *node) showPodLabels(user string, keys ...string) {
	n.t.Helper()
	config := fmt.Sprintf(`source:
  mode: sim
  sim: {profile: h100-8, control: %[1]s/sim.sock}
health:
  stateFile: %[1]s/state.json
  socket: %[1]s/agent.sock
  kubernetes: {enabled: false, kubeconfig: %[2]s}
plugin: {kubeletDir: %[1]s}
metrics: {listen: %[3]s, podLabels: [%[4]s]}
`, n.dir, theCluster.kubeconfig(user), n.address, strings.Join(keys, ", "))
	if err := os.WriteFile(filepath.Join(n.dir, "config.yaml"), []byte(config), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// runLabelled makes a pod on this node that has a GPU.
func (n *node) runLabelled(namespace, name string, labels map[string]string) {
	n.t.Helper()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := theCluster.client.CoreV1().Namespaces().Create(n.t.Context(), ns, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
	pod := n.pod(namespace, name)
	pod.Labels = labels
	pod, err := theCluster.client.CoreV1().Pods(namespace).Create(n.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	n.admit(pod)
}

func (n *node) label(namespace, pod, key, value string) {
	n.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, key, value)
	_, err := theCluster.client.CoreV1().Pods(namespace).Patch(n.t.Context(), pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
}

// held returns the temperature of the GPU that a pod holds, as /metrics has it, and the page.
func (n *node) held(pod string) (line, page string, err error) {
	if page, err = n.get("/metrics"); err != nil {
		return "", "", err
	}
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "DCGM_FI_DEV_GPU_TEMP{") && strings.Contains(line, `pod="`+pod+`"`) {
			return line, page, nil
		}
	}
	return "", page, errors.New("no GPU is held by " + pod)
}

// shows waits until the series of a pod's GPU, or the page, have all of what is wanted.
func (n *node) shows(what, pod string, want ...string) {
	n.t.Helper()
	n.eventually("/metrics: "+what, func() error {
		line, page, err := n.held(pod)
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

// allowPodLabels gives a user what metrics.podLabels needs, as README.md says.
func (c *cluster) allowPodLabels(t *testing.T, user string) {
	t.Helper()
	name := metav1.ObjectMeta{Name: "gpu-node-agent-pod-labels"}
	role := &rbac.ClusterRole{ObjectMeta: name, Rules: []rbac.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}}}}
	binding := &rbac.ClusterRoleBinding{
		ObjectMeta: name, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: name.Name},
		Subjects: []rbac.Subject{{APIGroup: rbac.GroupName, Kind: rbac.UserKind, Name: user}},
	}
	_, err := c.client.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
	_, err2 := c.client.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{})
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
}
