//go:build cgo && linux

package dcgm

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestWakeNeverBlocks(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	for range 100 {
		if n := b.lib.Violate(0, 13); n != 1 {
			t.Fatalf("%d callbacks", n)
		}
	}
	<-b.Wake()
	b.lib.Row(script.GPU, 0, 13, 0, b.clock.now().Add(time.Second))
	if got := b.pollAfter(time.Second, 1)[gpuID(0)].XIDs; len(got) != 1 {
		t.Errorf("XIDs %v: a hundred callbacks are one row of the stream", got)
	}
}

// DCGM calls back once in five seconds for a GPU (5).
func TestSecondXIDWithoutACallback(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	b.add(time.Second)
	b.xid(script.GPU, 0, 13, b.clock.now())
	b.lib.Violate(0, 13)
	<-b.Wake()
	samples, _ := b.poll()
	if got := codes(samples[gpuID(0)]); !slices.Equal(got, []int{13}) {
		t.Fatalf("XIDs %v, want 13", got)
	}
	b.add(time.Second)
	b.xid(script.GPU, 0, 48, b.clock.now())
	if got := codes(b.pollAfter(0, 1)[gpuID(0)]); !slices.Equal(got, []int{48}) {
		t.Errorf("XIDs %v, want 48 although nobody called back", got)
	}
}

// Another client of the engine ends our callbacks, and nobody tells us (6).
func TestSilencedCallbacks(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.lib.Silence()
	if n := b.lib.Violate(1, 79); n != 0 {
		t.Fatalf("%d callbacks are still there: this test tests nothing", n)
	}
	for i, code := range []int64{79, 48, 79} {
		b.add(20 * time.Second)
		b.xid(script.GPU, 1, code, b.clock.now())
		if got := codes(b.pollAfter(time.Second, 2)[gpuID(1)]); !slices.Equal(got, []int{int(code)}) {
			t.Errorf("XID %d: got %v, want %d", i, got, code)
		}
	}
}

// A callback says nothing but that a look is worth while: one of another condition, of a listener of
// before, or of an XID long reported, is no XID (7).
func TestStaleCallbacks(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	b.add(time.Second)
	b.xid(script.GPU, 0, 48, b.clock.now())
	b.pollAfter(time.Second, 1)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.open(config())
	b.poll()
	if n := b.lib.ViolateNVLink(0); n != 1 {
		t.Fatalf("%d callbacks", n)
	}
	if n := b.lib.ViolatePast(0, 79); n != 1 {
		t.Fatalf("%d callbacks of the listener of before", n)
	}
	if got := codes(b.pollAfter(time.Second, 1)[gpuID(0)]); len(got) != 0 {
		t.Errorf("XIDs %v of callbacks that are none of an XID", got)
	}
	b.lib.Violate(0, 48)
	<-b.Wake()
	if got := codes(b.pollAfter(time.Second, 1)[gpuID(0)]); len(got) != 0 {
		t.Errorf("XIDs %v: reported long ago", got)
	}
}

// The engine reads one event a second: a burst on five GPUs takes five (8).
func TestBurst(t *testing.T) {
	b := fresh(t)
	b.gpus(5)
	b.open(config())
	b.poll()
	b.add(time.Second)
	happened := b.clock.now()
	for gpu := range uint(5) {
		b.xid(script.GPU, gpu, 74, happened) // all at one time, and read one after the other
		b.lib.Violate(gpu, 74)
		<-b.Wake()
		for id, s := range b.pollAfter(time.Second, 5) {
			if want := id == gpuID(gpu); (len(s.XIDs) == 1) != want || len(s.XIDs) > 1 {
				t.Errorf("after the event of GPU %d: XIDs of %s: %v", gpu, id, s.XIDs)
			}
		}
	}
}
