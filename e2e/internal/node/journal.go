package node

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// Journal collects the output of the agent, the kubelet and other programs in order. It is printed if the test fails.
type Journal struct {
	start time.Time
	mu    sync.Mutex // guards text
	text  bytes.Buffer
}

func newJournal(t *testing.T) *Journal {
	t.Helper()
	j := &Journal{start: time.Now()}
	t.Cleanup(func() {
		if t.Failed() {
			j.mu.Lock()
			defer j.mu.Unlock()
			t.Logf("journal:\n%s", j.text.String())
		}
	})
	// The kubelet's code uses the process-wide klog logger.
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
	return j
}

func (j *Journal) add(who string, line []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	fmt.Fprintf(&j.text, "%7.3f %-7s %s\n", time.Since(j.start).Seconds(), who, line)
}

// writer returns a writer that adds whole lines.
func (j *Journal) writer(who string) io.Writer { return &lineWriter{journal: j, who: who} }

type lineWriter struct {
	journal *Journal
	who     string
	rest    []byte // incomplete line; exec and klog write one call at a time
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

// Lines returns the lines that contain a text.
func (j *Journal) Lines(words string) (lines []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.text.String()) {
		if strings.Contains(line, words) {
			lines = append(lines, line)
		}
	}
	return lines
}
