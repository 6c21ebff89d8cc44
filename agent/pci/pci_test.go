package pci

import (
	"context"
	"io/fs"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// bus is the PCI bus of a node: vendor, class, driver and whether it is a virtual function, by ID.
type bus map[string][4]string

func (b bus) files() fstest.MapFS {
	files := fstest.MapFS{devicesDir: {Mode: fs.ModeDir | 0o755}}
	for id, d := range b {
		dir := devicesDir + "/" + id
		files[dir+"/vendor"] = &fstest.MapFile{Data: []byte(d[0] + "\n")}
		files[dir+"/class"] = &fstest.MapFile{Data: []byte(d[1] + "\n")}
		if d[2] != "" {
			files[dir+"/driver"] = &fstest.MapFile{Data: []byte("../../../../bus/pci/drivers/" + d[2]), Mode: fs.ModeSymlink}
		}
		if d[3] != "" {
			files[dir+"/physfn"] = &fstest.MapFile{Data: []byte("../" + d[3]), Mode: fs.ModeSymlink}
		}
	}
	return files
}

func TestGPUs(t *testing.T) {
	b := bus{
		"0000:1b:00.0": {nvidia, "0x030200", "nvidia"},  // H100
		"0000:1b:00.4": {nvidia, "0x030200", "", "x"},   // a virtual function of it
		"0000:41:00.0": {nvidia, "0x030000", ""},        // with a display, unbound
		"0000:41:00.1": {nvidia, "0x040300", "snd"},     // its audio function
		"0000:5e:00.0": {nvidia, "0x030200", "nouveau"}, // with another driver
		"0000:86:00.0": {nvidia, "0x030200", "vfio-pci"},
		"0000:87:00.0": {nvidia, "0x030200", "nvgrace_gpu_vfio_pci"},
		"0000:88:00.0": {nvidia, "0x030200", "pci-stub"},
		"0000:a0:00.0": {nvidia, "0x068000", "nvidia-nvswitch"},
		"0000:00:02.0": {"0x8086", "0x030000", "i915"},
		"0000:00:03.0": {"", "", ""}, // removed meanwhile
	}
	gpus, err := GPUs(b.files())
	if err != nil {
		t.Fatal(err)
	}
	want := []GPU{
		{"0000:1b:00.0", "nvidia", false},
		{"0000:1b:00.4", "", true},
		{"0000:41:00.0", "", false},
		{"0000:5e:00.0", "nouveau", false},
		{"0000:86:00.0", "vfio-pci", false},
		{"0000:87:00.0", "nvgrace_gpu_vfio_pci", false},
		{"0000:88:00.0", "pci-stub", false},
	}
	if !reflect.DeepEqual(gpus, want) {
		t.Errorf("got %+v, want %+v", gpus, want)
	}
	if ids := ForContainers(gpus); len(ids) != 3 {
		t.Errorf("%v for containers, want 3", ids)
	}
	if gpus, err := GPUs(bus{}.files()); err != nil || gpus != nil {
		t.Errorf("an empty bus: %v, %v", gpus, err)
	}
	if _, err := GPUs(fstest.MapFS{}); err == nil {
		t.Error("no error without a bus")
	}
}

// The bus is read rarely, and a bus that cannot be read is unknown.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := &countingFS{MapFS: bus{"0000:1b:00.0": {nvidia, "0x030200", "nvidia"}}.files()}
		latest := new(health.Latest[[]string])
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); Follow(ctx, root, latest) }()
		synctest.Wait()
		first := latest.Load()
		if first == nil || !slices.Equal(*first, []string{"0000:1b:00.0"}) {
			t.Fatalf("%v", first)
		}
		<-time.After(10 * interval)
		synctest.Wait()
		if n := root.reads.Load(); n > 11 {
			t.Errorf("read %d times in ten intervals", n)
		}
		if latest.Load() != first {
			t.Error("an unchanged list is stored again")
		}
		root.removed.Store(true)
		<-time.After(interval)
		synctest.Wait()
		if ids := latest.Load(); ids != nil {
			t.Errorf("without a bus: %v", *ids)
		}
		cancel()
		<-done
	})
}

// countingFS counts how often the bus is listed. It can be removed.
type countingFS struct {
	fstest.MapFS
	reads   atomic.Int64
	removed atomic.Bool
}

func (c *countingFS) ReadDir(name string) ([]fs.DirEntry, error) {
	c.reads.Add(1)
	if c.removed.Load() {
		return nil, fs.ErrNotExist
	}
	return c.MapFS.ReadDir(name)
}

func TestID(t *testing.T) {
	for id, want := range map[string]string{
		"00000000:1B:00.0": "0000:1b:00.0", "0000:1b:00.0": "0000:1b:00.0", "00010000:01:00.0": "10000:01:00.0", "": "", "what": "what",
	} {
		if got := ID(id); got != want {
			t.Errorf("%q: got %q, want %q", id, got, want)
		}
	}
}
