package chaos

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// footprint is the agent's resource usage.
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

// checkGrowth checks upper limits during faults.
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

// checkLeaks compares a calm agent with its first calm. Go does not release threads.
func (w *world) checkLeaks(ctx context.Context) error {
	err := w.await(ctx, scaled(15*time.Second), func(ctx context.Context) error {
		s, err := w.snapshot(ctx)
		if err != nil {
			return err
		}
		if s.Memory.Error != "" {
			return violated("memory", "disk has space again, and the error stays: %s", s.Memory.Error)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if text, err := os.ReadFile(w.stateFile()); err != nil || !json.Valid(text) {
		return violated("memory", "state file: %v: %.200s", err, text)
	}
	if err := w.checkSaved(); err != nil {
		return err
	}
	rest, err := filepath.Glob(filepath.Join(w.StateDir(), "*"))
	rest = slices.DeleteFunc(rest, func(path string) bool {
		path = strings.TrimSuffix(path, ".spare")
		return path == w.stateFile() || slices.Contains([]string{"lock", "node.json", "last-good-config.json"}, filepath.Base(path))
	})
	if err != nil || len(rest) != 0 {
		return violated("memory", "files beside the state: %v, %v", rest, err)
	}
	return w.await(ctx, scaled(15*time.Second), func(ctx context.Context) error {
		w.CloseIdleConnections()
		f, err := w.footprint(ctx)
		if err != nil {
			return err
		}
		if w.baseline == nil {
			w.baseline = &f
			return nil
		}
		const room = 8 << 20 // memory that the collector frees later, and the peak of 10,000 XIDs
		most := uint64(math.Round(1.3*float64(w.baseline.RSS))) + room
		if f.goroutines > w.baseline.goroutines+4 || f.Files > w.baseline.Files+4 || f.Threads > w.baseline.Threads+12 || f.RSS > most {
			return violated("growth", "%+v; was %+v", f, *w.baseline)
		}
		return nil
	})
}
