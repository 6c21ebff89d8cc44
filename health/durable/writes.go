package durable

import (
	"fmt"
	"sync"
	"time"
)

// slowWrite is how long an access of the disk may take before it is a Failure.
const slowWrite = 10 * time.Second

// Failure is why a file does not have what it should. The zero Failure is none.
type Failure struct {
	Path  string
	Err   string
	Since time.Time
}

// String names the file, and since when it cannot be written.
func (f Failure) String() string {
	return fmt.Sprintf("%s cannot be written since %s: %s", f.Path, f.Since.UTC().Format(time.RFC3339), f.Err)
}

// Writes follows whether a file can be written, also while the disk does not answer. Its methods may be called from any goroutine.
type Writes struct {
	mu         sync.Mutex // guards the fields below
	path       string
	err        string
	since      time.Time // of err
	busySince  time.Time // start of the current disk access; zero if there is none
	unreserved string
}

// Begin begins an access of the disk for a file.
func (w *Writes) Begin(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.follow(path)
	w.busySince = time.Now()
}

// End ends an access of the disk that does not tell whether the file can be written.
func (w *Writes) End() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busySince = time.Time{}
}

// Report ends an access of the disk. err is why the file does not have what it should, nil if it has.
func (w *Writes) Report(path string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.follow(path)
	w.busySince = time.Time{}
	switch {
	case err == nil:
		w.err, w.since = "", time.Time{}
	case w.err == "":
		w.since = time.Now()
		fallthrough
	default:
		w.err = err.Error()
	}
}

// follow forgets another file. w.mu is held.
func (w *Writes) follow(path string) {
	if path != w.path {
		w.path, w.err, w.since, w.unreserved = path, "", time.Time{}, ""
	}
}

// SetUnreserved stores Written.Unreserved, and reports whether that is new and not nil.
func (w *Writes) SetUnreserved(err error) (isNew bool) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	isNew = text != "" && text != w.unreserved
	w.unreserved = text
	return isNew
}

// Unreserved returns why a full disk would refuse the next text; "" if it would not.
func (w *Writes) Unreserved() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unreserved
}

// Failure returns the failure that lasts now.
func (w *Writes) Failure() Failure {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch busy := time.Since(w.busySince); {
	case w.err != "":
		return Failure{w.path, w.err, w.since}
	case !w.busySince.IsZero() && busy > slowWrite:
		return Failure{w.path, fmt.Sprintf("%s: disk has not responded for %v", w.path, busy.Round(time.Second)), w.busySince}
	}
	return Failure{}
}
