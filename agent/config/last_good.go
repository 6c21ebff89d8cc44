package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// lastGoodFormat marks a file with a lastGood.
const lastGoodFormat = "gpu-node-agent configuration"

// lastGood has the content of the files of the last good configuration. The format has no version of the configuration: a release that does
// not accept the content refuses it like a file on the disk.
type lastGood struct {
	Format string            `json:"format"`
	Path   string            `json:"path"`  // of the configuration file
	Files  map[string][]byte `json:"files"` // by absolute path: the configuration file and the files that it names, without private keys
}

// Rejection describes why the last good configuration is used instead of the files on the disk.
type Rejection struct {
	Err   error     // of the files on the disk
	Path  string    // of the last good configuration
	Since time.Time // when it was saved first
}

// LoadOrLastGood returns the configuration. If the file or a file that it names is invalid, it returns the last good configuration of the
// same file, and a Rejection. That configuration is the Config.LastGood that was saved in the state directory. Flags and variables override
// both. Without a last good configuration that is valid now, it returns the errors of Load. The configuration then has the valid values,
// and defaults in place of the others.
func (l Loader) LoadOrLastGood() (Config, *Rejection, error) {
	l.partial = true
	running := l
	running.Running = true // a truncated file is no reason to switch to the defaults
	onDisk, err := running.Load()
	if err == nil {
		return onDisk, nil, nil
	}
	c, rejection, lastGoodErr := l.LoadLastGood()
	if rejection != nil {
		rejection.Err = err
		return c, rejection, nil
	}
	if errors.Is(err, errEmpty) {
		if onDisk, err = l.Load(); err == nil {
			return onDisk, nil, nil
		}
	}
	return onDisk.withoutInvalid(DefaultConfig()), nil, errors.Join(err, lastGoodErr)
}

// LoadPartial returns the configuration of LoadOrLastGood for commands that work with an invalid one too. If an agent with another file has
// saved its configuration, its values, not the defaults, take the place of the invalid ones. The error describes what is invalid and what
// is returned instead.
func (l Loader) LoadPartial() (Config, error) {
	c, rejection, err := l.LoadOrLastGood()
	switch {
	case err != nil:
		instead := "the defaults"
		if other, path := l.loadOther(); path != "" {
			l.partial, l.defaults = true, &other
			c, _ = l.Load()
			c, instead = c.withoutInvalid(other), "the last good configuration of another file, "+path
		}
		return c, fmt.Errorf("%w\nusing its valid values and %s", err, instead)
	case rejection != nil:
		return c, fmt.Errorf("%w\nusing the last good configuration, %s of %s", rejection.Err, rejection.Path,
			rejection.Since.Format(time.RFC3339))
	}
	return c, nil
}

// LoadLastGood loads the last good configuration. A nil Rejection means that there is none; the error then has the reasons, nil if there is
// no file.
func (l Loader) LoadLastGood() (Config, *Rejection, error) {
	if l.File = l.Path(); l.File == "" || l.StateDir == "" {
		return Config{}, nil, nil
	}
	path := statefile.ConfigurationPath(l.StateDir)
	c, r, err := l.loadSaved(path)
	switch {
	case err == nil:
		return c, r, nil
	case errors.Is(err, errNotSaved):
		return Config{}, nil, nil
	}
	return Config{}, nil, withPrefix("last good configuration "+path+": ", err)
}

// loadOther loads the last good configuration of any file, and returns its path; "" if there is none.
func (l Loader) loadOther() (Config, string) {
	if l.StateDir == "" {
		return Config{}, ""
	}
	path := statefile.ConfigurationPath(l.StateDir)
	g, _, err := readLastGood(path)
	if err != nil {
		return Config{}, ""
	}
	l.File = g.Path
	c, _, err := l.loadSaved(path)
	if err != nil {
		return Config{}, ""
	}
	return c, path
}

var errNotSaved = errors.New("not saved")

// loadSaved loads the last good configuration from a file, or returns errNotSaved if that does not exist.
func (l Loader) loadSaved(path string) (Config, *Rejection, error) {
	g, since, err := readLastGood(path)
	if file := absolute(l.File); err == nil && g.Path != file {
		err = fmt.Errorf("is of %s, not of %s", g.Path, file)
	}
	if err != nil {
		return Config{}, nil, err
	}
	l.lastGood = g.Files
	c, err := l.Load()
	return c, &Rejection{Path: path, Since: since}, err
}

// readLastGood reads a file with a last good configuration, and when it was saved.
func readLastGood(path string) (g lastGood, since time.Time, err error) {
	text, info, err := durable.WithSpare(0).Read(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = errNotSaved
	}
	if err != nil {
		return lastGood{}, time.Time{}, err
	}
	if err := json.Unmarshal(text, &g); err != nil {
		return lastGood{}, time.Time{}, fmt.Errorf("cannot be parsed: %w", err)
	}
	if g.Format != lastGoodFormat || g.Files[g.Path] == nil {
		return lastGood{}, time.Time{}, fmt.Errorf("expected the format %q with the file %q, got %q", lastGoodFormat, g.Path, g.Format)
	}
	return g, info.ModTime(), nil
}

// withoutInvalid returns the configuration with defaults in place of invalid values.
func (c Config) withoutInvalid(defaults Config) Config {
	valid := defaults.settings()
	err := c.Validate()
	for i, s := range c.settings() {
		_ = mapErrors(err, func(err error) error {
			if rest, ok := strings.CutPrefix(err.Error(), s.key); ok && strings.IndexAny(rest, ":[.") == 0 {
				s.value.Set(valid[i].value)
			}
			return err
		})
	}
	return c
}

// readFile reads a file of the configuration: of the last good one if the Loader has it, else from the disk.
func (l Loader) readFile(path string) ([]byte, error) {
	if text, ok := l.lastGood[absolute(path)]; ok {
		return text, nil
	}
	return os.ReadFile(path)
}

// collector reads the files that a configuration names, and collects their content.
type collector struct {
	Loader
	files map[string][]byte
}

func (l Loader) collector() collector { return collector{l, make(map[string][]byte)} }

func (c collector) read(path string) ([]byte, error) {
	text, err := c.readFile(path)
	if err == nil {
		c.files[absolute(path)] = text
	}
	return text, err
}

func (c collector) readWeb(path string) (w *web.Config, err error) {
	if text, ok := c.lastGood[absolute(path)]; ok {
		w, err = web.ParseConfig(path, text)
	} else {
		w, err = web.LoadConfig(path)
	}
	if err == nil && w.Text() != nil {
		c.files[absolute(path)] = w.Text()
	}
	return w, err
}

// document returns the collected files as a lastGood, nil without a configuration file. An empty file is not one: see
// Loader.Running.
func (c collector) document(path string, text []byte) []byte {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil
	}
	files := maps.Clone(c.files)
	files[absolute(path)] = text
	document, err := json.Marshal(lastGood{lastGoodFormat, absolute(path), files})
	if err != nil {
		return nil // unreachable: strings and bytes always marshal
	}
	return document
}

// absolute returns an absolute path, or the path itself without a working directory.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
