package dra

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sessionRig runs a session without sockets, under synctest.
type sessionRig struct {
	*publishRig
	session   *session
	config    health.Latest[plugin.Config]
	snapshots health.Latest[health.Snapshot]
	write     func() error // replaces the write of the checkpoint, until it returns nil
}

func newSessionRig(t *testing.T) *sessionRig {
	g := &sessionRig{publishRig: newPublishRig(t, apiservertest.New(t, publishNode))}
	cfg := plugin.DefaultConfig()
	cfg.API, cfg.KubeletDir, cfg.CDI.Dir = plugin.APIDRA, t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(cfg.KubeletDir, "plugins_registry"), 0o700); err != nil {
		t.Fatal(err)
	}
	g.config.Store(&cfg)
	d := New(Options{
		Config: &g.config, Snapshots: &g.snapshots, Node: publishNode, Connect: g.api.Client, Released: &health.Latest[plugin.Handover]{},
		Holders: func() podresources.Holders { return podresources.Holders{} }, Simulated: func() bool { return true }, Log: zap.NewNop(),
		Properties: func(context.Context, []health.Device) map[health.DeviceID]*health.Properties { return nil },
	})
	write := d.preparer.disk.writeFile
	d.preparer.disk.writeFile = func(path string, text []byte) error {
		if g.write != nil {
			if err := g.write(); err != nil {
				return err
			}
		}
		return write(path, text)
	}
	i := configuredInstance(&cfg)
	if err := d.preparer.open(i.dataDir()); err != nil {
		t.Fatal(err)
	}
	s := &session{Driver: d, instance: i, properties: newProperties(d), sockets: newSockets(d, i, zap.NewNop()), publisher: g.publisher}
	g.session = s
	s.sockets.other.Store(new(""))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(ctx)
		s.stopPublishing()
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return g
}

// poll publishes a snapshot in which the devices are as test changes them.
func (g *sessionRig) poll(change func([]health.DeviceState) []health.DeviceState) {
	g.snapshots.Store(&health.Snapshot{
		At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: change(testDevices()[:3]), // without MIG
	})
	g.advance(5 * time.Second)
}

func breakGPU0(devices []health.DeviceState) []health.DeviceState {
	devices[0].Verdict = health.Verdict{State: health.Unhealthy, Findings: []health.Finding{{
		Cause: "xid-79", Since: time.Unix(1000, 0), State: health.Unhealthy,
	}}}
	return devices
}

// A disk that is full or that blocks keeps a new device from being published: its name could change. The taints of the others do not wait.
func TestSessionPublishesTaintsWithoutDisk(t *testing.T) {
	for name, disk := range map[string]func(end <-chan struct{}) error{
		"full":   func(<-chan struct{}) error { return errors.New("no space left on device") },
		"blocks": func(end <-chan struct{}) error { <-end; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newSessionRig(t)
				g.poll(func(d []health.DeviceState) []health.DeviceState { return d[:2] })
				g.wantDevices("gpu-0", "gpu-1")
				end := make(chan struct{})
				g.write = func() error { return disk(end) }
				g.poll(func(d []health.DeviceState) []health.DeviceState { return breakGPU0(d) })
				g.wantDevices("gpu-0!gpu-node-agent/xid-79", "gpu-1")
				var s Status
				g.session.report(&s)
				if !strings.Contains(s.Err, "checkpoint") {
					t.Errorf("error %q, want one that names the checkpoint", s.Err)
				}
				g.poll(func(d []health.DeviceState) []health.DeviceState { return d })
				g.wantDevices("gpu-0", "gpu-1")
				g.write = nil
				close(end)
				g.poll(breakGPU0)
				g.wantDevices("gpu-0!gpu-node-agent/xid-79", "gpu-1", "gpu-2")
				if g.session.report(&s); strings.Contains(s.Err, "checkpoint") {
					t.Errorf("error %q after the disk's recovery", s.Err)
				}
			})
		})
	}
}
