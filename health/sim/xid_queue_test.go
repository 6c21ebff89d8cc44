package sim

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestXIDQueueMergesWithoutPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", time.Second, event(t, 0, `{gpu: 0, xid: 13}`))
		src, ses := openSource(t, cfg)
		sleep(3*maxQueued*time.Second - time.Millisecond)
		inject(t, src, `{gpu: 0, xid: 31}`)
		if n := len(src.gpus[0].queue); n > maxQueued+1 {
			t.Errorf("%d entries; want %d", n, maxQueued+1)
		}
		counts := map[int]int{}
		var last health.XID
		for woken(ses) {
			for _, x := range gpuSample(t, poll(t, ses), 0).XIDs {
				if x.At.Before(last.At) {
					t.Fatalf("%v comes after %v", x, last)
				}
				counts[x.Code]++
				last = x
			}
		}
		if counts[13] != 3*maxQueued || counts[31] != 1 || last.Code != 31 {
			t.Errorf("%v, the last %d; want %d of 13, and the last 31", counts, last.Code, 3*maxQueued)
		}
	})
}

// TestXIDQueueWakesForTheRest checks that a reading has at most maxDelivered XIDs, and that Wake fires for the rest.
func TestXIDQueueWakesForTheRest(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		inject(t, src, `{gpu: 2, xid: 31, times: 10000}`)
		var polls, n int
		for ; woken(ses); polls++ {
			got := len(gpuSample(t, poll(t, ses), 2).XIDs)
			if got > maxDelivered {
				t.Errorf("%d XIDs in one reading", got)
			}
			n += got
		}
		if n != 10000 || polls != 10 {
			t.Errorf("%d XIDs in %d polls; want 10000 in 10", n, polls)
		}
	})
}
