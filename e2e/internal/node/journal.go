package node

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// Journal collects the output of the agent, the kubelet and other programs in order. It is printed if the test fails.
// The kubelet's code logs through the process-wide klog, so tests that run in parallel share its lines.
type Journal struct {
	start time.Time
	mu    sync.Mutex // guards text
	text  bytes.Buffer
}

func newJournal(t *testing.T) *Journal {
	t.Helper()
	j := &Journal{start: time.Now()}
	kubeletLog.add(j)
	t.Cleanup(func() {
		kubeletLog.remove(j)
		if t.Failed() {
			j.mu.Lock()
			defer j.mu.Unlock()
			t.Logf("journal:\n%s", j.text.String())
		}
	})
	return j
}

// kubeletLog receives the output of klog.
var kubeletLog journals //nolint:gochecknoglobals // klog is global as well

// journals writes whole lines to the journals of the running tests.
type journals struct {
	mu   sync.Mutex // guards open
	open []*Journal
}

func (js *journals) add(j *Journal) {
	js.mu.Lock()
	defer js.mu.Unlock()
	js.open = append(js.open, j)
}

func (js *journals) remove(j *Journal) {
	js.mu.Lock()
	defer js.mu.Unlock()
	js.open = slices.DeleteFunc(js.open, func(other *Journal) bool { return other == j })
}

// Write receives one call of klog.
func (js *journals) Write(p []byte) (int, error) {
	js.mu.Lock()
	defer js.mu.Unlock()
	for line := range bytes.Lines(p) {
		for _, j := range js.open {
			j.add("kubelet", bytes.TrimSuffix(line, []byte("\n")))
		}
	}
	return len(p), nil
}

// redirectKlog makes klog write to the journals.
func redirectKlog() error {
	flags := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(flags)
	for name, value := range map[string]string{
		"logtostderr": "false", "stderrthreshold": "FATAL", "one_output": "true", "skip_headers": "true", "v": "2",
	} {
		if err := flags.Set(name, value); err != nil {
			return err
		}
	}
	klog.SetOutput(&kubeletLog)
	return nil
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
	rest    []byte // incomplete line; exec writes one call at a time
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
