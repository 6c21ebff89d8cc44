package operator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestDetachDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 30 * time.Minute, "1s": time.Second, "2h": 2 * time.Hour, "24h": 24 * time.Hour} {
		if got, err := (DetachRequest{For: text}).duration(); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"30", "0s", "-1m", "25h", "soon", "999ms"} {
		if _, err := (DetachRequest{For: text}).duration(); err == nil || !strings.HasPrefix(err.Error(), "for: ") || !strings.Contains(err.Error(), strconv.Quote(text)) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestCheckNotHeld(t *testing.T) {
	node, held := agenttest.Node(), agenttest.Holders()
	free := podresources.Holders{At: agenttest.Now(), By: map[health.DeviceID][]podresources.Holder{}}
	for name, c := range map[string]struct {
		snapshot *health.Snapshot
		holders  podresources.Holders
		want     error
		parts    []string // of the error
	}{
		"no snapshot":        {nil, podresources.Holders{Err: "not asked"}, nil, nil},
		"no devices":         {&health.Snapshot{}, podresources.Holders{Err: "not asked"}, nil, nil},
		"not held":           {node, free, nil, nil},
		"not asked":          {node, podresources.Holders{Err: "not asked"}, errHoldersUnknown, []string{"not asked", "--force"}},
		"kubelet down":       {node, podresources.Holders{At: agenttest.Now(), By: free.By, Err: "no kubelet"}, errHoldersUnknown, []string{"no kubelet", "--force"}},
		"old response":       {node, podresources.Holders{At: agenttest.Ago(time.Minute), By: free.By}, errHoldersUnknown, []string{"1m0s", "--force"}},
		"GPU and MIG device": {node, held, errHeld, []string{"GPU 0 (GPU-0) is held by training/llm-0 (torch) ×2, web/chat-1 (vllm); ", "MIG device 2:1 1g.10gb (MIG-2-8) is held by nb/ada (main); ", "--force"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkNotHeld(c.snapshot, c.holders, agenttest.Now())
			if !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			for _, part := range c.parts {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v lacks %q", err, part)
				}
			}
		})
	}
}

// simServer is a Server with simulated GPUs and the components that it needs.
type simServer struct {
	Server
	simSocket string
}

// startServer starts a server and waits until its source is up.
func startServer(t *testing.T) *simServer {
	t.Helper()
	dir := agenttest.SocketDir(t)
	log := zaptest.NewLogger(t)
	c := health.DefaultConfig()
	c.Socket, c.StateFile = filepath.Join(dir, "agent.sock"), filepath.Join(dir, "state.json")
	simConfig := sim.DefaultConfig()
	simConfig.Control = filepath.Join(dir, "sim.sock")
	source, err := sim.New(simConfig, log)
	if err != nil {
		t.Fatal(err)
	}
	var sources health.Latest[monitor.Source]
	sources.Store(&monitor.Source{SourceID: health.SourceID{Kind: "sim", Inventory: "sim", Simulated: true}, StallAfter: 10 * time.Second, Open: source.Open})
	a := &simServer{Server{Config: new(health.Latest[health.Config]), Snapshots: new(health.Latest[health.Snapshot]), Log: log}, simConfig.Control}
	a.Config.Store(&c)
	a.Monitor = monitor.New(a.Config, &sources, a.Snapshots, log)
	keeper := statefile.New(a.Config, a.Snapshots, "", log)
	a.AwaitSaved = keeper.WaitWritten
	a.Holders = func() podresources.Holders { return podresources.Holders{Err: "no kubelet"} }
	a.RefreshHolders = func() {}
	a.EngineAddress = func() string { return "" }
	ctx, cancel := context.WithCancel(t.Context())
	var components sync.WaitGroup
	for _, run := range []func(context.Context) error{source.Run, a.Monitor.Run, keeper.Run, a.Run} {
		components.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { cancel(); components.Wait() })
	a.await(t, health.SourceUp)
	return a
}

// await waits until the source has a status.
func (a *simServer) await(t *testing.T, want health.SourceStatus) *health.Snapshot {
	t.Helper()
	var s *health.Snapshot
	agenttest.Eventually(t, "source "+want.String(), func() error {
		if s = a.Snapshots.Load(); s == nil || s.Source.Status != want {
			return fmt.Errorf("snapshot %+v", s)
		}
		return nil
	})
	return s
}

// send sends a request as soon as the socket exists.
func send[T any](t *testing.T, a *simServer, req request) (T, error) {
	t.Helper()
	socket := a.Config.Load().Socket
	var res T
	var err error
	agenttest.Eventually(t, "a response on "+socket, func() error {
		if res, err = call[T](t.Context(), socket, req); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		return nil
	})
	return res, err
}

func TestDetachAndAttach(t *testing.T) {
	t.Parallel()
	a := startServer(t)
	if _, err := send[DetachResponse](t, a, request{Detach: &DetachRequest{}}); err == nil || !strings.Contains(err.Error(), errHoldersUnknown.Error()) {
		t.Errorf("without a kubelet: %v", err)
	}
	if _, err := send[DetachResponse](t, a, request{Detach: &DetachRequest{For: "1y", Force: true}}); err == nil || !strings.Contains(err.Error(), `"1y"`) {
		t.Errorf("for a year: %v", err)
	}
	if a.Snapshots.Load().Source.Status != health.SourceUp {
		t.Fatal("detached by a refused request")
	}
	first, err := send[DetachResponse](t, a, request{Detach: &DetachRequest{For: "1h", Force: true}})
	if err != nil || first.Already || first.UnaskedEngine != "" || len(first.OpenFiles) != 0 || first.err() != nil || first.Until.Before(first.Since) {
		t.Fatalf("%+v, %v", first, err)
	}
	for _, d := range a.await(t, health.SourceDetached).Devices {
		if d.Verdict.State != health.Unhealthy || d.Verdict.Cause() != health.CauseReleased {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}

	second, err := send[DetachResponse](t, a, request{Detach: &DetachRequest{}}) // succeeds without holders: the devices are withheld already
	if err != nil || !second.Already || !second.Since.Equal(first.Since) || !second.Until.Before(first.Until) {
		t.Errorf("%+v, %v", second, err)
	}
	back, err := send[AttachResponse](t, a, request{Attach: &AttachRequest{}})
	if err != nil || back.Already || back.Source != "up" || len(back.NeedsReset) != 0 || back.err() != nil {
		t.Errorf("%+v, %v", back, err)
	}
	for _, d := range a.await(t, health.SourceUp).Devices {
		if d.Verdict.State != health.Healthy {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}
	if back, err = send[AttachResponse](t, a, request{Attach: &AttachRequest{}}); err != nil || !back.Already {
		t.Errorf("a second attach: %+v, %v", back, err)
	}
}

func TestClear(t *testing.T) {
	t.Parallel()
	a := startServer(t)
	sendEvent := func(text string) {
		t.Helper()
		e, err := sim.ParseEvent(text)
		if err != nil {
			t.Fatal(err)
		}
		agenttest.Eventually(t, "a response of the simulation", func() error {
			_, err := sim.Send(t.Context(), a.simSocket, e)
			return err
		})
	}
	var gpu health.DeviceID
	awaitFindings := func(want string) {
		t.Helper()
		agenttest.Eventually(t, want, func() error {
			d := a.Snapshots.Load().Devices[3]
			gpu = d.Device.ID
			if got := strings.Join(d.Verdict.Causes(), " "); got != want {
				return fmt.Errorf("findings %q, want %q", got, want)
			}
			return nil
		})
	}
	clear := func(cause string) (ClearResponse, error) {
		t.Helper()
		return send[ClearResponse](t, a, request{Clear: &ClearRequest{string(gpu), cause}})
	}
	awaitFindings("")
	if c, err := clear(""); err != nil || len(c.Cleared)+len(c.Remaining) != 0 {
		t.Errorf("healthy GPU: %+v, %v", c, err)
	}
	sendEvent(`{gpu: 3, xid: 48, lost: true}`)
	awaitFindings("xid-48 lost")
	seq := a.Snapshots.Load().Seq
	if c, err := clear(""); err != nil || !slices.Equal(c.Cleared, []string{"xid-48"}) || len(c.Remaining) != 1 || c.Remaining[0].Cause != "lost" {
		t.Errorf("lost GPU: %+v, %v", c, err)
	}
	if s := a.Snapshots.Load(); s.Seq <= seq || s.Devices[3].Verdict.State != health.Unhealthy {
		t.Errorf("%+v", s.Devices[3].Verdict)
	}
	if c, err := clear("lost"); err == nil || !strings.Contains(err.Error(), string(gpu)) || !strings.Contains(err.Error(), `"lost"`) {
		t.Errorf("lost GPU: %+v, %v", c, err)
	}
	sendEvent(`{gpu: 3, lost: false}`)
	awaitFindings("")
	h := *a.Config.Load()
	h.Cordon = []string{"3"}
	a.Config.Store(&h)
	awaitFindings("cordoned")
	if c, err := clear(""); err != nil || len(c.Cleared) != 0 || len(c.Remaining) != 1 || c.Remaining[0].Cause != "cordoned" {
		t.Errorf("cordoned GPU: %+v, %v", c, err)
	}
}

func TestClearResponseText(t *testing.T) {
	c := ClearResponse{[]string{"xid-48", "xid-95"}, []status.Finding{{Cause: "lost", Reason: "not reachable", Advice: "reboot", From: "GPU-1"}}}
	agenttest.MustContain(t, c.text(), "xid-48, xid-95\n", "lost", "not reachable", "reboot", "GPU-1")
	c.Cleared = nil
	if text := c.text(); strings.Contains(text, "xid") || !strings.Contains(text, "lost") {
		t.Error(text)
	}
	if text := (ClearResponse{}).text(); text == "" || strings.Contains(text, "\n") {
		t.Errorf("no findings: %q", text)
	}
}

func TestCallWithoutAgent(t *testing.T) {
	socket := filepath.Join(agenttest.SocketDir(t), "agent.sock")
	if _, err := call[ClearResponse](t.Context(), socket, request{Clear: &ClearRequest{}}); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "health.socket") || !strings.Contains(err.Error(), socket) {
		t.Errorf("%v", err)
	}
}

func TestDetachAndAttachResponseTexts(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	d := DetachResponse{Since: at, Until: at.Add(30 * time.Minute), UnaskedEngine: "node:5555", OpenFiles: []string{"/dev/nvidia0", "/dev/nvidiactl"}}
	agenttest.MustContain(t, d.text(), "2026-03-02T12:00:00Z", "2026-03-02T12:30:00Z", "node:5555")
	if err := d.err(); err == nil || !strings.Contains(err.Error(), "/dev/nvidia0, /dev/nvidiactl") {
		t.Error(err)
	}
	closed := d
	if closed.OpenFiles = nil; closed.text() == d.text() {
		t.Errorf("the text does not show whether files are open: %s", d.text())
	}
	d = DetachResponse{OpenFilesErr: "open /proc/self/fd: no such file or directory"}
	if err := d.err(); err == nil || !strings.Contains(err.Error(), d.OpenFilesErr) {
		t.Error(err)
	}
	a := AttachResponse{Source: "down", Error: "no driver"}
	if err := a.err(); err == nil || !strings.Contains(err.Error(), "down: no driver") || a.text() != "" {
		t.Errorf("%v; %s", err, a.text())
	}
	gpu := agenttest.Lost(agenttest.GPU(3), at)
	gpu.Verdict.Findings[0].Cause, gpu.Verdict.Findings[0].Clears = "xid-95", health.ClearsGPUReset
	gone := agenttest.Lost(agenttest.GPU(5), at)
	gone.Verdict.Findings[0].Cause, gone.Verdict.Findings[0].Clears = health.CauseMissing, health.ClearsItself
	a = AttachResponse{Source: "up"}
	a.NeedsReset, a.Unhealthy = remainingFindings([]health.DeviceState{agenttest.GPU(0), gpu, agenttest.Hot(agenttest.GPU(4), at), gone})
	agenttest.MustContain(t, a.text(), "GPU 3", "gpu-node-agent clear --gpu GPU-3 --cause xid-95", "GPU 5", "missing")
	if a.err() != nil || len(a.NeedsReset) != 1 || len(a.Unhealthy) != 1 {
		t.Errorf("%+v, %+v, %v", a.NeedsReset, a.Unhealthy, a.err())
	}
}
