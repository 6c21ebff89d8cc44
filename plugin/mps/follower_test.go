package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// fakeNode is a node with an mps-daemon that runs what it is told, and daemons that a test controls.
type fakeNode struct {
	root Root

	mu          sync.Mutex // guards the fields below
	down        bool       // mps-daemon does not respond
	stubborn    bool       // it does not stop daemons
	shm         string
	refusal     string // why mps-daemon does not do what it is told
	noProgram   bool   // the control program cannot be run
	daemons     map[health.DeviceID]*fakeDaemon
	nextPID     int
	told        *Follow // the newest; nil: mps-daemon has just started
	follows     int     // requests to follow
	slow        bool    // mps-daemon does not do yet what it was told
	holders     map[health.DeviceID][]podresources.Holder
	holdersErr  string
	claims      offer.Claims
	settling    bool // the kubelet may not have read all its pods
	restarts    []health.DeviceID
	oldReleases bool // the daemons do not know how to report the memory limit
}

type fakeDaemon struct {
	pid      int
	restarts uint64
	dead     bool          // mps-daemon does not restart it
	foreign  bool          // another daemon keeps mps-daemon from that
	delay    time.Duration // of each answer
	hang     bool
	missing  bool // no socket
	refuse   string
	refusal  string            // the text
	silent   string            // the command that gets no answer
	answer   map[string]string // instead of the usual one
	threads  string
	memory   string
	servers  map[int]*fakeServer
	log      []string // the commands except the ones that only read
	calls    []string // all commands
}

type fakeServer struct {
	status          string
	clients         []int
	threads, memory string
}

func newFakeNode(t *testing.T) *fakeNode {
	n := &fakeNode{
		root: Root(t.TempDir()), daemons: make(map[health.DeviceID]*fakeDaemon), nextPID: 100,
		holders: make(map[health.DeviceID][]podresources.Holder),
	}
	if err := os.MkdirAll(n.root.ShmDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	return n
}

// change changes the node.
func (n *fakeNode) change(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *fakeNode) start(id health.DeviceID, d *fakeDaemon) {
	n.nextPID++
	*d = fakeDaemon{
		pid: n.nextPID, restarts: d.restarts, delay: d.delay, refuse: d.refuse, refusal: d.refusal, answer: d.answer,
		threads: "100.0", servers: make(map[int]*fakeServer),
	}
	for _, dir := range []string{n.root.PipeDir(id), n.root.LogDir(id)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			panic(err)
		}
	}
	if err := os.WriteFile(filepath.Join(n.root.PipeDir(id), "nvidia-cuda-mps-control.pid"), []byte(strconv.Itoa(d.pid)), 0o600); err != nil {
		panic(err)
	}
}

// kill kills a daemon with its servers; mps-daemon restarts it with its next response.
func (n *fakeNode) kill(id health.DeviceID) {
	n.daemons[id].pid = 0
}

func (n *fakeNode) call(ctx context.Context, r Root, route string, body any) (Status, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return Status{}, errors.New("connection refused")
	}
	if route == restartRoute {
		id := body.(Restart).Device
		if n.daemons[id] == nil {
			return Status{}, fmt.Errorf("device %q: mps-daemon runs no daemon for it", id)
		}
		n.restarts = append(n.restarts, id)
		n.daemons[id].restarts++
		n.start(id, n.daemons[id])
		return Status{}, nil
	}
	pending := false
	if route == followRoute {
		n.follows++
		if f := body.(Follow); n.refusal == "" {
			pending = !f.same(n.told)
			n.told = &f
		}
	}
	s := Status{Version: "test", Shm: n.shm, Follows: n.told, Pending: pending}
	if route == followRoute {
		s.Error = n.refusal
	}
	for _, id := range []health.DeviceID{gpuA, gpuB} {
		if d := n.daemons[id]; d != nil {
			st := DaemonStatus{Device: id, PID: d.pid, Restarts: d.restarts, Foreign: d.foreign}
			if d.pid == 0 {
				st.Error = "signal: killed"
			}
			s.Daemons = append(s.Daemons, st)
		}
	}
	if n.slow {
		s.Pending = n.told != nil
		return s, ctx.Err()
	}
	n.follow(r)
	n.revive()
	return s, ctx.Err()
}

// follow does what mps-daemon was told.
func (n *fakeNode) follow(r Root) {
	if n.told == nil || n.stubborn {
		return
	}
	wanted := make(map[health.DeviceID]bool)
	for _, d := range n.told.Daemons {
		wanted[d.Device] = !n.told.Stopped
	}
	maps.DeleteFunc(n.daemons, func(id health.DeviceID, _ *fakeDaemon) bool {
		if !wanted[id] && !n.told.has(id) {
			_ = os.RemoveAll(filepath.Dir(r.PipeDir(id)))
		}
		return !wanted[id]
	})
	for id, w := range wanted {
		if w && n.daemons[id] == nil {
			n.daemons[id] = &fakeDaemon{}
			n.start(id, n.daemons[id])
		}
	}
}

// revive starts the daemons that have died.
func (n *fakeNode) revive() {
	for id, d := range n.daemons {
		if d.pid == 0 && !d.dead && !n.stubborn {
			d.restarts++
			n.start(id, d)
		}
	}
}

func (n *fakeNode) control(ctx context.Context, _ string, _ Root, id health.DeviceID, command string) (string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.noProgram {
		return "", fmt.Errorf("%w: x", errProgram)
	}
	d := n.daemons[id]
	if d == nil || d.pid == 0 || d.missing {
		return "", errNoDaemon
	}
	wait := d.delay
	if d.hang || d.silent != "" && strings.HasPrefix(command, d.silent) {
		wait = time.Hour
	}
	if wait > 0 {
		n.mu.Unlock()
		select {
		case <-time.After(min(wait, controlTimeout)):
		case <-ctx.Done():
		}
		n.mu.Lock()
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if wait >= controlTimeout {
			return "", errNoAnswer
		}
	}
	d.calls = append(d.calls, command)
	if d.refuse != "" && strings.HasPrefix(command, d.refuse) {
		return "", fmt.Errorf("%w: %s", errRefused, d.refusal)
	}
	if a, ok := d.answer[command]; ok {
		return a, nil
	}
	fields := strings.Fields(command)
	if !strings.HasPrefix(command, "get_") {
		d.log = append(d.log, command)
	}
	server := func() *fakeServer {
		pid, _ := strconv.Atoi(fields[1])
		return d.servers[pid]
	}
	if strings.Contains(fields[0], "server") || strings.Contains(fields[0], "client") || fields[0] == "get_active_thread_percentage" ||
		fields[0] == "set_active_thread_percentage" || strings.HasSuffix(fields[0], "t_device_pinned_mem_limit") &&
		!strings.Contains(fields[0], "default") {
		if fields[0] != "get_server_list" && server() == nil {
			return "", fmt.Errorf("%w: no such server", errRefused)
		}
	}
	percent := func(v string) string { return v + ".0" }
	switch fields[0] {
	case "get_server_list":
		var pids []string
		for pid := range d.servers {
			pids = append(pids, strconv.Itoa(pid))
		}
		return strings.Join(pids, "\n"), nil
	case "get_server_status":
		return server().status, nil
	case "get_client_list":
		return strings.Trim(fmt.Sprint(server().clients), "[]"), nil
	case "get_default_active_thread_percentage":
		return d.threads, nil
	case "set_default_active_thread_percentage":
		d.threads = percent(fields[1])
		return d.threads, nil
	case "get_default_device_pinned_mem_limit":
		if n.oldReleases {
			return "", fmt.Errorf("%w: unknown command", errRefused)
		}
		return d.memory, nil
	case "set_default_device_pinned_mem_limit":
		d.memory = fields[2]
		return "", nil
	case "get_active_thread_percentage":
		return server().threads, nil
	case "set_active_thread_percentage":
		server().threads = percent(fields[2])
		return server().threads, nil
	case "get_device_pinned_mem_limit":
		return server().memory, nil
	case "set_device_pinned_mem_limit":
		server().memory = fields[3]
		return "", nil
	case "terminate_client":
		pid, _ := strconv.Atoi(fields[2])
		server().clients = slices.DeleteFunc(server().clients, func(c int) bool { return c == pid })
		return "", nil
	}
	return "", fmt.Errorf("%w: unknown command", errRefused)
}

func (n *fakeNode) facts() offer.Facts {
	n.mu.Lock()
	defer n.mu.Unlock()
	by := make(map[health.DeviceID][]podresources.Holder)
	for id, h := range n.holders {
		by[id] = slices.Clone(h)
	}
	return offer.Facts{Now: time.Now(), Claims: n.claims, Holders: podresources.Holders{
		At: time.Now(), Err: n.holdersErr, By: by,
		Settling: n.settling,
	}}
}

// hold has a container hold a device by one of its IDs; none ends it.
func (n *fakeNode) hold(id health.DeviceID, deviceIDs ...string) {
	n.change(func() {
		delete(n.holders, id)
		for _, d := range deviceIDs {
			n.holders[id] = append(n.holders[id], podresources.Holder{
				Namespace: "a", Pod: "b", Container: "c", Resource: "nvidia.com/gpu",
				DeviceID: d,
			})
		}
	})
}

// holdClaim has a container hold a device by a claim.
func (n *fakeNode) holdClaim(id health.DeviceID) {
	n.change(func() {
		n.holders[id] = []podresources.Holder{{
			Namespace: "a", Pod: "b", Container: "c", DeviceID: "gpu-0",
			Claim: podresources.ClaimRef{Name: "mps"},
		}}
	})
}

// followerTest runs a Follower on a fakeNode in a synctest bubble.
type followerTest struct {
	*testing.T
	*fakeNode
	f       *Follower
	logs    *observer.ObservedLogs // of f
	desired health.Latest[Desired]
	stop    func() // ends Run; may be called again
}

func spec(id health.DeviceID) Spec {
	return Spec{Device: id, GPU: id, ThreadPercentage: 25, PinnedMemory: 20 << 30}
}

func runFollower(t *testing.T, test func(h *followerTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &followerTest{T: t, fakeNode: newFakeNode(t)}
		h.newAgent()
		defer func() { h.stop() }()
		test(h)
	})
}

// newAgent starts a follower that remembers nothing, as a restart of the agent does.
func (h *followerTest) newAgent() {
	if h.stop != nil {
		h.stop()
	}
	core, logs := observer.New(zap.InfoLevel)
	h.logs = logs
	h.f = NewFollower(Options{
		Desired: &h.desired, Root: func() Root { return h.root }, Simulated: func() bool { return false },
		Facts: h.facts, Log: zap.New(core),
	})
	h.f.control, h.f.call = h.control, h.call
	h.run()
}

// run runs the follower, as the start of a session does.
func (h *followerTest) run() {
	ctx, cancel := context.WithCancel(h.Context())
	ended := make(chan struct{})
	go func() {
		h.f.Run(ctx)
		close(ended)
	}()
	h.stop = func() { cancel(); <-ended }
}

// want has the devices shared by MPS.
func (h *followerTest) want(ids ...health.DeviceID) {
	d := &Desired{Root: h.root, Control: "control"}
	for _, id := range ids {
		d.Daemons = append(d.Daemons, spec(id))
	}
	h.desired.Store(d)
}

// advance lets time pass, in steps in which a kubelet would be asked.
func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // in a synctest bubble
	synctest.Wait()
}

func (h *followerTest) state(id health.DeviceID) health.MPSDaemon {
	h.Helper()
	s := h.f.State().Load()
	if s == nil || s.Daemons[id] == nil {
		h.Fatalf("%s has no state", id)
	}
	return *s.Daemons[id]
}

// wantState checks whether a daemon is ready, and its cause.
func (h *followerTest) wantState(when string, id health.DeviceID, ready bool, cause string) {
	h.Helper()
	if d := h.state(id); d.Ready != ready || d.Cause != cause {
		h.Fatalf("%s: %s: got ready %t, cause %q (%s), want %t, %q", when, id, d.Ready, d.Cause, d.Reason, ready, cause)
	}
}

// ready starts daemons and waits until they are ready.
func (h *followerTest) ready(ids ...health.DeviceID) {
	h.Helper()
	h.want(ids...)
	advance(5 * time.Second)
	for _, id := range ids {
		h.wantState("after the start", id, true, "")
	}
}

func (h *followerTest) daemon(id health.DeviceID) (d fakeDaemon) {
	h.change(func() {
		if h.daemons[id] != nil {
			d = *h.daemons[id]
		}
	})
	return d
}

func (h *followerTest) serve(id health.DeviceID, pid int, s fakeServer) {
	h.change(func() { h.daemons[id].servers[pid] = &s })
}
