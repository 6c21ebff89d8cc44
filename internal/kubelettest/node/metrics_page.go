package node

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
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
	var page Page
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		s, err := parseSeries(line)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		page = append(page, s)
	}
	return page, lines.Err()
}

func parseSeries(line string) (s Series, err error) {
	end := strings.IndexAny(line, "{ ")
	if end < 0 {
		return s, errors.New("no value")
	}
	s.Name, line = line[:end], line[end:]
	if line[0] == '{' {
		s.Labels = map[string]string{}
		line = line[1:]
		for !strings.HasPrefix(line, "}") {
			name, rest, found := strings.Cut(line, "=")
			if !found {
				return s, errors.New("label without a value")
			}
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return s, fmt.Errorf("label %s: %w", name, err)
			}
			if s.Labels[name], err = strconv.Unquote(quoted); err != nil {
				return s, fmt.Errorf("label %s: %w", name, err)
			}
			line = strings.TrimPrefix(rest[len(quoted):], ",")
		}
		line = line[1:]
	}
	s.Value, err = strconv.ParseFloat(strings.TrimSpace(line), 64)
	return s, err
}

// Value returns the value of the first series with a name and labels, and whether it exists. The labels are alternating
// names and values.
func (p Page) Value(name string, labels ...string) (float64, bool) {
	for _, s := range p {
		if s.Name == name && s.matches(labels) {
			return s.Value, true
		}
	}
	return 0, false
}

func (s Series) matches(labels []string) bool {
	for i := 0; i+1 < len(labels); i += 2 {
		if s.Labels[labels[i]] != labels[i+1] {
			return false
		}
	}
	return true
}
