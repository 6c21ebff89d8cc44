package metrics

import (
	"bytes"
	"math"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// text writes families in Prometheus' text format, to the byte as expfmt does (and as the tests compare it with that).
//
// Nearly all of a page are the labels of its devices, which each family has again. Expfmt looks at each letter of them
// each time, which was half of what a scrape took; here a list of labels that series share is written once and then
// copied, as kube-state-metrics does.
type text struct {
	buf   []byte
	lists map[list]written
}

// list is a list of labels: the same place in memory is the same labels.
type list struct {
	first  **dto.LabelPair
	length int
}

// written is where a list stands in the text.
type written struct{ from, to int }

func newText() text { return text{lists: make(map[list]written)} }

// reset forgets all. What was written is overwritten.
func (t *text) reset() {
	t.buf = t.buf[:0]
	clear(t.lists)
}

// add writes a family, which has a help, series, and names that any Prometheus takes. Lists of labels do not change
// before the next reset.
func (t *text) add(f *dto.MetricFamily) error {
	kind := " gauge\n"
	switch f.GetType() {
	case dto.MetricType_GAUGE:
	case dto.MetricType_COUNTER:
		kind = " counter\n"
	default: // there are two of them
		buf := bytes.NewBuffer(t.buf)
		_, err := expfmt.MetricFamilyToText(buf, f)
		t.buf = buf.Bytes()
		return err
	}
	name := f.GetName()
	b := append(t.buf, "# HELP "...)
	b = append(b, name...)
	b = append(b, ' ')
	b = escape(b, f.GetHelp(), false)
	b = append(b, "\n# TYPE "...)
	b = append(b, name...)
	b = append(b, kind...)
	for _, m := range f.Metric {
		b = append(b, name...)
		b = t.labels(b, m.Label)
		b = append(b, ' ')
		b = number(b, m.GetGauge().GetValue()+m.GetCounter().GetValue()) // it has one of them
		b = append(b, '\n')
	}
	t.buf = b
	return nil
}

// labels appends a list of labels.
func (t *text) labels(b []byte, labels []*dto.LabelPair) []byte {
	if len(labels) == 0 {
		return b
	}
	id := list{&labels[0], len(labels)}
	if at, ok := t.lists[id]; ok {
		return append(b, b[at.from:at.to]...)
	}
	from := len(b)
	separator := byte('{')
	for _, l := range labels {
		b = append(b, separator)
		b = append(b, l.GetName()...)
		b = append(b, `="`...)
		b = escape(b, l.GetValue(), true)
		b = append(b, '"')
		separator = ','
	}
	b = append(b, '}')
	t.lists[id] = written{from, len(b)}
	return b
}

// escape appends what a value, which is quoted, or a help is in the format.
func escape(b []byte, s string, quoted bool) []byte {
	from := 0
	for i := range len(s) {
		c := s[i]
		if c != '\\' && c != '\n' && (c != '"' || !quoted) {
			continue
		}
		if c == '\n' {
			c = 'n'
		}
		b = append(b, s[from:i]...)
		b = append(b, '\\', c)
		from = i + 1
	}
	return append(b, s[from:]...)
}

// number appends a value.
func number(b []byte, v float64) []byte {
	if n := int64(v); math.Abs(v) < 1e6 && float64(n) == v { // most are; and there is no -0 in the format
		return strconv.AppendInt(b, n, 10)
	}
	return strconv.AppendFloat(b, v, 'g', -1, 64)
}
