package metrics

import (
	"os"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Every field of the table is exported with its name, type and help; text fields are labels.
func TestFieldsAreExported(t *testing.T) {
	var names []string
	for _, f := range fields.List(nil) {
		names = append(names, f.Name)
	}
	before := fullNode()
	before.Devices[0].Sample.Values[health.FieldClocksEvents] = 0
	src := configuredSources(before, testConfig(names...))
	poll(src, fullNode())
	page := render(t, newCollector(src))
	for _, f := range fields.List(nil) {
		if f.Type == fields.TypeLabel {
			continue
		}
		if header := "# HELP " + f.Name + " " + f.Help + "\n# TYPE " + f.Name + " " + f.Type + "\n" + f.Name + "{"; !strings.Contains(page, header) {
			t.Errorf("the page lacks %q", header)
		}
	}
	expectSeries(t, page, 1, "DCGM_FI_DEV_SM_CLOCK", `DCGM_FI_DRIVER_VERSION="580.95.05"`)
}

// Grafana's dashboard 12239 expects one series per GPU with the labels gpu and instance.
func TestFieldsForGrafana12239(t *testing.T) {
	s := setValues(testNode(), fieldValues(1))
	s.Devices = s.Devices[:3]
	page := render(t, newCollector(configuredSources(s, testConfig(fields.SetDefault, fields.SetProfiling))))
	for _, name := range []string{
		"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED",
		"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
	} {
		for _, gpu := range []string{"0", "1", "2"} {
			expectSeries(t, page, 1, name, `gpu="`+gpu+`"`)
		}
	}
}

// Field series have the labels of dcgm-exporter and no others.
func TestFieldLabels(t *testing.T) {
	c := *testConfig("DCGM_FI_DEV_FB_USED", "DCGM_FI_DRIVER_VERSION")
	c.Attribution = AttributePerPod
	src := configuredSources(setValues(testNode(), map[health.Field]float64{health.FieldFBUsed: 1}), &c)
	src.Holders = func() podresources.Holders {
		return podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "GPU-a::1"}},
			"MIG-1": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "MIG-1"}},
		}}
	}
	page := render(t, newCollector(src))
	for _, want := range []string{
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",device="nvidia0",gpu="0",hostname="node-1",modelName="NVIDIA H100 80GB HBM3",pci_bus_id="00000000:1B:00.0"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",container="c",device="nvidia0",gpu="0",hostname="node-1",` +
			`modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:1B:00.0",pod="p",vgpu="1"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",GPU_I_ID="1",GPU_I_PROFILE="1g.10gb",UUID="GPU-c",container="c",device="nvidia2",gpu="2",` +
			`hostname="node-1",modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:52:00.0",pod="p"} 1`,
	} {
		expectSeries(t, page, 1, "DCGM_FI_DEV_FB_USED", want)
	}
}

// Selected text and number fields are labels; the agent does not export texts that are not selected.
func TestFieldsAsLabels(t *testing.T) {
	c := DefaultConfig()
	c.Fields = []fields.Spec{
		{Name: "DCGM_FI_DEV_SM_CLOCK", Type: "counter", Help: "custom"},
		{Name: "DCGM_FI_DEV_NAME"},
		{Name: "DCGM_FI_DEV_SERIAL"},
		{Name: "DCGM_FI_DEV_ECC_CURRENT", Type: "label"},
	}
	c, err := c.Resolve(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	s := testNode()
	s.Devices[0].Sample.Values[300] = 1
	s.Devices[0].Device.Texts = map[health.Field]string{53: "a \"quoted\" text\n", 85: "not selected"}
	page := render(t, newCollector(configuredSources(s, &c)))
	expectSeries(t, page, 1, "DCGM_FI_DEV_SM_CLOCK", `DCGM_FI_DEV_NAME="NVIDIA H100 80GB HBM3"`, `DCGM_FI_DEV_ECC_CURRENT="1"`, `DCGM_FI_DEV_SERIAL="a \"quoted\" text\n"`)
	if strings.Contains(page, "not selected") || !strings.Contains(page, "# HELP DCGM_FI_DEV_SM_CLOCK custom\n# TYPE DCGM_FI_DEV_SM_CLOCK counter\n") {
		t.Errorf("got:\n%s", page)
	}
}

// A lost GPU has a state but no measurements, except its last XID: an alert on the XID must not end with the GPU. While a
// GPU is present, DCGM's value counts.
func TestLostGPU(t *testing.T) {
	for _, c := range []struct {
		presence health.Presence
		values   map[health.Field]float64
		last     int
		want     string // "": no series
	}{
		{health.Present, map[health.Field]float64{health.FieldXID: 31}, 79, "31"},
		{health.Present, nil, 79, ""},
		{health.Lost, nil, 79, "79"},
		{health.Missing, nil, 79, "79"},
		{health.Inaccessible, nil, 79, "79"},
		{health.Detached, nil, 79, "79"},
		{health.PresenceUnknown, nil, 79, "79"},
		{health.Lost, map[health.Field]float64{health.FieldXID: 48}, 79, "48"},
		{health.Lost, nil, 0, ""},
	} {
		s := testNode()
		lost := &s.Devices[1]
		lost.Sample = health.Sample{Presence: c.presence, Values: c.values}
		if c.last != 0 {
			lost.LastXID = health.XID{Code: c.last, At: now}
		}
		page := render(t, newCollector(testSources(s)))
		if c.want != "" {
			expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`, `err_code="`+c.want+`"`, "} "+c.want+"\n")
		} else {
			expectSeries(t, page, 0, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`)
		}
		expectSeries(t, page, 0, "DCGM_FI_DEV_GPU_TEMP", `UUID="GPU-b"`)
		expectSeries(t, page, 1, namespace+"device_state", `UUID="GPU-b"`, `state="unhealthy"} 1`)
	}
}

// The compute instances of a GPU instance share their series: the newest XID and any measured value count.
func TestComputeInstancesShareSeries(t *testing.T) {
	s := testNode()
	first, second := &s.Devices[len(s.Devices)-2], &s.Devices[len(s.Devices)-1]
	first.Sample.Values = nil
	second.Sample.Values[health.FieldXID] = 43
	second.LastXID = health.XID{Code: 43, At: now}
	page := render(t, newCollector(testSources(s)))
	expectSeries(t, page, 1, "DCGM_FI_DEV_FB_USED", `GPU_I_ID="2"`)
	expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `GPU_I_ID="2"`, `err_code="43"`, "} 43\n")
}

// No series occurs twice, even with inconsistent holders and inventories, and no device outlives its snapshot.
func TestNoDuplicateOrStaleSeries(t *testing.T) {
	for _, attribution := range []string{AttributePerDevice, AttributePerPod} {
		c := *testConfig(fields.SetDefault, fields.SetProfiling, fields.SetOptional)
		c.Attribution = attribution
		s := fullNode()
		s.Devices = append(s.Devices, s.Devices[3]) // one MIG device with two UUIDs
		s.Devices[len(s.Devices)-1].Device.ID = "MIG-9"
		src := configuredSources(s, &c)
		one := podresources.Holder{Namespace: "n", Pod: "p", Container: "c", Resource: "r", DeviceID: "GPU-a"}
		otherResource, replica := one, one
		otherResource.Resource, replica.DeviceID = "other", "GPU-a::0"
		src.Holders = func() podresources.Holders {
			return podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
				"GPU-a": {one, otherResource, replica}, "MIG-2": {one}, "MIG-3": {one}, "GPU-unknown": {one},
			}}
		}
		collector := newCollector(src)
		seen := make(map[string]bool)
		for line := range strings.Lines(render(t, collector)) {
			id := line[:strings.LastIndex(line, " ")]
			if seen[id] && !strings.HasPrefix(line, "#") {
				t.Errorf("duplicate series %s", id)
			}
			seen[id] = true
		}
		poll(src, &health.Snapshot{Devices: s.Devices[1:2]})
		if page := render(t, collector); strings.Contains(page, "GPU-a") || strings.Contains(page, "MIG-") {
			t.Errorf("the page has removed devices:\n%s", page)
		}
	}
}
