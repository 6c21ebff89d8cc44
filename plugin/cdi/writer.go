package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

// Device is a device that containers may get by a CDI name.
type Device struct {
	Name    string              // in the spec, without the kind
	State   *health.DeviceState // never nil
	Offered bool                // new pods may get it
}

// Input is all that a spec depends on, in addition to the files of the host.
type Input struct {
	Config  Config
	Host    Host
	Driver  string // version; empty: unknown
	Devices []Device

	NVML         bool // the driver has the devices: they are not simulated
	Detached     bool // the driver must not be used
	MemoryLimits bool // containers may get limits in their environment, which a hook sets in the driver
}

// Writer ensures that the container runtime can resolve the CDI names of the devices. It belongs to one goroutine.
type Writer struct {
	StaticDir string // the directory of specs that administrators write
	Toolkit   *Toolkit
	log       *zap.Logger

	// The generated spec.
	cleaned      string        // the directory without temporary files of killed writers
	fingerprint  string        // of what it was made from; empty: none was written
	written      fs.FileInfo   // its file
	lastWarnings []string      // logged last
	failure      logonce.State // of the toolkit

	// The specs of others.
	kind      string     // for which found and names were read
	specs     []specFile // as they were then
	found     bool       // a spec has the kind
	specNames []string   // the device names of the kind
}

// staticDir is the directory of administrators' specs on every host (SPEC.md of CDI).
const staticDir = "/etc/cdi"

// NewWriter returns a writer for this host.
func NewWriter(log *zap.Logger) *Writer {
	return &Writer{StaticDir: staticDir, Toolkit: newToolkit(log.Named("nvcdi")), log: log}
}

// Ensure writes the spec if Config.Generate is set, and else checks the specs of others. Its error is why the container
// runtime could not give a container the devices. It is called for every snapshot, and only reads file metadata as long
// as nothing changed.
func (w *Writer) Ensure(in Input) error {
	if !in.Config.Generate {
		w.Toolkit.Stop()
		return w.check(in)
	}
	if err := w.generate(in); err != nil {
		return fmt.Errorf("cannot generate a CDI spec: %w", err)
	}
	return nil
}

func (w *Writer) generate(in Input) error {
	if in.Driver == "" {
		return errors.New("the driver version is not known yet")
	}
	// A missing GPU is still offered, but no container can use it. The same holds for one whose index another GPU has: with
	// plugin.deviceID index it has no name.
	in.Devices = slices.DeleteFunc(slices.Clone(in.Devices), func(d Device) bool {
		return d.State.Sample.Presence == health.Missing || d.State.Device.Index < 0
	})
	if len(in.Devices) == 0 {
		return nil
	}
	if w.cleaned != in.Config.Dir {
		w.cleaned = in.Config.Dir
		if err := durable.RemoveTemporaries(w.cleaned); err != nil {
			w.log.Warn("cannot remove the temporary files of an earlier process", zap.Error(err))
		}
	}
	g, fingerprint := w.chooseGenerator(in)
	file := in.Config.file()
	if fingerprint == w.fingerprint {
		if now, err := os.Stat(file); err == nil && os.SameFile(now, w.written) && now.ModTime().Equal(w.written.ModTime()) {
			return nil
		}
	}
	if g.keep && in.fits(file) {
		return w.remember(fingerprint, file)
	}
	spec, warnings, err := g.spec(in)
	if err != nil {
		return err
	}
	if len(warnings) > 0 && !slices.Equal(warnings, w.lastWarnings) {
		w.log.Warn("CDI spec is incomplete", zap.Strings("reasons", warnings))
	}
	w.lastWarnings = warnings
	if len(spec.Devices) == 0 {
		return errors.New(strings.Join(warnings, "; ")) // a spec without devices is invalid
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, text) {
		return w.remember(fingerprint, file)
	}
	if err := writeSpec(file, text); err != nil {
		return err
	}
	if err := w.remember(fingerprint, file); err != nil {
		return err
	}
	w.log.Info("CDI spec written", zap.String("file", file), zap.String("kind", spec.Kind), zap.Int("devices", len(spec.Devices)),
		zap.String("driver", in.Driver), zap.String("generator", g.name))
	return nil
}

// generator is what generates a spec.
type generator struct {
	name string // in the log
	spec func(Input) (spec *specs.Spec, warnings []string, err error)
	keep bool // a spec that exists and fits is kept instead
}

// chooseGenerator returns what generates the spec now, and what identifies all that the spec depends on. nvcdi is preferred
// where it can work. Until it has answered, and when it fails as a whole, a spec that fits stays: it may be nvcdi's last one.
func (w *Writer) chooseGenerator(in Input) (g generator, fingerprint string) {
	fromFiles := generator{name: "driver files", spec: newSpec}
	keys := in.keys()
	fingerprint = in.fingerprint(keys)
	if !in.NVML || in.Config.HookPath == "" {
		w.Toolkit.Stop()
		return fromFiles, fingerprint
	}
	parts, complete := w.Toolkit.request(in, keys)
	common := parts.byDevice[""]
	switch {
	case complete && common.edits != nil:
		g = generator{name: "nvcdi", spec: parts.spec}
	case complete || in.Detached:
		g = fromFiles
		g.keep = true
	default:
		g = generator{spec: func(Input) (*specs.Spec, []string, error) { return nil, nil, ErrPending }, keep: true}
	}
	if complete && w.failure.ErrorChanged(common.err) && common.err != nil {
		w.log.Warn("nvcdi cannot generate the CDI spec", zap.Error(common.err))
	}
	return g, fmt.Sprintf("%s\n%d %t %t", fingerprint, parts.number, complete, in.Detached)
}

// ErrPending reports that a spec will exist when nvcdi has answered.
var ErrPending = errors.New("nvcdi has not answered yet")

// remember notes that a file is the spec for all that the fingerprint identifies.
func (w *Writer) remember(fingerprint, file string) (err error) {
	w.fingerprint = fingerprint
	w.written, err = os.Stat(file)
	return err
}

// fits reports whether a spec in a file serves the input: it has the kind, the devices with their nodes, the driver's library
// and the hooks.
func (in Input) fits(file string) bool {
	text, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil || spec.Kind != in.Config.EffectiveKind() {
		return false
	}
	library := func(m *specs.Mount) bool {
		return filepath.Base(m.HostPath) == "libcuda.so."+in.Driver && m.HostPath == in.Host.mount(m.ContainerPath, "").HostPath
	}
	hook := func(h *specs.Hook) bool { return h.Path == in.Config.HookPath }
	if !slices.ContainsFunc(spec.ContainerEdits.Mounts, library) || !slices.ContainsFunc(spec.ContainerEdits.Hooks, hook) {
		return false
	}
	devices := make(map[string]*specs.ContainerEdits, len(spec.Devices))
	for i := range spec.Devices {
		devices[spec.Devices[i].Name] = &spec.Devices[i].ContainerEdits
	}
	return !slices.ContainsFunc(in.Devices, func(d Device) bool {
		nodes, err := in.Host.DeviceNodes(&d.State.Device)
		if devices[d.Name] == nil || err != nil || in.Host.checkNodes(devices[d.Name], nodes) != nil {
			return true
		}
		sets := func(h *specs.Hook) bool { return slices.Contains(h.Args, limitsHook) }
		return in.limits(&d.State.Device) && !slices.ContainsFunc(devices[d.Name].Hooks, sets)
	})
}

// fingerprint identifies the input and the files of the host on which a spec depends.
func (in Input) fingerprint(keys map[health.DeviceID]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v %s", in.Config, keys[""])
	for _, d := range in.Devices {
		fmt.Fprintf(&b, "\n%q %q %s", d.Name, d.State.Device.ID, keys[d.State.Device.ID])
	}
	return b.String()
}

// writeSpec replaces a spec, so that a container runtime never reads a partial one. CDI's own library, which container runtimes use, must
// accept the spec first.
func writeSpec(file string, text []byte) error {
	_, err := durable.Options{
		Mode: 0o644, DirMode: 0o755, // rootless container runtimes read it too
		Check: func(temporary string) error {
			if _, err := cdi.ReadSpec(temporary, 0); err != nil {
				return fmt.Errorf("invalid spec: %w", err)
			}
			return nil
		},
	}.Replace(file, text)
	return err
}

// specFile identifies a version of a file.
type specFile struct {
	path     string
	size     int64
	modified time.Time
}

// MissingError reports that no spec of another program resolves the names of all offered devices.
type MissingError struct {
	Kind    string
	Dirs    []string
	Devices []string // the names that the specs lack; nil: no spec has the kind
	Names   []string // the names that the specs have
}

func (e *MissingError) Error() string {
	dirs := strings.Join(e.Dirs, " or ")
	if e.Devices == nil {
		return fmt.Sprintf("no CDI spec for %s in %s; run nvidia-ctk cdi generate, or set plugin.cdi.generate to true", e.Kind, dirs)
	}
	return fmt.Sprintf("the CDI spec for %s in %s lacks %s and has %s; run nvidia-ctk cdi generate again, or change plugin.deviceID",
		e.Kind, dirs, grouped.Abbreviate(e.Devices), grouped.Abbreviate(e.Names))
}

// check returns an error unless the specs of others have all offered devices.
func (w *Writer) check(in Input) error {
	dirs, kind := []string{w.StaticDir, in.Config.Dir}, in.Config.EffectiveKind()
	if files := specFiles(dirs); w.kind != kind || !slices.Equal(files, w.specs) {
		w.kind, w.specs = kind, files
		w.readSpecs()
	}
	if !w.found {
		return &MissingError{Kind: kind, Dirs: dirs}
	}
	var missing []string
	for _, d := range in.Devices {
		if d.Offered && !slices.Contains(w.specNames, d.Name) {
			missing = append(missing, d.Name)
		}
	}
	if missing == nil {
		return nil
	}
	return &MissingError{kind, dirs, missing, w.specNames}
}

// specFiles lists the specs as container runtimes do, without unreadable ones.
func specFiles(dirs []string) []specFile {
	var files []specFile
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // an unreadable directory has no specs
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if ext := filepath.Ext(path); ext != ".json" && ext != ".yaml" {
				continue
			}
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
				files = append(files, specFile{path, info.Size(), info.ModTime()})
			}
		}
	}
	return files
}

// maxSpecSize limits the specs that are read, in bytes; specs of large machines have some 100 KiB.
const maxSpecSize = 16 << 20

// readSpecs collects the device names of the kind.
func (w *Writer) readSpecs() {
	w.found, w.specNames = false, nil
	for _, f := range w.specs {
		spec, err := f.read()
		if err != nil {
			w.log.Warn("cannot read CDI spec", zap.String("file", f.path), zap.Error(err))
			continue
		}
		if spec.Kind != w.kind {
			continue
		}
		w.found = true
		for _, d := range spec.Devices {
			w.specNames = append(w.specNames, d.Name)
		}
	}
	slices.Sort(w.specNames)
	w.specNames = slices.Compact(w.specNames)
}

// foreignSpec is the part that is read of another program's spec, so that newer CDI versions are accepted.
type foreignSpec struct {
	Kind           string       `yaml:"kind"`
	ContainerEdits foreignEdits `yaml:"containerEdits"` // of all devices
	Devices        []struct {
		Name           string       `yaml:"name"`
		ContainerEdits foreignEdits `yaml:"containerEdits"`
	} `yaml:"devices"`
}

type foreignEdits struct {
	Hooks []struct {
		Args []string `yaml:"args"`
	} `yaml:"hooks"`
}

// read returns an empty spec for a file that is too large.
func (f specFile) read() (spec foreignSpec, err error) {
	if f.size > maxSpecSize {
		return spec, nil
	}
	text, err := os.ReadFile(f.path)
	if err == nil {
		err = yaml.Unmarshal(text, &spec) // YAML includes JSON
	}
	return spec, err
}
