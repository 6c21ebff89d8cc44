package chaos

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// footprint is what the agent has of the machine.
type footprint struct {
	goroutines int
	node.Usage
}

func (w *world) footprint(ctx context.Context) (f footprint, err error) {
	page, err := w.Metrics(ctx)
	if err != nil {
		return f, err
	}
	g, ok := page.Value("go_goroutines")
	if !ok {
		return f, violated("growth", "go_goroutines is not on /metrics")
	}
	f.goroutines = int(g)
	f.Usage, err = node.UsageOf(w.Pid())
	return f, err
}

// checkGrowth bounds what the agent has in the middle of trouble.
func (w *world) checkGrowth(ctx context.Context) error {
	f, err := w.footprint(ctx)
	if err != nil {
		return err
	}
	if f.goroutines > 300 || f.Threads > 60 || f.Files > 150 {
		return violated("growth", "%+v", f)
	}
	return nil
}

// leftOver compares a calm agent with what it was at the first calm. Threads are not given back by Go.
func (w *world) leftOver(ctx context.Context) error {
	err := w.await(ctx, 15*time.Second, func(ctx context.Context) error {
		s, err := w.snapshot(ctx)
		if err != nil {
			return err
		}
		if s.Memory.Error != "" {
			return violated("memory", "the disk has room again, and: %s", s.Memory.Error)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if text, err := os.ReadFile(w.stateFile()); err != nil || !json.Valid(text) {
		return violated("memory", "the state file: %v: %.200s", err, text)
	}
	if err := w.checkKept(); err != nil {
		return err
	}
	rest, err := filepath.Glob(filepath.Join(w.Dir, "state", "*"))
	rest = slices.DeleteFunc(rest, func(path string) bool {
		return path == w.stateFile() || path == w.stateFile()+".lock"
	})
	if err != nil || len(rest) != 0 {
		return violated("memory", "beside the state file: %v, %v", rest, err)
	}
	return w.await(ctx, 15*time.Second, func(ctx context.Context) error {
		w.CloseIdleConnections()
		f, err := w.footprint(ctx)
		if err != nil {
			return err
		}
		if w.base == nil {
			w.base = &f
			return nil
		}
		const room = 8 << 20 // what the collector leaves until later, and what 10,000 XIDs have needed for a moment
		most := uint64(math.Round(1.3*float64(w.base.RSS))) + room
		if f.goroutines > w.base.goroutines+4 || f.Files > w.base.Files+4 || f.Threads > w.base.Threads+12 || f.RSS > most {
			return violated("growth", "%+v; it was %+v", f, *w.base)
		}
		return nil
	})
}
