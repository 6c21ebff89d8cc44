package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// cdiKeeper sees to it that the container runtime knows the CDI names that Allocate answers with. It belongs to
// one goroutine.
type cdiKeeper struct {
	root   fs.FS  // of the machine
	static string // the directory of specs that people write
	log    *zap.Logger

	made    *cdiInput   // what the spec that we wrote was made of; nil if there is none
	written fs.FileInfo // it, as it was then
	seen    []specFile  // the specs of others, as they were when names was read
	names   []string    // the devices of our kind in them, sorted
	found   bool        // whether any of them is of our kind
	kind    string      // that names was read for
	warned  string
}

func newCDIKeeper(log *zap.Logger) *cdiKeeper {
	return &cdiKeeper{root: os.DirFS("/"), static: "/etc/cdi", log: log}
}

// cdiInput is what a spec depends on.
type cdiInput struct {
	driver  string
	kind    string
	cdi     CDIConfig
	roots   [3]string
	devices []cdiDevice
	host    string // the nodes and sockets that are there: at boot some come later
}

type cdiDevice struct {
	name   string
	id     health.DeviceID
	minor  int
	gi, ci int
	nodes  string // or why there are none
}

func newCDIInput(cfg *Config, h host, driver string, devices []Device) *cdiInput {
	in := &cdiInput{
		driver: driver, kind: cfg.cdiKind(), cdi: cfg.CDI,
		roots: [3]string{cfg.DriverRoot, cfg.ContainerDriverRoot, cfg.DevRoot},
		host:  strings.Join(slices.Concat(h.controlNodes(), h.driverSockets()), " "),
	}
	for _, d := range devices {
		v := &d.State.Device
		nodes, err := h.deviceNodes(v)
		if err != nil {
			nodes = []string{err.Error()}
		}
		in.devices = append(in.devices, cdiDevice{cfg.idOf(d), v.ID, v.Minor, v.GI, v.CI, strings.Join(nodes, " ")})
	}
	return in
}

// driverSockets returns the sockets below the driver root that are there.
func (h host) driverSockets() []string {
	root, err := fs.Sub(h.root, below(h.cfg.driverRootHere()))
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(driverSockets(), func(name string) bool {
		_, err := fs.Stat(root, name)
		return err != nil
	})
}

func (in *cdiInput) same(o *cdiInput) bool {
	return o != nil && in.driver == o.driver && in.kind == o.kind && in.cdi == o.cdi && in.roots == o.roots && in.host == o.host && slices.Equal(in.devices, o.devices)
}

// ready makes the spec if that is ours to do, and returns why the container runtime could not give a container
// the devices of the layout, "" if it could. It is called for every snapshot and does nothing if nothing
// has changed.
func (k *cdiKeeper) ready(cfg *Config, layout []Resource, snap *health.Snapshot) (why string) {
	if !cfg.usesCDI() || len(layout) == 0 {
		return ""
	}
	devices := behind(layout)
	if cfg.CDI.Generate {
		if err := k.generate(cfg, snap.Source.Versions.Driver, devices); err != nil {
			return "no CDI spec could be generated: " + err.Error()
		}
		return ""
	}
	return k.look(cfg, devices)
}

// behind returns the devices of a layout, each once.
func behind(layout []Resource) []Device {
	var devices []Device
	for _, r := range layout {
		for i, d := range r.Devices {
			if i == 0 || r.Devices[i-1].State != d.State { // replicas are side by side
				devices = append(devices, d)
			}
		}
	}
	return devices
}

// generate writes the spec anew if it is gone, or if what it was made of has changed.
func (k *cdiKeeper) generate(cfg *Config, driver string, devices []Device) error {
	if driver == "" {
		return errors.New("the version of the driver is not known yet")
	}
	// A GPU that has left the driver's list is still ours to show, but no container can have it, and the driver may
	// have given its index to another.
	devices = slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return d.State.Sample.Presence == health.Missing })
	if len(devices) == 0 {
		return nil
	}
	h := host{k.root, cfg}
	in, file := newCDIInput(cfg, h, driver, devices), cfg.cdiFile()
	if in.same(k.made) {
		if now, err := os.Stat(file); err == nil && os.SameFile(now, k.written) && now.ModTime().Equal(k.written.ModTime()) {
			return nil
		}
	}
	spec, warnings, err := newCDISpec(cfg, h, driver, devices)
	if err != nil {
		return err
	}
	k.warn(warnings)
	if len(spec.Devices) == 0 {
		return errors.New(strings.Join(warnings, "; ")) // a spec without devices is not valid
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	if err := writeCDISpec(file, text); err != nil {
		return err
	}
	k.made = in
	if k.written, err = os.Stat(file); err != nil {
		return err
	}
	k.log.Info("CDI spec written", zap.String("file", file), zap.String("kind", spec.Kind), zap.Int("devices", len(spec.Devices)),
		zap.String("driver", driver))
	return nil
}

// cdiFile is named as NVIDIA's plugin names it, so that ours replaces one that it has left behind.
func (c *Config) cdiFile() string {
	return filepath.Join(c.CDI.Dir, strings.ReplaceAll(c.cdiKind(), "/", "-")+".json")
}

// writeCDISpec replaces a spec at once, so that a container runtime never reads half of one. The library that
// container runtimes use has to accept it first.
func writeCDISpec(file string, text []byte) (err error) {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // container runtimes of users read it too
		return err
	}
	// A name that ends in neither .json nor .yaml is no spec.
	temp, err := os.CreateTemp(filepath.Dir(file), ".gpu-node-agent-*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temp.Name()))
		}
	}()
	_, err = temp.Write(text)
	err = errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close())
	if err != nil {
		return err
	}
	if _, err := cdi.ReadSpec(temp.Name(), 0); err != nil {
		return fmt.Errorf("the spec would not be valid: %w", err)
	}
	return os.Rename(temp.Name(), file)
}

func (k *cdiKeeper) warn(warnings []string) {
	if text := strings.Join(warnings, "; "); text != k.warned {
		k.warned = text
		if text != "" {
			k.log.Warn("CDI spec is incomplete", zap.Strings("why", warnings))
		}
	}
}

// specFile is a file in a directory of specs.
type specFile struct {
	path     string
	size     int64
	modified time.Time
}

// look checks that somebody else's spec has all devices by the names that Allocate will use.
func (k *cdiKeeper) look(cfg *Config, devices []Device) (why string) {
	dirs := []string{k.static, cfg.CDI.Dir}
	if files := specFiles(dirs); k.kind != cfg.cdiKind() || !slices.Equal(files, k.seen) {
		k.kind, k.seen = cfg.cdiKind(), files
		k.read()
	}
	where := strings.Join(dirs, " or ")
	if !k.found {
		return fmt.Sprintf("plugin.deviceList %s needs a CDI spec for %s, and there is none in %s; run nvidia-ctk cdi generate, "+
			"or set plugin.cdi.generate to true", strings.Join(cfg.DeviceList, ", "), k.kind, where)
	}
	var missing []string
	for _, d := range devices {
		if name := cfg.idOf(d); d.Healthy() {
			if _, ok := slices.BinarySearch(k.names, name); !ok {
				missing = append(missing, name)
			}
		}
	}
	if len(missing) == 0 {
		return ""
	}
	other := DeviceIDIndex
	if cfg.DeviceID == DeviceIDIndex {
		other = DeviceIDUUID
	}
	return fmt.Sprintf("the CDI spec for %s in %s has no device %s, only %s; run nvidia-ctk cdi generate again, or set plugin.deviceID to %s",
		k.kind, where, some(missing), some(k.names), other)
}

// specFiles lists the specs as container runtimes would. What cannot be read is not there.
func specFiles(dirs []string) []specFile {
	var files []specFile
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
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

// maxSpecSize bounds what is read of a spec; those of large machines have some 100 KiB.
const maxSpecSize = 16 << 20

// read collects the names of our kind. Only kind and names are looked at, so that a spec of a newer CDI will do.
func (k *cdiKeeper) read() {
	k.found, k.names = false, nil
	names := map[string]bool{}
	for _, f := range k.seen {
		var spec struct {
			Kind    string `yaml:"kind"`
			Devices []struct {
				Name string `yaml:"name"`
			} `yaml:"devices"`
		}
		if f.size > maxSpecSize {
			continue
		}
		text, err := os.ReadFile(f.path)
		if err == nil {
			err = yaml.Unmarshal(text, &spec) // JSON is YAML
		}
		if err != nil {
			k.log.Warn("CDI spec cannot be read", zap.String("file", f.path), zap.Error(err))
			continue
		}
		if spec.Kind != k.kind {
			continue
		}
		k.found = true
		for _, d := range spec.Devices {
			names[d.Name] = true
		}
	}
	k.names = slices.Sorted(maps.Keys(names))
}
