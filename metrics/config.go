package metrics

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// Config is the `metrics` section of config.yaml.
type Config struct {
	Listen        string        `yaml:"listen"`        // host:port of the web server; an empty host means all addresses
	WebConfigFile string        `yaml:"webConfigFile"` // TLS and passwords, in the format of Prometheus' exporter-toolkit
	Fields        []fields.Spec `yaml:"fields"`        // exported fields of DCGM, and sets of fields
	FieldsFile    string        `yaml:"fieldsFile"`    // replaces Fields; in dcgm-exporter's format
	Names         []string      `yaml:"names"`         // generations of dcgm-exporter's names: fields.Generations
	Attribution   string        `yaml:"attribution"`   // AttributePerDevice, AttributePerPod
	IdleBelow     float64       `yaml:"idleBelow"`     // a GPU with a lower utilization, in percent, is idle
	Window        time.Duration `yaml:"window"`        // of the DCGM_EXP_ counts
	PodLabels     []string      `yaml:"podLabels"`     // keys, and patterns of keys, of exported pod labels
	PodUID        bool          `yaml:"podUID"`        // export the pods' UIDs
	ClaimLabels   bool          `yaml:"claimLabels"`   // export the claims by which pods hold devices
	HPCJobDir     string        `yaml:"hpcJobDir"`     // directory with the job IDs of each GPU
	Compat        CompatConfig  `yaml:"compat"`

	Processes processes.Config `yaml:"processes"`

	// Chosen is the selection that Resolve derives from Fields or FieldsFile.
	Chosen fields.Selection `yaml:"-"`
}

// CompatConfig makes the metrics compatible with other exporters.
type CompatConfig struct {
	HostnameLabel string `yaml:"hostnameLabel"` // hostname, or Hostname as in dcgm-exporter before 4.8
}

// The values of Config.Attribution: how series name the holder of a device.
const (
	AttributePerDevice = "perDevice" // one series per device, without a holder if it is shared
	AttributePerPod    = "perPod"    // additionally one series per holder of a shared device
)

// DefaultConfig returns the defaults. 9400 is dcgm-exporter's port.
func DefaultConfig() Config {
	return Config{
		Listen: ":9400", Fields: []fields.Spec{{Name: fields.SetDefault}}, Names: []string{fields.Names48}, Attribution: AttributePerDevice,
		IdleBelow: 5, Window: 5 * time.Minute, PodLabels: []string{}, Compat: CompatConfig{HostnameLabel: "hostname"},
		Processes: processes.DefaultConfig(),
	}
}

// Resolve sets Chosen. Entries that select no field are in Chosen.Unknown; Resolve fails if FieldsFile cannot be read with readFile, which
// is like os.ReadFile, or if no entry selects a metric: only an empty Fields ends every series of DCGM.
func (c Config) Resolve(readFile func(string) ([]byte, error)) (Config, error) {
	if c.FieldsFile == "" {
		if c.Chosen = fields.Select(c.Fields, c.Names...); c.selectsNone() && len(c.Fields) > 0 {
			return c, errors.New("fields: no entry selects a metric; for none at all write []")
		}
		return c, nil
	}
	text, err := readFile(c.FieldsFile)
	if err != nil {
		return c, fmt.Errorf("fieldsFile: %w", err)
	}
	if c.Chosen = fields.SelectCSV(string(text), c.Names...); c.selectsNone() {
		return c, fmt.Errorf("fieldsFile: %s: no line selects a metric; for none at all set fields: [] instead", c.FieldsFile)
	}
	return c, nil
}

// selectsNone reports whether valid names select no metric.
func (c Config) selectsNone() bool { return len(c.Chosen.Fields) == 0 && c.validateNames() == nil }

// Notes returns a warning for each entry that has no effect.
func (c Config) Notes() []string { return c.withFieldsKey(c.Chosen.Unknown) }

// Requirements returns a note for each selected field that has a value with a newer DCGM only.
func (c Config) Requirements() []string { return c.withFieldsKey(c.Chosen.Requirements()) }

// withFieldsKey puts the key that selects the fields before each text.
func (c Config) withFieldsKey(texts []string) []string {
	key := "metrics.fields"
	if c.FieldsFile != "" {
		key = "metrics.fieldsFile: " + c.FieldsFile
	}
	notes := make([]string, len(texts))
	for i, text := range texts {
		notes[i] = key + ": " + text
	}
	return notes
}

// Validate returns every invalid value with its key below `metrics`.
func (c Config) Validate() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	_, port, err := net.SplitHostPort(c.Listen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		fail("listen: expected HOST:PORT or :PORT such as :9400, got %q", c.Listen)
	}
	errs = append(errs, c.validateNames())
	for _, path := range []struct{ key, value, otherwise string }{
		{"fieldsFile", c.FieldsFile, "metrics.fields"},
		{"webConfigFile", c.WebConfigFile, "plain HTTP"},
		{"hpcJobDir", c.HPCJobDir, "no jobs"},
	} {
		if path.value != "" && !filepath.IsAbs(path.value) {
			fail("%s: expected an absolute path, or \"\" for %s, got %q", path.key, path.otherwise, path.value)
		}
	}
	if c.Attribution != AttributePerDevice && c.Attribution != AttributePerPod {
		fail("attribution: expected perDevice or perPod, got %q", c.Attribution)
	}
	if !(c.IdleBelow >= 0 && c.IdleBelow <= 100) {
		fail("idleBelow: expected a percentage from 0 to 100, got %v", c.IdleBelow)
	}
	if c.Window < time.Minute || c.Window > 24*time.Hour {
		fail("window: expected 1m to 24h, got %v", c.Window)
	}
	if l := c.Compat.HostnameLabel; l != "hostname" && l != "Hostname" {
		fail("compat.hostnameLabel: expected hostname or Hostname, got %q", l)
	}
	for _, err := range c.Processes.Validate() {
		fail("processes.%w", err)
	}
	return errors.Join(append(errs, c.validatePodLabels())...)
}

func (c Config) validateNames() error {
	if len(c.Names) == 0 {
		return fmt.Errorf("names: expected one or both of %s, got an empty list", strings.Join(fields.Generations(), ", "))
	}
	var errs []error
	for i, name := range c.Names {
		switch {
		case !slices.Contains(fields.Generations(), name):
			errs = append(errs, fmt.Errorf("names[%d]: expected one of %s, got %q", i, strings.Join(fields.Generations(), ", "), name))
		case slices.Index(c.Names, name) != i:
			errs = append(errs, fmt.Errorf("names[%d]: same entry as names[%d], %s; remove one of the two", i, slices.Index(c.Names, name), name))
		}
	}
	return errors.Join(errs...)
}
