package containers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Examiner examines the node's containers with one configuration. It asks the driver, so that a pass may hang.
type Examiner[R any] interface {
	// Next waits until the next pass is due. It returns false when ctx ends.
	Next(ctx context.Context) bool

	// Pass examines the containers once. Passes do not overlap.
	Pass(ctx context.Context) R

	// Late returns what is published while a pass takes too long. The pass still runs.
	Late() R

	Publish(R)
	Clear() // withdraws what was published

	// Close releases the driver. No pass runs.
	Close()
}

// Follow has the containers examined until ctx ends, while begin returns an Examiner for the configuration. A pass that takes longer than
// limit has failed. Follow returns when the driver is released: not before a pass that hangs has returned.
func Follow[C comparable, R any](
	ctx context.Context, config *health.Latest[C], limit time.Duration, begin func(C) (e Examiner[R], enabled bool),
) {
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, config, func(c *C) C { return *c })
		if e, enabled := begin(c); enabled {
			follow(same, limit, e)
		} else {
			<-same.Done()
		}
		cancel()
	}
}

func follow[R any](ctx context.Context, limit time.Duration, e Examiner[R]) {
	passes := health.Guard[struct{}, R]{Limit: limit}
	defer e.Close()
	defer passes.Wait()
	defer e.Clear() // before Wait, which may take as long as the driver hangs
	for e.Next(ctx) {
		r, err := passes.Call(ctx.Done(), struct{}{}, func() R { return e.Pass(ctx) }, func() { e.Publish(e.Late()) })
		if err == nil {
			e.Publish(r)
		}
	}
}

// namesLimit limits one reading of names. It leaves time for the rest of a pass.
const namesLimit = 3 * time.Second

// NamesReader reads the names of the node's pods and containers again and again. A directory that hangs delays its user by namesLimit. Its
// calls must not overlap.
type NamesReader struct {
	calls   health.Guard[string, readResult]
	last    Names  // of the last reading without an error
	podLogs string // of last
}

type readResult struct {
	names Names
	err   error
}

// NewNamesReader returns a NamesReader.
func NewNamesReader() *NamesReader {
	return &NamesReader{calls: health.Guard[string, readResult]{Limit: namesLimit}}
}

// Read returns the names in podLogs. While the directory hangs, it returns the names of the last good reading with an error that is
// health.ErrLate.
func (r *NamesReader) Read(ctx context.Context, podLogs string) (Names, error) {
	got, err := r.calls.Call(ctx.Done(), podLogs, func() readResult {
		names, err := readNames(podLogs)
		return readResult{names, err}
	}, nil)
	switch {
	case err == nil:
		if got.err == nil {
			r.last, r.podLogs = got.names, podLogs
		}
		return got.names, got.err
	case errors.Is(err, health.ErrLate):
		err = fmt.Errorf("%s: %w", podLogs, err)
	}
	if r.podLogs != podLogs {
		return Names{}, err
	}
	return r.last, err
}
