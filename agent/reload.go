package agent

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// reloadEvery is how often the file is looked at. It is read and compared: that sees every way of changing a
// file, a ConfigMap's swapped links included, and misses no event. One that is still being written is waited for: it
// must look the same twice.
const reloadEvery = time.Second

// reloadOn reloads at each signal and when the file has changed, until ctx ends.
func (a *Agent) reloadOn(ctx context.Context, hup <-chan os.Signal) {
	tick := time.NewTicker(a.reloadEvery)
	defer tick.Stop()

	// A file that was used is the configuration from then on: if it goes, the defaults do not come back.
	a.loader.File = a.loader.Path()
	a.loader.Running = true
	seen := a.sum()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			a.loader.File = a.loader.Path()
			a.bad = "" // who asks gets an answer, also to what was said before
			a.reload("SIGHUP")
		case <-tick.C:
			now := a.sum()
			// A bad one may have named a file that was not there yet: it is tried until it is good.
			if (now != a.loadedSum || !a.reloaded.Load().OK) && now == seen {
				a.loader.File = a.loader.Path()
				a.reload("the file has changed")
			}
			seen = now
		}
	}
}

// sum is that of the files as they are now: if it is not that of those the configuration in force was made from,
// there is something to load.
func (a *Agent) sum() [sha256.Size]byte { return a.loader.Sum(*a.plugin.Load(), *a.metrics.Load()) }

// reload puts the configuration as it is now in force. If it is bad, the old one stays.
func (a *Agent) reload(why string) {
	a.loader.FieldsShown = len(a.metrics.Load().Chosen.Fields) > 0
	c, err := a.loader.Load()
	if err != nil {
		if err.Error() != a.bad {
			a.bad = err.Error()
			a.log.Error("configuration is bad: the old one stays", zap.String("why", why), zap.String("file", a.loader.Path()), zap.Error(err))
		}
		a.badConfig.Store(new(err.Error()))
		a.reloaded.Store(&metrics.Reload{OK: false, At: a.reloaded.Load().At})
		return
	}
	a.bad = ""
	a.apply(c)
	a.note(c)
	a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
	a.log.Info("configuration reloaded", zap.String("why", why), zap.String("file", a.loader.Path()))
}
