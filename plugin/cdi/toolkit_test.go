package cdi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const hook = "/usr/bin/nvidia-cdi-hook"

// toolkitTest is a Writer with a scripted nvcdi on a host with three GPUs.
type toolkitTest struct {
	*testing.T
	in   Input
	top  string // of the host's file system
	w    *Writer
	logs *observer.ObservedLogs

	mu      sync.Mutex // guards the fields below
	calls   map[health.DeviceID]int
	errs    map[health.DeviceID]error
	hanging map[health.DeviceID]chan struct{}
}

// runToolkitTest runs a test in a bubble.
func runToolkitTest(t *testing.T, f func(t *testing.T, h *toolkitTest)) {
	synctest.Test(t, func(t *testing.T) {
		h := &toolkitTest{
			T: t, top: hostDir(t, "/", driverVersion),
			calls: map[health.DeviceID]int{}, errs: map[health.DeviceID]error{}, hanging: map[health.DeviceID]chan struct{}{},
		}
		for i := range 3 {
			writeFile(t, filepath.Join(h.top, fmt.Sprint("dev/nvidia", i)), "")
		}
		h.in = testInput(t, h.top, 3)
		h.in.NVML, h.in.Config.HookPath = true, hook
		h.in.Devices[2].State.Device.Minor = 2
		h.restart()
		f(t, h)
	})
}

// restart replaces the Writer, as a new agent does.
func (h *toolkitTest) restart() {
	h.w, h.logs = newTestWriter(h.T)
	h.w.Toolkit.edits = h.edits
}

// edits is the scripted nvcdi: a GPU has its node and a DRM node.
func (h *toolkitTest) edits(r request, id health.DeviceID, _ *zap.Logger) (*specs.ContainerEdits, error) {
	h.mu.Lock()
	h.calls[id]++
	hang, err := h.hanging[id], h.errs[id]
	h.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if err != nil {
		return nil, err
	}
	if id == "" {
		library := "/usr/lib/x86_64-linux-gnu/libcuda.so." + driverVersion
		return &specs.ContainerEdits{
			Env:    []string{"NVIDIA_VISIBLE_DEVICES=void"},
			Mounts: []*specs.Mount{{HostPath: library, ContainerPath: library}},
			Hooks:  []*specs.Hook{{HookName: "createContainer", Path: r.hookPath, Args: []string{"nvidia-cdi-hook", "update-ldcache"}}},
		}, nil
	}
	n := strings.TrimPrefix(string(id), "GPU-")
	return &specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia" + n}, {Path: "/dev/dri/card" + n}}}, nil
}

// set scripts the calls for a device.
func (h *toolkitTest) set(id health.DeviceID, err error, hang chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.errs[id], h.hanging[id] = err, hang
}

func (h *toolkitTest) count(id health.DeviceID) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.calls[id]
}

// run starts the Toolkit, as when the driver may be used, until stop.
func (h *toolkitTest) run() (stop func(), done <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.w.Toolkit.Run(ctx)
	}()
	h.Cleanup(func() { cancel(); <-ended })
	return cancel, ended
}

// ensure calls Ensure after d and again for new parts, as the plugin does, and returns the nodes of the devices in the spec.
func (h *toolkitTest) ensure(d time.Duration) (nodes map[string][]string, err error) {
	h.Helper()
	synctest.Wait()
	<-time.After(d)
	for range 2 {
		synctest.Wait()
		err = h.w.Ensure(h.in)
	}
	text, readErr := os.ReadFile(h.in.Config.file())
	if readErr != nil {
		return nil, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		h.Fatal(err)
	}
	nodes = map[string][]string{}
	for i := range spec.Devices {
		nodes[spec.Devices[i].Name] = nodePaths(&spec.Devices[i].ContainerEdits)
	}
	return nodes, err
}

// wantSpec checks how many nodes each of the GPUs has in the spec: 2 from nvcdi, 1 without it, 0 if it is left out.
func (h *toolkitTest) wantSpec(after time.Duration, want ...int) {
	h.Helper()
	nodes, err := h.ensure(after)
	var got []int
	for _, d := range h.in.Devices {
		got = append(got, len(nodes[d.Name]))
	}
	if err != nil || !slices.Equal(got, want) {
		h.Fatalf("%v, %v: got %v, want %v", err, nodes, got, want)
	}
}

// written returns the generators of the specs that were written since the last call.
func (h *toolkitTest) written() (generators []string) {
	for _, e := range h.logs.FilterMessage("CDI spec written").All() {
		generators = append(generators, e.ContextMap()["generator"].(string))
	}
	h.logs.TakeAll()
	return generators
}

func (h *toolkitTest) wantWritten(generators ...string) {
	h.Helper()
	if got := h.written(); !slices.Equal(got, generators) {
		h.Errorf("wrote specs from %q, want %q", got, generators)
	}
}

var errNVML = errors.New("nvmlDeviceGetHandleByUUID: GPU is lost")

func TestToolkitGenerates(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		if _, err := h.ensure(0); !errors.Is(err, ErrPending) {
			t.Fatalf("before the first call: %v", err)
		}
		stop, done := h.run()
		h.wantSpec(0, 2, 2, 2)
		h.wantSpec(time.Hour, 2, 2, 2)
		h.wantWritten("nvcdi")

		// Other names and an additional GPU need only the call for that GPU.
		h.in.Devices = h.in.Devices[:2]
		h.in.Devices[0].Name = "0"
		h.wantSpec(0, 2, 2)
		h.in.Devices = h.in.Devices[:3]
		h.wantSpec(0, 2, 2, 2)
		if h.count("") != 1 || h.count("GPU-0") != 1 {
			t.Errorf("calls: %v", h.calls)
		}
		h.wantWritten("nvcdi", "nvcdi")

		// An agent that restarts serves with the spec that exists, and finds the same.
		stop()
		<-done
		h.restart()
		h.wantSpec(0, 2, 2, 2)
		h.run()
		h.wantSpec(0, 2, 2, 2)
		h.wantWritten()
		h.in.Config.HookPath = ""
		h.wantSpec(0, 1, 1, 1)
		h.wantWritten("driver files")
	})
}

// A GPU for which nvcdi fails or hangs does not affect the others.
func TestToolkitWithOneBadGPU(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		hang := make(chan struct{})
		h.set("GPU-0", nil, hang)
		h.set("GPU-1", errNVML, nil)
		_, _ = h.ensure(0)
		stop, done := h.run()
		h.wantSpec(deviceLimit, 1, 1, 2)
		warnings := fmt.Sprint(h.logs.FilterMessage("CDI spec is incomplete").All()[0].ContextMap())
		const bare = " with its device nodes only in the CDI spec: "
		if !strings.Contains(warnings, "GPU-0"+bare) || !strings.Contains(warnings, "GPU-1"+bare) ||
			!strings.Contains(warnings, errNVML.Error()) {
			t.Error(warnings)
		}
		h.set("GPU-1", nil, nil)
		h.wantSpec(retryAfter, 1, 2, 2)
		h.wantSpec(10*retryAfter, 1, 2, 2)
		if h.count("GPU-0") != 1 {
			t.Errorf("%d calls beside one that hangs", h.count("GPU-0")-1)
		}
		h.set("GPU-0", nil, nil)
		close(hang)
		h.wantSpec(retryAfter, 2, 2, 2)
		if h.count("GPU-0") != 1 {
			t.Error("the late result was not used")
		}
		stop()
		<-done

		// After a detach all parts are made again. A GPU that hangs keeps its previous part.
		hang = make(chan struct{})
		h.set("GPU-2", nil, hang)
		h.written()
		stop, done = h.run()
		h.wantSpec(2*deviceLimit, 2, 2, 2)
		all := h.logs.FilterMessage("CDI spec is incomplete").All()
		if warnings := fmt.Sprint(all[len(all)-1].ContextMap()); !strings.Contains(warnings, "GPU-2 as before in the CDI spec: ") {
			t.Error(warnings)
		}
		h.wantWritten()
		h.wantEndAfter(stop, done, hang)
		hang = make(chan struct{})
		h.set("", nil, hang)
		stop, done = h.run()
		h.wantSpec(0, 2, 2, 2)
		h.wantEndAfter(stop, done, hang)
	})
}

// wantEndAfter stops the Toolkit and checks that it ends after a call that hangs, and not before.
func (h *toolkitTest) wantEndAfter(stop func(), done <-chan struct{}, hang chan struct{}) {
	h.Helper()
	stop()
	synctest.Wait()
	select {
	case <-done:
		h.Error("Run returned while a call had the driver's files open")
	default:
	}
	close(hang)
	<-done
}

// If NVML fails, a spec that fits stays, and else the driver's files are listed.
func TestToolkitFails(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		h.set("", errNVML, nil)
		_, _ = h.ensure(0)
		stop, done := h.run()
		h.wantSpec(0, 1, 1, 1)
		h.wantSpec(10*retryAfter, 1, 1, 1)
		if n := h.logs.FilterMessage("nvcdi cannot generate the CDI spec").Len(); n != 1 {
			t.Errorf("%d log entries about nvcdi", n)
		}
		h.wantWritten("driver files")
		if n := h.count("GPU-0"); n != 0 {
			t.Errorf("%d calls for a GPU without NVML", n)
		}
		h.set("", nil, nil)
		h.wantSpec(retryAfter, 2, 2, 2)
		h.wantWritten("nvcdi")
		stop()
		<-done

		h.set("", errNVML, nil)
		stop, done = h.run() // after a detach
		h.wantSpec(time.Second, 2, 2, 2)
		stop()
		<-done
		h.restart()
		h.run()
		h.wantSpec(time.Second, 2, 2, 2)
		h.wantWritten()

		// The spec of another driver, hook or node is of no use.
		writeFile(t, filepath.Join(h.top, "usr/lib/x86_64-linux-gnu/libcuda.so.590.1.2"), "")
		h.in.Driver = "590.1.2"
		h.wantSpec(time.Second, 1, 1, 1)
		h.wantWritten("driver files")
	})
}

// Once the agent generates no spec, the driver is not used any more.
func TestToolkitStops(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		h.set("GPU-0", errNVML, nil)
		_, _ = h.ensure(0)
		h.run()
		h.wantSpec(retryAfter, 1, 2, 2)
		h.in.Config.Generate = false
		_, _ = h.ensure(0)
		calls := h.count("GPU-0")
		_, _ = h.ensure(10 * retryAfter)
		if n := h.count("GPU-0") - calls; n != 0 {
			t.Errorf("%d calls", n)
		}
		h.set("GPU-0", nil, nil)
		h.in.Config.Generate = true
		_, _ = h.ensure(0)
		h.wantSpec(0, 2, 2, 2)
	})
}

func TestSpecThatFits(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		_, _ = h.ensure(0)
		stop, done := h.run()
		h.wantSpec(0, 2, 2, 2)
		stop()
		<-done
		file := h.in.Config.file()
		for name, change := range map[string]func(*Input){
			"other driver":  func(in *Input) { in.Driver = "590.1.2" },
			"other hook":    func(in *Input) { in.Config.HookPath = "/other/nvidia-cdi-hook" },
			"other root":    func(in *Input) { in.Host.DriverRoot, in.Host.ContainerDriverRoot = "/run/nvidia/driver", "/" },
			"other kind":    func(in *Input) { in.Config.Kind = "example.com/gpu" },
			"other name":    func(in *Input) { in.Devices[0].Name = "0" },
			"other minor":   func(in *Input) { in.Devices[0].State.Device.Minor = 1 },
			"unknown minor": func(in *Input) { in.Devices[0].State.Device.Minor, in.Devices[0].State.Device.PCI = -1, "" },
		} {
			in := h.in
			in.Devices = slices.Clone(in.Devices)
			state := *in.Devices[0].State
			in.Devices[0].State = &state
			if change(&in); in.fits(file) {
				t.Errorf("%s: the spec fits", name)
			}
		}
		if !h.in.fits(file) || h.in.fits(file+".missing") {
			t.Error("the spec does not fit its own input, or a missing one does")
		}
	})
}

// nvcdi only warns of a missing device node, and it may disagree with the source.
func TestToolkitNodes(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		if err := os.Remove(filepath.Join(h.top, "dev/nvidia1")); err != nil {
			t.Fatal(err)
		}
		h.in.Devices[2].State.Device.Minor = 0
		_, _ = h.ensure(0)
		h.run()
		h.wantSpec(0, 2, 0, 0)
		warnings := h.logs.FilterMessage("CDI spec is incomplete").All()[0].ContextMap()["reasons"].([]any)
		for i, want := range [][]string{
			{"GPU-1 left out of the CDI spec: ", "/dev/nvidia1"},
			{"GPU-2 left out of the CDI spec: ", "/dev/nvidia0", "/dev/nvidia2"},
		} {
			if !slices.ContainsFunc(warnings, func(w any) bool {
				return !slices.ContainsFunc(want, func(s string) bool { return !strings.Contains(w.(string), s) })
			}) {
				t.Errorf("%d: none of %q has %q", i, warnings, want)
			}
		}
		// The source does not know the minor, but nvcdi does.
		h.in.Devices[2].State.Device.Minor, h.in.Devices[2].State.Device.PCI = -1, ""
		h.wantSpec(0, 2, 0, 2)
	})
}

// During a detach nothing is asked. A spec that is missing is generated from the driver's files.
func TestToolkitDuringDetach(t *testing.T) {
	runToolkitTest(t, func(t *testing.T, h *toolkitTest) {
		h.in.Detached = true
		h.wantSpec(0, 1, 1, 1)
		h.in.Detached = false
		h.wantSpec(0, 1, 1, 1)
		stop, done := h.run()
		h.wantSpec(0, 2, 2, 2)
		stop()
		<-done
		h.in.Detached = true
		h.wantSpec(time.Hour, 2, 2, 2)
		h.wantWritten("driver files", "nvcdi")
		if h.count("") != 1 {
			t.Errorf("%d calls", h.count(""))
		}
	})
}
