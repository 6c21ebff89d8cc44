package dcgm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// healthSystem is one of DCGM's health systems by our name.
type healthSystem struct {
	name string
	bits uint32
}

// healthSystems names DCGM's (dcgm_structs.h: dcgmHealthSystems_t). pmu, mcu and sm check nothing as of 4.6.
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

// The words of Config.HealthSystems that are no system, and the bits of the first.
const (
	AllHealthSystems  = "all"
	NoHealthSystems   = "none"
	everyHealthSystem = 0xffffffff // those that a newer DCGM may bring too
)

// ValidateHealthSystems says what is wrong with a list of health systems, if anything.
func ValidateHealthSystems(names []string) error {
	if len(names) == 0 {
		return errors.New("is empty; use [all], [none] or names of systems")
	}
	_, err := healthMask(names)
	return err
}

// healthMask returns DCGM's bits for a list of names; no list at all is all.
func healthMask(names []string) (mask uint32, err error) {
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
			errs = append(errs, fmt.Errorf("%q stands alone; remove it or the others", name))
		default:
			known := []string{AllHealthSystems, NoHealthSystems}
			for _, s := range healthSystems {
				known = append(known, s.name)
			}
			errs = append(errs, fmt.Errorf("%q is not known; use %s", name, strings.Join(known, ", ")))
		}
	}
	return mask, errors.Join(errs...)
}
