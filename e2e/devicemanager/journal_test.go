package devicemanager

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// journal keeps what the agent and the kubelet say, in the order they say it. Nobody reads it unless the
// test fails.
type journal struct {
	start time.Time
	mu    sync.Mutex // guards text
	text  bytes.Buffer
}

func newJournal(t *testing.T) *journal {
	j := &journal{start: time.Now()}
	t.Cleanup(func() {
		if t.Failed() {
			j.mu.Lock()
			defer j.mu.Unlock()
			t.Logf("what was said:\n%s", j.text.String())
		}
	})
	return j
}

func (j *journal) add(who string, line []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	fmt.Fprintf(&j.text, "%7.3f %-7s %s\n", time.Since(j.start).Seconds(), who, line)
}

// writer returns a writer of whole lines.
func (j *journal) writer(who string) io.Writer { return &lineWriter{journal: j, who: who} }

type lineWriter struct {
	journal *journal
	who     string
	rest    []byte // the begun line; one writer at a time, as exec and klog promise
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, whole := bytes.Cut(w.rest, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		w.journal.add(w.who, line)
		w.rest = rest
	}
}

// kubeletSpeaks sends the kubelet's log to the journal: its code logs through a logger of the process.
func (j *journal) kubeletSpeaks(t *testing.T) {
	t.Helper()
	flags := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(flags)
	for name, value := range map[string]string{
		"logtostderr": "false", "stderrthreshold": "FATAL", "one_output": "true", "skip_headers": "true", "v": "2",
	} {
		if err := flags.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	klog.SetOutput(j.writer("kubelet"))
	t.Cleanup(func() { klog.SetOutput(io.Discard) })
}

// count returns how many times somebody has said so.
func (j *journal) count(words string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return bytes.Count(j.text.Bytes(), []byte(words))
}
