package operator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestDetachDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 30 * time.Minute, "1s": time.Second, "2h": 2 * time.Hour, "24h": 24 * time.Hour} {
		if got, err := (DetachRequest{For: text}).duration(); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"30", "0s", "-1m", "25h", "soon", "999ms"} {
		if _, err := (DetachRequest{For: text}).duration(); err == nil || !strings.HasPrefix(err.Error(), "for: ") ||
			!strings.Contains(err.Error(), strconv.Quote(text)) {
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
		"no snapshot": {nil, podresources.Holders{Err: "not asked"}, nil, nil},
		"no devices":  {&health.Snapshot{}, podresources.Holders{Err: "not asked"}, nil, nil},
		"not held":    {node, free, nil, nil},
		"not asked":   {node, podresources.Holders{Err: "not asked"}, errHoldersUnknown, []string{"not asked", "--force"}},
		"kubelet down": {
			node,
			podresources.Holders{At: agenttest.Now(), By: free.By, Err: "no kubelet"},
			errHoldersUnknown,
			[]string{"no kubelet", "--force"},
		},
		"settling": {
			node,
			podresources.Holders{At: agenttest.Now(), By: free.By, Settling: true},
			errHoldersUnknown,
			[]string{"all its pods", "--force"},
		},
		"old response": {node, podresources.Holders{At: agenttest.Ago(time.Minute), By: free.By}, errHoldersUnknown, []string{"60s", "--force"}},
		"GPU and MIG device": {node, held, errHeld, []string{
			"GPU 0 (GPU-0): it is held by training/llm-0 (torch) ×2, web/chat-1 (vllm); ",
			"MIG device 2:1 1g.10gb (MIG-2-8): it is held by nb/ada (main); ", "--force",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkNotHeld(c.snapshot, offer.Facts{Now: agenttest.Now(), Holders: c.holders})
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

// newServer returns a server whose monitor does not run.
func newServer(c judge.Config, log *zap.Logger) *Server {
	s := &Server{Config: new(health.Latest[judge.Config]), Snapshots: new(health.Latest[health.Snapshot]), Log: log}
	s.Config.Store(&c)
	s.Monitor = monitor.New(s.Config, new(health.Latest[monitor.Source]), s.Snapshots, log)
	s.Ask = func(context.Context, time.Duration) offer.Facts {
		return offer.Facts{Now: time.Now(), Holders: podresources.Holders{Err: "no kubelet"}}
	}
	s.AwaitSaved = func(context.Context, *health.Snapshot) error { return nil }
	s.EngineAddress = func() string { return "" }
	s.MPS, s.Processes = &fakeMPS{}, func() *processes.Snapshot { return nil }
	return s
}

// startServer runs a server, its monitor and its state directory with simulated GPUs, and waits until the source is up.
func startServer(t *testing.T) *Server {
	t.Helper()
	dir := agenttest.SocketDir(t)
	log := zaptest.NewLogger(t)
	c := judge.DefaultConfig()
	c.Socket = filepath.Join(dir, "agent.sock")
	source, err := sim.New(sim.DefaultConfig(), log)
	if err != nil {
		t.Fatal(err)
	}
	var sources health.Latest[monitor.Source]
	sources.Store(&monitor.Source{
		SourceID: health.SourceID{Kind: "sim", Inventory: "sim", Simulated: true}, StallAfter: 10 * time.Second,
		Open: source.Open,
	})
	s := newServer(c, log)
	s.Monitor = monitor.New(s.Config, &sources, s.Snapshots, log)
	var entries health.Latest[health.IndexEntries]
	entries.Store(&health.IndexEntries{Refs: []health.IndexRef{{Key: judge.KeyCordon, Entry: "3"}}, Final: true})
	s.Monitor.SetIndexEntries(&entries)
	state := statefile.New(filepath.Join(dir, "state"), s.Snapshots, new(health.Latest[[]byte]), "", log)
	s.AwaitSaved = state.WaitWritten
	ctx, cancel := context.WithCancel(t.Context())
	var components sync.WaitGroup
	for _, run := range []func(context.Context) error{source.Run, s.Monitor.Run, state.Run, s.Run} {
		components.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { cancel(); components.Wait() })
	awaitSource(t, s, health.SourceUp)
	return s
}

// awaitSource waits until the source has a status, and returns the devices.
func awaitSource(t *testing.T, s *Server, want health.SourceStatus) []health.DeviceState {
	t.Helper()
	agenttest.Eventually(t, "source "+want.String(), func() error {
		if now := s.Snapshots.Load(); now == nil || now.Source.Status != want {
			return fmt.Errorf("snapshot %+v", now)
		}
		return nil
	})
	return s.Snapshots.Load().Devices
}

// send sends a request as soon as the socket exists.
func send[T any](t *testing.T, s *Server, route string, body any) (res T, err error) {
	t.Helper()
	socket := s.Config.Load().Socket
	agenttest.Eventually(t, "a response on "+socket, func() error {
		if res, err = call[T](t.Context(), socket, route, body); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		return nil
	})
	return res, err
}

// refusal is an error of the server: a status code and a part of the text.
func refusal(code int, part string) error { return unixsock.WithStatus(code, errors.New(part)) }

// wantRefusal compares an error with a refusal. An error without a code is reported with 500.
func wantRefusal(t *testing.T, what string, err, want error) {
	t.Helper()
	wanted, _ := errors.AsType[*unixsock.StatusError](want)
	code := http.StatusInternalServerError
	if got, ok := errors.AsType[*unixsock.StatusError](err); ok {
		code = got.Code
	}
	if err == nil || code != wanted.Code || !strings.Contains(err.Error(), want.Error()) {
		t.Errorf("%s: code %d, %v; want %d, %v", what, code, err, wanted.Code, want)
	}
}

// What the agent does not know now may be known later.
func TestUnknownSlicesAndLabels(t *testing.T) {
	s := newServer(judge.DefaultConfig(), zaptest.NewLogger(t))
	s.Slices = func(context.Context) (dra.PublishedSlices, error) { return dra.PublishedSlices{}, errNone }
	s.Labels = func(context.Context) (node.Labels, error) { return node.Labels{}, errNone }
	for _, route := range []string{slicesRoute, labelsRoute} {
		_, err := s.routes()[route](t.Context(), nil)
		wantRefusal(t, route, err, refusal(http.StatusServiceUnavailable, errNone.Error()))
	}
}

func TestDetachAndAttach(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	_, err := send[DetachResponse](t, s, detachRoute, nil)
	wantRefusal(t, "without a kubelet", err, refusal(http.StatusConflict, errHoldersUnknown.Error()))
	_, err = send[DetachResponse](t, s, detachRoute, DetachRequest{For: "1y", Force: true})
	wantRefusal(t, "for a year", err, refusal(http.StatusBadRequest, `"1y"`))
	if s.Snapshots.Load().Source.Status != health.SourceUp {
		t.Fatal("detached by a refused request")
	}
	first, err := send[DetachResponse](t, s, detachRoute, DetachRequest{For: "1h", Force: true})
	if err != nil || first.Already || first.UnaskedEngine != "" || len(first.OpenFiles) != 0 || first.err() != nil ||
		first.Until.Before(first.Since) {
		t.Fatalf("%+v, %v", first, err)
	}
	for _, d := range awaitSource(t, s, health.SourceDetached) {
		if d.Verdict.State != health.Unhealthy || d.Verdict.Cause() != health.CauseReleased {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}

	second, err := send[DetachResponse](t, s, detachRoute, DetachRequest{}) // succeeds without holders: the devices are withheld already
	if err != nil || !second.Already || !second.Since.Equal(first.Since) || !second.Until.Before(first.Until) {
		t.Errorf("%+v, %v", second, err)
	}
	back, err := send[AttachResponse](t, s, attachRoute, nil)
	if err != nil || back.Already || back.Source != "up" || len(back.NeedsReset) != 0 || back.err() != nil {
		t.Errorf("%+v, %v", back, err)
	}
	for _, d := range awaitSource(t, s, health.SourceUp) {
		if d.Verdict.State != health.Healthy {
			t.Errorf("%s is %+v", d.Device.ID, d.Verdict)
		}
	}
	if back, err = send[AttachResponse](t, s, attachRoute, nil); err != nil || !back.Already {
		t.Errorf("a second attach: %+v, %v", back, err)
	}
}

func TestDetachAndAttachResponseTexts(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	d := DetachResponse{
		Since: at, Until: at.Add(30 * time.Minute), UnaskedEngine: "node:5555",
		OpenFiles: []string{"/dev/nvidia0", "/dev/nvidiactl"},
	}
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
