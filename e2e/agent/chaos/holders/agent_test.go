package holders

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// agent is the agent of a release of the chart. A new one has not started.
type agent interface {
	start(v sequence.Values) error
	stop() error // SIGTERM
	kill() error // SIGKILL
	reload(v sequence.Values) error
	status() string // for a failure
}

// view is the kubelet's directory as a pod of a release sees it: with the mounts that the values give it.
type view struct {
	root    string // the kubelet's directory
	release int
}

// mount makes the view for values and returns the directories of the kubelet and of CDI specs in it.
func (v view) mount(values sequence.Values) (kubelet, cdi, state string, err error) {
	dir := filepath.Join(v.root, string(rune('a'+v.release)))
	if err := os.RemoveAll(dir); err != nil {
		return "", "", "", err
	}
	links := []string{"device-plugins", "pod-resources", "state"}
	cdi = filepath.Join(dir, "cdi")
	if values.DRA {
		links = append(links, "plugins_registry", filepath.Join("plugins", draDriver))
		cdi = filepath.Join(v.root, "cdi") // every release has it at this path, which the checkpoint names
		if err := os.MkdirAll(cdi, 0o750); err != nil {
			return "", "", "", err
		}
	}
	for _, name := range links {
		target, link := filepath.Join(v.root, name), filepath.Join(dir, name)
		if name == "state" && values.NoState {
			target = filepath.Join(v.root, "pod-state-"+string(rune('a'+v.release)))
			if err := os.RemoveAll(target); err != nil {
				return "", "", "", err
			}
		}
		for _, d := range []string{target, filepath.Dir(link)} {
			if err := os.MkdirAll(d, 0o750); err != nil {
				return "", "", "", err
			}
		}
		if err := os.Symlink(target, link); err != nil {
			return "", "", "", err
		}
	}
	return dir, cdi, filepath.Join(dir, "state"), nil
}

// pluginConfig returns the section plugin of values.
func pluginConfig(v sequence.Values, kubelet, cdi string) plugin.Config {
	c := plugin.DefaultConfig()
	c.KubeletDir, c.CDI.Dir = kubelet, cdi
	if v.DRA {
		c.API = plugin.APIDRA
	}
	if v.MIG != "" {
		c.MIGStrategy = v.MIG
	}
	if v.Resource != "" {
		c.Resource = v.Resource
	}
	switch v.Sharing {
	case sequence.TimeSlicing:
		c.Sharing.TimeSlicing.Resources = []plugin.SharedResource{{Name: c.Resource, Replicas: 2}}
	case sequence.Memory:
		c.Sharing.Memory.Resource, c.Sharing.Memory.Unit, c.Sharing.Memory.Enforcement = "nvidia.com/gpu-memory", "4Gi", plugin.EnforceNone
	case sequence.MPS:
		c.Sharing.MPS.Resources = []plugin.MPSResource{{Name: c.Resource, Replicas: 2}}
	}
	return c
}

// inProcess is the agent's packages below the process's surface: plugin, plugin/dra and podresources, with shortened intervals.
type inProcess struct {
	view
	faster    int
	snapshots *health.Latest[health.Snapshot]
	connect   func() (kubernetes.Interface, error)
	log       *zap.Logger

	cfg    *health.Latest[plugin.Config]
	plugin *plugin.Plugin
	dra    *dra.Driver
	lock   *nodelock.Lock
	cancel context.CancelFunc
	ended  *sync.WaitGroup
}

func (a *inProcess) start(v sequence.Values) error {
	kubelet, cdi, _, err := a.mount(v)
	if err != nil {
		return err
	}
	cfg := pluginConfig(v, kubelet, cdi)
	if err := cfg.Validate(); err != nil {
		return err
	}
	a.cfg = &health.Latest[plugin.Config]{}
	a.cfg.Store(&cfg)
	log := a.log.With(zap.String("agent", string(rune('a'+a.release))))
	a.lock = nodelock.New(nodelock.Self(), log.Named("lock")).Faster(a.faster)
	a.plugin = plugin.NewFaster(a.faster, a.cfg, a.snapshots, log.Named("plugin"))
	a.dra = dra.New(dra.Options{
		Config: a.cfg, Snapshots: a.snapshots, Node: nodeName, BootID: "boot", Connect: a.connect, PluginReleased: a.plugin.PluginReleased(),
		Holders: a.plugin.LatestHolders(),
		Ask:     a.plugin.AskHolders, NoPlugin: func() bool { return false },
		MPS: a.plugin.MPS(), Lock: a.lock, Simulated: func() bool { return true }, Faster: a.faster, Log: log.Named("dra"),
		Properties: &health.Latest[health.KnownProperties]{},
	})
	a.dra.Properties.Store(&health.KnownProperties{})
	a.plugin.SetLock(a.lock)
	a.plugin.SetDRAReleased(a.dra.DRAReleased())
	a.plugin.SetClaims(a.dra.ClaimDevice, a.dra.Prepared())
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel, a.ended = cancel, &sync.WaitGroup{}
	a.ended.Go(func() { _ = a.lock.Run(ctx) })
	a.ended.Go(func() { _ = a.plugin.Run(ctx) })
	a.ended.Go(func() { _ = a.dra.Run(ctx) })
	return nil
}

func (a *inProcess) stop() error {
	a.cancel()
	a.ended.Wait()
	a.lock.Close()
	return nil
}

// kill ends the agent and puts back the sockets that it has removed, as a killed process leaves them.
func (a *inProcess) kill() error {
	sockets := a.sockets()
	err := a.stop()
	for path, kept := range sockets {
		if _, statErr := os.Lstat(path); statErr != nil {
			if linkErr := os.Link(kept, path); linkErr != nil && !os.IsNotExist(linkErr) {
				err = linkErr
			}
		}
		_ = os.Remove(kept)
	}
	return err
}

// sockets keeps the sockets of agents under other names; it returns these by path.
func (a *inProcess) sockets() map[string]string {
	all := make(map[string]string)
	for i, pattern := range []string{"device-plugins/gpu-node-agent*", "plugins_registry/*", "plugins/" + draDriver + "/*.sock"} {
		files, _ := filepath.Glob(filepath.Join(a.root, pattern))
		for j, path := range files {
			if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
				continue
			}
			kept := filepath.Join(a.root, fmt.Sprintf("kept-%d-%d-%d", a.release, i, j))
			if os.Link(path, kept) == nil {
				all[path] = kept
			}
		}
	}
	return all
}

func (a *inProcess) reload(v sequence.Values) error {
	last := a.cfg.Load()
	cfg := pluginConfig(v, last.KubeletDir, last.CDI.Dir)
	if err := cfg.Validate(); err != nil {
		return err
	}
	a.cfg.Store(&cfg)
	return nil
}

func (a *inProcess) status() string {
	return fmt.Sprintf("plugin %+v, dra %+v", a.plugin.Status(), a.dra.Status())
}

// gpus returns a snapshot of simulated devices: three GPUs, and one in MIG mode with two MIG devices.
func gpus() *health.Snapshot {
	return &health.Snapshot{
		Seq: 1, At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: healthtest.NodeDevices(),
	}
}
