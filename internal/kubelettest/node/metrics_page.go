package node

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Series is one line of a metrics page.
type Series struct {
	Name   string
	Labels map[string]string
	Value  float64
}

// Page is a metrics page.
type Page []Series

// ParsePage parses Prometheus' text format without timestamps and exemplars.
func ParsePage(text []byte) (Page, error) {
	series := regexp.MustCompile(`^([\w:]+)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? +(\S+)$`)
	label := regexp.MustCompile(`(\w+)=("(?:[^"\\]|\\.)*")`)
	var page Page
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		match := series.FindStringSubmatch(line)
		if match == nil {
			return nil, fmt.Errorf("%q: expected NAME{LABELS} VALUE", line)
		}
		s := Series{Name: match[1], Labels: make(map[string]string)}
		var err, valueErr error
		for _, l := range label.FindAllStringSubmatch(match[2], -1) {
			s.Labels[l[1]], valueErr = strconv.Unquote(l[2])
			err = errors.Join(err, valueErr)
		}
		s.Value, valueErr = strconv.ParseFloat(match[3], 64)
		if err = errors.Join(err, valueErr); err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		page = append(page, s)
	}
	return page, nil
}

// Value returns the value of the first series with a name and labels, and whether it exists. The labels are alternating
// names and values.
func (p Page) Value(name string, labels ...string) (float64, bool) {
	for _, s := range p {
		matches := s.Name == name
		for l := range slices.Chunk(labels, 2) {
			matches = matches && s.Labels[l[0]] == l[1]
		}
		if matches {
			return s.Value, true
		}
	}
	return 0, false
}
