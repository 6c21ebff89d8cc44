package main

import (
	"math"
	"testing"
	"time"
)

func TestGrowth(t *testing.T) {
	line := func(start, perMinute float64, jitter ...float64) (s samples) {
		for i := range 61 {
			mib := start + perMinute*float64(i)
			if len(jitter) > 0 {
				mib += jitter[i%len(jitter)]
			}
			s = append(s, sample{time.Duration(i) * time.Minute, mib})
		}
		return s
	}
	warmup := line(20, 0)
	for i := range 10 {
		warmup[i].mib = float64(i)
	}
	for name, tt := range map[string]struct {
		s    samples
		want float64
	}{
		"flat":                      {line(20, 0), 0},
		"steady":                    {line(20, 0.1), 5},
		"shrinking":                 {line(20, -0.02), -1},
		"steady with jitter":        {line(20, 0.1, 0, 3, -3), 5},
		"growth before that time":   {warmup, 0},
		"one sample after the time": {line(20, 1)[:11], 0},
	} {
		if got := tt.s.growth(10 * time.Minute); math.Abs(got-tt.want) > 0.3 {
			t.Errorf("%s: growth %.2f, want %.2f", name, got, tt.want)
		}
	}
}
