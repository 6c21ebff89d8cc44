package metrics

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// renderPerPod renders a page with AttributePerPod.
func renderPerPod(t *testing.T, s *health.Snapshot, change func(*testSource)) string {
	t.Helper()
	c := *testConfig(fields.SetDefault)
	c.Attribution = AttributePerPod
	src := configuredSources(s, &c)
	change(&src)
	return render(t, collectorOf(src))
}

func TestAttribution(t *testing.T) {
	s := setValues(testNode(), map[health.Field]float64{health.FieldFBUsed: 1})
	const name = "DCGM_FI_DEV_FB_USED"
	page := render(t, collectorOf(testSources(s)))
	expectSeries(t, page, 5, name)
	expectSeries(t, page, 1, name, `UUID="GPU-a"`, `container="main"`, `namespace="team"`, `pod="train-0"`)
	expectSeries(t, page, 2, name, `pod=`)
	expectSeries(t, page, 1, name, `GPU_I_ID="1"`, `pod="web"`)
	expectSeries(t, page, 1, name, `device="nvidia2"`, `modelName="a `)

	page = renderPerPod(t, s, func(*testSource) {})
	expectSeries(t, page, 8, name)
	expectSeries(t, page, 1, name, `UUID="GPU-a"`)
	expectSeries(t, page, 4, name, `modelName="a `)
	expectSeries(t, page, 1, name, `pod="nb-1"`, `vgpu="0"`)
	expectSeries(t, page, 1, name, `pod="nb-1"`, `vgpu="2"`)
	expectSeries(t, page, 1, name, `pod="nb-2"`, `vgpu="1"`)
	expectSeries(t, page, 3, name, `vgpu=`)
}

// A pod's labels end with its allocation. If the pod resources cannot be read, the device series stay.
func TestHoldersChange(t *testing.T) {
	src := testSources(testNode())
	src.Processes, src.Memory = nil, nil // which have been attributed with the holders of their time
	c := collectorOf(src)
	expectSeries(t, render(t, c), 1, "DCGM_FI_DEV_GPU_TEMP", `pod="train-0"`)
	src.Holders = podresources.Holders{At: now.Add(-time.Hour), Err: "no such file"}
	page := render(t, c)
	if strings.Contains(page, `pod=`) {
		t.Errorf("the page has holders:\n%s", page)
	}
	expectSeries(t, page, 2, "DCGM_FI_DEV_GPU_TEMP")
	expectSeries(t, page, 1, namespace+"pod_resources_up", " 0\n")
	expectSeries(t, page, 1, namespace+"pod_resources_age_seconds", " 3600\n")
}

// A container with several units of memory has each series once, and its device stays one that is shared.
func TestAttributionOfMemory(t *testing.T) {
	src := testSources(testNode())
	holders := podresources.Holders{By: make(map[health.DeviceID][]podresources.Holder)}
	for i, pod := range []string{"a", "a", "b", "a"} {
		holders.By["GPU-a"] = append(holders.By["GPU-a"], podresources.Holder{
			Namespace: "team", Pod: pod, Container: "main", Resource: "nvidia.com/gpu-memory", DeviceID: fmt.Sprint("GPU-a::1024Mi::", i),
		})
	}
	src.Holders, src.Processes = holders, nil
	const name = "DCGM_FI_DEV_GPU_TEMP"
	expectSeries(t, render(t, collectorOf(src)), 0, name, "pod=")
	page := renderPerPod(t, testNode(), func(s *testSource) { s.Holders, s.Processes = src.Holders, nil })
	expectSeries(t, page, 1, name, `UUID="GPU-a"`, `pod="a"`)
	expectSeries(t, page, 1, name, `UUID="GPU-a"`, `pod="b"`)
	expectSeries(t, page, 0, name, `vgpu=`)
	expectSeries(t, page, 2, namespace+"device_allocated", "GPU-a")
}

func TestAttributionOfClaims(t *testing.T) {
	const temperature, allocated = "DCGM_FI_DEV_GPU_TEMP", namespace + "device_allocated"
	held := func(pod, container, claim, share string) podresources.Holder {
		ref := podresources.ClaimRef{Name: claim, Driver: "gpu.nvidia.com", Pool: "node-1", ShareID: share}
		return podresources.Holder{Namespace: "team", Pod: pod, Container: container, DeviceID: "gpu-0", Claim: ref}
	}
	page := func(t *testing.T, c *Config, holders ...podresources.Holder) string {
		src := testSources(testNode())
		src.Config = new(health.Latest[Config])
		src.Config.Store(c)
		src.Holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-a": holders}}
		src.Processes = nil
		return render(t, collectorOf(src))
	}
	labelled, perPod := testConfig("DCGM_FI_DEV_GPU_TEMP"), testConfig("DCGM_FI_DEV_GPU_TEMP")
	labelled.ClaimLabels, perPod.Attribution = true, AttributePerPod
	for name, c := range map[string]struct {
		config  *Config
		holders []podresources.Holder
		expect  func(t *testing.T, page string)
	}{
		"a whole device": {
			testConfig("DCGM_FI_DEV_GPU_TEMP"),
			[]podresources.Holder{held("a", "main", "gpus", "")},
			func(t *testing.T, page string) {
				expectSeries(t, page, 1, temperature, `UUID="GPU-a"`, `container="main"`, `pod="a"`)
				expectSeries(t, page, 1, allocated, `container="main"`, `pod="a"`, `resource=""`)
				expectSeries(t, page, 0, "dra_")
			},
		},
		"labels": {labelled, []podresources.Holder{held("a", "main", "gpus", "")}, func(t *testing.T, page string) {
			for _, metric := range []string{temperature, allocated} {
				expectSeries(t, page, 1, metric, `dra_claim_name="gpus"`, `dra_claim_namespace="team"`, `dra_driver_name="gpu.nvidia.com"`,
					`dra_pool_name="node-1"`, `dra_device_name="gpu-0"`)
			}
			expectSeries(t, page, 0, "dra_mig")
		}},
		"all containers of a pod hold its claim": {
			testConfig("DCGM_FI_DEV_GPU_TEMP"),
			[]podresources.Holder{held("a", "main", "gpus", ""), held("a", "side", "gpus", "")},
			func(t *testing.T, page string) {
				expectSeries(t, page, 1, temperature, `UUID="GPU-a"`, `pod="a"`)
				expectSeries(t, page, 0, temperature, `UUID="GPU-a"`, `container=`)
				expectSeries(t, page, 2, allocated, `pod="a"`)
			},
		},
		"two pods hold one claim": {
			testConfig("DCGM_FI_DEV_GPU_TEMP"),
			[]podresources.Holder{held("a", "main", "gpus", ""), held("b", "main", "gpus", "")},
			func(t *testing.T, page string) {
				expectSeries(t, page, 0, temperature, `UUID="GPU-a"`, `pod=`)
				expectSeries(t, page, 2, allocated, `UUID="GPU-a"`)
			},
		},
		"a share": {testConfig("DCGM_FI_DEV_GPU_TEMP"), []podresources.Holder{held("a", "main", "gpus", "s1")}, func(t *testing.T, page string) {
			expectSeries(t, page, 0, temperature, `UUID="GPU-a"`, `pod=`)
			expectSeries(t, page, 1, allocated, `pod="a"`)
		}},
		"shares, per pod": {perPod, []podresources.Holder{
			held("a", "main", "gpus", "s1"), held("a", "main", "gpus", "s2"),
			held("b", "main", "x", "s3"),
		}, func(t *testing.T, page string) {
			expectSeries(t, page, 1, temperature, `UUID="GPU-a"`, `pod="a"`)
			expectSeries(t, page, 1, temperature, `UUID="GPU-a"`, `pod="b"`)
			expectSeries(t, page, 0, temperature, `vgpu=`)
			expectSeries(t, page, 1, allocated, `pod="a"`)
		}},
	} {
		t.Run(name, func(t *testing.T) { c.expect(t, page(t, c.config, c.holders...)) })
	}
}

// A MIG device has dcgm-exporter's labels of its profile and UUID besides.
func TestClaimLabelsOfMIG(t *testing.T) {
	c := testConfig("DCGM_FI_DEV_FB_USED")
	c.ClaimLabels = true
	src := configuredSources(testNode(), c)
	src.Processes = nil
	held := podresources.Holder{Namespace: "team", Pod: "a", Container: "main", DeviceID: "gpu-2-mig-1g10gb-19-0"}
	held.Claim = podresources.ClaimRef{Name: "part", Driver: "gpu.nvidia.com", Pool: "node-1"}
	src.Holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"MIG-1": {held}}}
	page := render(t, collectorOf(src))
	for _, metric := range []string{"DCGM_FI_DEV_FB_USED", namespace + "device_allocated"} {
		expectSeries(t, page, 1, metric, `GPU_I_ID="1"`, `dra_claim_name="part"`, `dra_device_name="gpu-2-mig-1g10gb-19-0"`,
			`dra_mig_profile="1g.10gb"`, `dra_mig_device_uuid="MIG-1"`)
		expectSeries(t, page, 1, metric, "dra_")
	}
}

func TestReplicaOf(t *testing.T) {
	for id, want := range map[string]string{
		"GPU-1": "", "GPU-1::3": "3", "MIG-1::10": "10", "nvidia0": "", "nvidia0/gi1": "", "nvidia0/gi1/vgpu2": "2", "0::1": "1",
		"GPU-1::mps4::3": "3", "MIG-1::mps8192Mi::10": "10", "GPU-1::1024Mi::3": "", "GPU-1::1024Mi-mps::3": "",
	} {
		if got := replicaOf(podresources.Holder{DeviceID: id}); got != want {
			t.Errorf("replicaOf(%q) = %q, want %q", id, got, want)
		}
	}
}

// testPodLabels are the labels of testHolders' pods.
func testPodLabels(_, pod string) []Label {
	switch pod {
	case "train-0":
		return []Label{label("team", "vision"), label("app_name", "train"), label("empty", ""), label(podUIDLabel, "0f4b")}
	case "nb-1":
		return []Label{label("team", "notebooks")}
	}
	return nil
}

func TestPodLabelsOnSeries(t *testing.T) {
	const temp, allocated = "DCGM_FI_DEV_GPU_TEMP", namespace + "device_allocated"
	src := testSources(testNode())
	var pods []string
	src.PodLabels = func(namespace, pod string) []Label {
		pods = append(pods, namespace+"/"+pod)
		return testPodLabels(namespace, pod)
	}
	page := render(t, collectorOf(src))
	// A scrape asks for each pod once, so that its series agree.
	if slices.Sort(pods); !slices.Equal(pods, []string{"infer/web", "team/chat-0", "team/chat-1", "team/nb-1", "team/nb-2", "team/train-0"}) {
		t.Errorf("asked for %q", pods)
	}
	expectSeries(t, page, 1, temp, `team=`)
	expectSeries(t, page, 1, temp, `UUID="GPU-a",app_name="train",`, `pod="train-0",pod_uid="0f4b",team="vision"}`)
	expectSeries(t, page, 1, allocated, `pod="train-0",pod_uid="0f4b"`, `app_name="train"`, `team="vision"`)
	expectSeries(t, page, 1, temp, `pod_uid=`)
	expectSeries(t, page, 1, allocated, `pod_uid=`)
	for _, idle := range []string{namespace + "device_idle_seconds_total", namespace + "device_idle_for_seconds"} {
		expectSeries(t, page, 1, idle, `pod="train-0",pod_uid="0f4b"}`)
		expectSeries(t, page, 0, idle, `team=`)
	}
	expectSeries(t, page, 1, allocated, `pod="nb-1"`, `team="notebooks"`)
	expectSeries(t, page, 2, allocated, `team=`)
	if strings.Contains(page, "empty=") {
		t.Error("the page has an empty pod label")
	}

	page = renderPerPod(t, testNode(), func(src *testSource) { src.PodLabels = testPodLabels })
	expectSeries(t, page, 4, temp, `UUID="GPU-c"`)
	expectSeries(t, page, 2, temp, `pod="nb-1"`, `team="notebooks"`, `vgpu=`)
	expectSeries(t, page, 3, temp, `team=`)
}

// A pod label never replaces another label, and an invalid one does not affect the others.
func TestInvalidPodLabelsAreOmitted(t *testing.T) {
	src := configuredSources(testNode(), testConfig(fields.SetDefault, fields.SetOptional))
	src.PodLabels = func(string, string) []Label {
		labels := []Label{label(podUIDLabel, "")}
		for _, name := range []string{
			"gpu", "UUID", "hostname", "pod", "hpc_job", "err_code", "xid", "resource", "DCGM_FI_DRIVER_VERSION", "__name__", "", "0", "a-b", "a\"",
			"ü",
		} {
			labels = append(labels, label(name, "x"))
		}
		return append(labels, label("team", "good\xff"), label("team", "x"))
	}
	page := render(t, collectorOf(src))
	if strings.Contains(page, `="x"`) {
		t.Errorf("the page has an invalid label:\n%s", page)
	}
	expectSeries(t, page, 1, "DCGM_FI_DEV_GPU_TEMP", `UUID="GPU-a"`, `gpu="0"`, `pod="train-0"`, `team="good�"`)
	expectSeries(t, page, 1, "DCGM_FI_DEV_XID_ERRORS", `err_code="31"`, `team="good�"`)
}

func TestJobLabels(t *testing.T) {
	const temp, used = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_FB_USED"
	src := testSources(testNode())
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
	page := render(t, collectorOf(src))
	expectSeries(t, page, 2, temp, `UUID="GPU-a"`)
	expectSeries(t, page, 1, temp, `UUID="GPU-a"`, `hpc_job="4711"`, `pod="train-0"`)
	expectSeries(t, page, 1, temp, `UUID="GPU-a"`, `hpc_job="4712"`, `pod="train-0"`)
	expectSeries(t, page, 1, temp, `UUID="GPU-c"`)
	expectSeries(t, page, 0, temp, `UUID="GPU-c"`, `hpc_job`)
	expectSeries(t, page, 1, used, `GPU_I_ID="2"`, `hpc_job="part\n1"`)
	expectSeries(t, page, 1, used, `GPU_I_ID="1"`)
	expectSeries(t, page, 0, namespace+"device_state", "hpc_job")

	page = renderPerPod(t, testNode(), func(src *testSource) { src.Jobs = func(int, string) []string { return []string{"1", "2"} } })
	expectSeries(t, page, 8, temp, `UUID="GPU-c"`) // 2 jobs for the device and each of 3 replicas
}
