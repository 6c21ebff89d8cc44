package agent

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// lookEvery is how often the file is looked at. It is read and compared: that sees every way of changing a
// file, a ConfigMap's swapped links included, and misses no event. One that is still being written is waited for: it
// must look the same twice.
const lookEvery = time.Second

// reloadOn reloads at each signal and when the file has changed, until ctx ends.
func (a *Agent) reloadOn(ctx context.Context, hup <-chan os.Signal) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	// A file that was used is the configuration from then on: if it goes, the defaults do not come back.
	a.loader.File = a.loader.Path()
	a.loader.again = true
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
			if (now != a.made || !a.reloaded.Load().OK) && now == seen {
				a.loader.File = a.loader.Path()
				a.reload("the file has changed")
			}
			seen = now
		}
	}
}

// sum is that of the files as they are now: if it is not that of those the configuration in force was made from,
// there is something to load.
func (a *Agent) sum() [sha256.Size]byte {
	text, _ := os.ReadFile(a.loader.Path()) // one that cannot be read is empty here, and said when it is loaded
	return sumOf(text, *a.plugin.Load(), *a.metrics.Load())
}

// sumOf is the sum of a configuration's text, and of what the files that it names hold now, if it names any: that of
// NVIDIA's plugin, the list of fields, and the web configuration with its certificates.
func sumOf(text []byte, p plugin.Config, m metrics.Config) [sha256.Size]byte {
	for _, file := range []string{p.NVIDIAConfig, m.FieldsFile} {
		if file != "" {
			more, _ := os.ReadFile(file) // as above
			text = append(text, more...)
		}
	}
	if m.WebConfigFile != "" {
		text = append(text, webText(m.WebConfigFile)...)
	}
	return sha256.Sum256(text)
}

// reload puts the configuration as it is now in force. If it is bad, the old one stays.
func (a *Agent) reload(why string) {
	a.loader.shown = len(a.metrics.Load().Chosen.Fields) > 0
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
