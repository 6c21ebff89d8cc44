package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// TestDCGMGenerations runs the agent with each generation of DCGM. The series are the same: what DCGM does not measure
// follows from other fields, exactly. Only the rate of NVLink needs DCGM 4.7.
func TestDCGMGenerations(t *testing.T) {
	agent, library := build(t), compile(t)
	for _, names := range []string{"dcgm-exporter-4.8", "dcgm-exporter-4.9", "dcgm-exporter-4.8, dcgm-exporter-4.9"} {
		newest := fieldSeries(t, agent, library, "4.7.0", names)
		for _, version := range []string{"4.2.3", "4.6.0", "4.6.1"} {
			series := fieldSeries(t, agent, library, version, names)
			for s := range series {
				if _, ok := newest[s]; !ok {
					t.Errorf("%s: DCGM %s has %s, 4.7.0 has not", names, version, s)
				}
			}
			for s, want := range newest {
				needs47 := strings.HasPrefix(s, "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND ")
				if got, ok := series[s]; ok == needs47 || ok && got != want {
					t.Errorf("%s: %s is %v (%v) with DCGM %s, %v with 4.7.0", names, s, got, ok, version, want)
				}
			}
		}
		if !strings.Contains(names, ",") {
			continue
		}
		checkUnits(t, newest)
	}
}

// checkUnits checks that fields in base units have the values of the fields that they replace.
func checkUnits(t *testing.T, series map[string]float64) {
	t.Helper()
	for gpu := range gpus {
		value := func(name string) float64 {
			v, ok := series[fmt.Sprintf("DCGM_FI_DEV_%s %d", name, gpu)]
			if !ok {
				t.Errorf("no %s of GPU %d", name, gpu)
			}
			return v
		}
		if got, want := value("GPU_UTIL_RATIO"), value("GPU_UTIL")/100; got != want {
			t.Errorf("ratio %v of GPU %d, want %v", got, gpu, want)
		}
		if got, want := value("SM_CLOCK_HERTZ"), value("SM_CLOCK")*1e6; got != want {
			t.Errorf("%v Hz of GPU %d, want %v", got, gpu, want)
		}
		if got, want := value("FB_USED_BYTES"), value("FB_USED")*(1<<20); got != want {
			t.Errorf("%v bytes of GPU %d, want %v", got, gpu, want)
		}
	}
}

// fieldSeries runs the agent with a version of the scripted DCGM, and returns the fields' values by "NAME GPU".
func fieldSeries(t *testing.T, agent, library, version, names string) map[string]float64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), scaled(30*time.Second))
	defer cancel()
	n, err := node.New(ctx, agent)
	if err != nil {
		t.Fatal(err)
	}
	log := &buffer{}
	defer func() {
		if err := n.Remove(); err != nil {
			t.Errorf("%v; the agent's log:\n%s", err, log.last(2000))
		}
	}()
	e := &engine{library: library, script: filepath.Join(n.Dir, "dcgm")}
	env := append(e.env(), "CHAOS_DCGM_VERSION="+version)
	if err := os.WriteFile(e.script, []byte("ready\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	config := "source: {mode: embedded}\nplugin: {enabled: false}\nhealth: {socket: ''}\nmetrics: {listen: ADDRESS, names: [" +
		names + "]}\n"
	if err := n.Write(config); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(log, append(env, "GPU_NODE_AGENT_STATE_DIR=")...); err != nil {
		t.Fatal(err)
	}
	series := map[string]float64{}
	w := &world{Node: n}
	err = w.await(ctx, scaled(30*time.Second), func(ctx context.Context) error {
		page, err := n.Metrics(ctx)
		if err != nil {
			return err
		}
		isField := func(s node.Series) bool { return strings.HasPrefix(s.Name, "DCGM_FI_") }
		if !slices.ContainsFunc(page, isField) {
			return violated("fields", "no series of a field")
		}
		for _, s := range page {
			if isField(s) {
				series[s.Name+" "+s.Labels["gpu"]] = s.Value
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("DCGM %s, %s: %v; the agent's log:\n%s", version, names, err, log.last(2000))
	}
	return series
}
