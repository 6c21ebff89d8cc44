package agent

import (
	"bytes"
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// lookEvery is how often the file is looked at. It is read and compared: that sees every way of changing a
// file, a ConfigMap's swapped links included, and misses no event. One that is still being written is waited for: it
// must look the same twice.
const lookEvery = time.Second

// runReload reloads the configuration at SIGHUP and when the file has changed.
func (a *Agent) runReload(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	a.reloadOn(ctx, hup)
	return nil
}

// reloadOn reloads at each signal and when the file has changed, until ctx ends.
func (a *Agent) reloadOn(ctx context.Context, hup <-chan os.Signal) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	// A file that was used is the configuration from then on: if it goes, the defaults do not come back.
	a.loader.File = a.loader.Path()
	a.loader.again = true
	was := a.text()
	seen := was
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			a.loader.File = a.loader.Path()
			was = a.text()
			a.reload("SIGHUP")
		case <-tick.C:
			now := a.text()
			// A bad one may have named a file that was not there yet: it is tried until it is good.
			if (!bytes.Equal(now, was) || !a.reloaded.Load().OK) && bytes.Equal(now, seen) {
				was = now
				a.loader.File = a.loader.Path()
				a.reload("the file has changed")
			}
			seen = now
		}
	}
}

// text is what the file holds, nil if it cannot be read, and what the files that it names hold, if it names
// any: that of NVIDIA's plugin, the list of fields, and the web configuration with its certificates.
func (a *Agent) text() []byte {
	text, err := os.ReadFile(a.loader.Path())
	if err != nil {
		text = nil
	}
	if c := a.plugin.Load(); c != nil && c.NVIDIAConfig != "" {
		if more, err := os.ReadFile(c.NVIDIAConfig); err == nil {
			text = append(text, more...)
		}
	}
	if c := a.metrics.Load(); c != nil && c.FieldsFile != "" {
		if more, err := os.ReadFile(c.FieldsFile); err == nil {
			text = append(text, more...)
		}
	}
	if c := a.metrics.Load(); c != nil && c.WebConfigFile != "" {
		text = append(text, webText(c.WebConfigFile)...)
	}
	return text
}

// reload puts the configuration as it is now in force. If it is bad, the old one stays.
func (a *Agent) reload(why string) {
	c, err := a.loader.Load()
	if err != nil {
		if err.Error() != a.bad {
			a.bad = err.Error()
			a.log.Error("configuration is bad: the old one stays", zap.String("why", why), zap.String("file", a.loader.Path()), zap.Error(err))
		}
		a.reloaded.Store(&metrics.Reload{OK: false, At: a.reloaded.Load().At})
		return
	}
	a.bad = ""
	a.apply(c)
	a.note(c)
	a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
	a.log.Info("configuration reloaded", zap.String("why", why), zap.String("file", a.loader.Path()))
}
