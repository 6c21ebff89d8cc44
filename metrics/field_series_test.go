package metrics

import (
	"cmp"
	"maps"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
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
	page := render(t, collectorOf(src))
	for _, f := range fields.List(nil) {
		if f.Type == fields.TypeLabel {
			continue
		}
		if header := "# HELP " + f.Name + " " + f.Help + "\n# TYPE " + f.Name + " " + f.Type + "\n" + f.Name + "{"; !strings.Contains(page,
			header) {
			t.Errorf("the page lacks %q", header)
		}
	}
	expectSeries(t, page, 1, "DCGM_FI_DEV_SM_CLOCK", `DCGM_FI_DRIVER_VERSION="580.95.05"`)
}

// Grafana's dashboard 12239 expects one series per GPU with the labels gpu and instance.
func TestFieldsForGrafana12239(t *testing.T) {
	s := setValues(testNode(), fieldValues(1))
	s.Devices = s.Devices[:3]
	page := render(t, collectorOf(configuredSources(s, testConfig(fields.SetDefault, fields.SetProfiling))))
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
	src.Holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
		"GPU-a": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "GPU-a::1"}},
		"MIG-1": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "MIG-1"}},
	}}
	page := render(t, collectorOf(src))
	for _, want := range []string{
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",device="nvidia0",gpu="0",hostname="node-1",` +
			`modelName="NVIDIA H100 80GB HBM3",pci_bus_id="00000000:1B:00.0"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",container="c",device="nvidia0",gpu="0",hostname="node-1",` +
			`modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:1B:00.0",pod="p",vgpu="1"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",GPU_I_ID="1",GPU_I_PROFILE="1g.10gb",UUID="GPU-c",container="c",device="nvidia2",gpu="2",` +
			`hostname="node-1",modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:52:00.0",pod="p"} 1`,
	} {
		expectSeries(t, page, 1, "DCGM_FI_DEV_FB_USED", want)
	}
}

// With both generations of names, the two series of a device agree in every scrape, whichever fields DCGM has, and have the same
// labels.
func TestBothGenerationsAgree(t *testing.T) {
	older := map[health.Field]float64{
		health.FieldGPUUtil: 87, health.FieldMemCopyUtil: 33, health.FieldSMClock: 1980, health.FieldEnergy: 1234567, health.FieldFBUsed: 40961,
		449: 12, 150: 41,
	}
	newer := maps.Clone(older) // DCGM 4.7, which has sampled them at other times
	maps.Copy(newer, map[health.Field]float64{1613: 0.5, 1614: 0.5, 1603: 1, 1611: 1, 1627: 1, 1648: 4096})
	for dcgm, values := range map[string]map[health.Field]float64{"4.6": older, "4.7": newer} {
		s := setValues(testNode(), values)
		s.Devices = s.Devices[:1]
		page := render(t, collectorOf(configuredSources(s, namedConfig(both, fields.SetDefault))))
		for name, want := range map[string]float64{
			"DCGM_FI_DEV_GPU_UTIL": 87, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.87, "DCGM_FI_DEV_MEM_COPY_UTIL": 33, "DCGM_FI_DEV_MEMORY_UTIL_RATIO": 0.33,
			"DCGM_FI_DEV_SM_CLOCK": 1980, "DCGM_FI_DEV_SM_CLOCK_HERTZ": 1.98e9, "DCGM_FI_DEV_GPU_TEMP": 41, "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 41,
			"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1234567, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": 1234,
			"DCGM_FI_DEV_FB_USED": 40961, "DCGM_FI_DEV_FB_USED_BYTES": 40961 << 20, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 12,
		} {
			expectSeries(t, page, 1, name, `{DCGM_FI_DRIVER_VERSION="580.95.05",DCGM_FI_SYSTEM_DRIVER_VERSION="580.95.05",`,
				"} "+strconv.FormatFloat(want, 'g', -1, 64))
		}
		nvlink := 0
		if dcgm == "4.7" {
			nvlink = 1
		}
		expectSeries(t, page, nvlink, "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", "} 4096")
	}
}

// With the names of 4.9 only, DCGM 4.7's values are exported as they are; the page has no name of 4.8.
func TestNewerNames(t *testing.T) {
	s := setValues(testNode(), map[health.Field]float64{
		health.FieldGPUUtil: 87, 1613: 0.875, 1603: 1980000001, 1611: 7, 1625: 5,
		1627: 1<<20 + 1, 252: 9, 1648: 4096,
	})
	page := render(t, collectorOf(configuredSources(s, namedConfig([]string{fields.Names49}, fields.SetDefault))))
	for name, want := range map[string]string{
		"DCGM_FI_DEV_GPU_UTIL_RATIO": "0.875", "DCGM_FI_DEV_SM_CLOCK_HERTZ": "1.980000001e+09", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": "7",
		"DCGM_FI_DEV_FB_CAPACITY_BYTES": "5",
		"DCGM_FI_DEV_FB_USED_BYTES":     "1.048577e+06", "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND": "4096",
	} {
		expectSeries(t, page, 1, name, `UUID="GPU-a"`, `DCGM_FI_SYSTEM_DRIVER_VERSION="580.95.05"`, "} "+want)
	}
	for _, older := range []string{"DCGM_FI_DEV_GPU_UTIL{", "DCGM_FI_DEV_SM_CLOCK{", "DCGM_FI_DEV_FB_USED{", "DCGM_FI_DRIVER_VERSION="} {
		if strings.Contains(page, older) {
			t.Errorf("the page has %s", older)
		}
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
		{Name: "DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ", Type: "label"},
	}
	c, err := c.Resolve(os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	s := testNode()
	s.Devices[0].Sample.Values[300] = 1
	s.Devices[0].Sample.Values[113] = 1980
	s.Devices[0].Device.Texts = map[health.Field]string{53: "a \"quoted\" text\n", 85: "not selected"}
	page := render(t, collectorOf(configuredSources(s, &c)))
	expectSeries(t, page, 1, "DCGM_FI_DEV_SM_CLOCK", `DCGM_FI_DEV_NAME="NVIDIA H100 80GB HBM3"`, `DCGM_FI_DEV_ECC_CURRENT="1"`,
		`DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ="1.98e+09"`,
		`DCGM_FI_DEV_SERIAL="a \"quoted\" text\n"`)
	if strings.Contains(page, "not selected") || !strings.Contains(page,
		"# HELP DCGM_FI_DEV_SM_CLOCK custom\n# TYPE DCGM_FI_DEV_SM_CLOCK counter\n") {
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
		{health.Present, map[health.Field]float64{health.FieldXID: 0}, 0, "0"},
		{health.Present, map[health.Field]float64{health.FieldXID: 0}, 31, "0"}, // of an application, from before DCGM started
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
		lost.Verdict.Findings = lost.Verdict.Findings[1:] // without xid-79
		if c.last != 0 {
			lost.XIDs = healthtest.Counted(nil, health.XID{Code: c.last, At: now})
		}
		page := render(t, collectorOf(testSources(s)))
		if c.want != "" {
			expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`, `err_code="`+c.want+`"`, "} "+c.want+"\n")
		} else {
			expectSeries(t, page, 0, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`)
		}
		expectSeries(t, page, 0, "DCGM_FI_DEV_GPU_TEMP", `UUID="GPU-b"`)
		expectSeries(t, page, 1, namespace+"device_state", `UUID="GPU-b"`, `state="unhealthy"} 1`)
	}
}

// After a restart of DCGM its field is 0, and after one of the agent no last XID is left. That must not hide an XID that is
// still a finding.
func TestXIDFindingIsLastXID(t *testing.T) {
	xid := func(cause string, minutes int) health.Finding {
		return health.Finding{Cause: cause, State: health.Unhealthy, Last: now.Add(-time.Duration(minutes) * time.Minute)}
	}
	zero := map[health.Field]float64{health.FieldXID: 0}
	inherited := xid("xid-95", 1)
	inherited.From = "GPU-x"
	for name, c := range map[string]struct {
		sample   health.Sample
		findings []health.Finding
		last     health.XID
		want     string
	}{
		"no finding": {health.Sample{Presence: health.Present, Values: zero}, nil, health.XID{}, "0"},
		"finding of another": {
			health.Sample{Presence: health.Present, Values: zero},
			[]health.Finding{xid("temperature", 1), inherited},
			health.XID{},
			"0",
		},
		"finding": {
			health.Sample{Presence: health.Present, Values: zero},
			[]health.Finding{xid("lost", 1), xid("xid-48", 9)},
			health.XID{},
			"48",
		},
		"newest of two findings": {
			health.Sample{Presence: health.Present, Values: zero},
			[]health.Finding{xid("xid-48", 9), xid("xid-79", 1)},
			health.XID{},
			"79",
		},
		"no value": {health.Sample{Presence: health.Present}, []health.Finding{xid("xid-48", 9)}, health.XID{}, "48"},
		"lost":     {health.Sample{Presence: health.Lost}, []health.Finding{xid("lost", 1), xid("xid-79", 2)}, health.XID{}, "79"},
		"NVML is ahead of DCGM": {
			health.Sample{Presence: health.Present, Values: map[health.Field]float64{health.FieldXID: 31}},
			nil,
			health.XID{Code: 13, Witness: health.WitnessNVML},
			"13",
		},
		"DCGM reported it": {
			health.Sample{Presence: health.Present, Values: map[health.Field]float64{health.FieldXID: 31}},
			nil,
			health.XID{Code: 31},
			"31",
		},
	} {
		s := testNode()
		s.Devices[1].Sample, s.Devices[1].Verdict.Findings, s.Devices[1].XIDs = c.sample, c.findings, healthtest.Counted(nil, c.last)
		page := render(t, collectorOf(testSources(s)))
		if got := series(page, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`); len(got) != 1 || !strings.Contains(got[0], `err_code="`+c.want+`"`) {
			t.Errorf("%s: %q, want XID %s", name, got, c.want)
		}
	}
}

// The label err_msg has dcgm-exporter's text for every XID, also for XIDs that its list lacks, under either name of the field.
func TestXIDMessagesMatchDCGMExporter(t *testing.T) {
	text, err := os.ReadFile("testdata/dcgm-exporter-xids.csv")
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		if code, name, ok := strings.Cut(strings.TrimSpace(line), ","); ok && !strings.HasPrefix(line, "#") {
			want[code] = name
		}
	}
	if len(want) != 173 {
		t.Fatalf("%d texts in the list", len(want))
	}
	want["45"], _, _ = strings.Cut(want["45"], " -- ") // docs/migrating.md has the reason
	src := configuredSources(testNode(), namedConfig(both, "DCGM_FI_DEV_XID_ERRORS"))
	for n := -1; n < 200; n++ {
		code := strconv.Itoa(n)
		poll(src, setValues(testNode(), map[health.Field]float64{health.FieldXID: float64(n)}))
		page := render(t, collectorOf(src))
		for _, name := range []string{"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR"} {
			expectSeries(t, page, 1, name, `UUID="GPU-a"`, `,err_code="`+code+`",err_msg="`+cmp.Or(want[code], "Unknown Error")+`",`)
		}
	}
}

// The compute instances of a GPU instance share their series: the newest XID and any measured value count.
func TestComputeInstancesShareSeries(t *testing.T) {
	s := testNode()
	first, second := &s.Devices[len(s.Devices)-2], &s.Devices[len(s.Devices)-1]
	first.Sample.Values = nil
	second.Sample.Values[health.FieldXID] = 43
	second.XIDs = healthtest.Counted(nil, health.XID{Code: 43, At: now})
	page := render(t, collectorOf(testSources(s)))
	expectSeries(t, page, 1, "DCGM_FI_DEV_FB_USED", `GPU_I_ID="2"`)
	expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `GPU_I_ID="2"`, `err_code="43"`, "} 43\n")

	// The second one's XID is from before the agent started.
	first.Sample.Values, second.XIDs = map[health.Field]float64{health.FieldXID: 0}, health.Ledger{}
	page = render(t, collectorOf(testSources(s)))
	expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `GPU_I_ID="2"`)
	expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `GPU_I_ID="2"`, `err_code="43"`)
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
		src.Holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {one, otherResource, replica}, "MIG-2": {one}, "MIG-3": {one}, "GPU-unknown": {one},
		}}
		collector := collectorOf(src)
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
