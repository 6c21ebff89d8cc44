package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// compile builds the scripted libdcgm.so.4.
func compile(t *testing.T) (dir string) {
	dir = t.TempDir()
	if out, err := exec.Command("testdata/build-libdcgm", dir).CombinedOutput(); err != nil {
		t.Fatalf("build-libdcgm: %v\n%s", err, out)
	}
	return dir
}

// engine is a scripted DCGM in the agent's process. It reads from a file what happens to it and its GPUs.
type engine struct {
	library, script string
	host            bool     // it stands for a host engine in another process
	deferredLines   []string // lines to write after it is blind
	lines           int      // of the script
}

// reset writes the script for a new agent.
func (e *engine) reset(m *model) error {
	e.deferredLines = nil
	lines := m.source + "\n"
	if m.engineDetached {
		lines += "detached\n"
	}
	lines += "clock " + m.clock + "\n"
	for i, g := range m.gpu {
		lines += status(i, g.lost)
	}
	e.lines = strings.Count(lines, "\n")
	return os.WriteFile(e.script, []byte(lines+"ready\n"), 0o600)
}

func (e *engine) env() []string {
	return []string{"LD_LIBRARY_PATH=" + e.library, "CHAOS_DCGM=" + e.script}
}

// status returns the line for OK or lost (dcgm_structs.h: DcgmEntityStatus_t).
func status(gpu int, lost bool) string {
	return fmt.Sprintf("status %d %d\n", gpu, map[bool]int{false: 1, true: 4}[lost])
}

// event does what the event does to simulated GPUs.
func (e *engine) event(m *model, text string) error {
	ev, err := sim.ParseEvent(text)
	if err != nil {
		return err
	}
	var lines []string
	if ev.XID != nil {
		lines = append(lines, fmt.Sprintf("xid %d %d\n", *ev.GPU, *ev.XID))
	}
	if ev.Lost != nil {
		lines = append(lines, status(*ev.GPU, *ev.Lost))
	}
	switch {
	case ev.Source != nil: // already in the model
		lines = append([]string{m.source + "\n"}, e.deferredLines...)
		e.deferredLines = nil
	case m.source == "blind": // it does not call the driver
		e.deferredLines = append(e.deferredLines, lines...)
		return nil
	}
	return e.write(strings.Join(lines, ""))
}

// write appends lines to the script.
func (e *engine) write(lines string) error {
	f, err := os.OpenFile(e.script, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(lines)
	e.lines += strings.Count(lines, "\n")
	return errors.Join(err, f.Close())
}

// readState returns the library's state, as testdata/fault_script.c writes it.
func (e *engine) readState() (connected, detached bool, trap string, err error) {
	text, err := os.ReadFile(e.script + ".is")
	if err != nil {
		return false, false, "", err
	}
	var c, d int
	_, err = fmt.Sscanf(string(text), "connected %d detached %d trap %s", &c, &d, &trap)
	return c == 1, d == 1, trap, err
}

// checkRead returns an error until the library has read all lines.
func (e *engine) checkRead() error {
	var c, d, lines int
	var trap string
	text, err := os.ReadFile(e.script + ".is")
	if err == nil {
		_, err = fmt.Sscanf(string(text), "connected %d detached %d trap %s lines %d", &c, &d, &trap, &lines)
	}
	if err == nil && lines < e.lines {
		err = fmt.Errorf("library has read %d lines of %d", lines, e.lines)
	}
	return err
}

// Event applies an event to the simulated GPUs or the scripted DCGM.
func (w *world) Event(ctx context.Context, text string) error {
	if w.engine == nil {
		return w.Node.Event(ctx, text)
	}
	return w.engine.event(w.model, text)
}
