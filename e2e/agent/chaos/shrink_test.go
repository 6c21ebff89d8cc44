package chaos

import (
	"slices"
	"time"
)

// shrink returns the shortest failing sequence that it finds before end. It tries the last few steps alone, then
// removes ever smaller parts (delta debugging).
func shrink(steps []step, end time.Time, fails func([]step) bool) []step {
	for n := 2; n < len(steps) && time.Now().Before(end); n *= 2 {
		if last := steps[len(steps)-n:]; fails(last) {
			steps = last
			break
		}
	}
	for size := len(steps) / 2; size > 0; {
		shorter := false
		for from := 0; from < len(steps) && len(steps) > 1 && time.Now().Before(end); {
			rest := slices.Delete(slices.Clone(steps), from, min(from+size, len(steps)))
			if len(rest) > 0 && fails(rest) {
				steps, shorter = rest, true
			} else {
				from += size
			}
		}
		if !time.Now().Before(end) {
			break
		}
		if !shorter || size > 1 {
			size /= 2
		}
	}
	return steps
}
