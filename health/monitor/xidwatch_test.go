package monitor

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// watcher is a script that is an XIDWatcher too.
type watcher struct {
	*script
	looks atomic.Int64
	look  func() (bool, error)
}

func (w *watcher) XIDsChanged(context.Context) (bool, error) {
	w.looks.Add(1)
	w.set(func(s *script) { s.inside++; s.most = max(s.most, s.inside) })
	defer w.set(func(s *script) { s.inside-- })
	return w.look()
}

// watched runs a monitor over a watcher, in a synctest bubble.
func watched(t *testing.T, look func() (bool, error)) (*bench, *watcher) {
	t.Helper()
	b := monitor(t)
	w := &watcher{script: b.script, look: look}
	b.source.Store(&Source{Open: func(ctx context.Context) (health.Session, error) {
		if _, err := b.Open(ctx); err != nil {
			return nil, err
		}
		return w, nil
	}, StallAfter: 10 * time.Second})
	synctest.Wait()
	return b, w
}

func TestXIDWatcherIsAskedBetweenPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var news atomic.Bool
		b, w := watched(t, func() (bool, error) { return news.Swap(false), nil })
		defer b.stop()
		before := b.count(&b.polls)
		pass(10*time.Second + time.Millisecond)
		if n := b.count(&b.polls) - before; n != 10 {
			t.Errorf("%d polls in 10 s, want 10: the interval keeps its meaning", n)
		}
		if n := w.looks.Load(); n != 10 {
			t.Errorf("%d looks in 10 s, want one between two polls", n)
		}
		before = b.count(&b.polls)
		b.set(func(s *script) { s.xids = []health.XID{{Code: 79, At: time.Now()}} })
		news.Store(true)
		pass(maxXIDGap)
		if n := b.count(&b.polls) - before; n != 1 {
			t.Errorf("%d polls within %v of an XID, want 1", n, maxXIDGap)
		}
		if d := b.out.Load().Devices[0]; d.Verdict.State != health.Unhealthy || d.XIDCounts[79] != 1 {
			t.Errorf("the XID is not in the snapshot: %+v", d.Verdict)
		}
		if n := b.count(&b.most); n != 1 {
			t.Errorf("%d calls at the same time", n)
		}
	})
}

func TestXIDWatcherErrorEndsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dead atomic.Bool
		b, _ := watched(t, func() (bool, error) {
			if dead.Load() {
				return false, errors.New("the engine has died")
			}
			return false, nil
		})
		defer b.stop()
		dead.Store(true)
		opens, closes := b.count(&b.opens), b.count(&b.closes)
		pass(maxXIDGap)
		if s := b.shown(); s.Status != health.SourceDown || s.Err != "the engine has died" {
			t.Errorf("source %+v", s)
		}
		dead.Store(false)
		pass(minBackoff)
		if s := b.shown(); s.Status != health.SourceUp || b.count(&b.opens) != opens+1 || b.count(&b.closes) != closes+1 {
			t.Errorf("source %+v, opened %d times more", s, b.count(&b.opens)-opens)
		}
	})
}

func TestXIDWatcherThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var hangs atomic.Bool
		b, w := watched(t, func() (bool, error) {
			if hangs.Load() {
				<-hang
			}
			return false, nil
		})
		defer b.stop()
		config := *b.config.Load()
		config.Interval = time.Hour
		b.config.Store(&config)
		synctest.Wait()
		hangs.Store(true)
		polls := b.count(&b.polls)
		pass(maxXIDGap)
		looks := w.looks.Load()
		pass(time.Minute)
		if s := b.shown(); s.Status != health.SourceStalled || s.Err != "looking for XIDs has not returned within 10s" {
			t.Errorf("source %+v", s)
		}
		if w.looks.Load() != looks || b.count(&b.polls) != polls {
			t.Error("another call was made beside the one that hangs")
		}
		hangs.Store(false)
		close(hang)
		synctest.Wait()
		if s := b.shown(); s.Status != health.SourceUp || b.count(&b.polls) != polls+1 {
			t.Errorf("after the call has returned: source %+v, %d polls", s, b.count(&b.polls)-polls)
		}
		if n := b.count(&b.most); n != 1 {
			t.Errorf("%d calls at the same time", n)
		}
	})
}

// The last reading of a session is not lost to a look that is under way when another source is configured.
func TestXIDWatcherAndLastReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var hangs atomic.Bool
		b, _ := watched(t, func() (bool, error) {
			if hangs.Load() {
				<-hang
			}
			return false, nil
		})
		defer b.stop()
		hangs.Store(true)
		pass(maxXIDGap)
		b.set(func(s *script) { s.xids = []health.XID{{Code: 79, At: time.Now()}} })
		next := *b.source.Load()
		b.source.Store(&next)
		synctest.Wait()
		hangs.Store(false)
		close(hang)
		synctest.Wait()
		if d := b.out.Load().Devices[0]; d.XIDCounts[79] != 1 {
			t.Errorf("XIDs %v", d.XIDCounts)
		}
	})
}
