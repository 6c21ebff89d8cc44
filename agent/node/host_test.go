package node

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// vgpuConfig returns the PCI configuration of a vGPU whose capability has these records.
func vgpuConfig(records ...[]byte) []byte {
	config := make([]byte, 256)
	config[0x06], config[0x34] = 0x10, 0x60
	config[0x60], config[0x61] = 0x05, 0xd0 // another capability before it
	body := append([]byte("VF"), bytes.Join(records, nil)...)
	copy(config[0xd0:], append([]byte{0x09, 0, byte(3 + len(body))}, body...)) //nolint:gosec // short
	return config
}

func versionRecord(version, branch string) []byte {
	r := make([]byte, 22)
	r[1] = 22
	copy(r[2:12], version)
	copy(r[12:], branch)
	return r
}

func TestParseVGPU(t *testing.T) {
	loop := vgpuConfig(versionRecord("580.95", "r580"))
	loop[0x61] = 0x60
	plain := vgpuConfig()
	copy(plain[0xd3:], "NV")
	edited := func(edit func(config []byte)) []byte {
		config := vgpuConfig(versionRecord("580.95", "r580"))
		edit(config)
		return config
	}
	atEnd := make([]byte, 256) // the list leads to the last bytes
	atEnd[0x06], atEnd[0x34] = 0x10, 0xfb
	copy(atEnd[0xfb:], "\x09\x00\x05VF")
	for name, c := range map[string]struct {
		config []byte
		want   *vgpu
	}{
		"vGPU":                  {vgpuConfig(versionRecord("580.95.05", "r580_00")), &vgpu{"580.95.05", "r580_00"}},
		"another record before": {vgpuConfig([]byte{7, 4, 1, 2}, versionRecord("580.95", "r580")), &vgpu{"580.95", "r580"}},
		"without a version":     {vgpuConfig([]byte{7, 4, 1, 2}), &vgpu{}},
		"record of length 0":    {vgpuConfig([]byte{7, 0, 1, 2}), &vgpu{}},
		"record beyond the end": {vgpuConfig([]byte{7, 200, 1, 2}), &vgpu{}},
		"another capability":    {plain, nil},
		"loop":                  {loop, nil},
		"no capabilities":       {make([]byte, 256), nil},
		"not root":              {vgpuConfig(versionRecord("580.95", "r580"))[:64], nil},
		"unreadable":            {nil, nil},
		"no capability bit":     {edited(func(c []byte) { c[0x06] = 0xef }), nil},
		"first capability":      {edited(func(c []byte) { c[0x34] = 0xd0 }), &vgpu{"580.95", "r580"}},
		"at the end":            {atEnd, &vgpu{}},
		"beyond the end":        {edited(func(c []byte) { c[0x61], c[0xfc] = 0xfc, 0x09 }), nil},
		"at the last byte":      {edited(func(c []byte) { c[0x61], c[0xff] = 0xff, 0x05 }), nil},
		// then the BARs are no list
		"end of the list":       {edited(func(c []byte) { c[0x61], c[0x00], c[0x01] = 0, 0xde, 0x10; copy(c[0x10:], "\x09\x00\x05VF") }), nil},
		"without a signature":   {edited(func(c []byte) { c[0xd2] = 4 }), nil},
		"shorter than a record": {edited(func(c []byte) { c[0xd2]-- }), &vgpu{}},
		"longer than the space": {edited(func(c []byte) { c[0xd2] = 255 }), &vgpu{"580.95", "r580"}},
		"two versions":          {vgpuConfig(versionRecord("580.95", "r580"), versionRecord("1", "2")), &vgpu{"580.95", "r580"}},
		"short other record":    {vgpuConfig([]byte{7, 2}, versionRecord("580.95", "r580")), &vgpu{"580.95", "r580"}},
		"longest texts":         {vgpuConfig(versionRecord("1234567890", "abcdefghij")), &vgpu{"1234567890", "abcdefghij"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := parseVGPU(c.config); (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func FuzzParseVGPU(f *testing.F) {
	f.Add(vgpuConfig(versionRecord("580.95.05", "r580_00")))
	f.Add(vgpuConfig([]byte{7, 4, 1, 2}, versionRecord("580.95", "r580")))
	f.Fuzz(func(t *testing.T, config []byte) {
		if v := parseVGPU(config); v != nil && (len(v.HostVersion) > 10 || len(v.HostBranch) > 10) {
			t.Errorf("%+v", v)
		}
	})
}

// What sysfs does not have is read again, ever less often, and a GPU without a class delays nothing. A MIG device has no class.
func TestExamineHostAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFollowerHarness(t, LabelsAPI)
		sysfs := t.TempDir()
		class := filepath.Join(sysfs, "bus/pci/devices/0000:00:00.0/class")
		var reads atomic.Int32
		var pause atomic.Int64 // before the last read
		last := time.Now()
		h.SysFS = func() string {
			pause.Store(int64(time.Since(last)))
			last = time.Now()
			reads.Add(1)
			return sysfs
		}
		defer healthtest.Run(t, h.Run)()
		h.poll(gpu(0, a100, "1g.5gb"))
		if l := h.Desired().Load().Labels; l["nvidia.com/gpu.count"] != "1" || l["nvidia.com/gpu.mode"] != "" {
			t.Error(text(l))
		}
		for _, longest := range []time.Duration{examineAgain, 2 * examineAgain, 4 * examineAgain} {
			for before := reads.Load(); reads.Load() == before; {
				healthtest.Advance(longest / 8)
			}
			if p := time.Duration(pause.Load()); p < longest/2 || p > longest {
				t.Errorf("read after %v, want half of %v to all of it", p, longest)
			}
		}
		healthtest.Advance(4 * time.Hour)
		before := reads.Load()
		healthtest.Advance(10 * maxExamineAgain)
		if n := reads.Load() - before; n < 9 || n > 21 {
			t.Errorf("%d reads in ten longest pauses", n)
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(class), 0o750), os.WriteFile(class, []byte("0x030200\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
		healthtest.Advance(maxExamineAgain)
		if l := h.Desired().Load().Labels; l["nvidia.com/gpu.mode"] != "compute" {
			t.Error(text(l))
		}
		before = reads.Load()
		healthtest.Advance(time.Hour)
		if reads.Load() != before {
			t.Errorf("%d reads of what is known", reads.Load()-before)
		}
		h.poll(append(gpu(0, a100, "1g.5gb"), gpu(1, l4)...)) // a new GPU is examined at once, and soon again
		healthtest.Advance(examineAgain)
		if n := reads.Load() - before; n != 2 {
			t.Errorf("%d reads for a new GPU", n)
		}
	})
}

// The host's sysfs, with a GPU that was there when the agent started.
func TestExamineHost(t *testing.T) {
	sysfs := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(sysfs, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("class/dmi/id/product_name", "ProLiant XL675d Gen10 Plus \n")
	const pci = "bus/pci/devices/0000:00:00.0/"
	write(pci+"class", "0x030200\n")
	write(pci+"config", string(vgpuConfig(versionRecord("580.95", "r580"))))
	f := NewFollower(Options{SysFS: func() string { return sysfs }, Log: nop})
	devices := gpus(2, h100)
	snap := snapshotOf(devices)
	first, complete := f.examine(t.Context(), snap, nil, false)
	if complete {
		t.Error("complete without the class of GPU 1")
	}
	if err := os.RemoveAll(filepath.Join(sysfs, pci)); err != nil {
		t.Fatal(err)
	}
	write("bus/pci/devices/0000:01:00.0/class", "0x030200\n")
	second, complete := f.examine(t.Context(), snap, first, false)
	if !complete {
		t.Error("not complete with all classes")
	}
	labels := (&inventory{}).update(snap, serving()(snap), second).labels()
	for label, want := range map[string]string{
		"gpu.machine": "ProLiant-XL675d-Gen10-Plus", "gpu.mode": "compute", "vgpu.present": "true", "vgpu.host-driver-version": "580.95",
		"vgpu.host-driver-branch": "r580",
	} {
		if got := labels[gfdPrefix+label]; got != want {
			t.Errorf("%s=%s, want %s", label, got, want)
		}
	}
	if d := first.devices["GPU-1"]; d != (hostDevice{}) {
		t.Errorf("GPU 1 at first: %+v", d)
	}
	remote := NewFollower(Options{SysFS: func() string { return "" }, Log: nop})
	if h, _ := remote.examine(t.Context(), snap, nil, false); h.machine != "" || h.devices["GPU-0"] != (hostDevice{}) {
		t.Errorf("GPUs of another host: %+v", h)
	}
	snap.Source.Kind = simulation
	if h, complete := remote.examine(t.Context(), snap, nil, false); !complete || h.devices["GPU-0"] != (hostDevice{class: simulatedClass}) {
		t.Errorf("simulated GPUs: %+v", h)
	}
}
