package metrics

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"strconv"
	"sync"

	"github.com/klauspost/compress/gzip"
)

// answer is a response that is first made in memory, packed if the client takes that, and then sent. So what a
// page is made with is free again before a slow client has read it.
//
// Promhttp could pack too, at a level that takes as long as all the rest of a scrape to make a tenth less of it;
// and an answer takes single bytes, which http.ResponseWriter does not, so that expfmt writes each family
// without another buffer.
type answer struct {
	http.ResponseWriter // for the header
	*tools
	packed bool
	status int
}

// tools are what an answer is made with. They are big, and used again.
type tools struct {
	buf *bufio.Writer
	zip *gzip.Writer
	out *bytes.Buffer
}

// press makes answers, a few at a time: more would take no less time, as it is all computing, and ten scrapers
// would take ten times the memory.
type press struct {
	turns chan struct{}
	tools sync.Pool // of *tools
	pages sync.Pool // of *bytes.Buffer, which have been sent
}

// inParallel is how many answers are made at once.
const inParallel = 2

func newPress() *press { return &press{turns: make(chan struct{}, inParallel)} }

// serve answers with what fill writes.
func (p *press) serve(ctx context.Context, w http.ResponseWriter, packed bool, fill func(http.ResponseWriter)) {
	out, ok := p.pages.Get().(*bytes.Buffer)
	if !ok {
		out = new(bytes.Buffer)
	}
	out.Reset()
	w.Header().Add("Vary", "Accept-Encoding")
	status := p.make(ctx, w, packed, out, fill)
	if status != 0 {
		w.Header().Set("Content-Length", strconv.Itoa(out.Len()))
		w.WriteHeader(status)
		_, _ = out.WriteTo(w) // a client that has gone away is nobody's error
	}
	p.pages.Put(out)
	if status == 0 {
		panic(http.ErrAbortHandler) // no answer is better than an empty one
	}
}

// make waits for its turn, makes an answer and returns its status; 0 if the client has not waited for it.
func (p *press) make(ctx context.Context, w http.ResponseWriter, packed bool, out *bytes.Buffer, fill func(http.ResponseWriter)) int {
	select {
	case p.turns <- struct{}{}: // whoever has only closed his own side still reads
	default:
		select {
		case p.turns <- struct{}{}:
		case <-ctx.Done():
			return 0
		}
	}
	defer func() { <-p.turns }()
	t, ok := p.tools.Get().(*tools)
	if !ok {
		// The standard library's takes twice as long for the same; so does a level that makes a tenth less of it.
		zip, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // the level is one
		t = &tools{buf: bufio.NewWriterSize(nil, 32<<10), zip: zip}
	}
	t.out = out
	a := &answer{w, t, packed, http.StatusOK}
	if packed {
		w.Header().Set("Content-Encoding", "gzip")
		t.zip.Reset(out)
		t.buf.Reset(t.zip)
	} else {
		t.buf.Reset(out)
	}
	fill(a)
	_ = t.buf.Flush() // to memory
	if a.packed {
		_ = t.zip.Close()
	}
	t.out = nil
	p.tools.Put(t)
	return a.status
}

// WriteHeader is only called for an error, which is told in plain text and instead of all that was written before.
func (a *answer) WriteHeader(status int) {
	if a.status = status; status != http.StatusOK {
		a.packed = false
		a.Header().Del("Content-Encoding")
		a.out.Reset()
		a.buf.Reset(a.out)
	}
}

func (a *answer) Write(b []byte) (int, error)       { return a.buf.Write(b) }
func (a *answer) WriteString(s string) (int, error) { return a.buf.WriteString(s) }
func (a *answer) WriteByte(b byte) error            { return a.buf.WriteByte(b) }
func (a *answer) WriteRune(r rune) (int, error)     { return a.buf.WriteRune(r) }
