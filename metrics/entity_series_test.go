package metrics

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// nodeWithEntities is testNode with one entity of each kind, and a link of a GPU that is not listed.
func nodeWithEntities() *health.Snapshot {
	s := testNode()
	temp, flits, crcs := health.Field(858), health.Field(786), health.Field(1525)
	cpuTemp, util := health.Field(1110), health.Field(1100)
	s.Entities = []health.Entity{
		{Kind: health.EntityNVSwitch, ID: 3, Values: map[health.Field]float64{temp: 40, 863: 7}, Texts: map[health.Field]string{878: "SWX-3"}},
		{Kind: health.EntitySwitchLink, ID: 2, Parent: 3, Values: map[health.Field]float64{flits: 5}},
		{Kind: health.EntityGPULink, ID: 17, GPU: "GPU-b", Values: map[health.Field]float64{crcs: 0}},
		{Kind: health.EntityGPULink, ID: 17, GPU: "GPU-z", Values: map[health.Field]float64{crcs: 0}},
		{Kind: health.EntityCPU, ID: 1, Values: map[health.Field]float64{cpuTemp: 50, util: 0.25}},
		{Kind: health.EntityCPUCore, ID: 72, Parent: 1, Values: map[health.Field]float64{util: 0.5}},
		{Kind: health.EntityCPUCore, ID: 73, Parent: 1}, // all blank
	}
	return s
}

// fieldSeries returns the series of the selected fields, sorted.
func fieldSeries(t *testing.T, s *health.Snapshot, c *Config) (all []string) {
	page := render(t, collectorOf(configuredSources(s, c)))
	for _, f := range c.Chosen.Fields {
		all = append(all, series(page, f.Name)...)
	}
	slices.Sort(all)
	return all
}

// The series of entities have dcgm-exporter's labels and no pod.
func TestEntitySeries(t *testing.T) {
	c := testConfig("DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT", "DCGM_FI_DEV_NVSWITCH_LINK_FLIT_ERRORS",
		"DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_PER_LINK_TOTAL", "DCGM_FI_DEV_CPU_TEMP_CURRENT", "DCGM_FI_DEV_CPU_UTIL_TOTAL",
		"DCGM_FI_DEV_NVSWITCH_DEVICE_UUID", "DCGM_FI_DRIVER_VERSION")
	if len(c.Chosen.Unknown) > 0 {
		t.Fatalf("rejected: %v", c.Chosen.Unknown)
	}
	const driver = `DCGM_FI_DRIVER_VERSION="580.95.05",`
	want := []string{
		`DCGM_FI_DEV_CPU_TEMP_CURRENT{` + driver + `cpu="1",hostname="node-1"} 50`,
		`DCGM_FI_DEV_CPU_UTIL_TOTAL{` + driver + `cpu="1",cpucore="72",hostname="node-1"} 0.5`,
		`DCGM_FI_DEV_CPU_UTIL_TOTAL{` + driver + `cpu="1",hostname="node-1"} 0.25`,
		`DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_PER_LINK_TOTAL{` + driver + `device="nvidia1",gpu="1",gpu_uuid="GPU-b",` +
			`hostname="node-1",model_name="NVIDIA H100 80GB HBM3",nvlink="17",pci_bus_id="00000000:43:00.0"} 0`,
		`DCGM_FI_DEV_NVSWITCH_LINK_FLIT_ERRORS{` + driver + `hostname="node-1",nvlink="2",nvswitch="nvswitch3"} 5`,
		`DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{DCGM_FI_DEV_NVSWITCH_DEVICE_UUID="SWX-3",` + driver +
			`hostname="node-1",nvswitch="nvswitch3"} 40`,
	}
	got := fieldSeries(t, nodeWithEntities(), c)
	if !slices.Equal(got, want) {
		t.Errorf("series:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}

	old := nodeWithEntities()
	old.Source.Status, old.At = health.SourceDown, now.Add(-2*time.Minute)
	if got := fieldSeries(t, old, c); len(got) > 0 {
		t.Errorf("series of a source that is down: %v", got)
	}
}

// A number can be a label, and a field that is not selected has no series.
func TestEntityNumberAsLabel(t *testing.T) {
	c := DefaultConfig()
	c.Fields = []fields.Spec{{Name: "DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT"}, {Name: "DCGM_FI_DEV_NVSWITCH_PHYS_ID", Type: "label"}}
	c, err := c.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{`DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{DCGM_FI_DEV_NVSWITCH_PHYS_ID="7",hostname="node-1",nvswitch="nvswitch3"} 40`}
	if got := fieldSeries(t, nodeWithEntities(), &c); !slices.Equal(got, want) {
		t.Errorf("series %v, want %v", got, want)
	}
}

// A field of NVSwitches is no label of GPUs.
func TestEntityTextIsNoLabelOfGPUs(t *testing.T) {
	page := render(t, collectorOf(configuredSources(nodeWithEntities(),
		testConfig("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_NVSWITCH_DEVICE_UUID"))))
	all := series(page, "DCGM_FI_DEV_GPU_TEMP")
	if len(all) == 0 || strings.Contains(strings.Join(all, ""), "NVSWITCH") {
		t.Errorf("series of GPUs: %v", all)
	}
}
