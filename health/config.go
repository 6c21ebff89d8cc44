package health

import (
	"errors"
	"fmt"
	"time"
)

// Config is the `health` section of config.yaml.
type Config struct {
	Interval     time.Duration `yaml:"interval"`     // between two polls; an XID is polled for at once
	RecoverAfter time.Duration `yaml:"recoverAfter"` // how long a warning stands after it was last seen
	Temperature  float64       `yaml:"temperature"`  // °C from which a GPU is Degraded
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	// Data-centre GPUs slow themselves down between 85 and 90 °C (NVML's slowdown threshold).
	return Config{Interval: time.Second, RecoverAfter: time.Minute, Temperature: 90}
}

// Validate returns every fault, each with its key below `health`.
func (c Config) Validate() error {
	var errs []error
	if c.Interval < 100*time.Millisecond || c.Interval > time.Minute {
		errs = append(errs, fmt.Errorf("interval: %v is out of range; use 100ms to 1m", c.Interval))
	}
	if c.RecoverAfter < 0 {
		errs = append(errs, fmt.Errorf("recoverAfter: %v is negative; use 0 or more", c.RecoverAfter))
	}
	if !(c.Temperature > 0 && c.Temperature < 200) {
		errs = append(errs, fmt.Errorf("temperature: %v is out of range; use degrees Celsius, such as 90", c.Temperature))
	}
	return errors.Join(errs...)
}
