package logsink

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pipe is a writer that blocks until a test reads.
type pipe struct {
	mu      sync.Mutex // guards all below but reading
	text    bytes.Buffer
	err     error
	reading chan struct{} // a write waits until it is closed
}

func newPipe(blocked bool) *pipe {
	p := &pipe{reading: make(chan struct{})}
	if !blocked {
		close(p.reading)
	}
	return p
}

func (p *pipe) Write(b []byte) (int, error) {
	<-p.reading
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return 0, p.err
	}
	return p.text.Write(b)
}

func (p *pipe) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *pipe) lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Split(strings.TrimSuffix(p.text.String(), "\n"), "\n")
}

func notice(n uint64) []byte { return fmt.Appendf(nil, "%d missing\n", n) }

func write(t *testing.T, s *Sink, line string) {
	t.Helper()
	entry := []byte(line + "\n")
	if n, err := s.Write(entry); n != len(entry) || err != nil {
		t.Fatalf("Write returned %d, %v", n, err)
	}
	clear(entry) // zap reuses its buffer
}

func TestWriteKeepsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(false)
		s := New(p, notice)
		for i := range 100 {
			write(t, s, fmt.Sprint(i))
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		for i, line := range p.lines() {
			if line != fmt.Sprint(i) {
				t.Fatalf("line %d is %q", i, line)
			}
		}
		if s.Dropped() != 0 {
			t.Errorf("%d dropped", s.Dropped())
		}
	})
}

// While the writer is blocked, Write returns at once and the queue stays within its capacity. The notice is at the
// position of the missing entries.
func TestWriteDropsWhileBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(true)
		s := New(p, notice)
		long := strings.Repeat("x", 999)
		write(t, s, "first")
		synctest.Wait() // the goroutine is blocked in this write
		const more = 100
		for range capacity/1000 + more {
			write(t, s, long)
		}
		write(t, s, "short") // fits by its length, but would come before the notice
		if s.size > capacity || s.Dropped() != more+1 {
			t.Errorf("%d bytes wait, %d entries dropped", s.size, s.Dropped())
		}
		begin := time.Now()
		if err := s.Sync(); !errors.Is(err, errBlocked) || time.Since(begin) != syncTimeout {
			t.Errorf("Sync returned %v after %v", err, time.Since(begin))
		}

		close(p.reading)
		synctest.Wait()
		write(t, s, "later")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		got := p.lines()
		if n := 1 + capacity/1000 + 2; len(got) != n || got[0] != "first" || got[n-3] != long || got[n-2] != fmt.Sprintf("%d missing", more+1) ||
			got[n-1] != "later" {
			t.Errorf("%d lines, the last %.80q", len(got), got[max(0, len(got)-3):])
		}
	})
}

func TestCloseWhileBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(true)
		s := New(p, notice)
		write(t, s, "first")
		begin := time.Now()
		if err := s.Close(); !errors.Is(err, errBlocked) || time.Since(begin) > syncTimeout {
			t.Errorf("Close returned %v after %v", err, time.Since(begin))
		}
		write(t, s, "after Close")
		close(p.reading) // synctest requires that the goroutine ends
	})
}

func TestWriteCountsFailedWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(false)
		s := New(p, notice)
		p.fail(errors.New("broken pipe"))
		write(t, s, "a")
		write(t, s, "b")
		synctest.Wait()
		p.fail(nil)
		write(t, s, "c")
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if got := p.lines(); len(got) != 2 || got[0] != "2 missing" || got[1] != "c" || s.Dropped() != 2 {
			t.Errorf("got %q, %d dropped", got, s.Dropped())
		}
	})
}

func TestWriteDropsEntryLongerThanQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(false)
		s := New(p, notice)
		write(t, s, strings.Repeat("x", capacity))
		synctest.Wait()
		write(t, s, "next")
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if got := p.lines(); len(got) != 2 || got[0] != "1 missing" || got[1] != "next" {
			t.Errorf("got %.80q", got)
		}
	})
}

func TestWriteFromManyGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // Close waits for half a second only
		p := newPipe(false)
		s := New(p, notice)
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 100 {
					write(t, s, "line")
				}
			})
		}
		all.Wait()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if n := len(p.lines()); n != 800 {
			t.Errorf("%d lines", n)
		}
	})
}
