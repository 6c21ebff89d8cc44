package plugin

import (
	"testing"
	"time"
)

func TestAllocationTimesAreForgotten(t *testing.T) {
	var a allocationTimes
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	a.add(request([]string{"GPU-0"}, []string{"GPU-1"}), at)
	a.add(request([]string{"GPU-1"}), at.Add(time.Minute))
	if !a.last("GPU-0").Equal(at) || !a.last("GPU-1").Equal(at.Add(time.Minute)) || !a.last("GPU-2").IsZero() {
		t.Errorf("%v", a.at)
	}
	a.add(request([]string{"GPU-2"}), at.Add(time.Second+allocationMemory))
	if len(a.at) != 2 || !a.last("GPU-0").IsZero() {
		t.Errorf("after %v: %v", allocationMemory, a.at)
	}
}
