package plugin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func gone(r kubelettest.Resource) bool { return r.Name != "" && !r.Connected }

func TestOnStop(t *testing.T) {
	for _, c := range []struct {
		onStop             string
		capacity, messages int
	}{{"", 2, 1}, {OnStopKeep, 2, 1}, {OnStopWithdraw, 0, 2}} {
		t.Run(c.onStop, func(t *testing.T) {
			r := newRig(t, snapshot(2))
			cfg := *r.cfg.Load()
			cfg.OnStop = c.onStop
			r.cfg.Store(&cfg)
			k := r.kubelet()
			r.run()
			r.wait(k, gpu, listed(2, 2))
			r.status(isRegistered)
			r.stop()
			res := r.wait(k, gpu, gone)
			if res.Capacity() != c.capacity || res.Allocatable() != 0 || res.Messages != c.messages {
				t.Errorf("the kubelet has %+v", res)
			}
		})
	}
}

// A resource that is no more has no devices for the kubelet, at once and not after its grace time.
func TestRemovedResourceIsWithdrawn(t *testing.T) {
	for name, remove := range map[string]func(*rig){
		"no GPUs": func(r *rig) { r.snaps.Store(snapshot(0)) },
		"another name": func(r *rig) {
			cfg := *r.cfg.Load()
			cfg.Resource = "example.com/gpu"
			r.cfg.Store(&cfg)
		},
		"switched off": func(r *rig) { r.set(func(c *Config) { c.Enabled = false }) },
	} {
		t.Run(name, func(t *testing.T) {
			for range 10 { // each time another order of what happens at once
				r := newRig(t, snapshot(2))
				k := r.kubelet()
				r.run()
				r.wait(k, gpu, listed(2, 2))
				socket := r.socket()
				remove(r)
				if res := r.wait(k, gpu, gone); res.Capacity() != 0 || res.Messages != 2 {
					t.Errorf("the kubelet has %+v", res)
				}
				if _, err := os.Lstat(socket); err == nil {
					t.Errorf("%s is still there", socket)
				}
				r.stop()
			}
		})
	}
}

// A reader that does not read gets nothing and holds up nobody, not even the end.
func TestReaderThatDoesNotRead(t *testing.T) {
	r := newRig(t, snapshot(300))
	cfg := *r.cfg.Load()
	cfg.OnStop = OnStopWithdraw
	r.cfg.Store(&cfg)
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(300, 300))
	conn, err := dial(r.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // it is not needed any more
	if _, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(r.ctx, &pluginapi.Empty{}); err != nil {
		t.Fatal(err)
	}
	r.status(func(s ResourceStatus) bool { return s.Streams == 2 })
	// More than the 64 KiB that gRPC takes for a reader, even if it is sent only some of them.
	for i := range 40 {
		r.snaps.Store(with(r.snaps.Load(), 0, []health.State{health.Unhealthy, health.Healthy}[i%2]))
		r.wait(k, gpu, listed(300, 299+i%2))
	}
	start := time.Now()
	r.stop()
	if d := time.Since(start); d < r.p.timing.goodbye {
		t.Errorf("ended after %v: the reader was not stuck", d)
	}
	if res := r.wait(k, gpu, gone); res.Capacity() != 0 {
		t.Errorf("the kubelet that reads was not told: %+v", res)
	}
}

// What was measured last is enough for a new kubelet.
func TestKubeletRestartsWhileTheSourceIsDown(t *testing.T) {
	r := newRig(t, with(snapshot(4), 1, health.Unhealthy))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(4, 3))
	down := *r.snaps.Load()
	down.Seq++
	down.Source = health.Source{Status: health.SourceDown, Err: "the host engine is gone"}
	r.snaps.Store(&down)
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	r.wait(k, gpu, listed(4, 3))
	r.status(isRegistered)
	if _, err := k.Allocate(r.ctx, gpu, 2); err != nil {
		t.Error(err)
	}
	// And an agent that ends meanwhile ends.
	r.stop()
}

func TestDirectoryIsReplaced(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	for range 3 {
		r.wait(k, gpu, listed(2, 2))
		r.status(isRegistered)
		k.Stop()
		for _, dir := range []string{"device-plugins", "pod-resources"} {
			if err := os.RemoveAll(filepath.Join(r.root, dir)); err != nil {
				t.Fatal(err)
			}
		}
		r.status(func(s ResourceStatus) bool { return !s.Registered && strings.Contains(s.Err, "plugin.kubeletDir") })
		if err := k.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	r.wait(k, gpu, listed(2, 2))
	r.holders("asked again", func(h Holders) bool { return h.Err == "" })
}

// Having just started is nothing to warn of; not getting on is.
func TestQuietStart(t *testing.T) {
	starting := snapshot(0)
	starting.At, starting.Source = time.Time{}, health.Source{Status: health.SourceStarting}
	r := newRig(t, nil)
	r.kubelet()
	r.run()
	says := func(s Status) bool { return strings.Contains(s.Err, "not been seen yet") }
	r.whole(says)
	r.snaps.Store(starting)
	r.whole(says)
	down := *starting
	down.Source = health.Source{Status: health.SourceStalled, Err: "open has not returned for 10s"}
	r.snaps.Store(&down)
	r.logged("open has not returned for 10s")
	var warnings []string
	for _, e := range r.logs.FilterLevelExact(zap.WarnLevel).All() {
		if e.Message == "nothing to register with the kubelet" {
			warnings = append(warnings, e.Message)
		}
	}
	if len(warnings) != 1 {
		t.Errorf("%d warnings: %v", len(warnings), r.lines())
	}
}

// A link that has never listened stops as well.
func TestStopBeforeListening(t *testing.T) {
	srv := newTestServer(snapshot(1))
	r := newRig(t, nil)
	l := newLink(srv, Config{Enabled: true, Resource: gpu, KubeletDir: filepath.Join(r.root, "nowhere")}, quick(), r.p.pods, zap.NewNop())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l.run(ctx)
	l.stop(true)
}
