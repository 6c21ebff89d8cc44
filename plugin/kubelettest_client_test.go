package plugin_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const resource = "nvidia.com/gpu"

// TestClient tests *kubelettest.Client, by which other programs than the kubelet call a plugin.
func TestClient(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "gna") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	k, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	var mu sync.Mutex // guards received
	received := map[int][]kubelettest.Device{}
	k.OnDevices(func(name string, registration int, devices []kubelettest.Device) {
		mu.Lock()
		defer mu.Unlock()
		if name == resource {
			received[registration] = devices
		}
	})

	cfg := plugin.DefaultConfig()
	cfg.KubeletDir = dir
	var (
		config    health.Latest[plugin.Config]
		snapshots health.Latest[health.Snapshot]
	)
	config.Store(&cfg)
	snap := func(second health.State) *health.Snapshot {
		s := &health.Snapshot{At: time.Now(), Source: health.Source{Status: health.SourceUp}}
		for i, id := range []health.DeviceID{"GPU-a", "GPU-b"} {
			s.Devices = append(s.Devices, health.DeviceState{
				Device: health.Device{ID: id, Index: i}, Verdict: health.Verdict{State: []health.State{health.Healthy, second}[i]},
			})
		}
		return s
	}
	snapshots.Store(snap(health.Healthy))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var running sync.WaitGroup
	running.Go(func() { _ = plugin.New(&config, &snapshots, zap.NewNop()).Run(ctx) })
	defer running.Wait()
	defer cancel()
	state, err := k.WaitFor(ctx, func(s kubelettest.State) bool { return s.Resources[resource].Allocatable() == 2 })
	if err != nil {
		t.Fatal(err)
	}

	c, err := kubelettest.Dial(filepath.Join(dir, "device-plugins", state.Resources[resource].Endpoint))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.WatchWithoutReading(ctx); err != nil {
		t.Error(err)
	}
	if ids, err := c.PreferredAllocation(ctx, []string{"GPU-b", "GPU-a"}, 2); err != nil || len(ids) != 2 {
		t.Errorf("Prefer: %v, %v", ids, err)
	}
	if resp, err := c.Allocate(ctx, "GPU-b"); err != nil || resp.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] != "GPU-b" {
		t.Errorf("Allocate: %v, %v", resp, err)
	}
	if _, err := c.Allocate(ctx, "GPU-c"); err == nil {
		t.Error("allocated an unknown GPU")
	}
	var healthy []int
	err = c.Devices(ctx, func(devices []kubelettest.Device) bool {
		n := 0
		for _, d := range devices {
			if d.Healthy {
				n++
			}
		}
		healthy = append(healthy, n)
		if len(healthy) == 1 {
			snapshots.Store(snap(health.Unhealthy))
		}
		return len(healthy) < 2
	})
	if err != nil || !slices.Equal(healthy, []int{2, 1}) {
		t.Errorf("lists with %v healthy, %v; want 2, then 1", healthy, err)
	}
	if _, err := k.WaitFor(ctx, func(s kubelettest.State) bool { return s.Resources[resource].Allocatable() == 1 }); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if list := received[1]; len(received) != 1 || len(list) != 2 || list[1].Healthy {
		t.Errorf("received %v; want the last list on the first registration", received)
	}
}
