package agent

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// reloadInterval is how often the configuration files are read and compared. Unlike file events, that detects every way
// of changing a file, including a ConfigMap's replaced links. A changed file is loaded when two reads are equal, so that
// no half-written file is loaded.
const reloadInterval = time.Second

// reloadOn reloads at each signal and when a file changes, until ctx ends.
func (a *Agent) reloadOn(ctx context.Context, hup <-chan os.Signal) {
	tick := time.NewTicker(a.reloadInterval)
	defer tick.Stop()

	// The configuration stays bound to the file: its removal does not bring back the defaults.
	a.loader.File = a.loader.Path()
	a.loader.Running = true
	previous := a.fileSum()
	for {
		a.settle()
		select {
		case <-ctx.Done():
			return
		case <-hup:
			a.loader.File = a.loader.Path()
			a.loggedError.Clear() // respond to each signal, even if the error is the same
			a.reload("SIGHUP")
		case <-tick.C:
			storeChanged(&a.cleaned, kube.CleanedAt())
			current := a.fileSum()
			// Retry an invalid configuration even without a change: it may name a file that did not exist yet.
			if (current != a.loadedSum || !a.lastReload.Load().OK) && current == previous {
				a.loader.File = a.loader.Path()
				a.reload("file changed")
			}
			previous = current
		}
	}
}

// fileSum returns the sum of the current content of all configuration files.
func (a *Agent) fileSum() [sha256.Size]byte {
	return a.loader.Sum(*a.pluginConfig.Load(), *a.metricsConfig.Load())
}

// reject reports an invalid configuration once, and since when the one in force has been.
func (a *Agent) reject(err error, reason string, since time.Time) {
	if a.loggedError.ErrorChanged(err) {
		a.log.Error("invalid configuration; the last good one is in force", zap.String("reason", reason), zap.String("file", a.loader.Path()),
			zap.String("since", since.Format(time.RFC3339)), zap.Error(err)) // the console format omits dates
	}
	a.lastReload.Store(&view.Reload{OK: false, At: since, Err: err.Error()})
}

// reload loads the configuration and puts it in force. An invalid one changes nothing.
func (a *Agent) reload(reason string) {
	c, err := a.loader.Load()
	if err == nil {
		err = a.checkFixed(&c.Plugin)
	}
	if err == nil && a.settled {
		_, err = a.checkDevices(c)
	}
	if err != nil {
		a.reject(err, reason, a.lastReload.Load().At)
		return
	}
	a.loggedError.Clear()
	a.apply(c)
	a.logNotes(c)
	a.lastReload.Store(&view.Reload{OK: true, At: time.Now()})
	a.log.Info("configuration reloaded", zap.String("reason", reason), zap.String("file", a.loader.Path()))
}

// settle checks the configuration in force as soon as the devices of the node are known. If it fits them, it is saved as the last good one.
// Otherwise the last good one replaces it, if that fits the devices: a file that is valid on other nodes only must not take away what this
// node offers.
func (a *Agent) settle() {
	if a.settled {
		return
	}
	source := a.sourceConfig.Load().SourceConfig
	ready, err := a.checkDevices(config.Config{Source: source, Plugin: *a.pluginConfig.Load()})
	if !ready {
		return
	}
	if err != nil {
		c, rejection, _ := a.loader.LoadLastGood()
		if rejection == nil || sourceID(c.Source) != sourceID(source) {
			return // the plugin reports what does not fit
		}
		if _, misfit := a.checkDevices(c); misfit != nil || a.checkFixed(&c.Plugin) != nil {
			return
		}
		a.apply(c)
		a.reject(err, "devices", rejection.Since)
	}
	a.settled = true
	a.storeIndexEntries(*a.healthConfig.Load(), *a.pluginConfig.Load(), true)
	if !a.keepLastGood {
		storeChanged(&a.lastGood, a.files)
	}
}

// checkDevices returns an error if a configuration does not fit the devices of the node. Without shared devices each fits;
// otherwise ready is false until the devices of its source are known.
func (a *Agent) checkDevices(c config.Config) (ready bool, err error) {
	if !c.Plugin.Sharing.Enabled() {
		return true, nil
	}
	s := a.snapshots.Load()
	if !s.Polled() || s.Source.Inventory != sourceID(c.Source).Inventory {
		return false, nil
	}
	return true, c.Plugin.CheckDevices(s)
}

// reportOrphans reports pods with claims that have no driver as an event of the node, until ctx ends. Other pods are another event.
func (a *Agent) reportOrphans(ctx context.Context) error {
	reported := ""
	for ctx.Err() == nil {
		_, changed := a.plugin.LatestHolders().Watch()
		text := a.dra.Orphans()
		if text != "" && text != reported {
			a.reporter.Report(kube.NodeEvent{Reason: "GPUClaimsWithoutDriver", Message: text, At: time.Now()})
		}
		reported = text
		wait.For(ctx, changed)
	}
	return nil
}
