// Package response renders responses in memory, a few at once, and shares each with all requests that wait for it.
package response

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"runtime"
	"strconv"
	"sync"

	"github.com/klauspost/compress/gzip"
)

// maxConcurrent is the largest number of responses that are rendered at once. Rendering only computes, so more would not
// be faster, and many requests at once would take as many times the memory.
const maxConcurrent = 4

// Renderer renders responses and sends them. Equal requests that arrive before a rendering starts share it, and no two
// renderings of equal requests run at once. So a response is never older than its request, and a request waits for at most
// one other rendering of its page, however many requests there are.
//
// It compresses the responses itself: promhttp's compression level takes as long as all the rest of a scrape, for a
// result that is a tenth smaller.
type Renderer struct {
	slots     chan struct{} // one for each concurrent rendering
	gzips     sync.Pool     // of *gzip.Writer, which are large
	responses sync.Pool     // of *rendering

	mu       sync.Mutex // guards variants and rendering.users
	variants map[variant]*variantState
}

// variant identifies equal responses.
type variant struct {
	name string
	gzip bool
}

// variantState is the state of a variant that is requested.
type variantState struct {
	busy bool       // a rendering is running
	next *rendering // has not started; nil: there is none
}

// rendering is a response in memory.
type rendering struct {
	users int           // requests that wait for it or send it
	lead  chan struct{} // has a token when it may start; the request that takes the token renders it
	done  chan struct{} // closed when the following fields are set

	header http.Header
	status int // 0: rendering has failed
	buf    bytes.Buffer
}

// NewRenderer returns a renderer. It leaves a processor to the rest of the process. Otherwise clients that request many
// different pages delay probes.
func NewRenderer() *Renderer {
	return newRenderer(max(1, min(maxConcurrent, runtime.GOMAXPROCS(0)-1)))
}

func newRenderer(concurrent int) *Renderer {
	return &Renderer{slots: make(chan struct{}, concurrent), variants: make(map[variant]*variantState)}
}

// Handler returns a handler that sends the responses of h. They must not depend on the request.
func (r *Renderer) Handler(name string, h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.Serve(w, req, name, func(w http.ResponseWriter) { h(w, req) })
	})
}

// Serve sends the response that render writes, or that another request's render with the same name does. If the client
// leaves before that is rendered, Serve aborts the connection.
func (r *Renderer) Serve(w http.ResponseWriter, req *http.Request, name string, render func(http.ResponseWriter)) {
	v := variant{name, acceptsGzip(req.Header.Values("Accept-Encoding"))}
	res := r.join(v)
	defer r.leave(v, res)
	if !r.await(req.Context(), v, res, render) {
		panic(http.ErrAbortHandler) // else the client would get an empty page
	}
	maps.Copy(w.Header(), res.header)
	w.WriteHeader(res.status)
	_, _ = w.Write(res.buf.Bytes()) // it fails only if the client has disconnected
}

// join returns the next rendering of a variant.
func (r *Renderer) join(v variant) *rendering {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.variants[v]
	if !ok {
		s = &variantState{}
		r.variants[v] = s
	}
	if s.next == nil {
		if s.next, ok = r.responses.Get().(*rendering); !ok {
			s.next = &rendering{header: make(http.Header)}
		}
		s.next.lead, s.next.done = make(chan struct{}, 1), make(chan struct{})
		s.advance()
	}
	s.next.users++
	return s.next
}

// advance lets the next rendering start if none is running. The caller holds mu.
func (s *variantState) advance() {
	if !s.busy && s.next != nil {
		s.next.lead <- struct{}{}
	}
}

// leave recycles a rendering after its last use.
func (r *Renderer) leave(v variant, res *rendering) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if res.users--; res.users > 0 {
		return
	}
	if s := r.variants[v]; s != nil && s.next == res {
		s.next = nil
		r.removeUnused(v, s)
	}
	clear(res.header)
	res.buf.Reset()
	res.status = 0
	r.responses.Put(res)
}

// removeUnused removes the state of a variant without renderings. The caller holds mu.
func (r *Renderer) removeUnused(v variant, s *variantState) {
	if !s.busy && s.next == nil {
		delete(r.variants, v)
	}
}

// await waits until a rendering is done, or does it if this request takes the token. It reports whether there is a
// response: the rendering may fail, or ctx end before.
func (r *Renderer) await(ctx context.Context, v variant, res *rendering, render func(http.ResponseWriter)) bool {
	select {
	case <-res.lead: // even if ctx has ended: a client that has closed only its side still reads
	default:
		select {
		case <-res.lead:
		case <-res.done:
			return res.status != 0
		case <-ctx.Done():
			return false
		}
	}
	select {
	case r.slots <- struct{}{}:
	default:
		select {
		case r.slots <- struct{}{}:
		case <-ctx.Done():
			res.lead <- struct{}{} // another request renders it
			return false
		}
	}
	s := r.start(v)
	defer r.finish(v, s, res) // even if render panics
	r.render(res, v.gzip, render)
	return true
}

// start ends the time in which requests may join the next rendering.
func (r *Renderer) start(v variant) *variantState {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.variants[v]
	s.busy, s.next = true, nil
	return s
}

// finish ends a rendering and lets the next one start.
func (r *Renderer) finish(v variant, s *variantState, res *rendering) {
	close(res.done)
	<-r.slots
	r.mu.Lock()
	defer r.mu.Unlock()
	s.busy = false
	s.advance()
	r.removeUnused(v, s)
}

func (r *Renderer) render(res *rendering, compress bool, render func(http.ResponseWriter)) {
	b := &writer{res: res, status: http.StatusOK}
	if compress {
		b.gzip = r.gzipWriter(&res.buf)
		res.header.Set("Content-Encoding", "gzip")
	}
	res.header.Add("Vary", "Accept-Encoding")
	render(b)
	if b.gzip != nil {
		_ = b.gzip.Close() // to memory
		r.gzips.Put(b.gzip)
	}
	res.header.Set("Content-Length", strconv.Itoa(res.buf.Len()))
	res.status = b.status
}

func (r *Renderer) gzipWriter(w io.Writer) *gzip.Writer {
	z, ok := r.gzips.Get().(*gzip.Writer)
	if !ok {
		// The standard library takes twice as long for the same result; so does a level with a result a tenth smaller.
		z, _ = gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // BestSpeed is a valid level
	}
	z.Reset(w)
	return z
}

// writer writes a response.
type writer struct {
	res    *rendering
	gzip   *gzip.Writer // nil: not compressed
	status int
}

// Header implements http.ResponseWriter.
func (b *writer) Header() http.Header { return b.res.header }

// WriteHeader replaces what has been written if the status is an error: its message is sent uncompressed.
func (b *writer) WriteHeader(status int) {
	if b.status = status; status != http.StatusOK {
		b.gzip = nil
		b.res.header.Del("Content-Encoding")
		b.res.buf.Reset()
	}
}

func (b *writer) Write(p []byte) (int, error) {
	if b.gzip != nil {
		return b.gzip.Write(p)
	}
	return b.res.buf.Write(p)
}
