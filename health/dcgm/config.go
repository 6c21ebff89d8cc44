// Package dcgm measures GPUs through NVIDIA's DCGM. Only this package imports go-dcgm: it returns types of package health,
// and values that are blank in DCGM are absent.
//
// OBSERVED.md describes how a real DCGM behaves; comments cite its anchors. In short:
//
//   - Each poll reads DCGM's cache once and never the driver, where a faulty GPU can block for minutes.
//   - XIDs come from the stream of field 230. Policy callbacks are unusable: they are silent, lossy, and affect other
//     clients (OBSERVED.md#policies, OBSERVED.md#lossy-callbacks, OBSERVED.md#registration-leak).
//   - Presence comes from the GPU's status: DCGM's health check reports a lost GPU as healthy (OBSERVED.md#lost-gpu).
//   - Package health judges the values.
//
// go-dcgm keeps its connection in package variables, so a process has one session at a time.
package dcgm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// DefaultInterval is the default of Config.Interval.
const DefaultInterval = 10 * time.Second

// Config configures a session.
type Config struct {
	// Address of a host engine, "host:port" or "unix:///path". If empty, DCGM runs embedded in this process.
	Address string
	// Interval is how often metric fields are sampled and read; 0 means DefaultInterval. The fields that health is
	// judged by are sampled once a second regardless.
	Interval time.Duration
	// Fields are the metric fields to watch, by DCGM's numbers. Text fields are read with the inventory into health.Device.Texts, once a
	// minute. If this DCGM does not know a field in base units, the session watches the older field that it follows from
	// (health.DerivationOf). A field that is not available, or that is neither a number nor a text, is left out and logged once.
	//
	// Values of NVSwitches, NVLinks and CPUs are in health.Reading.Entities. DCGM's modules for them are used only if Fields has a field of
	// theirs.
	Fields []health.Field
	// HealthSystems are the systems that DCGM's health checks cover, by name: "pcie", "memory" and so on. Empty or "all"
	// covers all of them, "none" disables the checks.
	HealthSystems []string
	// LogLevel is the log level of an embedded engine (NONE, FATAL, ERROR, WARN, INFO, DEBUG, VERB); the default is NONE.
	// LogFile is its log file; the default is standard output. The first engine of a process opens the file. DCGM's
	// variables __DCGM_DBG_LVL and __DCGM_DBG_FILE override both.
	LogLevel, LogFile string
	// Attach makes the host engine at Address attach the driver first, if it is detached.
	Attach bool
}

// healthSystem is one of DCGM's health systems.
type healthSystem struct {
	name string
	bits uint32
	with uint32 // systems that its name selects too
}

// healthSystems lists DCGM's health systems (dcgm_structs.h: dcgmHealthSystems_t). As of 4.6, pmu, mcu and sm check
// nothing. IMEX is a system from 4.6.1 on and a part of NVLink before, so nvlink selects it too (OBSERVED.md#imex).
//
//nolint:gochecknoglobals // a table of constants
var healthSystems = [...]healthSystem{
	{"pcie", 0x1, 0},
	{"nvlink", systemNVLink, systemIMEX},
	{"pmu", 0x4, 0},
	{"mcu", 0x8, 0},
	{"memory", 0x10, 0},
	{"sm", 0x20, 0},
	{"inforom", 0x40, 0},
	{"thermal", 0x80, 0},
	{"power", 0x100, 0},
	{"driver", 0x200, 0},
	{"nvswitch", 0x400 | 0x800, 0}, // non-fatal and fatal
	{"connectx", 0x1000, 0},
	{"imex", systemIMEX, 0},
}

// Systems that depend on DCGM's version.
const (
	systemNVLink = 0x2
	systemIMEX   = 0x2000

	// oldSystems are the systems of every DCGM 4.
	oldSystems = systemIMEX - 1
)

// Values of Config.HealthSystems that are not systems.
const (
	AllHealthSystems  = "all"
	NoHealthSystems   = "none"
	everyHealthSystem = 0xffffffff // including a newer DCGM's systems
)

// ValidateHealthSystems returns all errors of a list of health systems, joined.
func ValidateHealthSystems(names []string) error {
	if len(names) == 0 {
		return errors.New("is empty; use [all], [none] or names of systems")
	}
	_, err := selectSystems(names)
	return err
}

// selectSystems returns DCGM's bits of the named systems; of all systems if names is empty.
func selectSystems(names []string) (mask uint32, err error) {
	switch {
	case len(names) == 0, len(names) == 1 && names[0] == AllHealthSystems:
		return everyHealthSystem, nil
	case len(names) == 1 && names[0] == NoHealthSystems:
		return 0, nil
	}
	var errs []error
	for _, name := range names {
		i := slices.IndexFunc(healthSystems[:], func(s healthSystem) bool { return s.name == name })
		switch {
		case i >= 0:
			mask |= healthSystems[i].bits | healthSystems[i].with
		case name == AllHealthSystems || name == NoHealthSystems:
			errs = append(errs, fmt.Errorf("%q excludes other systems; remove it or the others", name))
		default:
			valid := []string{AllHealthSystems, NoHealthSystems}
			for _, s := range healthSystems {
				valid = append(valid, s.name)
			}
			errs = append(errs, fmt.Errorf("%q is not known; use %s", name, strings.Join(valid, ", ")))
		}
	}
	return mask, errors.Join(errs...)
}

// systemsToSet returns the masks to enable the selected systems with, the preferred one first. An engine before 4.6.1 checks IMEX with
// NVLink; if an engine refuses systems that it does not know, it gets the old ones only.
func systemsToSet(selected uint32) []uint32 {
	if selected&systemIMEX != 0 {
		selected |= systemNVLink
	}
	if old := selected & oldSystems; old != selected && old != 0 {
		return []uint32{selected, old}
	}
	return []uint32{selected}
}
