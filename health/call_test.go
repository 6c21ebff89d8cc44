package health

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestCall(t *testing.T) {
	for name, test := range map[string]struct {
		takes, ends time.Duration // from the start; ends 0: ctx does not end
		want        []string
	}{
		"in time":             {time.Second, 0, []string{"done"}},
		"late":                {time.Minute, 0, []string{"late"}},
		"ended":               {5 * time.Second, time.Second, []string{"ended"}},
		"late, then ended":    {time.Minute, 30 * time.Second, []string{"late", "ended"}},
		"ended, then overdue": {time.Minute, time.Second, []string{"ended"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if test.ends > 0 {
					time.AfterFunc(test.ends, cancel)
				}
				var got []string
				add := func(what string) func() { return func() { got = append(got, what) } }
				start := time.Now()
				Call(ctx, 10*time.Second, func() int { <-time.After(test.takes); return 1 }, func(int) { add("done")() }, add("late"), add("ended"))
				if !slices.Equal(got, test.want) || time.Since(start) != test.takes {
					t.Errorf("%q after %v", got, time.Since(start))
				}
			})
		})
	}
}
