package exposition

import (
	"bytes"
	"math"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// encoder writes families in Prometheus' text format, byte by byte as expfmt does. It encodes a list of labels once and
// copies the text for every further series that shares the list.
type encoder struct {
	buf    []byte
	labels map[labelList]span
}

// labelList identifies a list of labels by its memory.
type labelList struct {
	first  **dto.LabelPair
	length int
}

// span is the position of an encoded list of labels in the text.
type span struct{ from, to int }

func newEncoder() encoder { return encoder{labels: make(map[labelList]span)} }

// reset clears the encoder. The next text overwrites the old one.
func (e *encoder) reset() {
	e.buf = e.buf[:0]
	clear(e.labels)
}

// encode appends a family, which must have a help, series and valid names. Lists of labels must not change before reset.
func (e *encoder) encode(f *dto.MetricFamily) error {
	kind := " gauge\n"
	switch f.GetType() {
	case dto.MetricType_GAUGE:
	case dto.MetricType_COUNTER:
		kind = " counter\n"
	default: // the page has one histogram and one summary
		buf := bytes.NewBuffer(e.buf)
		_, err := expfmt.MetricFamilyToText(buf, f)
		e.buf = buf.Bytes()
		return err
	}
	name := f.GetName()
	b := append(e.buf, "# HELP "...)
	b = append(b, name...)
	b = append(b, ' ')
	b = appendEscaped(b, f.GetHelp(), false)
	b = append(b, "\n# TYPE "...)
	b = append(b, name...)
	b = append(b, kind...)
	for _, m := range f.Metric {
		b = append(b, name...)
		b = e.appendLabels(b, m.Label)
		b = append(b, ' ')
		b = appendValue(b, m.GetGauge().GetValue()+m.GetCounter().GetValue()) // one of them is nil
		b = append(b, '\n')
	}
	e.buf = b
	return nil
}

func (e *encoder) appendLabels(b []byte, labels []*dto.LabelPair) []byte {
	if len(labels) == 0 {
		return b
	}
	list := labelList{&labels[0], len(labels)}
	if at, ok := e.labels[list]; ok {
		return append(b, b[at.from:at.to]...)
	}
	from := len(b)
	separator := byte('{')
	for _, l := range labels {
		b = append(b, separator)
		b = append(b, l.GetName()...)
		b = append(b, `="`...)
		b = appendEscaped(b, l.GetValue(), true)
		b = append(b, '"')
		separator = ','
	}
	b = append(b, '}')
	e.labels[list] = span{from, len(b)}
	return b
}

// appendEscaped appends a label value, which is quoted, or a help.
func appendEscaped(b []byte, s string, quoted bool) []byte {
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

func appendValue(b []byte, v float64) []byte {
	if n := int64(v); math.Abs(v) < 1e6 && float64(n) == v { // the common case; -0 is written as 0, as expfmt does
		return strconv.AppendInt(b, n, 10)
	}
	return strconv.AppendFloat(b, v, 'g', -1, 64)
}
