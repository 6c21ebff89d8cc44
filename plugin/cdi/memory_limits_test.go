package cdi

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/zap"
)

func TestLimitHooks(t *testing.T) {
	hook := func(args string) string {
		return fmt.Sprintf(`{"hookName": "createRuntime", "path": "/x", "args": [%s]}`, args)
	}
	limits := func(gpu string) string {
		return hook(fmt.Sprintf(`"nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", "/", "--gpu-id", %q`, gpu))
	}
	device := func(name, hooks string) string {
		return fmt.Sprintf(`{"name": %q, "containerEdits": {"hooks": [%s]}}`, name, hooks)
	}
	spec := func(devices, common string) string {
		return fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [%s], "containerEdits": {"hooks": [%s]}}`, devices,
			common)
	}
	for name, test := range map[string]struct {
		files map[string]string // by path: etc is the static directory
		want  map[string][]string
	}{
		"no spec":       {nil, map[string][]string{}},
		"without hooks": {map[string]string{"run/a.json": spec(device("GPU-0", ""), "")}, map[string][]string{"GPU-0": nil}},
		"by UUID": {
			map[string]string{"run/a.json": spec(device("GPU-0", limits("GPU-0"))+","+device("GPU-1", ""), "")},
			map[string][]string{"GPU-0": {"GPU-0"}, "GPU-1": nil},
		},
		"by index": {map[string]string{"etc/a.json": spec(device("0", limits("GPU-0")), "")}, map[string][]string{"0": {"GPU-0"}}},
		"several GPUs": {
			map[string]string{"etc/a.json": spec(device("all", limits("GPU-0")+","+limits("GPU-1")), "")},
			map[string][]string{"all": {"GPU-0", "GPU-1"}},
		},
		"of all devices": {map[string]string{"run/a.json": spec(device("GPU-0", ""), limits("GPU-0"))}, map[string][]string{"GPU-0": {"GPU-0"}}},
		"flag with =": {map[string]string{"run/a.json": spec(device("GPU-0",
			hook(`"nvidia-ctk", "hook", "apply-cuda-memory-limits", "--gpu-id=GPU-0"`)), "")}, map[string][]string{"GPU-0": {"GPU-0"}}},
		"other hook": {
			map[string]string{"run/a.json": spec(device("GPU-0", hook(`"nvidia-ctk", "hook", "chmod", "--gpu-id", "GPU-0"`)), "")},
			map[string][]string{"GPU-0": nil},
		},
		"no value": {
			map[string]string{"run/a.json": spec(device("GPU-0", hook(`"apply-cuda-memory-limits", "--gpu-id"`)), "")},
			map[string][]string{"GPU-0": nil},
		},
		"other kind": {
			map[string]string{"run/a.json": `{"kind": "other.com/gpu", "devices": [` + device("GPU-0", limits("GPU-0")) + `]}`},
			map[string][]string{},
		},
		"YAML": {map[string]string{
			"run/a.yaml": "kind: nvidia.com/gpu\ndevices:\n- name: GPU-0\n  containerEdits:\n    hooks:\n    - args: [x, " +
				"apply-cuda-memory-limits, --gpu-id, GPU-0]",
		}, map[string][]string{"GPU-0": {"GPU-0"}}},
		"broken": {
			map[string]string{"run/a.json": "{", "run/b.json": spec(device("GPU-0", limits("GPU-0")), "")},
			map[string][]string{"GPU-0": {"GPU-0"}},
		},
		"one of two specs": {
			map[string]string{"etc/a.json": spec(device("GPU-0", ""), ""), "run/a.json": spec(device("GPU-0", limits("GPU-0")), "")},
			map[string][]string{"GPU-0": {}},
		},
		"both specs": {
			map[string]string{"etc/a.json": spec(device("GPU-0", limits("GPU-0")), ""), "run/a.json": spec(device("GPU-0", limits("GPU-0")), "")},
			map[string][]string{"GPU-0": {"GPU-0"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range test.files {
				writeFile(t, filepath.Join(dir, file), text)
			}
			hooks, c := &LimitHooks{staticDir: filepath.Join(dir, "etc"), log: zap.NewNop()}, Config{Dir: filepath.Join(dir, "run")}
			for range 2 {
				if got := hooks.GPUs(c); !reflect.DeepEqual(got, test.want) {
					t.Errorf("%q, want %q", got, test.want)
				}
			}
			writeFile(t, filepath.Join(dir, "run/new.json"), spec(device("GPU-new", limits("GPU-new")), ""))
			if got := hooks.GPUs(c); len(got["GPU-new"]) != 1 {
				t.Errorf("after a new spec: %q", got)
			}
		})
	}
}

// A spec without the hook does not serve once memory is shared. One with the hook serves in any case.
func TestSpecThatFitsMemoryLimits(t *testing.T) {
	top := hostDir(t, "/", limitingDriver)
	writeFile(t, filepath.Join(top, "dev/nvidia0"), "")
	in := testInput(t, top, 1)
	in.Driver, in.Config.HookPath = limitingDriver, "/usr/bin/nvidia-cdi-hook"
	for _, written := range []bool{false, true} {
		w, _ := newTestWriter(t)
		if in.MemoryLimits = written; w.Ensure(in) != nil {
			t.Fatal("cannot write the spec")
		}
		for _, wanted := range []bool{false, true} {
			in.MemoryLimits = wanted
			if got, want := in.fits(in.Config.file()), written || !wanted; got != want {
				t.Errorf("written with the hook: %v, wanted: %v: fits %v", written, wanted, got)
			}
		}
	}
}

// FuzzLimitHooks reads any spec. A GPU that is found is in the spec after the flag.
func FuzzLimitHooks(f *testing.F) {
	for _, args := range []string{
		`"apply-cuda-memory-limits", "--gpu-id", "GPU-0"`,
		`"apply-cuda-memory-limits", "--gpu-id=GPU-0", "--gpu-id"`, `"x"`, `{}`,
	} {
		f.Add(`{"kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"hooks": [{"args": [` + args + `]}]}}]}`)
	}
	f.Add("kind: nvidia.com/gpu\ndevices: [{name: 0}, null, {containerEdits: {hooks: [null]}}]")
	f.Fuzz(func(t *testing.T, text string) {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, "spec.yaml"), text)
		for name, gpus := range (&LimitHooks{staticDir: dir, log: zap.NewNop()}).GPUs(Config{Dir: filepath.Join(dir, "run")}) {
			// YAML's escapes and aliases
			if len(gpus) > 0 && (!strings.Contains(text, limitsHook) || !strings.Contains(text, "gpu-id")) && !strings.ContainsAny(text, `\&*`) {
				t.Errorf("%q has %q", name, gpus)
			}
		}
	})
}
