package agent

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
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
		select {
		case <-ctx.Done():
			return
		case <-hup:
			a.loader.File = a.loader.Path()
			a.loggedError = "" // respond to each signal, even if the error is the same
			a.reload("SIGHUP")
		case <-tick.C:
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
	if err.Error() != a.loggedError {
		a.loggedError = err.Error()
		a.log.Error("invalid configuration; the last good one is in force", zap.String("reason", reason), zap.String("file", a.loader.Path()),
			zap.String("since", since.Format(time.RFC3339)), zap.Error(err)) // the console format omits dates
	}
	a.configError.Store(new(err.Error()))
	a.lastReload.Store(&metrics.Reload{OK: false, At: since})
}

// reload loads the configuration and puts it in force. An invalid one changes nothing.
func (a *Agent) reload(reason string) {
	a.loader.FieldsExported = len(a.metricsConfig.Load().Chosen.Fields) > 0
	c, err := a.loader.Load()
	if err != nil {
		a.reject(err, reason, a.lastReload.Load().At)
		return
	}
	a.loggedError = ""
	a.apply(c)
	a.logNotes(c)
	a.lastReload.Store(&metrics.Reload{OK: true, At: time.Now()})
	a.log.Info("configuration reloaded", zap.String("reason", reason), zap.String("file", a.loader.Path()))
}

// warnings returns what an operator must correct although the agent does its whole job.
func (a *Agent) warnings() []string {
	if err := a.configError.Load(); err != nil && !a.lastReload.Load().OK {
		return []string{"configuration: invalid; the last good one is in force: " + *err}
	}
	return nil
}
