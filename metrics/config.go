package metrics

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"
)

// Config is the `metrics` section of config.yaml.
type Config struct {
	Listen        string        `yaml:"listen"`        // host:port of the web server; an empty host means all addresses
	WebConfigFile string        `yaml:"webConfigFile"` // TLS and passwords, in the format of Prometheus's exporter-toolkit
	Fields        []FieldSpec   `yaml:"fields"`        // what of DCGM's fields is shown: names, and names of sets
	FieldsFile    string        `yaml:"fieldsFile"`    // the same in dcgm-exporter's format, instead of Fields
	Attribution   string        `yaml:"attribution"`   // AttributePerDevice, AttributePerPod
	IdleBelow     float64       `yaml:"idleBelow"`     // percent of utilization under which a GPU is idle
	Window        time.Duration `yaml:"window"`        // that the DCGM_EXP_ counts look back
	PodLabels     []string      `yaml:"podLabels"`     // keys of the pods' labels that are shown, and patterns of such
	PodUID        bool          `yaml:"podUID"`        // pods are shown with their UID
	HPCJobDir     string        `yaml:"hpcJobDir"`     // files that say which jobs run on a GPU
	Compat        CompatConfig  `yaml:"compat"`

	// Chosen is what Fields or FieldsFile come to; Resolve sets it.
	Chosen Selection `yaml:"-"`
}

// CompatConfig is for those who come from another exporter.
type CompatConfig struct {
	HostnameLabel string `yaml:"hostnameLabel"` // hostname, or Hostname as dcgm-exporter had it until 4.8
}

// The values of Config.Attribution: how series say who holds a device.
const (
	AttributePerDevice = "perDevice" // each series once; a shared one names nobody
	AttributePerPod    = "perPod"    // those of a shared device again for each holder
)

// DefaultConfig returns the defaults. 9400 is the port that dcgm-exporter's users already scrape.
func DefaultConfig() Config {
	return Config{
		Listen: ":9400", Fields: []FieldSpec{{Name: SetDefault}}, Attribution: AttributePerDevice, IdleBelow: 5,
		Window: 5 * time.Minute, PodLabels: []string{}, Compat: CompatConfig{HostnameLabel: "hostname"},
	}
}

// Validate returns every fault, each with its key below `metrics`.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	_, port, err := net.SplitHostPort(c.Listen)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		bad("listen: %q is not an address; use HOST:PORT or :PORT, such as :9400", c.Listen)
	}
	for i, f := range c.Fields {
		if f.Name == "" {
			bad("fields[%d].name: is missing; use the name of a field, such as DCGM_FI_DEV_GPU_TEMP", i)
		}
	}
	if c.FieldsFile != "" && !filepath.IsAbs(c.FieldsFile) {
		bad("fieldsFile: %q is not an absolute path; use one, or \"\" for metrics.fields", c.FieldsFile)
	}
	if c.WebConfigFile != "" && !filepath.IsAbs(c.WebConfigFile) {
		bad("webConfigFile: %q is not an absolute path; use one, or \"\" for plain HTTP", c.WebConfigFile)
	}
	if c.HPCJobDir != "" && !filepath.IsAbs(c.HPCJobDir) {
		bad("hpcJobDir: %q is not an absolute path; use one, or \"\" for no jobs", c.HPCJobDir)
	}
	if c.Attribution != AttributePerDevice && c.Attribution != AttributePerPod {
		bad("attribution: %q is not known; use perDevice or perPod", c.Attribution)
	}
	if !(c.IdleBelow >= 0 && c.IdleBelow <= 100) {
		bad("idleBelow: %v is out of range; use percent, such as 5", c.IdleBelow)
	}
	if c.Window < time.Minute || c.Window > 24*time.Hour {
		bad("window: %v is out of range; use 1m to 24h", c.Window)
	}
	if l := c.Compat.HostnameLabel; l != "hostname" && l != "Hostname" {
		bad("compat.hostnameLabel: %q is not known; use hostname or Hostname", l)
	}
	return errors.Join(append(errs, c.validatePodLabels())...)
}
