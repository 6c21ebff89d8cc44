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
// file, a ConfigMap's swapped links included, and misses no event.
const lookEvery = time.Second

// runReload reloads the configuration at SIGHUP and when the file has changed.
func (a *Agent) runReload(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	// A file that was used is the configuration from then on: if it goes, the defaults do not come back.
	a.loader.File = a.loader.Path()
	was := a.text()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
			a.loader.File = a.loader.Path()
			was = a.text()
			a.reload("SIGHUP")
		case <-tick.C:
			if now := a.text(); !bytes.Equal(now, was) {
				was = now
				a.loader.File = a.loader.Path()
				a.reload("the file has changed")
			}
		}
	}
}

// text is what the file holds, nil if it cannot be read, and what the files that it names hold, if it names
// any: that of NVIDIA's plugin, and the list of fields.
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
	return text
}

// reload puts the configuration as it is now in force. If it is bad, the old one stays.
func (a *Agent) reload(why string) {
	c, err := a.loader.Load()
	if err != nil {
		a.log.Error("configuration is bad: the old one stays", zap.String("why", why), zap.String("file", a.loader.Path()), zap.Error(err))
		a.reloaded.Store(&metrics.Reload{OK: false, At: a.reloaded.Load().At})
		return
	}
	a.apply(c)
	a.note(c)
	a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
	a.log.Info("configuration reloaded", zap.String("why", why), zap.String("file", a.loader.Path()))
}
