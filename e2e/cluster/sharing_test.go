//go:build cluster

package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	sliced, shared, gpuMemory v1.ResourceName = "example.com/sliced", "nvidia.com/gpu.shared", "nvidia.com/gpu-memory"

	mpsControl = "nvidia-cuda-mps-control" // the stand-in
	mpsDir     = "/opt/mps"                // of the stand-in in the containers
)

// mpsDaemons returns the PIDs of the MPS control daemons that run, by the UUID of the device.
func mpsDaemons() map[string]int {
	daemons := make(map[string]int)
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		panic(err) // a constant pattern
	}
	for _, file := range files {
		args, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(args), filepath.Join(mpsDir, mpsControl)+"\x00-f\x00") {
			continue // it has ended, or is another program
		}
		env, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "environ"))
		for v := range strings.SplitSeq(string(env), "\x00") {
			if device, ok := strings.CutPrefix(v, "CUDA_VISIBLE_DEVICES="); ok {
				daemons[device], _ = strconv.Atoi(filepath.Base(filepath.Dir(file)))
			}
		}
	}
	return daemons
}

// TestSharing has GPUs that are shared in each way beside whole ones, and kills the agent while pods hold shares.
func TestSharing(t *testing.T) {
	const kills = 50
	program := theCluster.file("state", "mps")
	if err := os.MkdirAll(program, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", theCluster.file(mpsControl), program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	values := []string{
		`mps.enabled=true`,
		`extraVolumes=[{"name": "standin", "hostPath": {"path": "` + program + `"}}]`,
		`extraVolumeMounts=[{"name": "standin", "mountPath": "` + mpsDir + `"}]`,
		`config.plugin.sharing={"timeSlicing": {"resources": [` +
			`{"name": "nvidia.com/gpu", "replicas": 10, "devices": ["2", "3"], "rename": "example.com/sliced"}]},` +
			`"mps": {"control": "` + mpsDir + "/" + mpsControl +
			`", "renameByDefault": true, "resources": [{"name": "nvidia.com/gpu", "replicas": 4, "devices": ["4", "5"]}]},` +
			`"memory": {"resource": "nvidia.com/gpu-memory", "unit": "1Gi", "reserve": "512Mi", "devices": ["6", "7"]}}`,
	}
	requests := map[string]struct {
		of     v1.ResourceName
		amount string
	}{
		"whole": {gpu, "1"}, "slice": {sliced, "1"}, "mps-0": {shared, "1"}, "mps-1": {shared, "1"}, "mps-2": {shared, "1"},
		"mps-3": {shared, "1"}, "mps-4": {shared, "1"},
		"memory-0": {gpuMemory, "10"}, "memory-1": {gpuMemory, "60"}, "memory-2": {gpuMemory, "60"},
	}
	pods := slices.Sorted(maps.Keys(requests))
	var daemons map[string]int
	var held map[string][]string
	step(t, "the node has whole, time-sliced, MPS and memory shares", func(t *testing.T) {
		upgrade(t, oldTag, values...)
		for name, want := range map[v1.ResourceName]string{gpu: "2/2", sliced: "20/20", shared: "8/8", gpuMemory: "156/156"} {
			awaitAmounts(t, name, want)
		}
		if daemons = mpsDaemons(); len(daemons) != 2 {
			t.Fatalf("MPS control daemons: %v", daemons)
		}
	})
	step(t, "pods get what they request, with the limits of MPS", func(t *testing.T) {
		for _, name := range pods {
			startPod(t, name, requests[name].of, requests[name].amount)
		}
		for _, name := range pods {
			checkShare(t, name, requests[name].of)
		}
		held = heldDevices(t)
		for _, name := range pods {
			if got, want := fmt.Sprint(len(held[name])), requests[name].amount; got != want {
				t.Errorf("pod %s holds %s devices, want %s", name, got, want)
			}
		}
	})
	keeps := make([]func(), len(pods))
	for i, name := range pods {
		keeps[i] = containerOf(t, name)
	}
	step(t, fmt.Sprintf("%d kills of the agent lose no share", kills), func(t *testing.T) {
		killOften(t, kills)
		awaitAmounts(t, shared, "8/8")
		awaitAmounts(t, gpuMemory, "156/156")
		if now := heldDevices(t); !maps.EqualFunc(now, held, slices.Equal[[]string]) {
			t.Errorf("pods hold %v, held %v", now, held)
		}
		if now := mpsDaemons(); !maps.Equal(now, daemons) {
			t.Errorf("MPS control daemons %v, were %v", now, daemons)
		}
		for _, same := range keeps {
			same()
		}
	})
	step(t, "a daemon that dies takes its device's shares until it is back", func(t *testing.T) { checkMPSDaemonReplaced(t, daemons) })
	step(t, "the end of the container of mps-daemon takes its daemons along, in the node's PID namespace too", testMPSDaemonKilled)
	deletePods(t, pods...)
	step(t, "helm uninstall ends the daemons", func(t *testing.T) {
		helm(t, "uninstall", release, "-n", namespace, "--wait", "--timeout", patience.String())
		eventually(t, "no MPS control daemon", func(context.Context) error {
			if left := mpsDaemons(); len(left) > 0 {
				return fmt.Errorf("daemons: %v", left)
			}
			return nil
		})
	})
}

// checkMPSDaemonReplaced kills an MPS control daemon, and waits for another one with its shares.
func checkMPSDaemonReplaced(t *testing.T, daemons map[string]int) {
	for device, pid := range daemons {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "another daemon of "+device, func(context.Context) error {
			if now := mpsDaemons(); len(now) != 2 || now[device] == pid {
				return fmt.Errorf("daemons: %v", now)
			}
			return nil
		})
		break
	}
	awaitAmounts(t, shared, "8/8")
}

// checkShare checks that a pod sees one device, and the limits of a share by MPS.
func checkShare(t *testing.T, name string, of v1.ResourceName) {
	t.Helper()
	device := awaitRunning(t, name)
	if !strings.HasPrefix(device, "GPU-") || strings.Contains(device, ",") {
		t.Errorf("pod %s sees %q, want one UUID", name, device)
	}
	if of == shared {
		checkMPSPod(t, name, device)
	}
}

// killOften kills the agent, and starts a pod with a share after each tenth time.
func killOften(t *testing.T, kills int) {
	t.Helper()
	for i := range kills {
		killAgent(t)
		if i%10 == 0 { // a pod that comes meanwhile; the kubelet rejects pods while no agent is registered
			awaitKubeletDevices(t, shared, 8)
			name := fmt.Sprintf("late-%d", i)
			startPod(t, name, shared, "1")
			awaitRunning(t, name)
			late := heldDevices(t) // no device twice
			if len(late[name]) != 1 {
				t.Errorf("pod %s holds %v", name, late[name])
			}
			deletePods(t, name)
		}
	}
}

// testMPSDaemonKilled kills mps-daemon with SIGKILL. Its pod has the node's PID namespace, as the chart's has with real GPUs: the kernel
// ends no process with it.
func testMPSDaemonKilled(t *testing.T) {
	ctx := t.Context()
	selector := metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=gpu-node-agent-mps"}
	sets, err := theCluster.client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(sets.Items, func(s appsv1.DaemonSet) bool { return strings.HasSuffix(s.Name, "-mps-daemon") })
	if i < 0 {
		t.Fatalf("no DaemonSet of mps-daemon in %d", len(sets.Items))
	}
	patch := []byte(`{"spec": {"template": {"spec": {"hostPID": true}}}}`)
	if _, err := theCluster.client.AppsV1().DaemonSets(namespace).Patch(ctx, sets.Items[i].Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := theCluster.client.CoreV1().Pods(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, selector); err != nil {
		t.Fatal(err)
	}
	hostPID := func(pid int) bool {
		own, err := os.Readlink("/proc/self/ns/pid")
		other, otherErr := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		return err == nil && otherErr == nil && own == other
	}
	var before map[string]int
	eventually(t, "daemons in the node's PID namespace", func(context.Context) error {
		before = mpsDaemons()
		for _, pid := range before {
			if !hostPID(pid) {
				return fmt.Errorf("daemon %d is in another one", pid)
			}
		}
		if len(before) != 2 {
			return fmt.Errorf("daemons: %v", before)
		}
		return nil
	})
	awaitAmounts(t, shared, "8/8")

	old := make([]int, 0, 3) // the daemons and a server
	for _, pid := range before {
		old = append(old, pid)
	}
	server := startMPSClient(t, slices.Sorted(maps.Keys(before))[0])
	if old = append(old, server); !processRuns(server) {
		t.Fatalf("no server %d", server)
	}

	if err := syscall.Kill(parentOf(t, old[0]), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "other daemons", func(context.Context) error {
		now := mpsDaemons()
		left := slices.DeleteFunc(slices.Clone(old), func(pid int) bool { return !processRuns(pid) })
		for device, pid := range now {
			if pid != before[device] && len(left) > 0 {
				t.Fatalf("daemon %d of %s runs beside %v of the container that has ended", pid, device, left)
			}
		}
		if len(now) != 2 || len(left) > 0 {
			return fmt.Errorf("daemons %v; of the container that has ended: %v", now, left)
		}
		return nil
	})
	awaitAmounts(t, shared, "8/8")
}

// startMPSClient starts a client of a device's daemon, and returns the process ID of its server.
func startMPSClient(t *testing.T, device string) (server int) {
	t.Helper()
	eventually(t, "a client of a daemon", func(context.Context) error { // a daemon that has just started refuses it
		client := exec.CommandContext(t.Context(), theCluster.file(mpsControl), "standin-client") //nolint:contextcheck // it outlives the attempt
		client.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia/mps/"+device+"/pipe")
		in, err := client.StdinPipe()
		if err != nil {
			return err
		}
		out, err := client.StdoutPipe()
		if err == nil {
			err = client.Start()
		}
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = in.Close(); _ = client.Wait() }) // it fails with its daemon
		line, _ := bufio.NewReader(out).ReadString('\n')
		if _, err := fmt.Sscanf(line, "client of server %d", &server); err != nil {
			return fmt.Errorf("client: %s", line)
		}
		return nil
	})
	return server
}

// processRuns reports whether a process runs. One that has ended and waits for its parent does not.
func processRuns(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// parentOf returns the parent of a process.
func parentOf(t *testing.T, pid int) (parent int) {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	if _, err := fmt.Sscanf(rest, "%1s %d", new(string), &parent); err != nil {
		t.Fatal(err)
	}
	return parent
}

// checkMPSPod checks what a pod with a share of a device has: environment, pipe directory and shared memory.
func checkMPSPod(t *testing.T, name, device string) {
	t.Helper()
	log, err := theCluster.client.CoreV1().Pods("default").GetLogs(name, &v1.PodLogOptions{}).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	env := make(map[string]string)
	for line := range strings.Lines(string(log)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		env[key] = value
	}
	for key, want := range map[string]string{
		"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": fmt.Sprintf("0=%dM", (81559-551)/4),
	} {
		if env[key] != want {
			t.Errorf("pod %s: %s is %q, want %q", name, key, env[key], want)
		}
	}
	pod, err := getPod(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	root := fmt.Sprintf("/proc/%d/root", pidOf(t, pod.Status.ContainerStatuses[0]))
	const mpsRoot = "/run/nvidia/mps"
	for inPod, onNode := range map[string]string{
		env["CUDA_MPS_PIPE_DIRECTORY"] + "/control": filepath.Join(mpsRoot, device, "pipe", "control"),
		"/dev/shm": filepath.Join(mpsRoot, "shm"),
	} {
		a, errA := os.Stat(root + inPod)
		b, errB := os.Stat(onNode)
		if err := errors.Join(errA, errB); err != nil || !os.SameFile(a, b) {
			t.Errorf("pod %s: %s is not %s of the node; %v", name, inPod, onNode, err)
		}
	}
}

// heldDevices returns the devices that the kubelet has given to each pod. No two pods may have the same.
func heldDevices(t *testing.T) map[string][]string {
	t.Helper()
	list, err := podResources(t).List(t.Context(), &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	held, holder := make(map[string][]string), make(map[string]string)
	for _, pod := range list.PodResources {
		for _, c := range pod.Containers {
			for _, d := range c.Devices {
				for _, id := range d.DeviceIds {
					if other, twice := holder[d.ResourceName+id]; twice {
						t.Errorf("pods %s and %s have %s", other, pod.Name, id)
					}
					holder[d.ResourceName+id] = pod.Name
					held[pod.Name] = append(held[pod.Name], id)
				}
			}
		}
	}
	for _, ids := range held {
		slices.Sort(ids)
	}
	return held
}

// killAgent kills the agent's process, and replaces its pod: the kubelet would delay a restart of the container.
func killAgent(t *testing.T) {
	t.Helper()
	pod := mustAgentPod(t)
	pid := pidOf(t, pod.Status.ContainerStatuses[0])
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	now := int64(0)
	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), pod.Name,
		metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another pod of the agent", func(ctx context.Context) error {
		next, err := agentPod(ctx)
		if err == nil && next.UID == pod.UID {
			err = errors.New("it is still the same")
		}
		return err
	})
}
