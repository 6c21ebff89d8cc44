package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// pastXID returns an XID from before the start.
func pastXID(ago time.Duration, gpu, xid int) PastXID { return PastXID{Ago: ago, GPU: &gpu, XID: &xid} }

// TestPastXIDsAreListed checks that each sample of a GPU lists the past XIDs, oldest first.
func TestPastXIDsAreListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Past = []PastXID{pastXID(10*time.Second, 5, 95), pastXID(time.Hour, 5, 31), pastXID(time.Minute, 6, 13)}
		cfg.Scenario = []Event{event(t, 0, `{gpu: 5, xid: 43}`), event(t, 0, `{gpu: 6, lost: true}`)}
		src := newSource(t, cfg)
		sleep(time.Minute) // before the clock starts
		ses := open(t, src)
		start := time.Now()
		rowsOf := func(s health.Sample) (xids []timedXID) {
			for _, row := range s.Rows {
				xids = append(xids, timedXID{row.Code, row.XID().At.Sub(start)})
			}
			return xids
		}
		r := poll(t, ses)
		want := map[int][]timedXID{5: {{31, -time.Hour}, {95, -10 * time.Second}}, 6: {{13, -time.Minute}}}
		for i, d := range r.Devices {
			switch got := rowsOf(r.Samples[i]); {
			case d.Kind == health.KindMIG && got != nil:
				t.Errorf("past XIDs of %s of GPU %d: %v; want none", d.ID, d.Index, got)
			case d.Kind == health.KindGPU && !reflect.DeepEqual(got, want[d.Index]):
				t.Errorf("past XIDs of GPU %d: %v; want %v", d.Index, got, want[d.Index])
			}
		}
		if s := gpuSample(t, r, 5); s.Values[health.FieldXID] != 43 || len(s.XIDs) != 1 || s.XIDs[0].Code != 43 {
			t.Errorf("last XID %v, new XIDs %v; want 43", s.Values[health.FieldXID], s.XIDs)
		}
		for _, again := range []health.Session{ses, open(t, src)} {
			for i, s := range poll(t, again).Samples {
				if !reflect.DeepEqual(s.Rows, r.Samples[i].Rows) {
					t.Errorf("past XIDs of %s: %v, before %v", s.Device, s.Rows, r.Samples[i].Rows)
				}
			}
		}
	})
}

// TestPastXIDsWaitForASample checks that a source without values keeps the past XIDs, also while a GPU is repartitioned.
func TestPastXIDsWaitForASample(t *testing.T) {
	for _, state := range []string{sourceBlind, sourceEmpty} {
		synctest.Test(t, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Past = []PastXID{pastXID(10*time.Second, 5, 95)}
			src, ses := openSource(t, cfg)
			inject(t, src, `{source: `+state+`}`, `{gpu: 5, mig: balanced}`)
			for _, s := range poll(t, ses).Samples {
				if s.Rows != nil || s.RowsWhole {
					t.Errorf("%s: %+v", state, s)
				}
			}
			inject(t, src, `{source: up}`)
			if s := gpuSample(t, poll(t, ses), 5); len(s.Rows) != 1 || s.Rows[0].Code != 95 || !s.RowsWhole || s.Values[health.FieldXID] != 95 {
				t.Errorf("after %s: %+v", state, s)
			}
		})
	}
}

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
		for _, x := range gpuSample(t, poll(t, ses), 0).XIDs {
			if x.At.Before(last.At) {
				t.Fatalf("%v comes after %v", x, last)
			}
			counts[x.Code] += x.Count()
			last = x
		}
		if counts[13] != 3*maxQueued || counts[31] != 1 || last.Code != 31 {
			t.Errorf("%v, the last %d; want %d of 13, and the last 31", counts, last.Code, 3*maxQueued)
		}
	})
}
