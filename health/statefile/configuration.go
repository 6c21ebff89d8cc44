package statefile

import (
	"bytes"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

// ConfigurationPath returns the path of the last good configuration, which is beside the state file.
func ConfigurationPath(stateFile string) string { return stateFile + ".config" }

// configurationFile is what Run last did about the last good configuration.
type configurationFile struct {
	path      string // "" before the first check
	text      []byte
	checkedAt time.Time
	logged    logonce.State // the error
}

// saveConfiguration writes the last good configuration beside the state file if the file there differs. Only the holder of
// the state file's lock writes.
func (f *File) saveConfiguration(stateFile string) {
	text := f.configuration.Load()
	if stateFile == "" || text == nil || len(*text) == 0 {
		return
	}
	path, last := ConfigurationPath(stateFile), &f.configurationFile
	unchanged := path == last.path && bytes.Equal(*text, last.text)
	if unchanged && time.Since(last.checkedAt) < checkInterval || !f.lock.Of(lockPath(stateFile)) {
		return
	}
	f.writes.Begin(stateFile)
	defer f.writes.End()
	file := durable.WithSpare(0)
	found, _, err := file.Read(path)
	if err != nil || !bytes.Equal(found, bytes.TrimRight(*text, " \n")) {
		_, err = file.Replace(path, *text)
	}
	last.path, last.text, last.checkedAt = path, *text, time.Now()
	if last.logged.ErrorChanged(err) && err != nil {
		f.log.Warn("cannot save the configuration; the agent will not start if the file becomes invalid", zap.String("file", path),
			zap.Error(err))
	}
}
