package exposition

import (
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

func textOf(t *testing.T, p *Page) string {
	t.Helper()
	var b strings.Builder
	for _, f := range p.Families() {
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

func TestPageSortsAndDropsDuplicates(t *testing.T) {
	p := NewPage(NewSchema([]Family{
		{Name: "b", Help: "bad \xff byte", Type: dto.MetricType_GAUGE},
		{Name: "c", Help: "No series.", Type: dto.MetricType_GAUGE},
		{Name: "a", Help: "A.", Type: dto.MetricType_COUNTER},
	}))
	const want = `# HELP a A.
# TYPE a counter
a 4
# HELP b bad � byte
# TYPE b gauge
b{x="1",y="2"} 1
b{x="2",y="1"} 2
b{x="3",y="�"} 3
`
	for _, memory := range []string{"new", "reused"} {
		one := p.Labels(nil, Label{"y", "2"}, Label{"x", "1"}, Label{"x", "not the first x"})
		p.AddWith(0, 3, p.Labels(nil, Label{"x", "3"}), Label{"y", "\xff"})
		p.AddWith(0, 2, nil, Label{"x", "2"}, Label{"y", "1"})
		p.Add(0, 1, one)
		p.Add(0, 5, one)
		p.Add(2, 4, nil)
		if got := textOf(t, p); got != want {
			t.Errorf("%s memory: got:\n%s", memory, got)
		}
		p.Reset()
		if got := textOf(t, p); got != "" {
			t.Errorf("after Reset: got:\n%s", got)
		}
	}
}
