package metrics

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// labelled are the labels of node's pods.
func labelled(_, pod string) []Label {
	switch pod {
	case "train-0":
		return []Label{{"team", "vision"}, {"app_name", "train"}, {"empty", ""}, {"pod_uid", "0f4b"}}
	case "nb-1":
		return []Label{{"team", "notebooks"}}
	}
	return nil
}

func expect(t *testing.T, page string, want int, name string, parts ...string) {
	t.Helper()
	if got := series(page, name, parts...); len(got) != want {
		t.Errorf("%d series of %s with %q, want %d:\n%s", len(got), name, parts, want, strings.Join(series(page, name), "\n"))
	}
}

func TestPodLabels(t *testing.T) {
	const temp, allocated = "DCGM_FI_DEV_GPU_TEMP", "gpu_node_agent_device_allocated"
	src := sources(node())
	src.PodLabels = labelled
	page := exposition(t, NewGatherer(src))
	expect(t, page, 1, temp, `team=`)
	expect(t, page, 1, temp, `UUID="GPU-a",app_name="train",`, `pod="train-0",pod_uid="0f4b",team="vision"}`)
	expect(t, page, 1, allocated, `pod="train-0",pod_uid="0f4b"`, `app_name="train"`, `team="vision"`)
	expect(t, page, 1, temp, `pod_uid=`)
	expect(t, page, 1, allocated, `pod_uid=`)
	for _, idle := range []string{"gpu_node_agent_device_idle_seconds_total", "gpu_node_agent_device_idle_for_seconds"} {
		expect(t, page, 1, idle, `pod="train-0",pod_uid="0f4b"}`)
		expect(t, page, 0, idle, `team=`)
	}
	expect(t, page, 1, allocated, `pod="nb-1"`, `team="notebooks"`)
	expect(t, page, 2, allocated, `team=`)
	if strings.Contains(page, "empty=") {
		t.Error("there is a label of no value")
	}

	c := *config(SetDefault)
	c.Attribution = AttributePerPod
	src = sourcesOf(node(), &c)
	src.PodLabels = labelled
	page = exposition(t, NewGatherer(src))
	expect(t, page, 4, temp, `UUID="GPU-c"`)
	expect(t, page, 2, temp, `pod="nb-1"`, `team="notebooks"`, `vgpu=`)
	expect(t, page, 3, temp, `team=`)
}

// A label of a pod takes no other label's place, and one that Prometheus would not take costs only itself.
func TestPodLabelsThatCannotBe(t *testing.T) {
	src := sourcesOf(node(), config(SetDefault, SetOptional))
	src.PodLabels = func(string, string) []Label {
		return []Label{
			{"gpu", "x"},
			{"UUID", "x"},
			{"hostname", "x"},
			{"pod", "x"},
			{"pod_uid", ""},
			{"hpc_job", "x"},
			{"err_code", "x"},
			{"xid", "x"},
			{"resource", "x"},
			{"DCGM_FI_DRIVER_VERSION", "x"},
			{"__name__", "x"},
			{"", "x"},
			{"0", "x"},
			{"a-b", "x"},
			{"a\"", "x"},
			{"ü", "x"},
			{"team", "good\xff"},
			{"team", "x"},
		}
	}
	page := exposition(t, NewGatherer(src))
	if strings.Contains(page, `="x"`) {
		t.Errorf("there is a label that cannot be:\n%s", page)
	}
	expect(t, page, 1, "DCGM_FI_DEV_GPU_TEMP", `UUID="GPU-a"`, `gpu="0"`, `pod="train-0"`, `team="good�"`)
	expect(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `err_code="31"`, `team="good�"`)
}

// A pod is asked for once in a scrape, so that its series agree.
func TestAPodIsAskedForOnce(t *testing.T) {
	asked := make(map[string]int)
	src := sources(node())
	src.PodLabels = func(namespace, pod string) []Label {
		asked[namespace+"/"+pod]++
		return nil
	}
	exposition(t, NewGatherer(src))
	for pod, n := range asked {
		if n != 1 {
			t.Errorf("%s: %d times", pod, n)
		}
	}
	if len(asked) != 4 {
		t.Errorf("%v", asked)
	}
}

func TestJobs(t *testing.T) {
	const temp, used = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_FB_USED"
	src := sources(node())
	src.Jobs = func(gpu int, gi string) []string {
		switch {
		case gpu == 0:
			return []string{"4711", "", "4712", "4711"}
		case gpu == 2 && gi == "2":
			return []string{"part\n1"}
		case gpu == 2 && gi == "":
			return []string{""}
		}
		return nil
	}
	page := exposition(t, NewGatherer(src))
	expect(t, page, 2, temp, `UUID="GPU-a"`)
	expect(t, page, 1, temp, `UUID="GPU-a"`, `hpc_job="4711"`, `pod="train-0"`)
	expect(t, page, 1, temp, `UUID="GPU-a"`, `hpc_job="4712"`, `pod="train-0"`)
	expect(t, page, 1, temp, `UUID="GPU-c"`)
	expect(t, page, 0, temp, `UUID="GPU-c"`, `hpc_job`)
	expect(t, page, 1, used, `GPU_I_ID="2"`, `hpc_job="part\n1"`)
	expect(t, page, 1, used, `GPU_I_ID="1"`)
	if strings.Contains(strings.Join(series(page, "gpu_node_agent_device_state"), ""), "hpc_job") {
		t.Error("a series that is no field's has a job")
	}

	// Each holder's series, for each job.
	c := *config(SetDefault)
	c.Attribution = AttributePerPod
	perPod := sourcesOf(node(), &c)
	perPod.Jobs = func(int, string) []string { return []string{"1", "2"} }
	expect(t, exposition(t, NewGatherer(perPod)), 8, temp, `UUID="GPU-c"`)
}

// What one compute instance of a GPU instance does not tell, another may.
func TestAnyComputeInstanceTells(t *testing.T) {
	s := node()
	last := len(s.Devices) - 1
	s.Devices[last-1].Sample.Values = nil
	page := exposition(t, NewGatherer(sources(s)))
	expect(t, page, 1, "DCGM_FI_DEV_FB_USED", `GPU_I_ID="2"`)
}

// The XIDs of a GPU instance in the window are those of all compute instances in it. One that all have reported is
// one.
func TestXIDCountsOfComputeInstances(t *testing.T) {
	s := node()
	src := sourcesOf(s, config(expXIDs))
	n := len(s.Devices)
	after := *s
	after.At = now.Add(1)
	after.Devices = append([]health.DeviceState(nil), s.Devices...)
	both := health.XID{Code: 43, At: now}
	first, second := &after.Devices[n-2], &after.Devices[n-1]
	first.Sample.XIDs = []health.XID{both, {Code: 31, At: now}}
	first.XIDCounts = map[int]uint64{43: 1, 31: 1}
	second.Sample.XIDs = []health.XID{both, {Code: 31, At: now.Add(2)}, {Code: 13, At: now}}
	second.XIDCounts = map[int]uint64{43: 1, 31: 1, 13: 1}
	src.Snapshots.Store(&after)
	src.Totals.fold(&after)
	page := exposition(t, NewGatherer(src))
	for _, want := range []string{`xid="43"} 1`, `xid="31"} 2`, `xid="13"} 1`} {
		expect(t, page, 1, expXIDs, `GPU_I_ID="2"`, want)
	}
	expect(t, page, 3, expXIDs, `GPU_I_ID="2"`)
	expect(t, page, 1, expXIDs, `GPU_I_ID="1"`, `xid=""} 0`)
}

// The labels of a field's series are dcgm-exporter's, and no others.
func TestLabels(t *testing.T) {
	c := *config("DCGM_FI_DEV_FB_USED", "DCGM_FI_DRIVER_VERSION")
	c.Attribution = AttributePerPod
	s := node()
	for i := range s.Devices {
		s.Devices[i].Sample.Values = map[health.Field]float64{health.FieldFBUsed: 1}
	}
	src := sourcesOf(s, &c)
	src.Holders = func() plugin.Holders {
		return plugin.Holders{By: map[health.DeviceID][]plugin.Holder{
			"GPU-a": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "GPU-a::1"}},
			"MIG-1": {{Namespace: "n", Pod: "p", Container: "c", DeviceID: "MIG-1"}},
		}}
	}
	page := exposition(t, NewGatherer(src))
	for _, want := range []string{
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",device="nvidia0",gpu="0",hostname="node-1",modelName="NVIDIA H100 80GB HBM3",pci_bus_id="00000000:1B:00.0"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",UUID="GPU-a",container="c",device="nvidia0",gpu="0",hostname="node-1",` +
			`modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:1B:00.0",pod="p",vgpu="1"} 1`,
		`{DCGM_FI_DRIVER_VERSION="580.95.05",GPU_I_ID="1",GPU_I_PROFILE="1g.10gb",UUID="GPU-c",container="c",device="nvidia2",gpu="2",` +
			`hostname="node-1",modelName="NVIDIA H100 80GB HBM3",namespace="n",pci_bus_id="00000000:52:00.0",pod="p"} 1`,
	} {
		expect(t, page, 1, "DCGM_FI_DEV_FB_USED", want)
	}
}
