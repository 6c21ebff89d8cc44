package sequence

import (
	"strings"
	"testing"
)

// A plan has each situation in a short sequence, whose steps all change something.
func TestPlanHasEachSituation(t *testing.T) {
	t.Parallel()
	const enough = 90
	o := Options{Single: true, NoDisk: true, NoAPI: true, Chart: true}
	longest := 0
	for seed := range uint64(10) {
		p, again := NewPlan(seed, o), NewPlan(seed, o)
		var s State
		n := 0
		for ; len(p.Missing()) > 0 && n < enough; n++ {
			step := p.Next(s)
			if second := again.Next(s); second != step {
				t.Fatalf("seed %d, step %d: %v, and %v for the same seed", seed, n, step, second)
			}
			after, changed := s.After(step)
			if !changed {
				t.Fatalf("seed %d, step %d: %v changes nothing in %+v", seed, n, step, s)
			}
			p.Played(s, step, after)
			again.Played(s, step, after)
			s = after
		}
		if missing := p.Missing(); len(missing) > 0 {
			t.Errorf("seed %d: %d steps without %s", seed, n, strings.Join(missing, ", "))
		}
		longest = max(longest, n)
	}
	t.Logf("at most %d steps", longest)
}

// Values without a new pod keep what a pod has from the chart.
func TestInPodOf(t *testing.T) {
	t.Parallel()
	mounts := Values{DRAMounts: true, Taints: true}
	for name, c := range map[string]struct{ next, running, want Values }{
		"the switch to DRA":       {Values{DRA: true}, mounts, Values{DRA: true, Taints: true}},
		"the switch back":         {mounts, Values{DRA: true}, Values{DRAMounts: true}},
		"no mounts":               {Values{DRA: true, Labels: true, Resource: "example.com/gpu"}, Values{}, Values{Resource: "example.com/gpu"}},
		"the mounts alone":        {Values{}, Values{DRA: true}, Values{DRA: true}},
		"sharing of the plugin":   {Values{Sharing: TimeSlicing}, Values{DRA: true}, Values{DRA: true}},
		"an MPS daemon's release": {Values{}, Values{Sharing: MPS}, Values{Sharing: MPS}},
	} {
		got := c.next.InPodOf(c.running)
		if got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		if !got.SamePod(c.running) {
			t.Errorf("%s: %v needs another pod than %v", name, got, c.running)
		}
	}
}
