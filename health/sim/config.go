// Package sim is a node's GPUs without the GPUs: a health.Session for laptops, kind clusters, tests and
// fault injection.
//
// A Source has a profile, which is a real machine; readings that move as under real load, the same ones
// for the same seed; and two ways of breaking things. A scenario is a timeline in the configuration. A
// control socket takes the same events from a person, at once. What a person set lies over what the
// scenario sets and outlives its loops.
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
	Profile  string        `yaml:"profile"`  // h100-8, a100-8, h100-8-mig, v100-16, l4-1, none
	Seed     int64         `yaml:"seed"`     // the same seed gives the same devices and readings
	Loop     time.Duration `yaml:"loop"`     // length of the scenario, which then starts anew; 0: it runs once
	Scenario []Event       `yaml:"scenario"` // in any order; At tells
	Past     []PastXID     `yaml:"past"`     // in any order; Ago tells
	Control  string        `yaml:"control"`  // path of a unix socket that takes events, "" for none
}

// minLoop is long enough that a loop cannot keep a core busy.
const minLoop = 100 * time.Millisecond

// DefaultConfig is a healthy DGX H100 on which nothing happens.
func DefaultConfig() Config { return Config{Profile: "h100-8", Seed: 1} }

// Validate returns every fault of the configuration, joined, each beginning with its key below source.sim.
func (c Config) Validate() error {
	var errs []error
	add := func(key, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
	}

	p, known := profileNamed(c.Profile)
	if !known {
		add("profile", "%q is not known; use one of %s", c.Profile, strings.Join(profileNames(), ", "))
	}
	if c.Loop < 0 || (c.Loop > 0 && c.Loop < minLoop) {
		add("loop", "%v is too short; use 0 to run once, or %v and more", c.Loop, minLoop)
	}
	if n := unixsock.PathLen(c.Control); c.Control != "" && n > unixsock.MaxPath {
		add("control", "the path is %d bytes too long for a unix socket; use a shorter one", n-unixsock.MaxPath)
	}
	for i, e := range c.Scenario {
		key := fmt.Sprintf("scenario[%d]", i)
		if e.At < 0 {
			add(key+".at", "%v lies before the start; use 0s or later", e.At)
		}
		if c.Loop > 0 && e.At >= c.Loop {
			add(key+".at", "%v would never come; the loop starts anew after %v", e.At, c.Loop)
		}
		faults := e.faults()
		if known {
			faults = append(faults, e.misses(p)...)
		}
		for _, f := range faults {
			add(strings.TrimSuffix(key+"."+f.key, "."), "%s", f.text)
		}
	}
	for i, x := range c.Past {
		for _, f := range x.faults(p, known) {
			add(fmt.Sprintf("past[%d].%s", i, f.key), "%s", f.text)
		}
	}
	return errors.Join(errs...)
}
