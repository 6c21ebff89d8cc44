package monitor

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// However events are mixed, the queue keeps every XID, in bounded space.
func TestEventQueueMerges(t *testing.T) {
	var q []queuedEvent
	counts := make(map[health.Event]int)
	add := func(e health.Event) {
		q = appendEvent(q, queuedEvent{Event: e})
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
		n := e.XID.Count()
		e.XID.Times = 0
		counts[e.Event] -= n
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
		q = appendEvent(q, queuedEvent{Event: health.Event{XID: x}})
	}
	if len(q) != 5 || q[0].XID.Times != 2 || q[2].XID.Detail.PID != 2 || q[4].XID.Code != 31 {
		t.Errorf("%+v", q)
	}
}
