package chaos

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func TestSameSeedSameSequence(t *testing.T) {
	a, b, other := sequence(7, kinds()), sequence(7, kinds()), sequence(8, kinds())
	seen, differ := map[string]bool{}, false
	for range 3000 {
		x := a()
		if y := b(); x != y {
			t.Fatalf("%v and %v of equal seeds", x, y)
		}
		differ = differ || x != other()
		seen[x.kind] = true
		back, err := parse(x.String())
		if err != nil || !reflect.DeepEqual(back, []step{x}) {
			t.Fatalf("%v is parsed as %v, %v", x, back, err)
		}
	}
	if !differ {
		t.Error("different seeds give equal steps")
	}
	for _, k := range kinds() {
		if !seen[k.name] {
			t.Errorf("%s never occurs", k.name)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"explode", "lost 8", "mig 1 all", "xid 1", "dead now", "calm 3", "clock 7", "empty", "lost 1 !"} {
		if steps, err := parse(text); err == nil {
			t.Errorf("%s is parsed as %v", text, steps)
		}
	}
}

func TestShrink(t *testing.T) {
	var steps []step
	for next := sequence(1, kinds()); len(steps) < 60; {
		steps = append(steps, next())
	}
	// The sequence fails if GPU 3 is lost some time before DCGM dies.
	needs := []step{{kind: "lost", gpu: 3}, {kind: "dead"}}
	steps = slices.Insert(steps, 11, needs[0])
	steps = append(steps, needs[1])
	runs := 0
	got := shrink(steps, time.Now().Add(time.Minute), func(s []step) bool {
		runs++
		i := slices.Index(s, needs[0])
		return i >= 0 && slices.Contains(s[i:], needs[1])
	})
	if !slices.Equal(got, needs) || runs > 200 {
		t.Errorf("%v after %d runs; want %v", got, runs, needs)
	}
	if got := shrink(steps, time.Now().Add(-time.Second),
		func([]step) bool { t.Error("called after the deadline"); return true }); !slices.Equal(got, steps) {
		t.Errorf("after the deadline: %v", got)
	}
}

func TestJournalCountsFlips(t *testing.T) {
	j := newJournal()
	say := func(registration int, healthy bool) {
		j.record("r", registration, []kubelettest.Device{{ID: "a", Healthy: healthy}, {ID: "b", Healthy: true}})
	}
	say(1, true)
	say(1, true)
	say(1, false)
	j.record("r", 1, nil) // withdrawn
	say(2, true)          // another stream, which lags behind
	say(1, false)
	say(2, false)
	say(1, true)
	if want := map[string]int{"a": 2}; !reflect.DeepEqual(j.flips, want) {
		t.Errorf("%v; want %v", j.flips, want)
	}
}

// Only steps that cause a registration extend the time limit.
func TestRegistrationTakesLonger(t *testing.T) {
	serves := func(names ...string) func(*registration) {
		all := map[string]map[string]bool{}
		for _, n := range names {
			all[n] = nil
		}
		return func(r *registration) { r.setResources(all) }
	}
	begin, kill, done := (*registration).expectRegistration, (*registration).streamClosed, (*registration).confirmed
	for name, c := range map[string]struct {
		happens []func(*registration)
		want    time.Duration
	}{
		"nothing":                          {nil, 0},
		"kubelet started":                  {[]func(*registration){begin}, settleDelay},
		"all registered":                   {[]func(*registration){begin, done}, 0},
		"first measurement":                {[]func(*registration){serves("a")}, settleDelay},
		"unchanged resources":              {[]func(*registration){serves("a", "b"), done, serves("b", "a")}, 0},
		"resource removed":                 {[]func(*registration){serves("a", "b"), done, serves("b")}, 0},
		"resource added":                   {[]func(*registration){serves("a"), done, serves("a", "b")}, settleDelay},
		"resource returned":                {[]func(*registration){serves("a", "b"), done, serves("a"), done, serves("a", "b")}, settleDelay},
		"stream killed":                    {[]func(*registration){begin, done, kill}, settleDelay},
		"stream killed twice":              {[]func(*registration){begin, done, kill, done, kill}, settleDelay + time.Second},
		"stream killed before it returned": {[]func(*registration){begin, done, kill, kill, kill}, settleDelay + 3*time.Second},
		"directory wiped":                  {[]func(*registration){kill, kill, kill, begin}, settleDelay},
		"plugin dropped":                   {[]func(*registration){begin, done, (*registration).pluginDropped}, auditTimeout},
		"agent restarted":                  {[]func(*registration){serves("a"), kill, kill, done, (*registration).restarted}, settleDelay},
	} {
		var r registration
		for _, f := range c.happens {
			f(&r)
		}
		if got := r.extraTime(); got != scaled(c.want) {
			t.Errorf("%s: %v more, want %v", name, got, c.want)
		}
	}
}
