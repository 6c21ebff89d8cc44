package agent

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestDCGMLogLevel(t *testing.T) {
	for level, want := range map[zapcore.Level]string{
		zapcore.DebugLevel: "DEBUG", zapcore.InfoLevel: "FATAL", zapcore.WarnLevel: "FATAL", zapcore.ErrorLevel: "FATAL",
	} {
		if got := dcgmLogLevel(level); got != want {
			t.Errorf("at %v DCGM logs %s, want %s", level, got, want)
		}
	}
}

func TestNewSourceAttachesHostEngineOnly(t *testing.T) {
	for mode, want := range map[string]bool{config.ModeEmbedded: false, config.ModeSim: false, config.ModeStandalone: true} {
		c := config.DefaultConfig()
		c.Source.Mode = mode
		if mode == config.ModeStandalone {
			c.Source.Address = "localhost:5555"
		}
		source, run, err := newSource(sourceConfigOf(c), nil, nil, nil, zap.NewAtomicLevel(), zap.NewNop())
		if err != nil || source.Open == nil || run == nil || (source.Attach != nil) != want {
			t.Errorf("%s: attach %v, want %v; %v", mode, source.Attach != nil, want, err)
		}
	}
}

// Each event source is listed. One that is off has a reason, and only the others run.
func TestNewSourceListsEventSources(t *testing.T) {
	type on map[health.Witness]bool
	for text, want := range map[string]on{
		"source: {mode: embedded}":                               {health.WitnessNVML: true, health.WitnessKernelLog: false},
		"source: {mode: embedded, events: off, kernelLog: true}": {health.WitnessNVML: false, health.WitnessKernelLog: true},
		"source: {address: 'localhost:5555'}":                    {health.WitnessNVML: true, health.WitnessKernelLog: false},
		"source: {address: 'localhost:5555', events: off}":       {health.WitnessNVML: false, health.WitnessKernelLog: false},
		"source: {address: 'localhost:5555', events: nvml}":      {health.WitnessNVML: true, health.WitnessKernelLog: false},
		"source: {mode: sim}":                                    {health.WitnessNVML: false, health.WitnessKernelLog: false},
		"source: {mode: sim, events: nvml, kernelLog: true}":     {health.WitnessNVML: true, health.WitnessKernelLog: true},
	} {
		c, err := config.Loader{File: agenttest.WriteFile(t, t.TempDir(), "config.yaml", text)}.Load()
		if err != nil {
			t.Fatal(err)
		}
		source, _, err := newSource(sourceConfigOf(c), nil, nil, nil, zap.NewAtomicLevel(), zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		got := make(on)
		for _, e := range source.Events {
			got[e.Witness] = e.Run != nil
			if (e.Run == nil) != strings.HasPrefix(e.Off, "source.") {
				t.Errorf("%s: %v: run %v, off %q", text, e.Witness, e.Run != nil, e.Off)
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

// NVML's events depend on the GPUs that the source has listed in this process and that are there.
func TestListedGPUs(t *testing.T) {
	devices := []health.DeviceState{
		{Device: health.Device{ID: "GPU-a", Kind: health.KindGPU}, Sample: health.Sample{Presence: health.Present}},
		{Device: health.Device{ID: "GPU-b", Kind: health.KindGPU}, Sample: health.Sample{Presence: health.Lost}},
		{Device: health.Device{ID: "MIG-c", Kind: health.KindMIG, Parent: "GPU-a"}, Sample: health.Sample{Presence: health.Present}},
	}
	restored := &health.Snapshot{Devices: devices}
	read := &health.Snapshot{Devices: devices, Source: health.Source{Polls: 1}}
	for s, want := range map[*health.Snapshot][]string{nil: nil, restored: nil, read: {"GPU-a"}} {
		if got := listedGPUs(s); !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The devices of another simulation, or of another host engine, are another inventory.
func TestSourceIDNamesInventory(t *testing.T) {
	id := func(mode, address, profile string, seed int64) health.SourceID {
		c := config.DefaultConfig().Source
		c.Mode, c.Address, c.Sim.Profile, c.Sim.Seed = mode, address, profile, seed
		return sourceID(c)
	}
	sim, dcgm := id(config.ModeSim, "", "h100-8", 1), id(config.ModeStandalone, "a:5555", "h100-8", 1)
	if sim != id(config.ModeSim, "", "h100-8", 1) || dcgm != id(config.ModeStandalone, "a:5555", "l4-1", 2) {
		t.Error("differs for one inventory")
	}
	for _, other := range []health.SourceID{
		id(config.ModeSim, "", "l4-1", 1), id(config.ModeSim, "", "h100-8", 2), dcgm, id(config.ModeStandalone, "b:5555", "h100-8", 1),
	} {
		if other.Inventory == sim.Inventory || other != dcgm && other.Inventory == dcgm.Inventory {
			t.Errorf("%+v is not another inventory", other)
		}
	}
}

// DCGM watches the fields that are shown, so another list reopens the session. It does not restart a simulation, and no
// other key of the metrics section changes the source.
func TestSourceConfigFollowsFields(t *testing.T) {
	of := func(text string) sourceConfig {
		t.Helper()
		c, err := config.Loader{File: agenttest.WriteFile(t, t.TempDir(), "config.yaml", text)}.Load()
		if err != nil {
			t.Fatal(err)
		}
		return sourceConfigOf(c)
	}
	if w := of(""); !slices.Contains(w.fields, health.FieldGPUTemp) || slices.Contains(w.fields, health.FieldFBTotal) {
		t.Errorf("%+v", w)
	}
	if reflect.DeepEqual(of(""), of("metrics: {fields: [default, DCGM_FI_DEV_FB_TOTAL]}")) {
		t.Error("equal for different fields")
	}
	if !reflect.DeepEqual(of(""), of("metrics: {idleBelow: 7, listen: ':1'}")) {
		t.Error("differs for equal fields")
	}
	named := func(names string) sourceConfig {
		return of("metrics: {fields: [DCGM_FI_DEV_FB_USED, DCGM_FI_DEV_GPU_TEMP], names: " + names + "}")
	}
	if !reflect.DeepEqual(named("[dcgm-exporter-4.8]"), named("[dcgm-exporter-4.8, dcgm-exporter-4.9]")) {
		t.Error("differs for more names of equal fields")
	}
	const sim = "source: {mode: sim}\n"
	if !reflect.DeepEqual(of(sim), of(sim+"metrics: {fields: [profiling]}")) {
		t.Error("fields restart a simulation")
	}
}
