package backoff

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

const samples = 10_000

// pauses returns the shortest and the longest of many pauses, each the nth since Reset.
func pauses(b *Backoff, n int) (shortest, longest time.Duration) {
	for i := range samples {
		b.Reset()
		var pause time.Duration
		for range n {
			pause = b.Next()
		}
		if i == 0 {
			shortest = pause
		}
		shortest, longest = min(shortest, pause), max(longest, pause)
	}
	return shortest, longest
}

// Pauses double to Max, and spread over the upper half of each.
func TestNext(t *testing.T) {
	b := Backoff{Min: time.Second, Max: 10 * time.Second}
	for i, full := range []time.Duration{1, 2, 4, 8, 10, 10} {
		full *= time.Second
		shortest, longest := pauses(&b, i+1)
		if shortest < full/2 || shortest > full*51/100 || longest < full*99/100 || longest > full {
			t.Errorf("pause %d of %v lasts from %v to %v", i, full, shortest, longest)
		}
	}
}

// A pause keeps within Max when Max is lowered, and goes on from there when Max is raised.
func TestNextAfterOtherMax(t *testing.T) {
	b := Backoff{Min: time.Second, Max: time.Hour}
	for range 100 {
		b.Next()
	}
	for i, full := range []time.Duration{3 * time.Second, 6 * time.Second, 12 * time.Second} {
		if b.Max = 3 * time.Second; i > 0 {
			b.Max = time.Minute
		}
		if pause := b.Next(); pause < full/2 || pause > full {
			t.Errorf("pause %d of %v lasts %v", i, full, pause)
		}
	}
}

// The longest times do not overflow, and no time is no pause.
func TestNextExtremes(t *testing.T) {
	const most = 1<<62 - 1 // 146 years
	long, none := Backoff{Min: most, Max: most}, Backoff{}
	for range 100 {
		if pause := long.Next(); pause < most/2 {
			t.Fatalf("pause %v", pause)
		}
		if pause := none.Next(); pause != 0 {
			t.Fatalf("pause %v", pause)
		}
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, start := Backoff{Min: time.Minute, Max: time.Hour}, time.Now()
		if !b.Wait(t.Context()) {
			t.Error("ended early")
		}
		if d := time.Since(start); d < 30*time.Second || d > time.Minute {
			t.Errorf("waited %v", d)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		if b.Wait(ctx) || time.Since(start) != time.Second {
			t.Errorf("waited %v of an ended context", time.Since(start))
		}
	})
}
