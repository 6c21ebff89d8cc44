// Package sim simulates a node's GPUs: it opens health.Sessions for laptops, kind clusters, tests and fault injection.
//
// A Source simulates the machine of a profile. Its values move as under real load and depend on the seed and the time
// only. Events change it: a scenario in the configuration, and lines that people send to a control socket. An event from
// the control socket overrides the scenario, also in its later loops.
package sim

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Config is the `source.sim` section of the configuration.
type Config struct {
	Profile  string        `yaml:"profile"`  // name of the simulated machine
	Seed     int64         `yaml:"seed"`     // the same seed gives the same devices and values
	DCGM     string        `yaml:"dcgm"`     // generation of DCGM whose fields it has: "4.6" or "4.7"
	Loop     time.Duration `yaml:"loop"`     // length of the scenario, which then restarts; 0: it runs once
	Scenario []Event       `yaml:"scenario"` // in any order; At is the time of each
	Past     []PastXID     `yaml:"past"`     // in any order; Ago is the time of each
	Control  string        `yaml:"control"`  // path of a unix socket that accepts events; "" for none
}

// minLoop is long enough that a loop cannot keep a core busy.
const minLoop = 100 * time.Millisecond

// DefaultConfig is a healthy DGX H100 without events.
func DefaultConfig() Config { return Config{Profile: "h100-8", Seed: 1, DCGM: "4.6"} }

// Validate returns all errors of the configuration, joined. Each starts with its key below source.sim.
func (c Config) Validate() error {
	var errs []error
	add := func(key string, faults ...error) {
		for _, err := range faults {
			if e := new(keyError); errors.As(err, &e) {
				err = keyErrorf(strings.Trim(key+"."+e.key, "."), "%s", e.text)
			}
			errs = append(errs, err)
		}
	}

	p, err := profileByName(c.Profile)
	if err != nil {
		add("profile", err)
	}
	if _, err := generationByName(c.DCGM); err != nil {
		add("dcgm", err)
	}
	if c.Loop < 0 || c.Loop > 0 && c.Loop < minLoop {
		add("", keyErrorf("loop", "%v is too short; use 0 to run once, or at least %v", c.Loop, minLoop))
	}
	if n := unixsock.PathLen(c.Control); c.Control != "" && n > unixsock.MaxPath {
		add("", keyErrorf("control", "the path is %d bytes too long for a unix socket; use a shorter one", n-unixsock.MaxPath))
	}
	for i, e := range c.Scenario {
		key := fmt.Sprintf("scenario[%d]", i)
		if e.At < 0 {
			add(key, keyErrorf("at", "%v is before the start; use 0s or later", e.At))
		}
		if c.Loop > 0 && e.At >= c.Loop {
			add(key, keyErrorf("at", "%v is after the end of the loop; use less than %v", e.At, c.Loop))
		}
		add(key, e.validate()...)
		if p != nil {
			add(key, e.validateFor(p)...)
		}
	}
	for i, x := range c.Past {
		add(fmt.Sprintf("past[%d]", i), x.validate(p)...)
	}
	return errors.Join(errs...)
}
