package metrics

import (
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
// Promhttp could pack too, at a level that takes as long as all the rest of a scrape to make a tenth less of it.
type answer struct {
	http.ResponseWriter // for the header

	zip    *gzip.Writer // nil: not packed
	out    *bytes.Buffer
	status int
}

// press makes answers, a few at a time: more would take no less time, as it is all computing, and ten scrapers
// would take ten times the memory.
type press struct {
	turns chan struct{}
	zips  sync.Pool // of *gzip.Writer, which are big
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
	a := &answer{ResponseWriter: w, out: out, status: http.StatusOK}
	if packed {
		a.zip = p.zip(out)
		w.Header().Set("Content-Encoding", "gzip")
	}
	fill(a)
	if a.zip != nil {
		_ = a.zip.Close() // to memory
		p.zips.Put(a.zip)
	}
	return a.status
}

func (p *press) zip(out io.Writer) *gzip.Writer {
	zip, ok := p.zips.Get().(*gzip.Writer)
	if !ok {
		// The standard library's takes twice as long for the same; so does a level that makes a tenth less of it.
		zip, _ = gzip.NewWriterLevel(io.Discard, gzip.BestSpeed) // the level is one
	}
	zip.Reset(out)
	return zip
}

// WriteHeader is only called for an error, which is told in plain text and instead of all that was written before.
func (a *answer) WriteHeader(status int) {
	if a.status = status; status != http.StatusOK {
		a.zip = nil
		a.Header().Del("Content-Encoding")
		a.out.Reset()
	}
}

func (a *answer) Write(b []byte) (int, error) {
	if a.zip != nil {
		return a.zip.Write(b)
	}
	return a.out.Write(b)
}
