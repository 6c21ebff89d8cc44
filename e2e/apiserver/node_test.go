package apiserver

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// machine is a node that is registered with the API server.
type machine struct {
	*node.Node
	name string
}

// newMachine creates a Node object and starts a kubelet. The agent uses the API server as user.
func newMachine(t *testing.T, name, user string) machine {
	t.Helper()
	n := machine{node.New(t), name}
	n.Env = []string{"NODE_NAME=" + name}
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady"}
	object, err := theCluster.client.CoreV1().Nodes().Create(t.Context(), newObject(name), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	object.Status.Conditions = []v1.NodeCondition{ready}
	if _, err := theCluster.client.CoreV1().Nodes().UpdateStatus(t.Context(), object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.StartKubelet()
	n.configure(user, true)
	return n
}

// newObject returns a Node as the kubelet registers it. Without any field, the API server would track no field managers.
func newObject(name string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}}
}

// configure writes the agent's configuration: whether it reports the condition and events, and which pod labels it adds
// to metrics.
func (n machine) configure(user string, enabled bool, podLabels ...string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf(`source: {sim: {profile: h100-8}}
health: {kubernetes: {enabled: %v, kubeconfig: %s}}
metrics: {podLabels: [%s]}
`, enabled, theCluster.pki.Kubeconfig(user), strings.Join(podLabels, ", ")))
}

// start starts an agent and waits until the kubelet has gpus allocatable GPUs.
func (n machine) start(gpus int) {
	n.T.Helper()
	n.StartAgent()
	n.Eventually(fmt.Sprintf("the kubelet has %d GPUs", gpus), func() error { return n.KubeletHas(node.GPU, 8, gpus) })
}

// runPod creates a pod on this node that requests a GPU, and returns the GPU that the kubelet assigns.
func (n machine) runPod(namespace, name string, labels map[string]string) (gpu string, uid types.UID) {
	n.T.Helper()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := theCluster.client.CoreV1().Namespaces().Create(n.T.Context(), ns, metav1.CreateOptions{}); err != nil {
		n.T.Fatal(err)
	}
	pod := node.Pod(namespace, name, node.GPU, 1)
	pod.Labels, pod.Spec.NodeName = labels, n.name
	pod, err := theCluster.client.CoreV1().Pods(namespace).Create(n.T.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		n.T.Fatal(err)
	}
	n.Admit(n.Bind(pod))
	for id := range n.Kubelet.PodDevices(pod, node.GPU) {
		return id, pod.UID
	}
	n.T.Fatalf("pod %s has no GPU", name)
	return "", ""
}

// clearFindings clears a GPU's findings as an operator does.
func (n machine) clearFindings(gpu string) {
	n.T.Helper()
	n.Post("agent.sock", "/clear", `{"device":%q}`, gpu)
}

// index returns the index of a GPU, from the agent's metrics.
func (n machine) index(gpu string) (index string) {
	n.T.Helper()
	n.Eventually("/metrics has the pod's GPU", func() error {
		metrics, err := n.Scrape()
		if err != nil {
			return err
		}
		if index = metrics.Index(gpu); index == "" {
			err = errors.New("no series of " + gpu)
		}
		return err
	})
	return index
}

// loggedOnce checks that the agent logs an error of requests that require a right on a resource, such as events, and
// that it does not log it at each retry. An error may come once more after a recovery.
func (n machine) loggedOnce(resource string) {
	n.T.Helper()
	counts := make(map[string]int)
	n.Eventually("logged: no access to "+resource, func() error {
		clear(counts)
		for _, line := range n.Journal.Lines(`"required":`) {
			if strings.Contains(line, " "+resource+`"`) {
				_, text, _ := strings.Cut(line, `"error":`)
				counts[text]++
			}
		}
		if len(counts) == 0 {
			return errors.New("no error is logged")
		}
		return nil
	})
	for text, count := range counts {
		if count > 2 {
			n.T.Errorf("logged %d times: %s", count, text)
		}
	}
}
