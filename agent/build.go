package agent

import (
	"cmp"
	"encoding/json"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// Build says what this binary is.
type Build struct {
	Version, Revision, Go, DCGMBindings string

	settings map[string]string // the flags and variables that it was built with, as far as Go says
}

// ReadBuild returns what this binary is: the version and the revision are the linker's to know. If that says nothing
// of the revision, Go may.
func ReadBuild(version, revision string) Build {
	b := Build{Version: version, Revision: revision, Go: runtime.Version(), settings: make(map[string]string)}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	for _, m := range info.Deps {
		if m.Path == "github.com/NVIDIA/go-dcgm" {
			b.DCGMBindings = m.Version
		}
	}
	for _, s := range info.Settings {
		b.settings[s.Key] = s.Value
	}
	b.Revision = cmp.Or(b.Revision, b.settings["vcs.revision"])
	return b
}

// modified reports whether what was built is not what the revision has: make build says so in the version, go
// build in its settings.
func (b Build) modified() bool {
	return strings.HasSuffix(b.Version, "-dirty") || b.settings["vcs.modified"] == "true"
}

// String returns one line of what the binary is, and one of how it was built.
func (b Build) String() string {
	words := []string{"gpu-node-agent", b.Version}
	if b.Revision != "" {
		words = append(words, "("+b.Revision+")")
	}
	line := strings.Join(words, " ") + ", " + b.Go + ", go-dcgm " + cmp.Or(b.DCGMBindings, "unknown")
	words = []string{"built with"}
	for _, key := range slices.Sorted(maps.Keys(b.settings)) {
		words = append(words, key+"="+b.settings[key])
	}
	return line + "\n" + strings.Join(words, " ") + "\n"
}

// JSON returns the same as one document.
func (b Build) JSON() (string, error) {
	text, err := json.MarshalIndent(map[string]any{
		"version": b.Version, "revision": b.Revision, "modified": b.modified(),
		"go": b.Go, "goDCGM": b.DCGMBindings, "build": b.settings,
	}, "", "  ")
	return string(text) + "\n", err
}
