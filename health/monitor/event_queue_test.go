package monitor

import (
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// However events are mixed, the queue keeps every XID, in bounded space.
func TestEventQueueMerges(t *testing.T) {
	var q []queuedEvent
	counts := make(map[health.Event]int)
	add := func(e health.Event) {
		q = appendEvent(q, queuedEvent{Event: e, times: 1})
		counts[e]++
	}
	for i := range 50 * maxQueued {
		add(health.Event{Kind: health.EventXID, GPU: "GPU-0", GI: i % 3, CI: i % 5, XID: health.XID{Code: i % 7}})
		add(health.Event{Kind: health.EventXID, GPU: "GPU-0", XID: health.XID{Code: i % 7, Witness: health.WitnessKernelLog}})
		add(health.Event{Kind: health.EventRecoveryAction, GPU: "GPU-0"})
	}
	if len(q) > maxQueued+3*5*7+7+1 {
		t.Errorf("%d entries", len(q))
	}
	for _, e := range q {
		counts[e.Event] -= e.times
	}
	for e, n := range counts {
		if n != 0 && e.Kind == health.EventXID {
			t.Errorf("%d of %+v are lost", n, e)
		}
	}
}

// XIDs of a short queue keep their order and the detail of each.
func TestEventQueueKeepsDetails(t *testing.T) {
	var q []queuedEvent
	for _, x := range []health.XID{
		{Code: 31},
		{Code: 31},
		{Code: 31, Detail: health.XIDDetail{PID: 1}},
		{Code: 31, Detail: health.XIDDetail{PID: 2}},
		{Code: 43},
		{Code: 31},
	} {
		q = appendEvent(q, queuedEvent{Event: health.Event{XID: x}, times: 1})
	}
	if len(q) != 5 || q[0].times != 2 || q[2].XID.Detail.PID != 2 || q[4].XID.Code != 31 {
		t.Errorf("%+v", q)
	}
}

// Merged XIDs are several events, of which the last was at the time of the entry.
func TestTakeXIDs(t *testing.T) {
	at := time.Now()
	e := queuedEvent{Event: health.Event{XID: health.XID{Code: 31, At: at}}, times: 5}
	xids := append(e.takeXIDs(2), e.takeXIDs(3)...)
	for i := 1; i < len(xids); i++ {
		if !xids[i].At.After(xids[i-1].At) {
			t.Errorf("%v is not after %v", xids[i].At, xids[i-1].At)
		}
	}
	if len(xids) != 5 || e.times != 0 || !xids[4].At.Equal(at) {
		t.Errorf("%v, %d left", xids, e.times)
	}
}
