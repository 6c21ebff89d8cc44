//go:build cgo && linux

package nvml

import (
	"context"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// observedProperties returns the function and its log.
func observedProperties() (func(context.Context, []health.Device) map[health.DeviceID]*health.Properties, *observer.ObservedLogs) {
	core, logs := observer.New(zap.InfoLevel)
	return Properties(zap.New(core)), logs
}

func TestProperties(t *testing.T) {
	const serial0, serial1 = "1650000000000", "1650000000001"
	gpu := health.Properties{Brand: "Nvidia", AddressingMode: "HMM", Serial: serial1}
	first := health.Properties{Brand: "Nvidia", AddressingMode: "HMM", Serial: serial0}
	slice := health.MIGProperties{
		ProfileID: 19, PlacementStart: 2, MemorySlices: 1, Multiprocessors: 16, CopyEngines: 1, Decoders: 1,
		JPEGEngines: 1,
	}
	type table map[health.DeviceID]*health.Properties
	withMIG := func(p health.Properties, m *health.MIGProperties) *health.Properties {
		p.MIG = m
		return &p
	}
	d0, d1, mig := gpuDevice(0), gpuDevice(1), migDevice(1, 9)
	all := table{d0.ID: &first, d1.ID: &gpu, mig.ID: withMIG(gpu, &slice)}
	without := func(ids ...health.DeviceID) table {
		rest := maps.Clone(all)
		for _, id := range ids {
			delete(rest, id)
		}
		return rest
	}
	noMIG := table{d0.ID: &first, d1.ID: &gpu, mig.ID: &gpu}
	old := func(serial string) *health.Properties { return &health.Properties{Brand: "Nvidia", Serial: serial} }
	for name, test := range map[string]struct {
		commands []string
		want     table
		log      string // in the warning; empty: none
	}{
		"all": {nil, all, ""},
		"other brand": {
			[]string{"brand 0 2", "addressing 0 0"},
			table{d0.ID: {Brand: "Tesla", AddressingMode: "None", Serial: serial0}, d1.ID: &gpu, mig.ID: all[mig.ID]},
			"",
		},
		"unknown brand": {[]string{"brand 0 99", "addressing 0 99"}, table{d0.ID: {Serial: serial0}, d1.ID: &gpu, mig.ID: all[mig.ID]}, ""},
		"old driver": {
			[]string{"driver 535.54.03"},
			table{d0.ID: old(serial0), d1.ID: old(serial1), mig.ID: withMIG(*old(serial1), &slice)},
			"",
		},
		"no brand": {
			[]string{"fail nvmlDeviceGetBrand 0 3 -1"},
			table{d0.ID: {AddressingMode: "HMM", Serial: serial0}, d1.ID: &gpu, mig.ID: all[mig.ID]},
			"",
		},
		"no serial number": {
			[]string{"fail nvmlDeviceGetSerial 0 3 -1"},
			table{d0.ID: {Brand: "Nvidia", AddressingMode: "HMM"}, d1.ID: &gpu, mig.ID: all[mig.ID]},
			"",
		},
		"brand fails":      {[]string{"fail nvmlDeviceGetBrand 0 999 -1"}, without(d0.ID), "nvmlDeviceGetBrand"},
		"addressing fails": {[]string{"fail nvmlDeviceGetAddressingMode 0 999 -1"}, without(d0.ID), "nvmlDeviceGetAddressingMode"},
		"serial fails":     {[]string{"fail nvmlDeviceGetSerial 1 999 -1"}, without(d1.ID, mig.ID), "nvmlDeviceGetSerial"},
		"fabric": {[]string{"fabric 0 2", "fabric 1 3"}, table{
			d0.ID:  {Brand: "Nvidia", AddressingMode: "HMM", Serial: serial0, FabricPending: true},
			d1.ID:  {Brand: "Nvidia", AddressingMode: "HMM", Serial: serial1, Clique: "00112233-4455-6677-8899-001122334455.1"},
			mig.ID: {Brand: "Nvidia", AddressingMode: "HMM", Serial: serial1, Clique: "00112233-4455-6677-8899-001122334455.1", MIG: &slice},
		}, ""},
		"fabric fails": {[]string{"fabric 0 3", "fail nvmlDeviceGetGpuFabricInfo 0 999 -1"}, table{
			d0.ID: {Brand: "Nvidia", AddressingMode: "HMM", Serial: serial0, FabricPending: true}, d1.ID: &gpu, mig.ID: all[mig.ID],
		}, "nvmlDeviceGetGpuFabricInfo"},
		"lost GPU":           {[]string{"lost 0"}, without(d0.ID), string(d0.ID)},
		"lost GPU with MIG":  {[]string{"lost 1"}, without(d1.ID, mig.ID), string(d1.ID)},
		"absent GPU":         {[]string{"absent 0"}, without(d0.ID), "nvmlDeviceGetHandleByUUID"},
		"no root":            {[]string{"fail nvmlDeviceGetGpuInstanceById -1 4 -1"}, noMIG, "nvmlDeviceGetGpuInstanceById"},
		"driver without MIG": {[]string{"fail nvmlDeviceGetGpuInstanceById -1 13 -1"}, noMIG, "nvmlDeviceGetGpuInstanceById"},
		"MIG off meanwhile":  {[]string{"mig off"}, without(mig.ID), string(mig.ID)},
		"instance fails":     {[]string{"fail nvmlGpuInstanceGetInfo -1 999 -1"}, without(mig.ID), "nvmlGpuInstanceGetInfo"},
		"profile fails": {
			[]string{"fail nvmlDeviceGetGpuInstanceProfileInfo 1 999 -1"},
			without(mig.ID),
			"nvmlDeviceGetGpuInstanceProfileInfo",
		},
		"profile not supported": {[]string{"fail nvmlDeviceGetGpuInstanceProfileInfo 1 3 -1"}, without(mig.ID), "19"},
		"no driver":             {[]string{"unload"}, table{}, string(d0.ID)},
	} {
		t.Run(name, func(t *testing.T) {
			lib := newLibrary(t)
			lib.Do("mig 1 0 9 0")
			for _, c := range test.commands {
				lib.Do("%s", c)
			}
			read, logs := observedProperties()
			for range 2 {
				expectProperties(t, read(t.Context(), []health.Device{d0, d1, mig}), test.want)
			}
			var warned []string
			for _, e := range logs.All() {
				warned = append(warned, e.ContextMap()["device"].(string)+" "+e.ContextMap()["error"].(string))
			}
			if text := strings.Join(warned, "\n"); (text != "") != (test.log != "") || !strings.Contains(text, test.log) {
				t.Errorf("log %q; want warnings that name %q", text, test.log)
			}
			if len(warned) > 1 && name != "no driver" { // whose error changes
				t.Errorf("logged more than once: %q", warned)
			}
		})
	}
}

func expectProperties(t *testing.T, got, want map[health.DeviceID]*health.Properties) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("properties of %d devices, want %d", len(got), len(want))
	}
	for id, w := range want {
		g := got[id]
		if g == nil || g.Brand != w.Brand || g.AddressingMode != w.AddressingMode || g.Serial != w.Serial || g.Clique != w.Clique ||
			g.FabricPending != w.FabricPending || (g.MIG == nil) != (w.MIG == nil) || w.MIG != nil && *g.MIG != *w.MIG {
			t.Errorf("%s: %+v, want %+v", id, g, w)
		}
	}
}

// A GPU that hangs costs the others nothing, and is not asked again while it hangs.
func TestPropertiesWhileGPUHangs(t *testing.T) {
	lib := newLibrary(t)
	lib.Do("hang nvmlDeviceGetBrand 0")
	read, logs := observedProperties()
	devices := []health.Device{gpuDevice(0), gpuDevice(1)}
	first := make(chan map[health.DeviceID]*health.Properties)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { first <- read(ctx, devices) }()
	lib.Do("await hanging 1")
	lib.Do("await calls nvmlDeviceGetAddressingMode 1") // of GPU 1
	cancel()
	<-first
	// The goroutine of a call that has ended may still be at its end.
	expect := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); runtime.Gosched() {
			if got := read(t.Context(), devices); len(got) == n && got[devices[1].ID] != nil {
				return
			}
		}
		t.Fatalf("not the properties of %d GPUs", n)
	}
	for range 3 {
		expect(1)
	}
	if n := lib.Number("hanging"); n != 1 {
		t.Errorf("%d calls hang", n)
	}
	if n := logs.FilterField(zap.String("device", string(devices[0].ID))).Len(); n != 1 {
		t.Errorf("%d warnings of GPU 0, want one: %v", n, logs.All())
	}
	lib.Do("release")
	expect(2)
}

// The properties of a GPU that hangs until the deadline are missing, which is logged.
func TestPropertiesUntilDeadline(t *testing.T) {
	lib := newLibrary(t)
	lib.Do("hang nvmlDeviceGetBrand 0")
	read, logs := observedProperties()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if got := read(ctx, []health.Device{gpuDevice(0)}); len(got) > 0 {
		t.Errorf("%+v", got)
	}
	if all := logs.All(); len(all) != 1 || all[0].ContextMap()["error"] != errHangs.Error() {
		t.Errorf("%+v", all)
	}
}

// An error that returns is logged again.
func TestPropertiesLogsErrorsAgain(t *testing.T) {
	lib := newLibrary(t)
	read, logs := observedProperties()
	for i, command := range []string{"lost 0", "lost 0", "back 0", "lost 0"} {
		lib.Do("%s", command)
		read(t.Context(), []health.Device{gpuDevice(0)})
		if want := []int{1, 1, 1, 2}[i]; logs.Len() != want {
			t.Errorf("%d: %d warnings, want %d", i, logs.Len(), want)
		}
	}
}

// Every brand that NVIDIA's driver names has a name.
func TestBrandNames(t *testing.T) {
	seen := map[string]bool{"": true}
	for b := nvml.BRAND_QUADRO; b <= nvml.BRAND_TITAN_RTX; b++ {
		if name := brandName(b); seen[name] {
			t.Errorf("brand %d: %q", b, name)
		} else {
			seen[name] = true
		}
	}
	for _, b := range []nvml.BrandType{-1, nvml.BRAND_UNKNOWN, nvml.BRAND_NVIDIA_DLA, nvml.BRAND_COUNT, 1 << 30} {
		if name := brandName(b); name != "" {
			t.Errorf("brand %d: %q", b, name)
		}
	}
}
