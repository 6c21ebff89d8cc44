//go:build cgo && linux

package dcgm

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// A GPU that cannot be measured stays so when nothing is there to compare it with.
func TestStaleGPUStaysStale(t *testing.T) {
	for _, how := range []string{"lost", "paused"} {
		t.Run(how, func(t *testing.T) {
			b := fresh(t)
			b.gpus(2)
			b.open(config())
			b.poll()
			for second := range 40 { // GPU 1 stands still
				b.add(time.Second)
				b.sample(1)
				s, _ := b.poll()
				if second == 39 && !s[gpuID(1)].Stale {
					t.Fatal("not stale")
				}
			}
			if how == "lost" {
				b.lib.Entity(script.GPU, 0, statusLost)
			}
			for second := range 8 {
				b.add(time.Second)
				s, _ := b.poll()
				if !s[gpuID(1)].Stale {
					t.Fatalf("%d s later GPU 1 is measured: %v", second, s[gpuID(1)].Values)
				}
			}
		})
	}
}

// An engine that lists no GPU for a while tells nothing of their partitions.
func TestXIDOfAPartitionAfterAnEmptyList(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.mig(0, map[uint][]uint{0: {0}})
	b.open(config())
	b.poll()
	b.pollAfter(time.Second, 1)
	b.lib.Empty(true)
	for range 20 {
		b.add(time.Second)
		b.sample(1)
		if _, err := b.Poll(t.Context()); err != nil {
			t.Log(err)
			break
		}
	}
	b.lib.Empty(false)
	b.xid(script.CI, 0, 95, b.clock.now())
	b.xid(script.GPU, 0, 48, b.clock.now())
	var gpu, mig []int
	for range 20 {
		b.add(time.Second)
		b.sample(1)
		r, err := b.Poll(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Samples {
			if s.Device == gpuID(0) {
				gpu = append(gpu, codes(s)...)
			}
			if s.Device == migID(0) {
				mig = append(mig, codes(s)...)
				for _, x := range s.Past {
					mig = append(mig, -x.Code)
				}
			}
		}
	}
	if !slices.Contains(gpu, 48) || len(mig) == 0 {
		t.Errorf("gpu %v mig %v", gpu, mig)
	}
}

// A MIG mode that is not sampled yet is not "off".
func TestMIGModeAfterBinding(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.mig(1, map[uint][]uint{0: {0}})
	b.open(config())
	b.poll()
	b.lib.Entity(script.GPU, 1, statusDetached)
	b.pollAfter(time.Second, 2)
	b.lib.Entity(script.GPU, 1, statusOK)
	b.lib.Hold(script.GPU, 1, 67, 3)
	bad := 0
	for range 15 {
		b.add(time.Second)
		b.sample(2)
		b.lib.Int(script.GPU, 1, 67, 1, 0, b.clock.now())
		_, r := b.poll()
		for _, d := range r.Devices {
			if d.ID == gpuID(1) && !d.MIGMode {
				bad++
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d readings show the GPU as not in MIG mode", bad)
	}
}

// A field that comes after the GPU was shown without it is still read.
func TestInventoryThatComesLate(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.lib.Hold(script.GPU, 1, 86, 8)
	b.open(config())
	for second := range 300 {
		b.add(time.Second)
		b.sample(2)
		if second%60 == 59 {
			b.lib.Int(script.GPU, 1, 86, 2, 0, b.clock.now()) // as it is watched
		}
		b.poll()
	}
	if got := b.devices[len(b.devices)-1].NUMA; len(got) == 0 {
		t.Error("no NUMA node 5 minutes later")
	}
}

// Watches that are made anew because the samples stand still lose no XID.
func TestXIDsWhenAHostEngineStandsStill(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	cfg := config()
	cfg.Address = "node:5555"
	b.open(cfg)
	b.poll()
	b.lib.Clock(-time.Hour)
	var got, past []int
	sent := 0
	for range 120 {
		b.add(time.Second)
		b.sample(2)
		sent++
		b.xid(script.GPU, 0, int64(1000+sent), b.clock.now())
		r, err := b.Poll(t.Context())
		if err != nil {
			t.Log("after", sent, err)
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
			b.open(cfg)
			continue
		}
		for _, s := range r.Samples {
			if s.Device == gpuID(0) {
				got = append(got, codes(s)...)
				for _, x := range s.Past {
					past = append(past, x.Code)
				}
			}
		}
	}
	for n := 1; n <= sent; n++ {
		if !slices.Contains(got, 1000+n) {
			t.Errorf("XID number %d is lost (past %v)", n, past)
		}
	}
}
