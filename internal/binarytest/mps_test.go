package binarytest

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

const (
	sharedResource = "nvidia.com/gpu.shared"
	gpuMemory      = "nvidia.com/gpu-memory"
)

// mpsNode is a node with an agent, mps-daemon and the stand-in for MPS.
type mpsNode struct {
	*process
	kubelet *kubelettest.Kubelet
	control *mpstest.ControlProgram
	daemon  *exec.Cmd // mps-daemon; nil if it does not run
	uuids   []string  // of the GPUs
}

// mpsConfig has two GPUs with four MPS shares each.
const mpsConfig = simConfig + `
plugin:
  kubeletDir: DIR
  sharing:
    mps:
      {root: DIR/mps, control: CONTROL, renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4, devices: ['6', '7']}]}`

// withoutMPS is mpsConfig without MPS.
const withoutMPS = simConfig + `
plugin: {kubeletDir: DIR, sharing: {mps: {root: DIR/mps, control: CONTROL}}}`

// newMPSNode prepares a node. Its mps-daemon must exit with 0 at SIGTERM when the test ends, and leave no process.
func newMPSNode(t *testing.T, config string) *mpsNode {
	t.Helper()
	n := &mpsNode{control: mpstest.New(t)}
	n.process = newProcess(t, n.expand(config))
	n.kubelet = n.startKubelet()
	t.Cleanup(func() {
		n.stopDaemon()
		if left := n.control.Processes(); len(left) > 0 && !t.Failed() {
			t.Errorf("mps-daemon left %+v", left)
		}
	})
	return n
}

// startMPSNode runs all of a node and waits until all shares of mpsConfig are allocatable.
func startMPSNode(t *testing.T) *mpsNode {
	t.Helper()
	n := newMPSNode(t, mpsConfig)
	n.launchDaemon()
	n.launch()
	n.awaitShares(4, 4)
	return n
}

func (n *mpsNode) expand(config string) string {
	return strings.ReplaceAll(config, "CONTROL", n.control.Path)
}

func (n *mpsNode) reload(config string) {
	n.t.Helper()
	n.process.reload(n.expand(config))
}

func (n *mpsNode) launchDaemon() {
	n.t.Helper()
	// As the chart does: without the configuration file.
	n.daemon = exec.Command(binary, "mps-daemon", "--source.mode=sim", "--plugin.sharing.mps.root="+filepath.Join(n.Dir, "mps"),
		"--plugin.sharing.mps.control="+n.control.Path)
	n.daemon.Dir = n.Dir
	n.daemon.Env = append(os.Environ(), raceOptions)
	n.daemon.Stdout, n.daemon.Stderr = n.process, n.process
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := n.daemon.Start(); err != nil {
		n.t.Fatal(err)
	}
}

func (n *mpsNode) stopDaemon() {
	if n.daemon == nil {
		return
	}
	_ = n.daemon.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(awaitTimeout, func() { _ = n.daemon.Process.Kill() })
	defer kill.Stop()
	if err := n.daemon.Wait(); err != nil {
		n.t.Errorf("mps-daemon: %v", err)
	}
	n.daemon = nil
}

// killDaemon kills mps-daemon alone: neither a container nor systemd ends its daemons.
func (n *mpsNode) killDaemon() {
	_ = n.daemon.Process.Kill()
	_ = n.daemon.Wait() // it was killed
	n.daemon = nil
}

// killContainer kills mps-daemon with all that it has started.
func (n *mpsNode) killContainer() {
	n.killDaemon()
	n.control.KillAll()
}

// gpu returns the UUID of a GPU.
func (n *mpsNode) gpu(index int) string {
	n.t.Helper()
	if len(n.uuids) == 0 {
		n.await("the GPUs", func() bool { return len(n.snapshot().GPUs) > 0 })
		for _, gpu := range n.snapshot().GPUs {
			n.uuids = append(n.uuids, string(gpu.UUID))
		}
	}
	return n.uuids[index]
}

func (n *mpsNode) pipe(device string) string { return filepath.Join(n.Dir, "mps", device, "pipe") }

// shares returns the number of healthy shares of each device of a resource, by the UUID.
func (n *mpsNode) shares(resource string) map[string]int {
	healthy := make(map[string]int)
	for _, d := range n.kubelet.State().Resources[resource].Devices {
		id, _, _ := strings.Cut(d.ID, "::")
		if d.Healthy {
			healthy[id]++
		} else {
			healthy[id] += 0
		}
	}
	return healthy
}

// awaitShares waits until the kubelet counts so many healthy shares of GPU 6 and of GPU 7.
func (n *mpsNode) awaitShares(six, seven int) {
	n.t.Helper()
	n.await(fmt.Sprintf("%d and %d shares", six, seven), func() bool {
		return maps.Equal(n.shares(sharedResource), map[string]int{n.gpu(6): six, n.gpu(7): seven})
	})
}

func (n *mpsNode) connect(device string, req mpstest.ClientRequest) *mpstest.Client {
	n.t.Helper()
	c, err := mpstest.Connect(n.pipe(device), req)
	if err != nil {
		n.t.Fatalf("connect to the daemon of %s: %v", device, err)
	}
	n.t.Cleanup(c.Close)
	return c
}

// Shares are registered once the daemons have their limits, however long that takes. The other resource does not wait.
func TestMPSRegisteredWithLimits(t *testing.T) {
	t.Parallel()
	n := newMPSNode(t, mpsConfig)
	const delay = 5 * time.Second // of two of the commands before the limits are set
	n.control.SetFaults(mpstest.AllDevices,
		mpstest.Faults{Delay: map[string]mpstest.Duration{"get_default_active_thread_percentage": mpstest.Duration(delay)}})
	var early, registered atomic.Bool // a list came before the limits of its devices were set
	n.kubelet.OnDevices(func(resource string, _ int, devices []kubelettest.Device) {
		if resource != sharedResource {
			return
		}
		// The first daemon with limits is enough to register the resource.
		if !registered.Swap(true) && !slices.ContainsFunc(devices, func(d kubelettest.Device) bool { return d.Healthy }) {
			early.Store(true)
		}
		for _, d := range devices {
			id, _, _ := strings.Cut(d.ID, "::")
			if d.Healthy && !n.limited(id) {
				early.Store(true)
			}
		}
	})
	n.launchDaemon()
	n.launch()
	n.awaitAllocatable(n.kubelet, 6)
	n.awaitShares(4, 4)
	if early.Load() {
		t.Error("shares were registered before their limits were set")
	}
	for _, device := range []string{n.gpu(6), n.gpu(7)} {
		if out, err := n.control.Control(n.pipe(device), "get_default_active_thread_percentage"); err != nil || out != "25.0" {
			t.Errorf("%s: %s, %v", device, out, err)
		}
		c := n.connect(device, mpstest.ClientRequest{})
		if c.Limits.ThreadPercentage != 25 || c.Limits.PinnedMemory[device]>>20 != (81559-551)/4 {
			t.Errorf("a client of %s without an environment: %v", device, c)
		}
		c.Close()
	}

	// So it is for a daemon that was restarted.
	n.control.SetFaults(mpstest.AllDevices,
		mpstest.Faults{Delay: map[string]mpstest.Duration{"get_default_active_thread_percentage": mpstest.Duration(time.Second)}})
	before := n.control.Daemons()[n.gpu(6)]
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.awaitShares(0, 4)
	n.awaitShares(4, 4)
	if now := n.control.Daemons()[n.gpu(6)]; early.Load() || now == before {
		t.Errorf("shares of daemon %d after the kill of %d were offered before their limits were set", now, before)
	}
}

// limited reports whether the newest daemon of a device has got its limits.
func (n *mpsNode) limited(device string) (limited bool) {
	for _, c := range n.control.Commands() {
		switch {
		case c.Device != device:
		case c.Text == "start":
			limited = false
		case strings.HasPrefix(c.Text, "set_default_device_pinned_mem_limit "):
			limited = true
		}
	}
	return limited
}

// A container gets the pipe and /dev/shm of its device, and limits that MPS takes.
func TestMPSAllocation(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	a, err := n.kubelet.Allocate(t.Context(), sharedResource, 1)
	if err != nil {
		t.Fatal(err)
	}
	device, _, _ := strings.Cut(a.Devices[0], "::")
	env := a.Response.GetEnvs()
	if env["NVIDIA_VISIBLE_DEVICES"] != device {
		t.Errorf("environment: %v", env)
	}
	hostPaths := make(map[string]string)
	for _, m := range a.Response.GetMounts() {
		hostPaths[m.GetContainerPath()] = m.GetHostPath()
	}
	pipe := hostPaths[env["CUDA_MPS_PIPE_DIRECTORY"]]
	if pipe != n.pipe(device) || hostPaths["/dev/shm"] != filepath.Join(n.Dir, "mps", "shm") {
		t.Fatalf("environment %v, mounts %v", env, hostPaths)
	}
	c, err := mpstest.Connect(pipe, mpstest.ClientRequest{Env: env})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Limits.ThreadPercentage != 25 || c.Limits.PinnedMemory[device]>>20 != (81559-551)/4 {
		t.Error(c)
	}
	if _, err := n.kubelet.Allocate(t.Context(), sharedResource, 2); err == nil {
		t.Error("two shares for one container")
	}
}

// The daemons and their clients outlive the agent, whose next process sets nothing again.
func TestMPSOutlivesAgent(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	pids := n.control.Daemons()
	client := n.connect(n.gpu(6), mpstest.ClientRequest{})
	for name, end := range map[string]func(){"kill": n.Kill, "stop": n.stop} {
		commands := len(n.control.Commands())
		end()
		n.launch()
		n.await("a look at both daemons after "+name, func() bool { return len(n.control.Commands()) >= commands+4 })
		n.awaitShares(4, 4)
		n.awaitPage("/readyz", http.StatusOK)
		if now := n.control.Daemons(); !maps.Equal(now, pids) {
			t.Errorf("%s of the agent: daemons %v, want %v", name, now, pids)
		}
		for _, c := range n.control.Commands()[commands:] {
			if !strings.HasPrefix(c.Text, "get_") {
				t.Errorf("%s of the agent: %+v", name, c)
			}
		}
	}
	select {
	case <-client.Done():
		t.Error(client.Err())
	default:
	}
}

// The end of mps-daemon's container ends all its daemons. The next ones get their limits before shares are offered.
func TestMPSContainerKilled(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	pids := n.control.Daemons()
	client := n.connect(n.gpu(6), mpstest.ClientRequest{})
	n.killContainer()
	<-client.Done()
	client.Close()
	n.awaitShares(0, 0)
	n.await("mps-down", func() bool { return n.findings("mps-down") == 2 })
	n.launchDaemon()
	n.awaitShares(4, 4)
	for device, pid := range n.control.Daemons() {
		if pid == pids[device] || !n.limited(device) {
			t.Errorf("daemon %d of %s, was %d; limits %t", pid, device, pids[device], n.limited(device))
		}
	}
}

// Daemons that outlive mps-daemon are somebody else's for the next one: they keep their clients, and the finding says how to end them.
func TestMPSForeignDaemon(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	pids := n.control.Daemons()
	client := n.connect(n.gpu(6), mpstest.ClientRequest{})
	n.killDaemon()
	if err := syscall.Kill(pids[n.gpu(7)], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.launchDaemon()
	n.awaitShares(0, 4)
	n.await("mps-foreign", func() bool { return n.findings("mps-foreign") == 1 })
	out, _ := run(t, "status", "--config", n.config(), "-o", "json")
	_, command, _ := strings.Cut(out, "run on the node: ")
	command, _, _ = strings.Cut(command, `"`)
	if want := fmt.Sprintf("pkill -KILL -P %d; kill -KILL %[1]d", pids[n.gpu(6)]); command != want {
		t.Fatalf("command %q, want %q; status: %s", command, want, out)
	}
	select {
	case <-client.Done():
		t.Error(client.Err())
	default:
	}
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	<-client.Done()
	client.Close()
	n.awaitShares(4, 4)
	n.await("no finding", func() bool { return n.findings("mps-foreign") == 0 })
	n.connect(n.gpu(6), mpstest.ClientRequest{}).Close()
}

// A daemon that fails takes its own device's shares, until it has recovered.
func TestMPSDaemonFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cause string
		fail  func(n *mpsNode, client *mpstest.Client)
		mend  func(n *mpsNode, client *mpstest.Client) // nil: mps-daemon does
	}{
		{"mps-down", func(n *mpsNode, _ *mpstest.Client) {
			n.control.SetFaults(n.gpu(6), mpstest.Faults{ExitAtStart: true})
			_ = syscall.Kill(n.control.Daemons()[n.gpu(6)], syscall.SIGKILL)
		}, func(n *mpsNode, _ *mpstest.Client) { n.control.SetFaults(n.gpu(6), mpstest.Faults{}) }},
		{
			"mps-hung", func(n *mpsNode, _ *mpstest.Client) { _ = syscall.Kill(n.control.Daemons()[n.gpu(6)], syscall.SIGSTOP) },
			func(n *mpsNode, _ *mpstest.Client) { _ = syscall.Kill(n.control.Daemons()[n.gpu(6)], syscall.SIGCONT) },
		},
		{
			"mps-fault", func(n *mpsNode, _ *mpstest.Client) { n.control.Fault(n.pipe(n.gpu(6))) },
			func(_ *mpsNode, client *mpstest.Client) { client.Close() },
		},
		{"mps-limits", func(n *mpsNode, _ *mpstest.Client) {
			n.control.SetFaults(n.gpu(6), mpstest.Faults{Answer: map[string]string{"get_default_active_thread_percentage": "100.0"}})
			_ = syscall.Kill(n.control.Daemons()[n.gpu(6)], syscall.SIGKILL)
		}, func(n *mpsNode, _ *mpstest.Client) { n.control.SetFaults(n.gpu(6), mpstest.Faults{}) }},
	} {
		t.Run(c.cause, func(t *testing.T) {
			t.Parallel()
			n := startMPSNode(t)
			client, other := n.connect(n.gpu(6), mpstest.ClientRequest{}), n.connect(n.gpu(7), mpstest.ClientRequest{})
			before := n.control.Daemons()
			c.fail(n, client)
			n.awaitShares(0, 4)
			n.await(c.cause, func() bool { return n.findings(c.cause) == 1 })
			n.awaitAllocatable(n.kubelet, 6)
			if out, code := run(t, "status", "--config", n.config()); code != 0 || !strings.Contains(out, c.cause) {
				t.Errorf("status: exit code %d: %s", code, out)
			}
			c.mend(n, client)
			n.awaitShares(4, 4)
			n.await("no finding", func() bool { return n.findings(c.cause) == 0 })
			if n.control.Daemons()[n.gpu(7)] != before[n.gpu(7)] {
				t.Error("the daemon of GPU 7 was restarted")
			}
			select {
			case <-other.Done():
				t.Errorf("the client of GPU 7: %v", other.Err())
			default:
			}
			client.Close()
			n.connect(n.gpu(6), mpstest.ClientRequest{}).Close()
		})
	}
}

// A driver without multi-user mode and without a command for the memory limit: limits hold, clients of another user wait, and operators
// are told when two pods hold a device.
func TestMPSOlderDriver(t *testing.T) {
	t.Parallel()
	n := newMPSNode(t, mpsConfig)
	n.control.SetFaults(mpstest.AllDevices, mpstest.Faults{NoMultiUser: true, NoMemoryLimit: true})
	n.launchDaemon()
	n.launch()
	n.awaitShares(4, 4)
	one, two := 1001, 1002
	first := n.connect(n.gpu(6), mpstest.ClientRequest{UID: &one})
	if first.Limits.ThreadPercentage != 25 || first.Limits.PinnedMemory[n.gpu(6)]>>20 != (81559-551)/4 {
		t.Error(first)
	}
	connected := make(chan error, 1)
	go func() {
		c, err := mpstest.Connect(n.pipe(n.gpu(6)), mpstest.ClientRequest{UID: &two})
		if err == nil {
			c.Close()
		}
		connected <- err
	}()
	const warning = ": this driver serves one user at a time; pods of other users wait: give them one runAsUser"
	told := func() bool {
		_, text := n.get("/readyz")
		return strings.Contains(text, warning)
	}
	share := func(i int) string { return fmt.Sprintf("%s::mps4::%d", n.gpu(6), i) }
	if _, err := n.kubelet.AllocateIDs(t.Context(), sharedResource, share(0)); err != nil {
		t.Fatal(err)
	}
	n.await("the first pod", func() bool { return len(n.snapshot().GPUs[6].Holders) == 1 })
	if told() {
		t.Error("warned of one pod")
	}
	if _, err := n.kubelet.AllocateIDs(t.Context(), sharedResource, share(1)); err != nil {
		t.Fatal(err)
	}
	n.await("a warning", told)
	for _, command := range []string{"status", "doctor"} {
		if out, _ := run(t, command, "--config", n.config()); !strings.Contains(out, "GPU 6") || !strings.Contains(out, warning) {
			t.Errorf("%s: %s", command, out)
		}
	}
	n.awaitShares(4, 4) // it works for one user at a time
	select {
	case err := <-connected:
		t.Errorf("a client of another user did not wait: %v", err)
	default:
	}
	first.Close()
	if err := <-connected; err != nil {
		t.Error(err)
	}
	n.kubelet.Free(sharedResource, share(0))
	n.await("no warning", func() bool { return !told() })
}

// The command lists daemons and their clients of now, and terminates one.
func TestMPSCommand(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	kept := n.connect(n.gpu(6), mpstest.ClientRequest{PID: 4_000_001})
	ended := n.connect(n.gpu(6), mpstest.ClientRequest{PID: 4_000_002})
	for _, output := range []string{"text", "json"} {
		if out := n.command(0, "mps", "-o", output); !strings.Contains(out, n.gpu(7)) || !strings.Contains(out, "4000001") ||
			!strings.Contains(out, "4000002") {
			t.Errorf("mps -o %s: %s", output, out)
		}
	}
	n.command(1, "mps", "terminate", "--gpu", "7", "--client", "4000002")
	n.command(0, "mps", "terminate", "--gpu", "6", "--client", "4000002")
	if err := ended.Err(); !errors.Is(err, mpstest.Error(mpstest.ClientTerminated)) {
		t.Error(err)
	}
	n.await("the end of the client on the list", func() bool { // the server removes it after it has told the client
		out := n.command(0, "mps")
		return strings.Contains(out, "4000001") && !strings.Contains(out, "4000002")
	})
	select {
	case <-kept.Done():
		t.Error("the other client was terminated:", kept.Err())
	default:
	}
	n.awaitShares(4, 4)
}

// A lost GPU takes its shares, as ever.
func TestMPSGPULost(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	n.sim("{gpu: 7, lost: true}")
	n.awaitShares(4, 0)
	n.sim("{gpu: 7, lost: false}")
	n.awaitShares(4, 4)
}

// The driver cannot be released while a daemon has it.
func TestMPSDetach(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	n.command(0, "detach")
	if left := n.control.Processes(); len(left) > 0 {
		t.Errorf("after the detach: %+v", left)
	}
	n.awaitShares(0, 0)
	n.Kill()
	n.launch()
	n.awaitMetrics("gpu_node_agent_source_detached 1")
	n.killContainer()
	n.launchDaemon()
	n.awaitSocket(filepath.Join(n.Dir, "mps", "mps-daemon.sock"))
	s, err := mps.QueryStatus(t.Context(), mps.Root(filepath.Join(n.Dir, "mps")))
	if left := n.control.Processes(); len(left) > 0 || err != nil || s.Follows != nil && !s.Follows.Stopped {
		t.Errorf("after restarts: %+v, %+v, %v", left, s.Follows, err)
	}
	n.command(0, "attach")
	n.awaitShares(4, 4)
	if len(n.control.Daemons()) != 2 {
		t.Error("no daemons")
	}
}

// A device that leaves MPS keeps its daemon while a container holds a share of it.
func TestMPSLeave(t *testing.T) {
	t.Parallel()
	n := startMPSNode(t)
	a, err := n.kubelet.Allocate(t.Context(), sharedResource, 1)
	if err != nil {
		t.Fatal(err)
	}
	held, _, _ := strings.Cut(a.Devices[0], "::")
	free := n.gpu(6)
	if free == held {
		free = n.gpu(7)
	}
	n.await("the holder", func() bool { return n.countHolders(a.Container.Pod) == 1 })
	before := n.control.Daemons()
	n.reload(withoutMPS)
	n.await("the end of the daemon of "+free, func() bool { return maps.Equal(n.control.Daemons(), map[string]int{held: before[held]}) })
	n.awaitAllocatable(n.kubelet, 7)
	c := n.connect(held, mpstest.ClientRequest{})
	n.kubelet.Free(sharedResource, a.Devices...)
	n.await("the end of the pod", func() bool { return n.countHolders(a.Container.Pod) == 0 })
	select {
	case <-c.Done():
		t.Error("a client that is connected was ended:", c.Err())
	default:
	}
	c.Close()
	n.await("the end of all daemons", func() bool { return len(n.control.Processes()) == 0 })
	n.awaitAllocatable(n.kubelet, 8)
}

// Without mps-daemon nothing is offered, and the agent reports why. It comes later.
func TestMPSWithoutDaemon(t *testing.T) {
	t.Parallel()
	n := newMPSNode(t, mpsConfig)
	n.launch()
	n.awaitAllocatable(n.kubelet, 6)
	n.awaitPage("/readyz", http.StatusServiceUnavailable, "mps")
	if got := n.shares(sharedResource); len(got) > 0 {
		t.Errorf("offered: %v", got)
	}
	n.launchDaemon()
	n.awaitShares(4, 4)
	n.awaitPage("/readyz", http.StatusOK)
}

// Units of memory: the number on a GPU follows from its size.
func TestMemoryUnits(t *testing.T) {
	t.Parallel()
	const h100, l4 = (81559 - 551 - 512) / 1024, (23034 - 435 - 512) / 1024
	for profile, perGPU := range map[string][]int{
		"h100-8":  {h100, h100, h100, h100, h100, h100, h100, h100},
		"mixed-4": {h100, h100, l4, l4},
	} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			n := newMPSNode(t, fmt.Sprintf("source: {mode: sim, sim: {profile: %s, control: DIR/sim.sock}}\n"+
				"plugin: {kubeletDir: DIR, sharing: {memory: {resource: %s, unit: 1Gi, reserve: 512Mi}}}", profile, gpuMemory))
			n.launch()
			want := make(map[string]int)
			for i, units := range perGPU {
				want[n.gpu(i)] = units
			}
			n.await("all units", func() bool { return maps.Equal(n.shares(gpuMemory), want) })
			a, err := n.kubelet.Allocate(t.Context(), gpuMemory, 10)
			if err != nil {
				t.Fatal(err)
			}
			device, _, _ := strings.Cut(a.Devices[0], "::")
			for _, id := range a.Devices {
				if !strings.HasPrefix(id, device+"::") {
					t.Errorf("units of two GPUs: %v", a.Devices)
					break
				}
			}
			if a.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] != device || len(a.Devices) != 10 {
				t.Errorf("%v for %v", a.Response.GetEnvs(), a.Devices)
			}
			n.sim("{gpu: 3, lost: true}")
			want[n.gpu(3)] = 0
			n.await("the units of the other GPUs", func() bool { return maps.Equal(n.shares(gpuMemory), want) })
		})
	}
}

// One node has whole GPUs, and GPUs that are shared in each way.
func TestAllKindsOfSharing(t *testing.T) {
	t.Parallel()
	n := newMPSNode(t, simConfig+`
plugin:
  kubeletDir: DIR
  sharing:
    timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10, devices: ['2', '3'], rename: example.com/sliced}]}
    mps: {root: DIR/mps, control: CONTROL, renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2, devices: ['4', '5']}]}
    memory: {resource: nvidia.com/gpu-memory, unit: 1Gi, reserve: 512Mi, devices: ['6', '7']}`)
	n.launchDaemon()
	n.launch()
	want := map[string]int{resource: 2, "example.com/sliced": 20, sharedResource: 4, gpuMemory: 2 * 78}
	n.await("all resources", func() bool {
		state := n.kubelet.State()
		for name, count := range want {
			if state.Resources[name].Allocatable() != count {
				return false
			}
		}
		return len(state.Resources) == len(want)
	})
	for name := range want {
		a, err := n.kubelet.Allocate(t.Context(), name, 1)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		env := a.Response.GetEnvs()
		if _, ok := env["CUDA_MPS_PIPE_DIRECTORY"]; ok != (name == sharedResource) {
			t.Errorf("%s: %v", name, env)
		}
	}
	n.Kill()
	awaitLoss(t, n.kubelet)
	n.launch()
	n.await("all resources", func() bool {
		state := n.kubelet.State()
		for name, count := range want {
			if state.Resources[name].Allocatable() != count {
				return false
			}
		}
		return true
	})
}
