package mps

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// desiredVersion is the version of Root.DesiredFile. The agent and mps-daemon may be of different releases: a release reads files of its
// version and of earlier ones, ignores keys that it lacks, and raises the version only for a change that others would misread.
const desiredVersion = 1

// desiredFile is the content of Root.DesiredFile. It names devices only, no program and no path: who can write it has fewer rights than
// mps-daemon.
type desiredFile struct {
	Version int `json:"version"`
	// Stopped means that no daemon may run, because an operator detached the driver. It outlives restarts of the agent and of
	// mps-daemon.
	Stopped bool            `json:"stopped"`
	Daemons []desiredDaemon `json:"daemons"`
}

type desiredDaemon struct {
	Device           health.DeviceID `json:"device"`
	GPU              health.DeviceID `json:"gpu"`
	Index            int             `json:"index"`
	MIG              bool            `json:"mig"`
	ThreadPercentage int             `json:"threadPercentage"`
	PinnedMemory     uint64          `json:"pinnedMemory"`
	Leaving          bool            `json:"leaving"` // MPS no longer serves the device; its daemon runs until nobody uses it
}

func (d desiredDaemon) spec() Spec {
	s := Spec{Device: d.Device, GPU: d.GPU, Index: d.Index, ThreadPercentage: d.ThreadPercentage, PinnedMemory: d.PinnedMemory}
	if d.MIG {
		s.Kind = health.KindMIG
	}
	return s
}

func newDesiredDaemon(s Spec, leaving bool) desiredDaemon {
	return desiredDaemon{
		Device: s.Device, GPU: s.GPU, Index: s.Index, MIG: s.Kind == health.KindMIG,
		ThreadPercentage: s.ThreadPercentage, PinnedMemory: s.PinnedMemory, Leaving: leaving,
	}
}

// desiredOptions are how Root.DesiredFile is replaced and read. It is small, and containers mount directories beside it.
func desiredOptions() durable.Options { return durable.Options{DirMode: 0o755, Limit: 1 << 20} }

// readDesired reads Root.DesiredFile. If there is none, the error is fs.ErrNotExist.
func readDesired(r Root) (desiredFile, error) {
	path := r.DesiredFile()
	text, _, err := desiredOptions().Read(path)
	if err != nil {
		return desiredFile{}, err
	}
	d, err := parseDesired(text)
	if err != nil {
		return desiredFile{}, fmt.Errorf("%s: %w", path, err)
	}
	return d, nil
}

func parseDesired(text []byte) (d desiredFile, err error) {
	if err := json.Unmarshal(text, &d); err != nil {
		return desiredFile{}, err
	}
	if d.Version < 1 || d.Version > desiredVersion {
		return desiredFile{}, fmt.Errorf("version: expected 1 to %d, found %d; run the same release of the agent and of mps-daemon",
			desiredVersion, d.Version)
	}
	seen := make(map[health.DeviceID]bool, len(d.Daemons))
	for i, daemon := range d.Daemons {
		switch id := daemon.Device; {
		case !isFileName(string(id)):
			return desiredFile{}, fmt.Errorf("daemons[%d].device: expected a UUID, found %q", i, id)
		case !isFileName(string(daemon.GPU)):
			return desiredFile{}, fmt.Errorf("daemons[%d].gpu: expected a UUID, found %q", i, daemon.GPU)
		case seen[id]:
			return desiredFile{}, fmt.Errorf("daemons[%d].device: %s is there twice", i, id)
		default:
			seen[id] = true
		}
	}
	return d, nil
}

// isFileName reports whether a device's ID can name its directory below Root.
func isFileName(id string) bool {
	return id != "" && id[0] != '.' && len(id) <= 100 && !strings.ContainsFunc(id, func(r rune) bool {
		return r != '-' && r != '.' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
}

// writeDesired replaces Root.DesiredFile.
func writeDesired(r Root, d desiredFile) error {
	text, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	_, err = desiredOptions().Replace(r.DesiredFile(), append(text, '\n'))
	return err
}
