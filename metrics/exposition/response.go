package exposition

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strconv"
	"sync"

	"github.com/klauspost/compress/gzip"
)

// maxRenders is the number of responses that are rendered at once. Rendering only computes, so more would not be
// faster, and many scrapers at once would take as many times the memory.
const maxRenders = 2

// renderer renders responses into memory before it sends them, so that a slow client occupies a buffer but not a page.
//
// It compresses the responses itself: promhttp's compression level takes as long as all the rest of a scrape, for a
// result that is a tenth smaller.
type renderer struct {
	slots   chan struct{}
	gzips   sync.Pool // of *gzip.Writer, which are large
	buffers sync.Pool // of *bytes.Buffer
}

func newRenderer() *renderer { return &renderer{slots: make(chan struct{}, maxRenders)} }

// serve sends the response that render writes. If the client leaves before a slot is free, serve aborts the connection.
func (r *renderer) serve(ctx context.Context, w http.ResponseWriter, compress bool, render func(http.ResponseWriter)) {
	buf, ok := r.buffers.Get().(*bytes.Buffer)
	if !ok {
		buf = new(bytes.Buffer)
	}
	buf.Reset()
	w.Header().Add("Vary", "Accept-Encoding")
	status := r.render(ctx, w, compress, buf, render)
	if status != 0 {
		w.Header().Set("Content-Length", strconv.Itoa(buf.Len()))
		w.WriteHeader(status)
		_, _ = buf.WriteTo(w) // it fails only if the client has disconnected
	}
	r.buffers.Put(buf)
	if status == 0 {
		panic(http.ErrAbortHandler) // else the client would get an empty page
	}
}

// render waits for a slot, renders a response into buf and returns its status; 0 if ctx ends before a slot is free.
func (r *renderer) render(ctx context.Context, w http.ResponseWriter, compress bool, buf *bytes.Buffer, render func(http.ResponseWriter)) int {
	select {
	case r.slots <- struct{}{}: // even if ctx has ended: a client that has closed only its side still reads
	default:
		select {
		case r.slots <- struct{}{}:
		case <-ctx.Done():
			return 0
		}
	}
	defer func() { <-r.slots }()
	b := &bufferedResponse{ResponseWriter: w, buf: buf, status: http.StatusOK}
	if compress {
		b.gzip = r.gzipWriter(buf)
		w.Header().Set("Content-Encoding", "gzip")
	}
	render(b)
	if b.gzip != nil {
		_ = b.gzip.Close() // to memory
		r.gzips.Put(b.gzip)
	}
	return b.status
}

func (r *renderer) gzipWriter(w io.Writer) *gzip.Writer {
	z, ok := r.gzips.Get().(*gzip.Writer)
	if !ok {
		// The standard library takes twice as long for the same result; so does a level with a result a tenth smaller.
		z, _ = gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // BestSpeed is a valid level
	}
	z.Reset(w)
	return z
}

// bufferedResponse is a response in memory.
type bufferedResponse struct {
	http.ResponseWriter // only for Header

	gzip   *gzip.Writer // nil: not compressed
	buf    *bytes.Buffer
	status int
}

// WriteHeader replaces what has been written if the status is an error: its message is sent uncompressed.
func (b *bufferedResponse) WriteHeader(status int) {
	if b.status = status; status != http.StatusOK {
		b.gzip = nil
		b.Header().Del("Content-Encoding")
		b.buf.Reset()
	}
}

func (b *bufferedResponse) Write(p []byte) (int, error) {
	if b.gzip != nil {
		return b.gzip.Write(p)
	}
	return b.buf.Write(p)
}
