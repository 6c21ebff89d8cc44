//go:build cluster

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

const (
	namespace = "gpu"
	release   = "gna"
	gpu       = "nvidia.com/gpu"
)

// step runs a step of a test. The test ends if the step fails.
func step(t *testing.T, name string, do func(t *testing.T)) {
	t.Helper()
	begin := time.Now()
	if !t.Run(name, do) {
		explain(t)
		t.Fatalf("step failed: %s", name)
	}
	t.Logf("%5.1fs  %s", time.Since(begin).Seconds(), name)
}

// eventually waits until holds returns nil. It fails if a process in need exits.
func eventually(t *testing.T, what string, holds func(context.Context) error, need ...*process.Process) {
	t.Helper()
	eventuallyWithin(t, patience, what, holds, need...)
}

// eventuallyWithin is eventually for a step that takes minutes.
func eventuallyWithin(t *testing.T, bound time.Duration, what string, holds func(context.Context) error, need ...*process.Process) {
	t.Helper()
	took, err := process.Await(t.Context(), bound, holds, need...)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	t.Logf("%s: after %.1fs", what, took.Seconds())
}

// helm runs helm and returns its output.
func helm(t *testing.T, args ...string) string {
	t.Helper()
	out, err := tryHelm(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryHelm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), theCluster.file("helm"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+theCluster.pki.Kubeconfig(admin), "HOME="+theCluster.file("state"))
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("helm %s: %w\n%s%s", strings.Join(args, " "), err, out.Bytes(), stderr.Bytes())
	}
	return out.String(), nil
}

const chart = "../../charts/gpu-node-agent"

// upgrade installs or upgrades the chart and waits until its pods are ready.
func upgrade(t *testing.T, tag string, values ...string) {
	t.Helper()
	helm(t, append(upgradeArgs(tag, values...), "--wait", "--timeout", patience.String())...)
}

func upgradeArgs(tag string, values ...string) []string {
	args := []string{
		"upgrade", "--install", release, chart, "-n", namespace, "--create-namespace", "-f", "testdata/values.yaml", "--set",
		"image.tag=" + tag,
	}
	for _, v := range values {
		args = append(args, "--set-json", v)
	}
	return args
}

// resourceAmounts returns the capacity and allocatable amount of a resource, such as "8/7".
func resourceAmounts(ctx context.Context, name v1.ResourceName) (string, error) {
	node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	in := func(all v1.ResourceList) string {
		if q, ok := all[name]; ok {
			return q.String()
		}
		return "none"
	}
	return in(node.Status.Capacity) + "/" + in(node.Status.Allocatable), nil
}

// awaitAmounts waits until the node has this capacity/allocatable amount of a resource.
func awaitAmounts(t *testing.T, name v1.ResourceName, want string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node has %s of %s", want, name), func(ctx context.Context) error {
		have, err := resourceAmounts(ctx, name)
		if err == nil && have != want {
			err = fmt.Errorf("it has %s", have)
		}
		return err
	})
}

func agentPods(ctx context.Context) ([]v1.Pod, error) {
	pods, err := theCluster.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "gpu-node-agent/serves=node"})
	if err != nil {
		return nil, err
	}
	return pods.Items, nil
}

// agentPod returns the running pod of the chart.
func agentPod(ctx context.Context) (*v1.Pod, error) {
	pods, err := agentPods(ctx)
	if err != nil {
		return nil, err
	}
	if len(pods) != 1 {
		return nil, fmt.Errorf("%d pods of the agent, want 1", len(pods))
	}
	pod := &pods[0]
	if pod.DeletionTimestamp != nil || pod.Status.Phase != v1.PodRunning {
		return nil, fmt.Errorf("agent's pod is %s, with deletion at %v", pod.Status.Phase, pod.DeletionTimestamp)
	}
	return pod, nil
}

// mustAgentPod waits for the agent's pod during a replacement.
func mustAgentPod(t *testing.T) (pod *v1.Pod) {
	t.Helper()
	eventually(t, "one pod of the agent", func(ctx context.Context) (err error) {
		pod, err = agentPod(ctx)
		return err
	})
	return pod
}

// replaceAgentPod deletes the agent's pod and waits for the new one.
func replaceAgentPod(t *testing.T) {
	t.Helper()
	previous := mustAgentPod(t)
	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), previous.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if is := mustAgentPod(t); is.UID == previous.UID {
		t.Fatal("the agent's pod was not replaced")
	}
}

// checkSamePod checks that the agent's pod and container are still the same.
func checkSamePod(t *testing.T, previous *v1.Pod) {
	t.Helper()
	is := mustAgentPod(t)
	if is.UID != previous.UID || is.Status.ContainerStatuses[0].ContainerID != previous.Status.ContainerStatuses[0].ContainerID {
		t.Errorf("agent's pod is %s (%s), was %s (%s)", is.Name, is.UID, previous.Name, previous.UID)
	}
}

// inAgent runs a command of the agent in its container.
func inAgent(t *testing.T, args ...string) string {
	t.Helper()
	mustAgentPod(t)
	out, err := tryInAgent(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryInAgent(ctx context.Context, args ...string) (string, error) {
	pod, err := agentPod(ctx)
	if err != nil {
		return "", err
	}
	request := theCluster.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&v1.PodExecOptions{
			Container: "gpu-node-agent", Command: append([]string{"/usr/local/bin/gpu-node-agent", "--config", "/etc/gpu-node-agent/config.yaml"},
				args...),
			Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(theCluster.config, http.MethodGet, request.URL().String())
	if err != nil {
		return "", err
	}
	var out, stderr bytes.Buffer
	if err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &stderr}); err != nil {
		return "", fmt.Errorf("gpu-node-agent %s: %w\n%s%s", strings.Join(args, " "), err, out.Bytes(), stderr.Bytes())
	}
	return out.String(), nil
}

// inject injects an event with the command in NOTES.txt. The agent's socket may come after its metrics.
func inject(t *testing.T, format string, args ...any) {
	t.Helper()
	mustAgentPod(t)
	event := fmt.Sprintf(format, args...)
	eventually(t, "the agent gets "+event, func(ctx context.Context) error {
		_, err := tryInAgent(ctx, "sim", event)
		if err != nil && !strings.Contains(err.Error(), "no simulated source listens") {
			t.Fatal(err) // the agent may have it
		}
		return err
	})
}

// scrape returns the agent's metrics page.
func scrape(ctx context.Context) (string, error) { return scrapePath(ctx, "/metrics") }

// scrapePath returns a page of the agent for any HTTP status.
func scrapePath(ctx context.Context, path string) (string, error) {
	pod, err := agentPod(ctx)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+pod.Status.PodIP+":9400"+path, nil)
	if err != nil {
		return "", err
	}
	r, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Body.Close() }()
	text, err := io.ReadAll(r.Body)
	return string(text), err
}

// awaitSeries waits until the agent's metrics have a line with a prefix that contains the other texts.
func awaitSeries(t *testing.T, begins string, has ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("/metrics has %s… with %q", begins, has), func(ctx context.Context) error {
		page, err := scrape(ctx)
		if err != nil {
			return err
		}
		_, err = findLine(page, begins, has...)
		return err
	})
}

// awaitReadyz waits until the agent's /readyz begins with a text and contains the other texts.
func awaitReadyz(t *testing.T, begins string, has ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("/readyz begins with %q and has %q", begins, has), func(ctx context.Context) error {
		page, err := scrapePath(ctx, "/readyz")
		if err != nil {
			return err
		}
		all := strings.HasPrefix(page, begins)
		for _, text := range has {
			all = all && strings.Contains(page, text)
		}
		if !all {
			err = fmt.Errorf("it is %q", page)
		}
		return err
	})
}

func startKubelet(t *testing.T) {
	t.Helper()
	if err := theCluster.startKubelet(); err != nil {
		t.Fatal(err)
	}
}

func stopKubelet() { _ = theCluster.kubelet.Stop() } // its exit status does not matter

func replaceKubelet(t *testing.T) {
	t.Helper()
	stopKubelet()
	startKubelet(t)
}

func findLine(page, begins string, has ...string) (string, error) {
	var near []string
	for line := range strings.Lines(page) {
		if !strings.HasPrefix(line, begins) {
			continue
		}
		all := true
		for _, text := range has {
			all = all && strings.Contains(line, text)
		}
		if all {
			return line, nil
		}
		near = append(near, line)
	}
	return "", fmt.Errorf("no such line; similar ones are:\n%s", strings.Join(near[:min(len(near), 16)], ""))
}

// label returns the value of a label in a line of metrics.
func label(line, name string) string {
	_, rest, _ := strings.Cut(line, name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
