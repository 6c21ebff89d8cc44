package dcgm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// healthSystem is one of DCGM's health systems.
type healthSystem struct {
	name string
	bits uint32
}

// healthSystems lists DCGM's health systems (dcgm_structs.h: dcgmHealthSystems_t). As of 4.6, pmu, mcu and sm check
// nothing.
//
//nolint:gochecknoglobals // a table of constants
var healthSystems = [...]healthSystem{
	{"pcie", 0x1},
	{"nvlink", 0x2},
	{"pmu", 0x4},
	{"mcu", 0x8},
	{"memory", 0x10},
	{"sm", 0x20},
	{"inforom", 0x40},
	{"thermal", 0x80},
	{"power", 0x100},
	{"driver", 0x200},
	{"nvswitch", 0x400 | 0x800}, // non-fatal and fatal
	{"connectx", 0x1000},
}

// Values of Config.HealthSystems that are not systems.
const (
	AllHealthSystems  = "all"
	NoHealthSystems   = "none"
	everyHealthSystem = 0xffffffff // including those of a newer DCGM
)

// ValidateHealthSystems returns all errors of a list of health systems, joined.
func ValidateHealthSystems(names []string) error {
	if len(names) == 0 {
		return errors.New("is empty; use [all], [none] or names of systems")
	}
	_, err := systemMask(names)
	return err
}

// systemMask returns DCGM's bits of the named systems; of all systems if names is empty.
func systemMask(names []string) (mask uint32, err error) {
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
			mask |= healthSystems[i].bits
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
