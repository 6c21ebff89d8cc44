package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
)

func TestCaptureStdLogAtDebugLevel(t *testing.T) {
	before := stdlog.Writer()
	core, logs := observer.New(zapcore.DebugLevel)
	restore, err := captureStdLog(zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	defer stdlog.SetOutput(before)
	defer restore()
	stdlog.Print("Listening for violations...")
	if all := logs.All(); len(all) != 1 || all[0].Level != zapcore.DebugLevel || all[0].LoggerName != "stdlog" ||
		all[0].Message != "Listening for violations..." {
		t.Errorf("logged %+v", all)
	}
}

// blockedWriter is a writer that fails while blocked is set.
type blockedWriter struct {
	io.Writer
	blocked atomic.Bool
}

func (w *blockedWriter) Write(p []byte) (int, error) {
	if w.blocked.Load() {
		return 0, errors.New("no reader")
	}
	return w.Writer.Write(p)
}

// The sink reports dropped entries in the format of the log, so that a parser can read them.
func TestSinkReportsDroppedEntries(t *testing.T) {
	for _, format := range []string{"json", "console"} {
		synctest.Test(t, func(t *testing.T) { // Sync waits for half a second only
			var text bytes.Buffer
			out := &blockedWriter{Writer: &text}
			c := config.LogConfig{Format: format}
			log, sink := newLogger(out, c, zap.NewAtomicLevel())
			out.blocked.Store(true)
			log.Info("dropped")
			log.Info("dropped too")
			if err := log.Sync(); err != nil {
				t.Fatal(err)
			}
			out.blocked.Store(false)
			log.Info("written")
			if err := sink.Close(); err != nil {
				t.Fatal(err)
			}
			lines := strings.SplitAfter(text.String(), "\n")
			if len(lines) != 3 || !strings.Contains(lines[1], "written") || sink.Dropped() != 2 {
				t.Fatalf("%s: %d dropped, log %q", format, sink.Dropped(), lines)
			}
			var entry struct {
				Level, Msg string
				Entries    int
			}
			if format == "console" {
				if !strings.Contains(lines[0], "WARN\t") || !strings.Contains(lines[0], `{"entries": 2}`) {
					t.Errorf("console: %q", lines[0])
				}
			} else if err := json.Unmarshal([]byte(lines[0]), &entry); err != nil || entry.Level != "warn" || entry.Entries != 2 || entry.Msg == "" {
				t.Errorf("json: %v %q", err, lines[0])
			}
		})
	}
}

// By default a person at a terminal reads text, and a program behind a pipe or a file JSON.
func TestLogFormatAuto(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = master.Close() }()
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	reader, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	defer func() { _ = pipe.Close() }()
	for name, c := range map[string]struct {
		format  string
		to      io.Writer
		from    io.Reader
		console bool
	}{
		"auto, a terminal": {config.DefaultConfig().Log.Format, tty, master, true},
		"auto, a pipe":     {config.LogAuto, pipe, reader, false},
		"json, a terminal": {config.LogJSON, tty, master, false},
		"console, a pipe":  {config.LogConsole, pipe, reader, true},
	} {
		log, sink := newLogger(c.to, config.LogConfig{Format: c.format}, zap.NewAtomicLevel())
		log.Info("hello")
		if err := sink.Close(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(c.from).ReadString('\n')
		if err != nil || json.Valid([]byte(line)) == c.console || strings.Contains(line, "INFO\thello") != c.console {
			t.Errorf("%s: %q, %v", name, line, err)
		}
	}
}
