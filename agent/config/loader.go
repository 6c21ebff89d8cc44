package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nvidiaconfig"
)

// Loader finds and reads the configuration. Flags override environment variables, these the file, and the file the
// defaults.
type Loader struct {
	File  string         // "": see Path
	Flags *pflag.FlagSet // with the flags of AddFlags; nil for none

	StateDir string // Config.StateDir

	// Running is set for a reload. An empty file is then an error: a program that truncates the file before it writes it
	// would otherwise switch the node to the defaults.
	Running bool

	lastGood map[string][]byte // see LoadOrLastGood; nil to read the disk
	partial  bool              // read what is valid of a file that is not YAML; it is an error nevertheless
	defaults *Config           // nil for DefaultConfig
}

// AddFlags adds a flag for every key, such as --source.mode. The flags are hidden: they are too many for each help text.
func AddFlags(flags *pflag.FlagSet) {
	for _, s := range new(Config).settings() {
		flags.String(s.key, "", "overrides "+s.key)
		flag := flags.Lookup(s.key)
		flag.Hidden = true
		if s.value.Kind() == reflect.Bool {
			flag.NoOptDefVal = "true" // otherwise the flag takes the next argument as its value
		}
	}
}

// defaultFile is read without --config. Only root can write there. A file in the working directory counts only if --config names it,
// because another user may have written it.
const defaultFile = "/etc/gpu-node-agent/config.yaml"

// Path returns the file that Load reads: File, or the default file if it exists, or "".
func (l Loader) Path() string {
	if l.File != "" {
		return l.File
	}
	return existing(defaultFile)
}

// existing returns the path unless nothing is there. If that is unknown, it returns the path, and reading reports why: the defaults would
// hide it.
func existing(path string) string {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return path
}

// Load returns the configuration, or all errors in it. Each error starts with its key. With an error, the values that could
// be decoded are set.
func (l Loader) Load() (Config, error) {
	text, file, fileErr := l.read()
	c := l.defaultConfig()
	c.StateDir = l.StateDir
	settings := c.settings()
	keys := make([]string, len(settings))
	for i, s := range settings {
		keys[i] = s.key
	}
	tree, unknown := sectionTree(file, reflect.TypeFor[Config](), "", keys, func(line int) string {
		if line == 0 {
			return fmt.Sprintf(" (in %s)", l.Path())
		}
		return fmt.Sprintf(" (in %s, line %d)", l.Path(), line)
	})

	// Resource names and MIG profiles contain dots, so viper must not split keys at them.
	const delim = "::"
	v := viper.NewWithOptions(viper.KeyDelimiter(delim))
	if err := v.MergeConfigMap(tree); err != nil {
		return Config{}, err
	}
	var errs []error
	set := make(origins)
	for _, s := range settings {
		vkey := strings.ReplaceAll(s.key, ".", delim)
		if err := v.BindEnv(vkey, envName(s.key)); err != nil {
			return Config{}, err
		}
		if l.Flags != nil && l.Flags.Changed(s.key) {
			v.Set(vkey, l.Flags.Lookup(s.key).Value.String())
		}
		if v.IsSet(vkey) {
			errs = append(errs, s.decode(v.Get(vkey)))
			set[s.key] = origin{l.source(s.key), fmt.Sprint(s.value)}
		}
	}
	c.Source.Address = normalizeAddress(c.Source.Address)
	c.restoreOff()
	c.Sum = sumOf(text, c.Plugin, c.Metrics) // before the files are read: a later change then shows up as a different sum
	files := l.collector()
	if file := c.Plugin.NVIDIAConfig; file != "" {
		text, err := files.read(file)
		if err == nil {
			var notes []string
			c.Plugin, notes, err = nvidiaconfig.Import(text, c.Plugin) // keeps the keys that the file does not set
			for _, n := range notes {
				c.Notes = append(c.Notes, file+": "+n)
			}
		}
		errs = append(errs, withPrefix("plugin.nvidiaConfig: "+file+": ", err))
	}
	cleanPaths(&c.Plugin.KubeletDir, &c.Plugin.Sharing.MPS.Root)
	for _, n := range c.Plugin.Notes() {
		c.Notes = append(c.Notes, "plugin."+n)
	}
	resolved, err := c.Metrics.Resolve(files.read)
	errs = append(errs, withPrefix("metrics.", err))
	c.Metrics, c.Notes = resolved, append(c.Notes, resolved.Notes()...)
	c.Web, err = files.readWeb(c.Metrics.WebConfigFile)
	errs = append(errs, withPrefix("metrics.", err))
	xid, notes := c.Health.XID.WithNVIDIAEnv(os.Getenv(catalog.EnvDisableHealthChecks), os.Getenv(catalog.EnvEnableHealthChecks))
	c.Health.XID = xid
	c.Notes = slices.Concat(c.Notes, notes, unknownVariables(os.Environ(), keys), foreignVariables(os.Environ(), set), c.kubeconfigNotes(),
		c.driverNotes(), c.unusedNotes())
	// Values that could not be decoded have their defaults here, so Validate adds only other errors.
	errs = append(errs, c.Validate())
	errs = append(errs, l.checkStateDir())
	if fileErr != nil { // values of the file are missing, so other errors may be due to that
		return c, fileErr
	}
	c.LastGood = files.document(l.Path(), text)
	return c, errors.Join(append(unknown, set.annotate(errors.Join(errs...)))...)
}

// cleanPaths writes paths in one way: they are compared, and /k/ is /k.
func cleanPaths(paths ...*string) {
	for _, path := range paths {
		if *path != "" { // Validate refuses that
			*path = filepath.Clean(*path)
		}
	}
}

// restoreOff writes off where a file has false: Helm reads an unquoted off in a values file as false.
func (c *Config) restoreOff() {
	for key, off := range map[*string]string{&c.Source.Events: EventsOff, &c.Node.Labels.Output: node.LabelsOff} {
		if *key == "false" {
			*key = off
		}
	}
}

// Parse returns the configuration of a file's text alone, without flags, the environment and the files that it names. It returns an error
// if a key or value cannot be decoded, or if an agent would refuse what the text sets in health or node.
func Parse(text []byte) (Config, error) {
	file, err := parse(text)
	if err != nil {
		return Config{}, err
	}
	c := DefaultConfig()
	tree, errs := sectionTree(file, reflect.TypeFor[Config](), "", nil, func(int) string { return "" })
	for _, s := range c.settings() {
		var value any = tree
		for name := range strings.SplitSeq(s.key, ".") {
			section, _ := value.(map[string]any)
			value = section[name]
		}
		if value != nil {
			errs = append(errs, s.decode(value))
		}
	}
	c.restoreOff()
	return c, errors.Join(append(errs, withPrefix("health.", c.Health.Validate()), withPrefix("node.", c.Node.Validate()))...)
}

func (l Loader) defaultConfig() Config {
	if l.defaults != nil {
		return *l.defaults
	}
	return DefaultConfig()
}

// kubeconfigNotes returns a note if the kubeconfig cannot be used. Unlike with other files that is not an error: a kubelet's
// kubeconfig may appear after the agent starts, and the device plugin does not need the API server.
func (c Config) kubeconfigNotes() []string {
	if c.Health.Kubernetes.Kubeconfig == "" {
		return nil
	}
	if _, err := kube.RESTConfig(c.Health.Kubernetes.Kubeconfig); err != nil {
		return []string{err.Error() + "; the agent does not use the API server until the file is valid"}
	}
	return nil
}

// unusedNotes returns a note for each setting that has no effect because of another one.
func (c Config) unusedNotes() (notes []string) {
	defaults := DefaultConfig()
	set := func(value, otherwise any) bool { return fmt.Sprint(value) != fmt.Sprint(otherwise) } // an empty list is as none
	isSim := c.Source.Resolved() == ModeSim
	if isSim && c.Source.Address != "" {
		notes = append(notes, fmt.Sprintf("source.address: %s has no effect: source.mode is sim", c.Source.Address))
	}
	if !isSim && set(c.Source.Sim, defaults.Source.Sim) {
		notes = append(notes, "source.sim: has no effect: source.mode is not sim")
	}
	if c.Metrics.FieldsFile != "" && set(c.Metrics.Fields, defaults.Metrics.Fields) {
		notes = append(notes, "metrics.fields: has no effect: metrics.fieldsFile replaces it")
	}
	return notes
}

// Names of what sets Loader.StateDir.
const (
	StateDirFlag     = "state-dir"
	stateDirVariable = envPrefix + "_STATE_DIR"
)

// DefaultStateDir returns the state directory without the flag.
func DefaultStateDir() string {
	if dir, ok := os.LookupEnv(stateDirVariable); ok {
		return dir
	}
	return "/var/lib/gpu-node-agent"
}

// checkStateDir does not wait for a disk that does not answer. The running agent reports what it cannot write.
func (l Loader) checkStateDir() error {
	if l.StateDir != "" && !filepath.IsAbs(l.StateDir) {
		return fmt.Errorf("--%s: expected an absolute path, or \"\" for none, got %q", StateDirFlag, l.StateDir)
	}
	isFile, err := health.CallOnce(nil, time.Second, func() bool {
		info, err := os.Stat(l.StateDir)
		return err == nil && !info.IsDir()
	})
	if err == nil && isFile && !l.Running {
		return fmt.Errorf("--%s: expected a directory, got the file %q", StateDirFlag, l.StateDir)
	}
	return nil
}

// driverNotes returns a note if the agent uses the driver beside a host engine although source.events is off. It is off where only the
// engine is to hold the driver's files.
func (c Config) driverNotes() []string {
	if c.Source.Resolved() != ModeStandalone || c.Source.Events != EventsOff || !c.Metrics.Processes.Enabled {
		return nil
	}
	return []string{"metrics.processes.enabled: true uses the driver beside the host engine, although source.events is off: " +
		"GPU resets, changes of the MIG mode and driver updates fail until gpu-node-agent detach"}
}
