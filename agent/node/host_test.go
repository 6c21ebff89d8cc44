package node

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
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
		"gpu.machine": "ProLiant-XL675d-Gen10-Plus", "gpu.mode": "compute", "vgpu.present": "true", "vgpu.host-driver-version": "580.95", "vgpu.host-driver-branch": "r580",
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
