package statefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// reserve is the space in bytes that the disk keeps for a file at least, twice. The state of 8 GPUs with every XID that a flood leaves
// in Ledger.Rows takes half of it.
const reserve = 1 << 20

func fileOptions() durable.Options { return durable.WithSpare(reserve) }

// readFunc reads a file like durable.Options.Read.
type readFunc func(path string) (text []byte, info fs.FileInfo, err error)

// document is a file of the state directory.
type document struct {
	path    string
	options durable.Options
	adopted bool        // the file may be written: its content was read or set aside
	text    []byte      // that the file has or should have; nil if there is nothing to write
	info    fs.FileInfo // of the file as read or written last; nil if there should be none
	written bool        // by this process

	unreserved error // durable.Written.Unreserved
}

// content is what a document means. json.Unmarshal reads what it can of a newer version.
type content interface{ newerVersion() int } // 0 if this release has written it

// parse reads the file. Without a file there is neither a text nor an error.
func (d *document) parse(read readFunc, c content) (text []byte, info fs.FileInfo, err error) {
	text, info, err = read(d.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, nil
	case err != nil:
		return nil, nil, fmt.Errorf("%s cannot be read: %w", d.path, err)
	}
	if err = json.Unmarshal(text, c); err != nil {
		err = fmt.Errorf("%s cannot be parsed: %w", d.path, err)
	}
	return text, info, err
}

// adopt reads or sets aside the file, so that it may be written. replaced reports what was set aside and why; err reports why the file may
// not be written. The caller holds the lock.
func (d *document) adopt(read readFunc, c content) (replaced, err error) {
	text, info, err := d.parse(read, c)
	suffix, readable := ".damaged", []byte(nil)
	switch newer := c.newerVersion(); {
	case err != nil && text == nil:
		suffix = ".unread"
	case newer > 0:
		err, suffix = fmt.Errorf("%s has version %d of a newer release", d.path, newer), fmt.Sprintf(".version%d", newer)
		readable, _ = json.Marshal(c) // what was read can be written
	}
	if err != nil {
		aside, asideErr := durable.SetAside(d.path, suffix)
		if asideErr != nil {
			return nil, fmt.Errorf("%w; cannot set it aside: %w; writing nothing there", err, asideErr)
		}
		replaced, text, info = fmt.Errorf("%w; set aside as %s", err, aside), readable, nil
	}
	d.text, d.info, d.written, d.adopted = text, info, false, true
	return replaced, nil
}

// replace writes a text if the file lacks it; without a text, whatever is there stays. Written is zero if nothing was written. Otherwise
// difference is how the file differed from what this process read or wrote, "" if it did not.
func (d *document) replace(text []byte) (w durable.Written, difference string, err error) {
	difference = d.difference()
	if text == nil || difference == "" && bytes.Equal(text, d.text) {
		return w, "", nil
	}
	if w, err = d.options.Replace(d.path, text); err == nil {
		d.text, d.info, d.written, d.unreserved = text, w.Info, true, w.Unreserved
	}
	return w, difference, err
}

// difference describes how the file differs from what this process read or wrote, "" if it does not.
func (d *document) difference() string {
	info, err := os.Stat(d.path)
	switch {
	case err != nil && d.info == nil && d.text == nil:
		return "" // there was no file
	case err != nil:
		return "no file"
	case d.info == nil || !os.SameFile(d.info, info):
		return "another file"
	case !durable.Same(d.info, info):
		return "other content"
	}
	return ""
}
