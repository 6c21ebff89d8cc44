package kernellog

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// recorder is an EventReceiver for a reader in the same goroutine.
type recorder struct{ events []health.Event }

func (r *recorder) Receive(e health.Event) { r.events = append(r.events, e) }
func (*recorder) SetEvents(error)          {}

func (r *recorder) codes() (codes []int) {
	for _, e := range r.events {
		codes = append(codes, e.XID.Code)
	}
	return codes
}

func newReader(to health.EventReceiver) *reader {
	return &reader{path: "/dev/kmsg", to: to, log: zap.NewNop()}
}

// xidRecord returns a record of the kernel with an XID.
func xidRecord(sequence, code int) string {
	return fmt.Sprintf("4,%d,23603062006,-;NVRM: Xid (PCI:0000:1b:00): %d, text\n", sequence, code)
}

// device reads as /dev/kmsg does: a read returns one record or an error.
type device []any

func (d *device) Read(p []byte) (int, error) {
	if len(*d) == 0 {
		return 0, io.EOF
	}
	next := (*d)[0]
	*d = (*d)[1:]
	if err, ok := next.(error); ok {
		return 0, err
	}
	return copy(p, next.(string)), nil
}

func TestReadRecords(t *testing.T) {
	overwritten, large := &os.PathError{Op: "read", Path: "/dev/kmsg", Err: syscall.EPIPE},
		&os.PathError{Op: "read", Path: "/dev/kmsg", Err: syscall.EINVAL}
	storm := make(device, 10000)
	for i := range storm {
		storm[i] = xidRecord(i+1, 31)
	}
	var failing device // each read but the next
	for i := range 2 * maxFailures {
		failing = append(failing, overwritten, xidRecord(i+1, 31))
	}
	for name, c := range map[string]struct {
		from          device
		codes         []int
		skipped, lost uint64
	}{
		"two in one microsecond": {device{xidRecord(1, 13), xidRecord(2, 13)}, []int{13, 13}, 0, 0},
		"other records":          {device{"6,1,2,-;usb 1-1: new device\n SUBSYSTEM=usb\n DEVICE=c189:1\n", xidRecord(2, 13)}, []int{13}, 0, 0},
		"the kernel overwrote some": {device{
			xidRecord(7, 13), overwritten, xidRecord(10, 31), overwritten, overwritten,
			xidRecord(12, 79),
		}, []int{13, 31, 79}, 0, 3},
		"one exceeds the buffer": {device{xidRecord(7, 13), large, xidRecord(9, 31)}, []int{13, 31}, 1, 1},
		"malformed records":      {device{"text\n", "\n", "4,x,2,-;NVRM: Xid (PCI:0000:1b:00): 79, text\n", xidRecord(2, 13)}, []int{13}, 3, 0},
		"an XID in another form": {device{"4,1,2,-;NVRM: Xid (GPU 3): 79, text\n", xidRecord(2, 13)}, []int{13}, 1, 0},
		"a process wrote it":     {device{"12,1,2,-;NVRM: Xid (PCI:0000:1b:00): 79, text\n", xidRecord(2, 13)}, []int{13}, 0, 0},
		"a property that looks like one": {
			device{"6,1,2,-;text\n 4,9,2,-;NVRM: Xid (PCI:0000:1b:00): 79, text\n", xidRecord(2, 13)},
			[]int{13},
			0, 0,
		},
		"records that were read before": {device{xidRecord(3, 13), xidRecord(2, 31), xidRecord(3, 13), xidRecord(4, 79)}, []int{13, 79}, 0, 0},
		"an endless line": {
			device{strings.Repeat("x", maxRecord), strings.Repeat("x", maxRecord), "x\n", xidRecord(2, 13)},
			[]int{13},
			1, 0,
		},
		"an endless line that ends as one": {device{strings.Repeat("x", maxRecord), xidRecord(1, 79), xidRecord(2, 13)}, []int{13}, 1, 0},
		"every other read fails":           {failing, slices.Repeat([]int{31}, 2*maxFailures), 0, 0},
		"a storm of equal lines":           {storm, slices.Repeat([]int{31}, len(storm)), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var to recorder
			core, logs := observer.New(zap.InfoLevel)
			r := newReader(&to)
			r.device, r.log = true, zap.New(core)
			if err := r.readRecords(&c.from); !errors.Is(err, io.EOF) {
				t.Errorf("error %v, want the end of the records", err)
			}
			if !slices.Equal(to.codes(), c.codes) || r.skipped.total != c.skipped || r.lost.total != c.lost {
				t.Errorf("XIDs %v, %d skipped, %d lost; want %v, %d, %d", to.codes(), r.skipped.total, r.lost.total, c.codes, c.skipped, c.lost)
			}
			lostLogged := slices.ContainsFunc(logs.All(), func(e observer.LoggedEntry) bool { _, is := e.ContextMap()["lost"]; return is })
			if lostLogged != (c.lost > 0) || logs.Len() > 2 {
				t.Errorf("%d lost, logged %v", c.lost, logs.All())
			}
		})
	}
}

// An error that stays must not occupy a processor.
func TestReadRecordsEndsIfNothingCanBeRead(t *testing.T) {
	for _, lasting := range []error{syscall.EPIPE, syscall.EINVAL} {
		if err := newReader(&recorder{}).readRecords(failing{lasting}); !errors.Is(err, lasting) {
			t.Errorf("%v, want %v", err, lasting)
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestSkippedRecordsAreLoggedSparsely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		r := newReader(&recorder{})
		r.log = zap.New(core)
		for range 3 {
			for range 1000 {
				r.take([]byte("malformed\n"))
			}
			time.Sleep(time.Minute) //nolint:forbidigo // in the bubble
		}
		r.take([]byte("malformed\n"))
		all := logs.All()
		if len(all) != 4 || all[3].ContextMap()["skipped"] != uint64(3001) {
			t.Errorf("%d entries, want 4, the last with 3001 records: %+v", len(all), all)
		}
	})
}

// feed receives what an event source reports.
type feed struct {
	events chan health.Event
	states chan error
}

func (f *feed) Receive(e health.Event) { f.events <- e }
func (f *feed) SetEvents(err error)    { f.states <- err }

// start runs an event source of the path until the test ends.
func start(t *testing.T, path string) *feed {
	t.Helper()
	f := &feed{make(chan health.Event, 100), make(chan error, 100)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Events(path, zap.NewNop())(ctx, f)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return f
}

// wantUp waits until the source is up.
func (f *feed) wantUp(t *testing.T) {
	t.Helper()
	for err := range f.states {
		if err == nil {
			return
		}
	}
}

func (f *feed) wantDown(t *testing.T) error {
	t.Helper()
	for err := range f.states {
		if err != nil {
			return err
		}
	}
	return nil
}

// wantXIDs waits for XIDs, and checks their order.
func (f *feed) wantXIDs(t *testing.T, codes ...int) {
	t.Helper()
	for _, code := range codes {
		e := <-f.events
		if e.XID.Code != code || e.XID.At.IsZero() {
			t.Fatalf("%+v, want XID %d with a time", e, code)
		}
	}
}

func appendTo(t *testing.T, path string, records ...string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(strings.Join(records, ""))
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestEventsOfMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kmsg")
	f := start(t, path)
	if err := f.wantDown(t); !strings.Contains(err.Error(), "source.kernelLogPath: "+path) {
		t.Errorf("%v, want it to name the key and the path", err)
	}
	mkfifo(t, path)
	f.wantUp(t)
	appendTo(t, path, xidRecord(1, 13))
	f.wantXIDs(t, 13)
}

func TestEventsPauseBetweenAttempts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kmsg")
	synctest.Test(t, func(t *testing.T) {
		f, begun := start(t, path), time.Now()
		for range 10 {
			_ = f.wantDown(t)
		}
		const pauses = (2+4+8+16+32)*time.Second + 4*maxPause // at most; each is shortened by up to half
		if d := time.Since(begun); d < pauses/2 || d > pauses {
			t.Errorf("ten attempts in %v, want pauses that grow to a minute", d)
		}
	})
}

func TestEventsOfOtherFiles(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]string{
		dir:           "expected /dev/kmsg at " + dir + ", got d",
		os.DevNull:    "1:3",
		dir + "/f":    "got a regular file",
		dir + "/f/x":  "not a directory",
		"/proc/no/me": "does not exist",
		"/proc/stat":  "got a regular file", // as /proc/kmsg
	} {
		appendTo(t, dir+"/f")
		synctest.Test(t, func(t *testing.T) {
			err := start(t, path).wantDown(t)
			if !strings.HasPrefix(err.Error(), "source.kernelLogPath: ") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", path, err, want)
			}
		})
	}
}

// Check takes no record, and says why the log could not be read.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kmsg")
	if err := Check(path); err == nil || !strings.Contains(err.Error(), path+" does not exist") {
		t.Errorf("no file: %v", err)
	}
	mkfifo(t, path)
	f := start(t, path)
	f.wantUp(t)
	appendTo(t, path, xidRecord(1, 13))
	f.wantXIDs(t, 13)
	if err := Check(path); err != nil {
		t.Error(err)
	}
	appendTo(t, path, xidRecord(2, 31))
	f.wantXIDs(t, 31)
	if err := Check(dir); err == nil || !strings.Contains(err.Error(), "expected /dev/kmsg at "+dir) {
		t.Errorf("a directory: %v", err)
	}
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	if err := Check(loop); !errors.Is(err, syscall.ELOOP) || !strings.HasPrefix(err.Error(), "source.kernelLogPath: ") {
		t.Errorf("a link to itself: %v", err)
	}
	refused := &os.PathError{Op: "open", Path: "/dev/kmsg", Err: syscall.EPERM} // root can open any FIFO
	if err := openError(refused); !errors.Is(err, syscall.EPERM) || !strings.Contains(err.Error(), "CAP_SYSLOG") {
		t.Errorf("no permission: %v", err)
	}
	if err := Check("/dev/kmsg"); err != nil && strings.Contains(err.Error(), "expected the kernel log") {
		t.Error(err)
	}
}

// The error of a read ends the reading, and names the key.
func TestReadFails(t *testing.T) {
	f, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // only read
	err = newReader(&recorder{}).readRecords(f)
	if !errors.Is(err, syscall.EISDIR) || !strings.HasPrefix(err.Error(), "source.kernelLogPath: ") {
		t.Errorf("a directory: %v", err)
	}
}

// A FIFO outlives its writers. A record may come in parts, and one in another form changes nothing.
func TestEventsOfFIFO(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kmsg")
	mkfifo(t, path)
	f := start(t, path)
	f.wantUp(t)
	for range 3 {
		appendTo(t, path, xidRecord(1, 13), "kernel: NVRM: Xid (PCI:0000:1b:00): 79, text\n", xidRecord(1, 31))
		f.wantXIDs(t, 13, 31)
	}
	appendTo(t, path, xidRecord(2, 43)[:20])
	appendTo(t, path, xidRecord(2, 43)[20:])
	f.wantXIDs(t, 43)
	if len(f.states) != 0 {
		t.Errorf("state %v", <-f.states)
	}
}

func mkfifo(t *testing.T, path string) {
	t.Helper()
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
}

// The records of a real kernel log have the form that parseRecord expects. They are read from the start on, and after an error behind the
// newest record that was read.
func TestOpenKernelLog(t *testing.T) {
	all := drainKernelLog(t, &reader{path: "/dev/kmsg", hasLast: true})
	if len(all) == 0 {
		t.Skip("the kernel log is empty")
	}
	newest := all[len(all)-1].sequence
	if later := drainKernelLog(t, &reader{path: "/dev/kmsg"}); len(later) > 0 && later[0].sequence <= newest {
		t.Errorf("the first record has the number %d, want more than %d", later[0].sequence, newest)
	}
	t.Logf("%d records", len(all))
}

// drainKernelLog returns the records that a reader can read now.
func drainKernelLog(t *testing.T, r *reader) (all []record) {
	t.Helper()
	f, err := r.open()
	if err != nil {
		t.Skip(err)
	}
	defer f.Close() //nolint:errcheck // only read
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		t.Skip("no kernel log: ", err)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReaderSize(nonBlocking{raw}, maxRecord)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, syscall.EPIPE) {
			continue
		}
		if err != nil {
			return all
		}
		rec, ok := parseRecord(line)
		switch {
		case ok:
			all = append(all, rec)
		case line[0] != ' ':
			t.Errorf("%q is no record", line)
		}
	}
}

// The end of the context ends a read of the kernel log.
func TestEventsOfKernelLog(t *testing.T) {
	if err := Check("/dev/kmsg"); err != nil {
		t.Skip(err)
	}
	start(t, "/dev/kmsg").wantUp(t)
}

// nonBlocking reads until nothing is left.
type nonBlocking struct{ raw syscall.RawConn }

func (r nonBlocking) Read(p []byte) (n int, err error) {
	if e := r.raw.Read(func(fd uintptr) bool { n, err = syscall.Read(int(fd), p); return true }); e != nil {
		return 0, e
	}
	return max(n, 0), err
}
