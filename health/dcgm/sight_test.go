//go:build cgo && linux

package dcgm

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// After an XID 119 DCGM calls the GPUs OK and has no value of them any more.
func TestBlindEngineEndsTheSession(t *testing.T) {
	for name, interval := range map[string]time.Duration{"light polls": time.Hour, "full polls": time.Second} {
		t.Run(name, func(t *testing.T) {
			b := fresh(t)
			b.gpus(2)
			cfg := config()
			cfg.Interval = interval
			b.open(cfg)
			b.poll()
			b.pollAfter(time.Second, 2)
			for id := range uint(2) {
				for _, f := range []uint{54, 67, 150, 395, 396, 1507, 1523} {
					b.lib.Int(script.GPU, id, f, 9223372036854775792, 0, b.clock.now())
				}
				b.lib.Float(script.GPU, id, 155, 140737488355328, 0, b.clock.now())
			}
			var err error
			seconds := 0
			for ; err == nil && seconds < 20; seconds++ {
				b.add(time.Second)
				_, err = b.Poll(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), "blind") || seconds > 5 {
				t.Fatalf("after %d s: %v", seconds, err)
			}
			if err := b.Close(); err != nil {
				t.Error(err)
			}
			if _, err := Open(t.Context(), cfg, b.log); err == nil || !strings.Contains(err.Error(), "blind") {
				t.Errorf("Open of a blind engine: %v", err)
			}
		})
	}
}

// GPUs that have none of the fields of health are not blind for that.
func TestGPUsWithoutFieldsOfHealth(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	blank := func() {
		for _, f := range []uint{150, 395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, 0, f, 9223372036854775794, 0, b.clock.now())
		}
		b.lib.Float(script.GPU, 0, 155, 50, 0, b.clock.now())
	}
	blank()
	b.open(config())
	for range 100 {
		b.poll()
		b.add(time.Second)
		blank()
	}
}

func TestEngineThatStopsMeasuringEndsTheSession(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	for range 60 {
		b.pollAfter(time.Second, 2)
	}
	var err error
	seconds := 0
	for ; err == nil && seconds < 100; seconds++ {
		b.add(time.Second)
		_, err = b.Poll(t.Context())
	}
	if err == nil || !strings.Contains(err.Error(), "has not measured") || seconds < 30 || seconds > 35 {
		t.Errorf("after %d s: %v, want an error after 30 s", seconds, err)
	}
}
