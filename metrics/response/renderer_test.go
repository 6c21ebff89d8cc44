package response

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// counter renders its number of renderings. A rendering takes a second, so that tests under synctest are about time.
type counter struct {
	started, running, most atomic.Int64
}

const renderTime = time.Second

func (c *counter) render(w http.ResponseWriter) {
	n := c.started.Add(1)
	running := c.running.Add(1)
	for most := c.most.Load(); running > most && !c.most.CompareAndSwap(most, running); most = c.most.Load() {
	}
	<-time.After(renderTime)
	c.running.Add(-1)
	fmt.Fprint(w, n)
}

// serve sends a request and returns the body of the response; aborted if the connection is.
func serve(ctx context.Context, r *Renderer, name string, render func(http.ResponseWriter)) (body string, aborted bool) {
	defer func() { aborted = recover() != nil }()
	w := httptest.NewRecorder()
	r.Serve(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil), name, render)
	return w.Body.String(), false
}

func expectUnused(t *testing.T, r *Renderer) {
	t.Helper()
	if len(r.variants) > 0 || len(r.slots) > 0 {
		t.Errorf("%d variants and %d slots are left", len(r.variants), len(r.slots))
	}
}

// Requests that arrive during a rendering do not get it, but share the next one.
func TestRendererSharesResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := newRenderer(maxConcurrent), &counter{}
		var wg sync.WaitGroup
		request := func(want string, within time.Duration) {
			wg.Go(func() {
				begin := time.Now()
				if body, aborted := serve(t.Context(), r, "page", c.render); body != want || aborted || time.Since(begin) > within {
					t.Errorf("got rendering %q, aborted %v, after %v; want %s within %v", body, aborted, time.Since(begin), want, within)
				}
			})
		}
		request("1", renderTime)
		<-time.After(renderTime / 2)
		for range 100 {
			request("2", 3*renderTime/2)
		}
		<-time.After(renderTime)
		for range 100 {
			request("3", 3*renderTime/2)
		}
		wg.Wait()
		request("4", renderTime)
		wg.Wait()
		expectUnused(t, r)
	})
}

func TestRendererLimitsConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := newRenderer(maxConcurrent), &counter{}
		var wg sync.WaitGroup
		for i := range 5 * maxConcurrent {
			wg.Go(func() {
				if _, aborted := serve(t.Context(), r, strconv.Itoa(i), c.render); aborted {
					t.Errorf("request %d is aborted", i)
				}
			})
		}
		wg.Wait()
		if c.most.Load() != maxConcurrent {
			t.Errorf("%d concurrent renderings, want %d", c.most.Load(), maxConcurrent)
		}
		expectUnused(t, r)
	})
}

// Rendering leaves a processor to probes, unless there is only one.
func TestNewRendererLeavesProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for processors, want := range map[int]int{1: 1, 2: 1, 3: 2, 5: 4, 64: maxConcurrent} {
		runtime.GOMAXPROCS(processors)
		if got := cap(NewRenderer().slots); got != want {
			t.Errorf("%d processors: %d concurrent renderings, want %d", processors, got, want)
		}
	}
}

// If the client whose request would render a response leaves, another request renders it.
func TestRendererContinuesAfterClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := newRenderer(maxConcurrent), &counter{}
		var wg sync.WaitGroup
		for i := range maxConcurrent {
			wg.Go(func() { serve(t.Context(), r, strconv.Itoa(i), c.render) })
		}
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		for _, ctx := range []context.Context{ctx, t.Context()} { // the first to arrive is to render
			wg.Go(func() {
				body, aborted := serve(ctx, r, "page", c.render)
				if left := ctx.Err() != nil; aborted != left || !left && body == "" {
					t.Errorf("client left: %v, aborted %v, got %q", left, aborted, body)
				}
			})
			synctest.Wait()
		}
		cancel()
		synctest.Wait()
		if n := c.started.Load(); n != maxConcurrent {
			t.Errorf("%d renderings started, want %d", n, maxConcurrent)
		}
		wg.Wait()
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if body, aborted := serve(ctx, r, "page", c.render); aborted || body == "" {
			t.Errorf("a client that has only closed its side: aborted %v, got %q", aborted, body)
		}
		expectUnused(t, r)
	})
}

func TestRendererRecoversFromPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c := newRenderer(maxConcurrent), &counter{}
		fail := func(w http.ResponseWriter) {
			c.render(w)
			panic("no page")
		}
		var wg sync.WaitGroup
		for range 2 { // two renderings, whose memory is used again
			wg.Go(func() { serve(t.Context(), r, "page", c.render) })
			synctest.Wait()
		}
		wg.Wait()
		for range 10 {
			wg.Go(func() {
				if body, aborted := serve(t.Context(), r, "page", fail); !aborted {
					t.Errorf("got %q", body)
				}
			})
		}
		wg.Wait()
		if body, aborted := serve(t.Context(), r, "page", c.render); body != strconv.FormatInt(c.started.Load(), 10) || aborted {
			t.Errorf("after a panic: aborted %v, got %q", aborted, body)
		}
		expectUnused(t, r)
	})
}

// For any sequence of requests and departures, a response is complete and not older than its request.
func TestRendererAtRandom(t *testing.T) {
	r := newRenderer(maxConcurrent)
	var wg sync.WaitGroup
	var started [3]atomic.Int64
	for client := range 50 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(client)))
			for range 200 {
				page := random.IntN(len(started))
				ctx, cancel := context.WithCancel(t.Context())
				if random.IntN(3) == 0 {
					go cancel()
				}
				before := started[page].Load()
				body, aborted := serve(ctx, r, strconv.Itoa(page), func(w http.ResponseWriter) {
					n := started[page].Add(1)
					for range 10 {
						fmt.Fprintf(w, "%d %d,", page, n)
					}
				})
				left := ctx.Err() != nil
				cancel()
				if aborted {
					if !left {
						t.Error("aborted, though the client has not left")
					}
					continue
				}
				var gotPage, n int64
				if _, err := fmt.Sscanf(body, "%d %d,", &gotPage, &n); err != nil || gotPage != int64(page) || n <= before ||
					body != strings.Repeat(fmt.Sprintf("%d %d,", gotPage, n), 10) {
					t.Errorf("page %d after rendering %d: %v, got %q", page, before, err, body)
				}
			}
		})
	}
	wg.Wait()
	expectUnused(t, r)
}

// An error is sent uncompressed and without what has been written before.
func TestRendererSendsErrorsAsPlainText(t *testing.T) {
	r := newRenderer(maxConcurrent)
	for range 2 { // the second response reuses the memory of the first
		w, req := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		req.Header.Set("Accept-Encoding", "gzip")
		r.Serve(w, req, "page", func(w http.ResponseWriter) {
			_, _ = w.Write(bytes.Repeat([]byte("half a page"), 9999))
			http.Error(w, "no", http.StatusInternalServerError)
		})
		if w.Code != http.StatusInternalServerError || w.Body.String() != "no\n" || w.Header().Get("Content-Encoding") != "" {
			t.Errorf("status %d, header %v, body %q", w.Code, w.Header(), w.Body)
		}
		w = httptest.NewRecorder()
		w.Header().Set("X-Frame-Options", "deny")
		r.Handler("page", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "page") }).ServeHTTP(w, req)
		if h := w.Header(); w.Code != http.StatusOK || h.Get("Content-Encoding") != "gzip" || h.Get("X-Content-Type-Options") != "" ||
			h.Get("X-Frame-Options") != "deny" {
			t.Errorf("status %d, header %v", w.Code, h)
		}
	}
}
