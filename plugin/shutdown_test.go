package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestOnStop(t *testing.T) {
	for _, c := range []struct {
		onStop             string
		capacity, messages int
	}{{"", 2, 1}, {OnStopKeep, 2, 1}, {OnStopWithdraw, 0, 2}} {
		t.Run(c.onStop, func(t *testing.T) {
			t.Parallel()
			h, k := startHarness(t, snapshot(2), func(cfg *Config) { cfg.OnStop = c.onStop })
			h.stop()
			res := h.waitResource(k, gpu, disconnected)
			if res.Capacity() != c.capacity || res.Allocatable() != 0 || res.Messages != c.messages {
				t.Errorf("the kubelet has %+v", res)
			}
		})
	}
}

// Run returns only when nothing reads the kubelet's pod resources any more.
func TestStopAwaitsPodResources(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	reads, resume := make(chan struct{}), make(chan struct{})
	begun := sync.OnceFunc(func() { close(reads) })
	h.p.SetClaims(func(string, string, podresources.ClaimRef) (device health.DeviceID, admin, ok bool) {
		begun()
		<-resume
		return "", false, false
	}, &health.Latest[offer.Claims]{})
	h.kubelet().HoldClaim(kubelettest.HeldClaim{
		Container: kubelettest.Container{Namespace: "ml", Pod: "one", Name: "main"}, Claim: "train", Driver: DefaultDRADriver, Pool: "node",
		Devices: []kubelettest.HeldDevice{{Name: "gpu-1"}},
	})
	h.run()
	<-reads
	ended := make(chan struct{})
	go func() {
		h.stop()
		close(ended)
	}()
	select {
	case <-ended:
		t.Error("Run returned during a read")
	case <-time.After(shortTimeout):
	}
	close(resume)
	<-ended
}

// The kubelet loses the devices of a removed resource at once, not after its grace period.
func TestRemovedResourceIsWithdrawn(t *testing.T) {
	for name, remove := range map[string]func(*harness){
		"no GPUs":        func(h *harness) { h.snaps.Store(snapshot(0)) },
		"other resource": func(h *harness) { h.setConfig(func(c *Config) { c.Resource = "example.com/gpu" }) },
		"disabled":       func(h *harness) { h.setConfig(func(c *Config) { c.Enabled = false }) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 10 { // each with another order of concurrent events
				h, k := startHarness(t, snapshot(2))
				socket := h.socket()
				remove(h)
				if res := h.waitResource(k, gpu, disconnected); res.Capacity() != 0 || res.Messages != 2 {
					t.Errorf("the kubelet has %+v", res)
				}
				if _, err := os.Lstat(socket); err == nil {
					t.Errorf("%s still exists", socket)
				}
				h.stop()
			}
		})
	}
}

// A client that does not read delays neither other clients nor the end of the plugin.
func TestStopDoesNotWaitForSlowReader(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(300))
	h.p.timing.withdrawTimeout = shortTimeout
	k := h.register(func(c *Config) { c.OnStop = OnStopWithdraw })
	client, err := kubelettest.Dial(h.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.WatchWithoutReading(h.ctx); err != nil {
		t.Fatal(err)
	}
	h.waitStatus(func(s ResourceStatus) bool { return s.Streams == 2 })
	// More than the 64 KiB that gRPC buffers for a reader, even if the stream skips some lists.
	for i := range 40 {
		h.setHealth(0, []health.State{health.Unhealthy, health.Healthy}[i%2])
		h.waitResource(k, gpu, listed(300, 299+i%2))
	}
	start := time.Now()
	h.stop()
	if d := time.Since(start); d < h.p.timing.withdrawTimeout {
		t.Errorf("ended after %v: the reader was not blocked", d)
	}
	if res := h.waitResource(k, gpu, disconnected); res.Capacity() != 0 {
		t.Errorf("the kubelet did not get the empty list: %+v", res)
	}
}

// The last measurement serves a new kubelet while the source is down.
func TestKubeletRestartWhileSourceIsDown(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, with(snapshot(4), 1, health.Unhealthy))
		down := *h.snaps.Load()
		down.Seq++
		down.Source = health.Source{Status: health.SourceDown, Err: "connection refused"}
		h.snaps.Store(&down)
		h.restart(k)
		h.waitResource(k, gpu, listed(4, 3))
		h.waitStatus(isRegistered)
		if _, err := k.Allocate(h.ctx, gpu, 2); err != nil {
			t.Error(err)
		}
		h.stop()
	})
}

func TestRegistrarFollowsReplacedDirectory(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(2))
		for range 3 {
			k.Stop()
			h.remove(h.pluginDir())
			h.remove(filepath.Join(h.root, "pod-resources"))
			h.waitStatus(unregisteredFor("plugin.kubeletDir"))
			h.restart(k)
			h.waitResource(k, gpu, listed(2, 2))
			h.waitStatus(isRegistered)
		}
		h.waitHolders(holdersKnown)
	})
}

// Dynamic resource allocation that has yet to say whether it serves the devices is no reason for a warning.
func TestStartupLogLevelOfDRA(t *testing.T) {
	h := newHarness(t, snapshot(2))
	var dra health.Latest[Handover]
	h.p.SetDRAReleased(&dra)
	h.kubelet()
	h.run()
	h.waitLog(msgNothing, "about to learn", 1)
	dra.Store(&Handover{Reason: "claim ml/c"})
	h.waitLog(msgNothing, "claim ml/c", 1)
	if n := h.logs.FilterLevelExact(zap.WarnLevel).FilterMessage(msgNothing).Len(); n != 1 {
		t.Errorf("%d warnings: %v", n, h.logLines())
	}
}

// A starting source is logged as information, a failing one as a warning.
func TestStartupLogLevel(t *testing.T) {
	starting := snapshot(0)
	starting.At, starting.Source = time.Time{}, health.Source{Status: health.SourceStarting, Err: "opening"}
	h := newHarness(t, nil)
	h.kubelet()
	h.run()
	h.waitLog(msgNothing, "", 1)
	h.snaps.Store(starting)
	h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, "opening") })
	failing := *starting
	failing.Source = health.Source{Status: health.SourceStalled, Err: "open has not returned for 10s"}
	h.snaps.Store(&failing)
	h.waitLog(msgNothing, failing.Source.Err, 1)
	if n := h.logs.FilterLevelExact(zap.WarnLevel).FilterMessage(msgNothing).Len(); n != 1 {
		t.Errorf("%d warnings: %v", n, h.logLines())
	}
}
