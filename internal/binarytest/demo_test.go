package binarytest

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"
)

// Any signal that ends a command in a terminal ends the demo, without an error, a process or a file left behind.
func TestDemoEndsCleanly(t *testing.T) {
	t.Parallel()
	demo := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.Command("go", "build", "-o", demo,
		"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/demo").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, signal := range map[string]syscall.Signal{
		"Ctrl-C": syscall.SIGINT, "kill": syscall.SIGTERM, "closed terminal": syscall.SIGHUP,
		"closed pipe": 0,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tmp, err := os.MkdirTemp("", "gna") // short enough for unix sockets
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(tmp) })
			text, stderr, err := runDemo(t, demo, tmp, signal)
			if err != nil || stderr != "" {
				t.Errorf("%v: %s", err, stderr)
			}
			checkNothingLeft(t, tmp)
			for _, want := range []string{"GPU 0  GPU-", "Allocate gives GPU 0 and GPU 1 to pod"} {
				if !strings.Contains(text, want) {
					t.Errorf("%q is not in\n%s", want, text)
				}
			}
			for line := range strings.Lines(text) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 && !strings.Contains(line, binary) {
					t.Errorf("%d columns: %q", n, line)
				}
			}
		})
	}
}

// runDemo runs the demo until GPU 3 fails, and ends it with a signal, or by closing its output if signal is 0.
func runDemo(t *testing.T, demo, tmp string, signal syscall.Signal) (text, errors string, err error) {
	t.Helper()
	// An address in use: the demo has its own instead. Another process could take a port that is only free at the moment.
	inUse, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inUse.Close() })
	var stderr bytes.Buffer
	cmd := exec.Command(demo, "-agent", binary, "-listen", inUse.Addr().String())
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// If the GPUs are registered only after GPU 3 has failed, it fails again in the next loop of the scenario.
	text = readUntil(t, out, "GPU 3 is UNHEALTHY: 7 of 8 are allocatable")
	if signal == 0 {
		_ = out.Close()
	} else {
		if err := syscall.Kill(-cmd.Process.Pid, signal); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(out)
		if err != nil {
			t.Error(err)
		}
		text += string(rest)
	}
	err = cmd.Wait()
	return text, stderr.String(), err
}

// checkNothingLeft reports files in the temporary directory of a demo, and processes whose command line names it.
func checkNothingLeft(t *testing.T, tmp string) {
	t.Helper()
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(processes) == 0 {
		t.Errorf("cannot list the processes: %v", err)
	}
	for _, file := range processes {
		if command, _ := os.ReadFile(file); bytes.Contains(command, []byte(tmp)) { // a process may end meanwhile
			t.Errorf("left behind: %q", command)
		}
	}
}

// readUntil reads lines until one contains a text.
func readUntil(t *testing.T, r io.Reader, text string) string {
	t.Helper()
	var read strings.Builder
	lines := bufio.NewReader(r)
	for !strings.Contains(read.String(), text) {
		line, err := lines.ReadString('\n')
		read.WriteString(line)
		if err != nil {
			t.Fatalf("%v after\n%s", err, read.String())
		}
	}
	rest, _ := lines.Peek(lines.Buffered())
	return read.String() + string(rest)
}

// Every target that people use is in the list, in lines that fit a terminal.
func TestMakeHelpListsTargets(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("make", "-s", "-C", "../..", "help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	listed := make(map[string]bool)
	for line := range strings.Lines(string(out)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		listed[name] = len(strings.Fields(text)) > 1
		if len(line) > len("\n")+80 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	for _, phony := range regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindAllStringSubmatch(string(makefile), -1) {
		for name := range strings.FieldsSeq(phony[1]) {
			if !listed[name] && name != "all" {
				t.Errorf("%s is not in\n%s", name, out)
			}
		}
	}
}
