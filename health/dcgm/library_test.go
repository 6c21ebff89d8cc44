//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// openChild runs this test binary as a program that opens a session, with libraries from dir only.
func openChild(t *testing.T, dir, address string, env ...string) (out string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	inherited := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "__DCGM_DBG_") || strings.HasPrefix(v, "MALLOC_ARENA_MAX=") || strings.HasPrefix(v, "GLIBC_TUNABLES=")
	})
	cmd.Env = slices.Concat(inherited, []string{childAddress + "=-" + address, "LD_LIBRARY_PATH=" + dir}, env)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// libraryDir returns the directory of the scripted library.
func libraryDir(t *testing.T) string {
	t.Helper()
	path, err := Library()
	if err != nil || filepath.Base(path) != lib.Soname {
		t.Fatal(path, err)
	}
	return filepath.Dir(path)
}

// TestOpenWithoutLibrary checks that the error has dlopen's reason and the package to install.
func TestOpenWithoutLibrary(t *testing.T) {
	missing, invalid := t.TempDir(), t.TempDir()
	if err := os.WriteFile(invalid+"/"+lib.Soname, []byte("not a library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ dir, address, reason string }{
		{missing, "", "cannot open shared object file"},
		{missing, "localhost:5555", "cannot open shared object file"},
		{invalid, "", "file too short"},
	} {
		out, code := openChild(t, tt.dir, tt.address)
		if code != childFailed {
			t.Errorf("address %q: exit code %d, want %d\n%s", tt.address, code, childFailed, out)
		}
		for _, want := range []string{lib.Soname, tt.reason, "datacenter-gpu-manager-4-core"} {
			if !strings.Contains(out, want) {
				t.Errorf("address %q: error without %q: %s", tt.address, want, out)
			}
		}
	}
}

func TestOpenWithMissingFunctions(t *testing.T) {
	const canDetach = "opened\ndetach: <nil>"
	for flag, wants := range map[string]map[string]string{ // by address
		"":                    {"localhost:5555": canDetach},
		"-DLACK_VALUES_SINCE": {"": "dcgmGetValuesSince_v2"},
		"-DLACK_CONNECT":      {"localhost:5555": "dcgmConnect_v2", "": "opened"}, // an embedded engine needs no connection
		"-DLACK_CONNECT_URL":  {"unix:///run/x.sock": "opened", "localhost:5555": "opened"},
		"-DLACK_PROFILING":    {"": "opened"},
		"-DLACK_DETACH":       {"localhost:5555": errDetachOld.Error(), "": canDetach},
	} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel() // compiles
			dir := libraryDir(t)
			if flag != "" {
				dir = t.TempDir()
				if _, err := compile(dir, flag, "-O0"); err != nil {
					t.Fatal(err)
				}
			}
			for address, want := range wants {
				if out, code := openChild(t, dir, address); !strings.Contains(out, want) || (code != childFailed && code != 0) {
					t.Errorf("address %q: exit code %d and %q, want %q", address, code, out, want)
				}
			}
		})
	}
}

// TestEngineLogDefaults checks that an embedded engine logs nothing, and to no file, unless the environment says so.
func TestEngineLogDefaults(t *testing.T) {
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
		if out, code := openChild(t, libraryDir(t), tt.address, tt.env...); code != 0 || !strings.Contains(out, tt.want) {
			t.Errorf("address %q, environment %q: exit code %d and %q, want %q", tt.address, tt.env, code, out, tt.want)
		}
	}
}

// TestOneArena checks that all threads share one arena of glibc, in which small allocations do not follow a message, unless the
// environment says otherwise.
func TestOneArena(t *testing.T) {
	if b := newFixture(t, 0); b.lib.Arenas() == 0 {
		t.Skip("not glibc")
	}
	for _, tt := range []struct {
		env  string
		want string
	}{
		{"", "arenas: 1, gap: true\n"},
		{"MALLOC_ARENA_MAX=3", "arenas: 3, "},
		{"GLIBC_TUNABLES=glibc.malloc.arena_max=3", "arenas: 3, "},
		{"GLIBC_TUNABLES=glibc.malloc.tcache_count=0", "arenas: 1, gap: true\n"},
	} {
		if out, code := openChild(t, libraryDir(t), "", tt.env); code != 0 || !strings.Contains(out, tt.want) {
			t.Errorf("environment %q: exit code %d and %q, want %q", tt.env, code, out, tt.want)
		}
	}
}

// TestEngineLogConfig checks that each engine start uses the current configuration.
func TestEngineLogConfig(t *testing.T) {
	b := newFixture(t, 1)
	for _, level := range []string{"DEBUG", "FATAL"} {
		cfg := testConfig()
		cfg.LogLevel, cfg.LogFile = level, "/tmp/dcgm.log"
		b.open(cfg)
		if got, want := b.lib.Log(), level+" to /tmp/dcgm.log"; got != want {
			t.Errorf("the engine logs %s, want %s", got, want)
		}
		b.close()
	}
}

func TestOpenSecondSession(t *testing.T) {
	b := openFixture(t, 1, testConfig())
	if _, err := Open(context.Background(), testConfig(), zap.NewNop()); !errors.Is(err, lib.ErrSessionOpen) {
		t.Errorf("second Open: %v, want %v", err, lib.ErrSessionOpen)
	}
	if _, err := b.Poll(context.Background()); err != nil {
		t.Errorf("first session after the second Open: %v", err)
	}
}
