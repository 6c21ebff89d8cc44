package operator

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func TestDetachDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 30 * time.Minute, "1s": time.Second, "2h": 2 * time.Hour, "24h": 24 * time.Hour} {
		if got, err := (Detach{For: text}).duration(); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"30", "0s", "-1m", "25h", "soon", "999ms"} {
		if _, err := (Detach{For: text}).duration(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("for: %q is not a time of 1s to 24h", text)) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestHeldError(t *testing.T) {
	node, held := agenttest.Node(), agenttest.Holders()
	free := plugin.Holders{At: agenttest.Now(), By: map[health.DeviceID][]plugin.Holder{}}
	for name, c := range map[string]struct {
		snapshot *health.Snapshot
		holders  plugin.Holders
		want     []string // of the error, none if there is to be none
	}{
		"nothing is known":         {nil, plugin.Holders{Err: "the kubelet has not been asked yet"}, nil},
		"no devices":               {&health.Snapshot{}, plugin.Holders{Err: "the kubelet has not been asked yet"}, nil},
		"free":                     {node, free, nil},
		"nobody was asked":         {node, plugin.Holders{Err: "the kubelet has not been asked yet"}, []string{"not known: the kubelet has not been asked yet", "--force"}},
		"the kubelet is away":      {node, plugin.Holders{At: agenttest.Now(), By: free.By, Err: "no kubelet"}, []string{"not known: no kubelet", "--force"}},
		"nothing new was said":     {node, plugin.Holders{At: agenttest.Ago(time.Minute), By: free.By}, []string{"said nothing for 1m0s", "--force"}},
		"a GPU and a part of one ": {node, held, []string{"GPU 0 (GPU-0) is held by training/llm-0 (torch) ×2, web/chat-1 (vllm); ", "MIG device 2:1 1g.10gb (MIG-2-8) is held by nb/ada (main); ", "--force"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := heldError(c.snapshot, c.holders, agenttest.Now())
			if (err != nil) != (len(c.want) > 0) {
				t.Fatalf("%v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: no %q", err, w)
				}
			}
		})
	}
}

// agent is a Server on simulated GPUs, with the components that it needs.
type agent struct {
	Server
	simSocket string
}

// startAgent starts an agent and waits until its source is up.
func startAgent(t *testing.T) *agent {
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
	a := &agent{Server{Config: new(health.Latest[health.Config]), Snapshots: new(health.Latest[health.Snapshot]), Log: log}, simConfig.Control}
	a.Config.Store(&c)
	a.Monitor = monitor.New(a.Config, &sources, a.Snapshots, log)
	keeper := statefile.New(a.Config, a.Snapshots, "", log)
	a.AwaitSaved = keeper.WaitWritten
	a.Holders = func() plugin.Holders { return plugin.Holders{Err: "no kubelet"} }
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
func (a *agent) await(t *testing.T, want health.SourceStatus) *health.Snapshot {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		s, changed := a.Snapshots.Watch()
		if s != nil && s.Source.Status == want {
			return s
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("the source is not %v: %+v", want, s)
		}
	}
}

// send sends a request as soon as the socket exists.
func send[T any](t *testing.T, a *agent, q question) (T, error) {
	t.Helper()
	socket := a.Config.Load().Socket
	var answer T
	var refusal error
	agenttest.Eventually(t, "an answer on "+socket, func() error {
		answer, refusal = ask[T](t.Context(), socket, q)
		if refusal != nil && (strings.Contains(refusal.Error(), "no such file") || strings.Contains(refusal.Error(), "connection refused")) {
			return refusal
		}
		return nil
	})
	return answer, refusal
}

// The whole way over the socket, with what is shown meanwhile.
func TestOperatorDetaches(t *testing.T) {
	t.Parallel()
	a := startAgent(t)
	if _, err := send[Detached](t, a, question{Detach: &Detach{}}); err == nil || !strings.Contains(err.Error(), "whether pods hold GPUs is not known") {
		t.Errorf("with no kubelet: %v", err)
	}
	if _, err := send[Detached](t, a, question{Detach: &Detach{For: "1y", Force: true}}); err == nil || !strings.Contains(err.Error(), `"1y"`) {
		t.Errorf("for a year: %v", err)
	}
	if a.Snapshots.Load().Source.Status != health.SourceUp {
		t.Fatal("a refusal has detached")
	}
	first, err := send[Detached](t, a, question{Detach: &Detach{For: "1h", Force: true}})
	if err != nil || first.Already || first.Engine != "" || len(first.Open) != 0 || first.Unknown != "" || first.Until.Before(first.Since) {
		t.Fatalf("%+v, %v", first, err)
	}
	if first.err() != nil || !strings.Contains(first.text(), "the agent has no file of it open") {
		t.Errorf("%s, %v", first.text(), first.err())
	}
	for _, d := range a.await(t, health.SourceDetached).Devices {
		if d.Verdict.State != health.Unhealthy || d.Verdict.Cause() != health.CauseReleased {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}

	second, err := send[Detached](t, a, question{Detach: &Detach{}}) // not even the kubelet is asked: it is so
	if err != nil || !second.Already || !second.Since.Equal(first.Since) || !second.Until.Before(first.Until) || !strings.Contains(second.text(), "already, since") {
		t.Errorf("%+v, %v", second, err)
	}
	back, err := send[Attached](t, a, question{Attach: &Attach{}})
	if err != nil || back.Already || back.Source != "up" || len(back.Standing) != 0 || back.err() != nil || back.text() != "the driver is back, and the GPUs are measured" {
		t.Errorf("%+v, %v", back, err)
	}
	for _, d := range a.await(t, health.SourceUp).Devices {
		if d.Verdict.State != health.Healthy {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}
	if back, err = send[Attached](t, a, question{Attach: &Attach{}}); err != nil || !back.Already || !strings.Contains(back.text(), "was not let go of") {
		t.Errorf("a second attach: %+v, %v", back, err)
	}
}

// What an operator clears, and what stands all the same.
func TestOperatorClears(t *testing.T) {
	t.Parallel()
	a := startAgent(t)
	sendEvent := func(text string) {
		t.Helper()
		e, err := sim.ParseEvent(text)
		if err != nil {
			t.Fatal(err)
		}
		agenttest.Eventually(t, "an answer of the simulation", func() error {
			_, err := sim.Send(t.Context(), a.simSocket, e)
			return err
		})
	}
	var gpu health.DeviceID
	stands := func(want string) {
		t.Helper()
		agenttest.Eventually(t, want, func() error {
			d := a.Snapshots.Load().Devices[3]
			gpu = d.Device.ID
			if got := strings.Join(causesOf(d.Verdict), " "); got != want {
				return fmt.Errorf("%s stands, want %s", got, want)
			}
			return nil
		})
	}
	clear := func(cause string) (Cleared, error) {
		t.Helper()
		return send[Cleared](t, a, question{Clear: &Clear{gpu, cause}})
	}
	stands("")
	if c, err := clear(""); err != nil || c.text() != "cleared nothing: no findings stand" {
		t.Errorf("a healthy GPU: %s, %v", c.text(), err)
	}
	sendEvent(`{gpu: 3, xid: 48, lost: true}`)
	stands("xid-48 lost")
	seq := a.Snapshots.Load().Seq
	if c, err := clear(""); err != nil || c.text() != "cleared xid-48\nlost stands: the GPU is lost: the driver cannot reach it any more; drain and reboot the node" {
		t.Errorf("a lost GPU: %s, %v", c.text(), err)
	}
	if s := a.Snapshots.Load(); s.Seq <= seq || s.Devices[3].Verdict.State != health.Unhealthy {
		t.Errorf("%+v", s.Devices[3].Verdict)
	}
	if c, err := clear("lost"); err == nil || !strings.Contains(err.Error(), `cause "lost" of `+string(gpu)+" stands as it was just measured, and cannot be cleared: the GPU is lost") {
		t.Errorf("a lost GPU: %s, %v", c.text(), err)
	}
	sendEvent(`{gpu: 3, lost: false}`)
	stands("")
	h := *a.Config.Load()
	h.Cordon = []string{"3"}
	a.Config.Store(&h)
	stands("cordoned")
	want := "cleared nothing: what stands ends with its reason only\ncordoned stands: cordoned by \"3\" in health.cordon; " + health.ActionUncordon.Advice()
	if c, err := clear(""); err != nil || c.text() != want {
		t.Errorf("a cordoned GPU: %s, %v", c.text(), err)
	}
}

func causesOf(v health.Verdict) []string {
	var all []string
	for _, f := range v.Findings {
		all = append(all, f.Cause)
	}
	return all
}

func TestClearedText(t *testing.T) {
	c := Cleared{[]string{"xid-48", "xid-95"}, []status.Finding{{Cause: "lost", Reason: "it is gone", Advice: "reboot", From: "GPU-1"}}}
	if got, want := c.text(), "cleared xid-48, xid-95\nlost stands: it is gone; reboot (it is of GPU-1)"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Whoever finds nobody on the socket is told what to look at.
func TestAskNobody(t *testing.T) {
	none := filepath.Join(agenttest.SocketDir(t), "agent.sock")
	if _, err := ask[Cleared](t.Context(), none, question{Clear: &Clear{}}); err == nil ||
		!strings.Contains(err.Error(), "no agent listens there (is it running, and is that its health.socket?)") || !strings.Contains(err.Error(), none) {
		t.Errorf("%v", err)
	}
}

// Whoever asks is told what the agent could not do, and what to do about that.
func TestDriverTexts(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	d := Detached{Since: at, Until: at.Add(30 * time.Minute), Engine: "node:5555", Open: []string{"/dev/nvidia0", "/dev/nvidiactl"}}
	agenttest.MustContain(t, d.text(), "since 2026-03-02T12:00:00Z", "at 2026-03-02T12:30:00Z", "the host engine at node:5555 was not asked")
	if err := d.err(); err == nil || !strings.Contains(err.Error(), "still has /dev/nvidia0, /dev/nvidiactl open") || strings.Contains(d.text(), "no file") {
		t.Errorf("%v; %s", err, d.text())
	}
	d = Detached{Unknown: "open /proc/self/fd: no such file or directory"}
	if err := d.err(); err == nil || !strings.Contains(err.Error(), "not known") || strings.Contains(d.text(), "no file") {
		t.Errorf("%v; %s", err, d.text())
	}
	a := Attached{Source: "down", Error: "no driver"}
	if err := a.err(); err == nil || !strings.Contains(err.Error(), "the source is down: no driver") || a.text() != "" {
		t.Errorf("%v; %s", err, a.text())
	}
	gpu := agenttest.Lost(agenttest.GPU(3), at)
	gpu.Verdict.Findings[0].Cause, gpu.Verdict.Findings[0].Clears = "xid-95", health.ClearsGPUReset
	gone := agenttest.Lost(agenttest.GPU(5), at)
	gone.Verdict.Findings[0].Cause, gone.Verdict.Findings[0].Clears = health.CauseMissing, health.ClearsItself
	a = Attached{Source: "up"}
	a.Standing, a.Broken = standing([]health.DeviceState{agenttest.GPU(0), gpu, agenttest.Hot(agenttest.GPU(4), at), gone})
	agenttest.MustContain(t, a.text(), "GPU 3 still has xid-95", "gpu-node-agent clear --gpu GPU-3 --cause xid-95", "GPU 5 is unhealthy: missing; see")
	if a.err() != nil || len(a.Standing) != 1 || len(a.Broken) != 1 {
		t.Errorf("%+v, %+v, %v", a.Standing, a.Broken, a.err())
	}
}
