package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// checkPair reports whether a library works with a host engine, by DCGM's versions such as "4.7.1". An unknown version, or one
// that is not of this form, is no fault.
func checkPair(library, engine string) Check {
	c := Check{
		Status: CheckOK, Found: fmt.Sprintf("libdcgm %s and host engine %s", library, engine),
		Fix: "install the same DCGM version for both, or remove source.address to run DCGM inside the agent",
	}
	a, b := parseVersion(library), parseVersion(engine)
	mismatch := []int{4, 7, 1} // dcgm-exporter 4.9.0, release notes
	switch {
	case a == nil || b == nil || slices.Equal(a, b):
		c.Fix = ""
	case a[0] != b[0]:
		c.Status = CheckFail
		c.Found += ": different major versions do not work together"
	case slices.Equal(a, mismatch) && slices.Compare(b, a) < 0, slices.Equal(b, mismatch) && slices.Compare(a, b) < 0:
		c.Status = CheckWarn
		c.Found += ": with 4.7.1 and an earlier version, some requests fail with a version mismatch"
	case a[1] != b[1]:
		c.Status = CheckWarn
		c.Found += ": NVIDIA does not test different versions together"
	default:
		c.Fix = ""
	}
	return c
}

// parseVersion returns the three numbers of a version, nil if it does not begin with them.
func parseVersion(text string) []int {
	text, _, _ = strings.Cut(text, "-")
	var version []int
	for part := range strings.SplitSeq(text, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil
		}
		version = append(version, n)
	}
	if len(version) < 3 {
		return nil
	}
	return version[:3]
}
