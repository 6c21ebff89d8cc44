//go:build cgo && linux

package dcgm

import (
	"context"
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
)

// openChild runs this test binary as a program that opens a session, with libraries from dir only.
func openChild(t *testing.T, dir, address string, env ...string) (out string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	ours := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "__DCGM_DBG_") })
	cmd.Env = slices.Concat(ours, []string{childAddress + "=-" + address, "LD_LIBRARY_PATH=" + dir}, env)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

func TestOpenWithoutLibrary(t *testing.T) {
	for _, address := range []string{"", "localhost:5555"} {
		out, code := openChild(t, t.TempDir(), address)
		if code != childFailed {
			t.Errorf("address %q: exit code %d, want %d\n%s", address, code, childFailed, out)
		}
		for _, want := range []string{"libdcgm.so.4 cannot be loaded", "cannot open shared object file", "datacenter-gpu-manager-4-core"} {
			if !strings.Contains(out, want) {
				t.Errorf("address %q: the error does not say %q: %s", address, want, out)
			}
		}
	}
}

func TestOpenWithInvalidLibrary(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/"+soname, []byte("no library at all"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := openChild(t, dir, ""); code != childFailed || !strings.Contains(out, "file too short") {
		t.Errorf("exit code %d, want %d and dlopen's reason: %s", code, childFailed, out)
	}
}

func TestOpenFindsLibraryBySoname(t *testing.T) {
	dir := t.TempDir()
	if _, err := compile(dir); err != nil {
		t.Fatal(err)
	}
	if out, code := openChild(t, dir, ""); code != 0 || !strings.Contains(out, "opened") {
		t.Errorf("exit code %d: %s", code, out)
	}
}

func TestOpenWithMissingFunctions(t *testing.T) {
	tests := []struct{ flag, address, want string }{
		{"-DLACK_VALUES_SINCE", "", "dcgmGetValuesSince_v2"},
		{"-DLACK_CONNECT", "localhost:5555", "dcgmConnect_v2"},
		{"-DLACK_CONNECT", "", "opened"}, // an engine in the process needs no connection
		{"-DLACK_CONNECT_URL", "unix:///run/x.sock", "opened"},
		{"-DLACK_CONNECT_URL", "localhost:5555", "opened"},
		{"-DLACK_PROFILING", "", "opened"},
		{"-DLACK_DETACH", "localhost:5555", "opened\ndetach: libdcgm here is too old to have the host engine at localhost:5555 let go of the driver"},
		{"-DLACK_DETACH", "", "opened\ndetach: <nil>"},
		{"-DLACK_NOTHING", "localhost:5555", "opened\ndetach: <nil>"},
	}
	for _, tt := range tests {
		dir := t.TempDir()
		if _, err := compile(dir, tt.flag); err != nil {
			t.Fatal(err)
		}
		out, code := openChild(t, dir, tt.address)
		if !strings.Contains(out, tt.want) || (code != childFailed && code != 0) {
			t.Errorf("%s, address %q: exit code %d and %q, want it to say %q", tt.flag, tt.address, code, out, tt.want)
		}
	}
}

// DCGM's own log is quiet and not in a file that grows, unless somebody asks for it.
func TestEngineLogDefaults(t *testing.T) {
	dir := t.TempDir()
	if _, err := compile(dir); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		address string
		env     []string
		want    string
	}{
		{"", nil, "log: NONE to -\n"},
		{"", []string{"__DCGM_DBG_LVL=INFO"}, "log: INFO to -\n"},
		{"", []string{"__DCGM_DBG_LVL=DEBUG", "__DCGM_DBG_FILE=/tmp/dcgm.log"}, "log: DEBUG to /tmp/dcgm.log\n"},
		{"localhost:5555", nil, "log: \n"},
	} {
		if out, code := openChild(t, dir, tt.address, tt.env...); code != 0 || !strings.Contains(out, tt.want) {
			t.Errorf("address %q, environment %q: exit code %d and %q, want %q", tt.address, tt.env, code, out, tt.want)
		}
	}
}

// The level is that of the configuration when an engine starts, whatever it was for the one before.
func TestEngineLogConfig(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	for _, level := range []string{"DEBUG", "FATAL"} {
		cfg := testConfig()
		cfg.LogLevel, cfg.LogFile = level, "/tmp/dcgm.log"
		b.open(cfg)
		if got, want := b.lib.Log(), level+" to /tmp/dcgm.log"; got != want {
			t.Errorf("the engine logs %s, want %s", got, want)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A DCGM function that is not defined in symbols.c would end the process when called without a library,
// and keep a program that is linked with "-z now" from starting.
func TestNoUndefinedSymbols(t *testing.T) {
	program, err := elf.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	symbols, err := program.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	if len(symbols) == 0 {
		t.Fatal("the program imports nothing at all: this test looks at the wrong place")
	}
	for _, s := range symbols {
		if strings.HasPrefix(strings.ToLower(s.Name), "dcgm") || s.Name == "errorString" {
			t.Errorf("%s is left to the dynamic linker: add it to symbols.c", s.Name)
		}
	}
}

func TestLibraryPath(t *testing.T) {
	path, err := Library()
	if err != nil || !strings.HasSuffix(path, "/"+soname) {
		t.Errorf("Library() = %q, %v", path, err)
	}
}

func TestOpenSecondSession(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	b.open(testConfig())
	_, err := Open(context.Background(), testConfig(), zap.NewNop())
	if err == nil || !strings.Contains(err.Error(), "close it first") {
		t.Errorf("a second Open: %v", err)
	}
	if _, err := b.Poll(context.Background()); err != nil {
		t.Errorf("the first session, after the second was refused: %v", err)
	}
}
