package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// mpsKinds returns the kinds of steps for GPUs that are shared by MPS. A step concerns GPU 6 or 7.
func mpsKinds() []kind {
	return []kind{
		{"mps-kill", 5, true, nil, true},
		{"mps-hang", 3, true, nil, true},
		{"mps-continue", 5, true, nil, true},
		{"mps-fault", 4, true, nil, true}, // a fatal fault of the clients
		{"mps-client", 6, true, nil, false},
		{"mps-leave", 5, true, nil, true},                                           // all clients leave
		{"mps-limits", 2, true, nil, true},                                          // the next daemon reports another limit
		{"mps-no-start", 2, true, nil, true},                                        // the next daemon exits while it starts
		{"mps-mend", 6, true, nil, true},                                            // of both
		{"mps-agent-killed", 6, true, []string{"1", "2", "3", "4", "5", "6"}, true}, // at a command of a daemon's start
		{"mps-replicas", 3, false, []string{"2", "4"}, true},
		{"mps-daemon-restart", 4, false, []string{"term", "kill"}, true},
		{"agent-restart", 5, false, []string{"term", "kill"}, true},
		{"kubelet-restart", 2, false, nil, true},
		{"lost", 3, true, nil, true},
		{"back", 5, true, nil, true},
		{"detach", 2, false, []string{"forced"}, false},
		{"attach", 4, false, nil, false},
	}
}

const (
	mpsResource = "nvidia.com/gpu.shared"

	// mpsTimeout is how long a change of a daemon may take to reach the kubelet: the agent asks each daemon every 5 s, waits 10 s
	// for an answer, and has a daemon that hangs restarted after 30 s; mps-daemon waits up to 30 s before it starts one that
	// keeps exiting.
	mpsTimeout = 60 * time.Second
)

// mpsWorld is a node with GPUs that are shared by MPS.
//
// What the kubelet must have follows from the daemons themselves: the check asks them. The model has only what may end a daemon
// or a client.
type mpsWorld struct {
	*node.Node
	agent   string // the binary
	control *mpstest.ControlProgram
	kubelet *kubelet
	daemon  *exec.Cmd // mps-daemon
	log     *buffer

	replicas int
	detached bool
	scenario string // of the agent's last start
	gpu      map[int]*mpsGPU
}

type mpsGPU struct {
	uuid    string
	lost    bool
	faults  mpstest.Faults
	pid     int  // of the daemon at the last check
	ends    bool // something since then may have ended the daemon
	clients []*mpstest.Client
	failed  bool // something since the last check may have failed the clients
}

func newMPSWorld(ctx context.Context, t testing.TB, with setup) (_ player, err error) {
	n, err := node.New(ctx, with.agent)
	if err != nil {
		return nil, err
	}
	w := &mpsWorld{Node: n, agent: with.agent, control: mpstest.New(t), log: &buffer{}, replicas: 4, gpu: map[int]*mpsGPU{6: {}, 7: {}}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.end())
		}
	}()
	if w.kubelet, err = startKubelet(n.Dir); err != nil {
		return nil, err
	}
	if err := w.write(); err != nil {
		return nil, err
	}
	if err := w.startDaemon(); err != nil {
		return nil, err
	}
	if err := w.start(ctx); err != nil {
		return nil, err
	}
	return w, w.check(ctx)
}

func (w *mpsWorld) write() error {
	return w.Write(fmt.Sprintf(`source: {mode: sim, sim: {profile: h100-8, control: DIR/sim.sock, scenario: [%s]}}
health: {socket: DIR/agent.sock, recoverAfter: 1s, flap: {trips: 0, within: 100h}}
plugin: {kubeletDir: DIR, sharing: {mps: {root: DIR/mps, control: %s, renameByDefault: true,
  resources: [{name: nvidia.com/gpu, replicas: %d, devices: ['6', '7']}]}}}
metrics: {listen: ADDRESS}
`, w.scenario, w.control.Path, w.replicas))
}

// startDaemon starts mps-daemon as the chart does, without the configuration file: a step may be writing it.
func (w *mpsWorld) startDaemon() error {
	w.daemon = exec.Command(w.agent, "mps-daemon", "--source.mode=sim", "--plugin.sharing.mps.root="+filepath.Join(w.Dir, "mps"),
		"--plugin.sharing.mps.control="+w.control.Path)
	w.daemon.Dir = w.Dir
	w.daemon.Stdout, w.daemon.Stderr = w.log, w.log
	w.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return w.daemon.Start()
}

// daemonServes reports whether mps-daemon has its socket.
func (w *mpsWorld) daemonServes() bool {
	conn, err := net.Dial("unix", filepath.Join(w.Dir, "mps", "mps-daemon.sock"))
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}

func (w *mpsWorld) endDaemon(how string) error {
	if w.daemon == nil || w.daemon.Process == nil {
		return nil
	}
	defer func() { w.daemon = nil }()
	w.mayEnd(6, 7)
	if how == "kill" { // with its container
		_ = w.daemon.Process.Kill()
		_ = w.daemon.Wait() // it was killed
		w.control.KillAll()
		return nil
	}
	// before, it does not handle the signal
	for limit := time.Now().Add(scaled(30 * time.Second)); !w.daemonServes() && time.Now().Before(limit); {
		<-time.After(10 * time.Millisecond)
	}
	_ = w.daemon.Process.Signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- w.daemon.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return violated("end", "mps-daemon: %v", err)
		}
		return nil
	case <-time.After(scaled(30 * time.Second)):
		return errors.Join(violated("end", "mps-daemon did not exit"), w.daemon.Process.Kill(), <-ended)
	}
}

// start starts the agent and waits until it responds.
func (w *mpsWorld) start(ctx context.Context) error {
	w.scenario = fmt.Sprintf("{at: 0s, gpu: 6, lost: %t}, {at: 0s, gpu: 7, lost: %t}", w.gpu[6].lost, w.gpu[7].lost)
	if err := w.write(); err != nil {
		return err
	}
	if err := w.Start(w.log); err != nil {
		return err
	}
	return w.await(ctx, scaled(10*time.Second), func(ctx context.Context) error {
		if status, _, err := w.Get(ctx, "/livez"); err != nil || status != http.StatusOK {
			return violated("life", "restarted: /livez: status %d, %v", status, err)
		}
		if err := w.Event(ctx, "{gpu: 0, temperature: 0}"); err != nil {
			return err
		}
		s, err := getSnapshot(ctx, w.Node)
		if err != nil || len(s.GPUs) != gpus {
			return violated("life", "%d GPUs, %v", len(s.GPUs), err)
		}
		for i, g := range w.gpu {
			g.uuid = s.GPUs[i].UUID
		}
		return nil
	})
}

// mayEnd notes that something may end the daemons of GPUs, and with them their clients.
func (w *mpsWorld) mayEnd(indexes ...int) {
	for _, i := range indexes {
		w.gpu[i].ends, w.gpu[i].failed = true, true
	}
}

func (w *mpsWorld) pipe(g *mpsGPU) string { return filepath.Join(w.Dir, "mps", g.uuid, "pipe") }

// setFaults replaces the faults of a GPU's daemon.
func (w *mpsWorld) setFaults(g *mpsGPU, f mpstest.Faults) {
	g.faults = f
	w.control.SetFaults(g.uuid, f)
}

// signal sends a signal to the daemon of a GPU, if it runs.
func (w *mpsWorld) signal(g *mpsGPU, s syscall.Signal) {
	if pid := w.control.Daemons()[g.uuid]; pid > 0 {
		_ = syscall.Kill(pid, s) // it may have ended
	}
}

func (w *mpsWorld) apply(ctx context.Context, s step) error {
	i := 6 + s.gpu%2
	g := w.gpu[i]
	switch s.kind {
	case "mps-kill":
		w.mayEnd(i)
		w.signal(g, syscall.SIGKILL)
	case "mps-hang":
		w.mayEnd(i) // mps-daemon restarts a daemon that does not recover
		w.signal(g, syscall.SIGSTOP)
	case "mps-continue":
		w.signal(g, syscall.SIGCONT)
	case "mps-fault":
		if len(g.clients) > 0 && w.answers(g) == nil {
			g.failed = true
			w.control.Fault(w.pipe(g))
		}
	case "mps-client":
		return w.connect(ctx, g)
	case "mps-leave":
		w.leave(g)
	case "mps-limits":
		w.setFaults(g, mpstest.Faults{Answer: map[string]string{"get_default_active_thread_percentage": "90.0"}})
		w.mayEnd(i)
		w.signal(g, syscall.SIGKILL)
	case "mps-no-start":
		w.setFaults(g, mpstest.Faults{ExitAtStart: true})
		w.mayEnd(i)
		w.signal(g, syscall.SIGKILL)
	case "mps-mend":
		w.setFaults(g, mpstest.Faults{})
	case "mps-agent-killed":
		return w.killAgentAt(ctx, i, s.arg)
	case "mps-replicas":
		var err error
		if w.replicas, err = strconv.Atoi(s.arg); err != nil {
			return err
		}
		if err := w.write(); err != nil {
			return err
		}
		return w.Signal(syscall.SIGHUP)
	case "mps-daemon-restart":
		if err := w.endDaemon(s.arg); err != nil {
			return err
		}
		return w.startDaemon()
	case "agent-restart":
		return w.restart(ctx, s.arg)
	case "kubelet-restart":
		_, err := w.kubelet.request(command{Do: "restart"})
		return err
	case "lost", "back":
		g.lost = s.kind == "lost"
		return w.Event(ctx, fmt.Sprintf("{gpu: %d, lost: %t}", i, g.lost))
	case "detach":
		return w.detach(ctx)
	case "attach":
		w.detached = false
		_, err := request[attachResponse](ctx, w.Node, mpsTimeout, "POST /attach", nil)
		return err
	case calm:
		return w.revert(ctx)
	default:
		return fmt.Errorf("%v: unknown step", s)
	}
	return nil
}

// detach detaches the driver. No process may use it then.
func (w *mpsWorld) detach(ctx context.Context) error {
	w.mayEnd(6, 7)
	// The agent's own limit is a minute.
	_, err := request[detachResponse](ctx, w.Node, scaled(70*time.Second), "POST /detach", map[string]any{"for": "1h", "force": true})
	if err != nil {
		return violated("detach", "%v", err)
	}
	w.detached = true
	if left := w.control.Processes(); len(left) > 0 {
		return violated("detach", "the driver is detached, and %+v", left)
	}
	return nil
}

func (w *mpsWorld) restart(ctx context.Context, how string) error {
	if how == "term" {
		if err := w.Stop(); err != nil {
			return violated("end", "%v", err)
		}
	} else {
		w.Kill()
	}
	w.CloseIdleConnections()
	return w.start(ctx)
}

// killAgentAt kills a daemon, and kills the agent when the next daemon has got so many commands.
func (w *mpsWorld) killAgentAt(ctx context.Context, gpu int, count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	g, before := w.gpu[gpu], len(w.control.Commands())
	w.mayEnd(gpu)
	w.signal(g, syscall.SIGKILL)
	// The daemon may not start for a while: then the agent dies anyway.
	_ = await(ctx, w.Node, scaled(3*time.Second), time.Millisecond, func(context.Context) error {
		seen := 0
		for _, c := range w.control.Commands()[before:] {
			if c.Device == g.uuid {
				seen++
			}
		}
		if seen < n {
			return fmt.Errorf("%d commands", seen)
		}
		return nil
	})
	return w.restart(ctx, "kill")
}

// connect connects a client. Once the kubelet may give shares to pods, it must get the limits of a share.
func (w *mpsWorld) connect(ctx context.Context, g *mpsGPU) error {
	if len(g.clients) >= 5 || w.detached || g.lost {
		return nil
	}
	if err := w.checkView(ctx); err != nil {
		return err
	}
	if why := w.answers(g); why != nil { // then pods get no share
		return nil //nolint:nilerr // it is not the client's
	}
	c, err := mpstest.Connect(w.pipe(g), mpstest.ClientRequest{})
	if err != nil {
		return violated("client", "its share is healthy: %v", err)
	}
	g.clients = append(g.clients, c)
	if c.Limits.ThreadPercentage != float64(100/w.replicas) || c.Limits.PinnedMemory[g.uuid] == 0 {
		return violated("limits", "%d replicas: %v", w.replicas, c)
	}
	return nil
}

func (w *mpsWorld) leave(g *mpsGPU) {
	for _, c := range g.clients {
		c.Close()
	}
	g.clients = nil
}

// answers returns why a daemon cannot serve clients with the limits of a share; nil if it can.
func (w *mpsWorld) answers(g *mpsGPU) error {
	pid := w.control.Daemons()[g.uuid]
	if pid == 0 || mpstest.Stopped(pid) {
		return fmt.Errorf("daemon %d does not run", pid)
	}
	var err error
	get := func(format string, args ...any) string {
		out, controlErr := w.control.Control(w.pipe(g), fmt.Sprintf(format, args...))
		err = errors.Join(err, controlErr)
		return out
	}
	if out := get("get_default_active_thread_percentage"); out != strconv.Itoa(100/w.replicas)+".0" {
		return fmt.Errorf("threads: %s; %w", out, err)
	}
	if out := get("get_default_device_pinned_mem_limit 0"); out != strconv.Itoa((81559-551)/w.replicas)+"M" {
		return fmt.Errorf("memory: %s; %w", out, err)
	}
	for server := range strings.FieldsSeq(get("get_server_list")) {
		if status := get("get_server_status %s", server); status == "FAULT" {
			return errors.New(status)
		}
	}
	return err
}

// checkView waits until a share is healthy for the kubelet exactly if its daemon serves clients with its limits.
func (w *mpsWorld) checkView(ctx context.Context) error {
	return w.await(ctx, scaled(mpsTimeout), func(context.Context) error {
		a, err := w.kubelet.request(command{Do: "state"})
		if err != nil {
			return err
		}
		healthy, listed := map[string]int{}, map[string]int{}
		for _, d := range a.Resources[mpsResource].Devices {
			id, _, _ := strings.Cut(d.ID, "::")
			if listed[id]++; d.Healthy {
				healthy[id]++
			}
		}
		for i, g := range w.gpu {
			want, why := w.replicas, w.answers(g)
			if why != nil || g.lost || w.detached {
				want = 0
			}
			if healthy[g.uuid] != want || want > 0 && listed[g.uuid] != want {
				return violated("view", "GPU %d: the kubelet has %d healthy of %d shares, want %d; lost %t, detached %t, daemon: %v", i,
					healthy[g.uuid],
					listed[g.uuid], want, g.lost, w.detached, why)
			}
		}
		return nil
	})
}

func (w *mpsWorld) check(ctx context.Context) error {
	if err := w.checkView(ctx); err != nil {
		return err
	}
	daemons := w.control.Daemons()
	for i, g := range w.gpu {
		pid := daemons[g.uuid]
		if pid != g.pid && !g.ends && g.pid != 0 {
			return violated("daemons", "GPU %d: daemon %d; was %d", i, pid, g.pid)
		}
		g.pid = pid
		g.ends = pid == 0 || mpstest.Stopped(pid) || g.faults.ExitAtStart // it may be restarted later
		for _, c := range g.clients {
			if isClosed(c.Done()) && !g.failed {
				return violated("client", "GPU %d: a client ended: %v", i, c.Err())
			}
		}
		g.failed = g.ends || slices.ContainsFunc(g.clients, func(c *mpstest.Client) bool { return isClosed(c.Done()) })
	}
	if status, _, err := w.Get(ctx, "/livez"); err != nil || status != http.StatusOK {
		return violated("life", "/livez: status %d, %v", status, err)
	}
	if w.log.raced() {
		return violated("race", "see the log")
	}
	return w.checkOrphans(ctx)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// checkOrphans waits until each server belongs to the daemon that runs for its device, and each device has one daemon at most.
func (w *mpsWorld) checkOrphans(ctx context.Context) error {
	return w.await(ctx, scaled(mpsTimeout), func(context.Context) error {
		all := w.control.Processes()
		daemons := map[string][]int{}
		for _, p := range all {
			if !p.Server {
				daemons[p.Device] = append(daemons[p.Device], p.PID)
			}
		}
		for device, pids := range daemons {
			if len(pids) > 1 {
				return violated("orphans", "%s has daemons %v", device, pids)
			}
		}
		for _, p := range all {
			if p.Server && !slices.Contains(daemons[p.Device], p.Parent) {
				return violated("orphans", "server %d of %s is a child of %d; the daemons are %v", p.PID, p.Device, p.Parent, daemons)
			}
		}
		return nil
	})
}

// revert reverts all faults: then every share is healthy.
func (w *mpsWorld) revert(ctx context.Context) error {
	if w.detached {
		if err := w.apply(ctx, step{kind: "attach"}); err != nil {
			return err
		}
	}
	for gpu := range w.gpu {
		for _, kind := range []string{"mps-mend", "mps-continue", "mps-leave", "back"} {
			if err := w.apply(ctx, step{kind: kind, gpu: gpu}); err != nil {
				return err
			}
		}
	}
	err := w.await(ctx, scaled(mpsTimeout), func(context.Context) error {
		for i, g := range w.gpu {
			if err := w.answers(g); err != nil {
				return violated("calm", "GPU %d: %v", i, err)
			}
		}
		return nil
	})
	return errors.Join(err, w.check(ctx))
}

// await calls try until it returns nil or the time is up.
func (w *mpsWorld) await(ctx context.Context, d time.Duration, try func(context.Context) error) error {
	return await(ctx, w.Node, d, 50*time.Millisecond, try)
}

func (w *mpsWorld) summary() string {
	out := fmt.Sprintf("replicas:%d", w.replicas)
	if w.detached {
		out += " detached"
	}
	for _, i := range slices.Sorted(maps.Keys(w.gpu)) {
		g := w.gpu[i]
		out += fmt.Sprintf(" [%d pid:%d clients:%d", i, g.pid, len(g.clients))
		if g.lost {
			out += " lost"
		}
		if g.faults.ExitAtStart {
			out += " no-start"
		}
		if len(g.faults.Answer) > 0 {
			out += " limits"
		}
		out += "]"
	}
	return out
}

func (w *mpsWorld) description() string { return "GPUs 6 and 7 are shared by MPS" }

func (w *mpsWorld) logged() *buffer { return w.log }

// end stops everything. No process may remain.
func (w *mpsWorld) end() error {
	var errs []error
	for _, g := range w.gpu {
		w.signal(g, syscall.SIGCONT)
		w.leave(g)
	}
	if err := w.Stop(); err != nil {
		errs = append(errs, violated("end", "%v", err))
	}
	errs = append(errs, w.endDaemon("term"))
	if left := w.control.Processes(); len(left) > 0 {
		errs = append(errs, violated("orphans", "at the end: %+v", left))
	}
	if w.kubelet != nil {
		errs = append(errs, w.kubelet.end())
	}
	if w.log.raced() {
		errs = append(errs, violated("race", "see the log"))
	}
	return errors.Join(append(errs, w.Remove())...)
}
