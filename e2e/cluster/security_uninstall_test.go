//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// agentProcesses returns the directories in /proc of the agents, including commands in the container.
func agentProcesses() (dirs []string) {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		panic(err) // the pattern is constant
	}
	for _, name := range names {
		if comm, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(comm), "gpu-node-agent") {
			dirs = append(dirs, filepath.Dir(name))
		}
	}
	return dirs
}

// checkConfined checks the effect of the pod's security context: no capabilities, no new privileges, a seccomp filter and a
// read-only root.
func checkConfined(t *testing.T) {
	t.Helper()
	all := agentProcesses()
	if len(all) != 1 {
		t.Fatalf("%d agent processes, want 1", len(all))
	}
	dir := all[0]
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("agent's process lacks %q:\n%s", want, status)
		}
	}
	mounts, err := os.ReadFile(filepath.Join(dir, "mounts"))
	if err != nil {
		t.Fatal(err)
	}
	root, _, _ := strings.Cut(string(mounts), "\n")
	if f := strings.Fields(root); len(f) < 4 || f[1] != "/" || !strings.HasPrefix(f[3], "ro") {
		t.Errorf("agent's root is writable: %s", root)
	}
}

// measureUsage starts to measure the agent's CPU usage; the returned function logs it with the agent's memory.
func measureUsage(t *testing.T) func() {
	t.Helper()
	dir := agentProcesses()[0]
	used := func() float64 {
		text, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), ") ") // proc(5): the name may contain anything
		var ticks float64
		for _, field := range strings.Fields(rest)[11:13] { // utime, stime
			n, err := strconv.ParseFloat(field, 64)
			if err != nil {
				t.Fatal(err)
			}
			ticks += n
		}
		return ticks / 100 // USER_HZ
	}
	begin, before := time.Now(), used()
	return func() {
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil {
			t.Fatal(err)
		}
		_, rss, _ := strings.Cut(string(status), "VmRSS:")
		rss, _, _ = strings.Cut(rss, "\n")
		t.Logf("the agent used %.2f%% of a CPU, memory %s", 100*(used()-before)/time.Since(begin).Seconds(), strings.TrimSpace(rss))
	}
}

// awaitCondition waits for a status of the node's condition.
func awaitCondition(t *testing.T, want v1.ConditionStatus, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node's condition GPUHealthy is %s, %s", want, reason), func(ctx context.Context) error {
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type != "GPUHealthy" {
				continue
			}
			if c.Status == want && c.Reason == reason {
				return nil
			}
			return fmt.Errorf("condition is %s, %s: %s", c.Status, c.Reason, c.Message)
		}
		return fmt.Errorf("the node has no condition GPUHealthy")
	})
}

func awaitPodEvent(t *testing.T, pod, reason string) {
	t.Helper()
	eventually(t, "pod "+pod+" has the event "+reason, func(ctx context.Context) error {
		events, err := theCluster.client.CoreV1().Events("default").List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod + ",reason=" + reason})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("no such event")
		}
		return err
	})
}

// uninstall uninstalls the release and checks what remains in the cluster and on the node.
func uninstall(t *testing.T) {
	uninstallBeside(t, func(string, string) bool { return false })
}

// uninstallBeside is uninstall beside pods, of which some files also stay.
func uninstallBeside(t *testing.T, stays func(dir, name string) bool) {
	t.Helper()
	before := agentFiles(t)
	helm(t, "uninstall", release, "-n", namespace, "--wait", "--timeout", patience.String())
	eventually(t, "no object of the release is left", releaseLeft)
	after := agentFiles(t)
	for dir, files := range after {
		for _, name := range files {
			if !survives(dir, name) && !stays(dir, name) {
				t.Errorf("%s is left in %s", name, dir)
			}
		}
	}
	for dir, files := range before {
		for _, name := range files {
			if (survives(dir, name) || stays(dir, name)) && !slices.Contains(after[dir], name) {
				t.Errorf("%s was removed from %s", name, dir)
			}
		}
	}
}

// releaseLeft returns an error that names an object of the release in the cluster, of any kind that can be listed.
func releaseLeft(ctx context.Context) error {
	lists, err := theCluster.client.Discovery().ServerPreferredResources()
	if err != nil {
		return err
	}
	for _, list := range lists {
		for _, r := range list.APIResources {
			if !strings.Contains(fmt.Sprint(r.Verbs), "list") || strings.Contains(r.Name, "/") {
				continue
			}
			var found metav1.PartialObjectMetadataList
			path := "/apis/" + list.GroupVersion + "/" + r.Name
			if !strings.Contains(list.GroupVersion, "/") {
				path = "/api/" + list.GroupVersion + "/" + r.Name
			}
			text, err := theCluster.client.RESTClient().Get().AbsPath(path).Param("labelSelector", "app.kubernetes.io/instance="+release).DoRaw(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if err := json.Unmarshal(text, &found); err != nil {
				return err
			}
			if len(found.Items) > 0 {
				return fmt.Errorf("%s: %s", path, found.Items[0].Name)
			}
		}
	}
	return nil
}

const (
	kubeletPluginDir = "/var/lib/kubelet/device-plugins"
	stateDir         = "/var/lib/gpu-node-agent"
	cdiDir           = "/var/run/cdi"
)

// survives reports whether a file on the node is the kubelet's, or survives for the next installation.
func survives(dir, name string) bool {
	name = strings.TrimSuffix(name, ".spare")
	return dir == kubeletPluginDir && (name == "kubelet.sock" || name == "kubelet_internal_checkpoint") ||
		dir == stateDir && slices.Contains([]string{"state.sim.json", "node.json", "last-good-config.json", "lock"}, name) ||
		filepath.Join(dir, name) == checkpoint
}

// agentFiles returns the files in the agent's directories on the node, by directory.
func agentFiles(t *testing.T) map[string][]string {
	t.Helper()
	files := make(map[string][]string)
	for _, dir := range []string{
		kubeletPluginDir, "/var/lib/kubelet/plugins_registry", draDir, stateDir, "/run/gpu-node-agent", cdiDir,
		"/etc/cdi",
	} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") && dir == kubeletPluginDir {
				continue // the kubelet is writing its checkpoint
			}
			files[dir] = append(files[dir], e.Name())
		}
	}
	return files
}
