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

// Build describes the binary.
type Build struct {
	Version, Revision, Go, DCGMBindings string

	settings map[string]string // the build settings that Go records
}

// ReadBuild returns the description of this binary. The linker sets the version and the revision; without a revision,
// ReadBuild uses the one that Go records.
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

// modified reports whether the binary was built from a modified revision. make build records that in the version, go
// build in its settings.
func (b Build) modified() bool {
	return strings.HasSuffix(b.Version, "-dirty") || b.settings["vcs.modified"] == "true"
}

// String returns a line with the versions and a line with the build settings.
func (b Build) String() string {
	parts := []string{"gpu-node-agent", b.Version}
	if b.Revision != "" {
		parts = append(parts, "("+b.Revision+")")
	}
	line := strings.Join(parts, " ") + ", " + b.Go + ", go-dcgm " + cmp.Or(b.DCGMBindings, "unknown")
	parts = []string{"built with"}
	for _, key := range slices.Sorted(maps.Keys(b.settings)) {
		parts = append(parts, key+"="+b.settings[key])
	}
	return line + "\n" + strings.Join(parts, " ") + "\n"
}

// MarshalJSON returns the description as a JSON object.
func (b Build) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{
		"version": b.Version, "revision": b.Revision, "modified": b.modified(),
		"go": b.Go, "goDCGM": b.DCGMBindings, "build": b.settings,
	})
}
