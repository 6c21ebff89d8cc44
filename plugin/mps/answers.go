package mps

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxPIDs limits a list of servers or clients. A daemon has one server, in rare cases some more, and each at most 60 clients.
const maxPIDs = 1024

// parsePIDs parses the answer of get_server_list and get_client_list: one process ID per line, none for an empty list.
func parsePIDs(answer string) (pids []int, err error) {
	for field := range strings.FieldsSeq(answer) {
		pid, err := strconv.Atoi(field)
		if err != nil || pid < 1 || strconv.Itoa(pid) != field {
			return nil, fmt.Errorf("%w: expected process IDs, found %q", errRefused, quote(answer))
		}
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	pids = slices.Compact(pids)
	if len(pids) > maxPIDs {
		return nil, fmt.Errorf("%w: expected at most %d process IDs, found %d", errRefused, maxPIDs, len(pids))
	}
	return pids, nil
}

// The states of a server.
const (
	serverInitializing = "INITIALIZING"
	serverActive       = "ACTIVE"
	serverFault        = "FAULT"
)

// parseServerStatus parses the answer of get_server_status: one of the states, maybe in a sentence. It returns "" for any other answer.
func parseServerStatus(answer string) string {
	words := strings.FieldsFunc(strings.ToUpper(answer), func(r rune) bool { return r < 'A' || r > 'Z' })
	for _, state := range []string{serverFault, serverInitializing, serverActive} {
		if slices.Contains(words, state) {
			return state
		}
	}
	return ""
}

var (
	percentagePattern = regexp.MustCompile(`^([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%?$`)
	sizePattern       = regexp.MustCompile(`(?i)^([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([MGT])i?B?$`)
)

// parsePercentage parses the answer of the commands about the active thread percentage, such as "25.0".
func parsePercentage(answer string) (percent float64, ok bool) {
	m := percentagePattern.FindStringSubmatch(strings.TrimSpace(answer))
	if m == nil {
		return 0, false
	}
	percent, err := strconv.ParseFloat(m[1], 64)
	return percent, err == nil && percent >= 0 && percent <= 100
}

// size is an amount of memory as the control program writes it. It may be rounded to its unit.
type size struct{ bytes, unit uint64 }

// parseSize parses the answer of the commands about the pinned memory limit, such as "3G" or "1024M", maybe at the end of a sentence.
func parseSize(answer string) (size, bool) {
	fields := strings.FieldsFunc(answer, func(r rune) bool { return r == ' ' || r == '\n' || r == '\t' || r == '=' || r == ':' })
	for n := 1; n <= min(2, len(fields)); n++ { // "3G", "3 G"
		m := sizePattern.FindStringSubmatch(strings.Join(fields[len(fields)-n:], ""))
		if m == nil {
			continue
		}
		unit := uint64(1) << map[string]int{"M": 20, "G": 30, "T": 40}[strings.ToUpper(m[2])]
		value, err := strconv.ParseFloat(m[1], 64)
		if err != nil || value*float64(unit) >= 1<<62 {
			return size{}, false
		}
		return size{uint64(value * float64(unit)), unit}, true
	}
	return size{}, false
}

// near reports whether the size may be want, rounded.
func (s size) near(want uint64) bool {
	return s.bytes < want+s.unit && want < s.bytes+s.unit
}
