package plugin

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var update = flag.Bool("update", false, "write the golden files anew")

func testTerms(cfg Config, root fstest.MapFS) terms {
	return terms{&cfg, host{root, &cfg}, func() string { return "a1b2c3d4-0000-4000-8000-000000000000" }}
}

// machine is the file system of a machine with three GPUs, the second of which is partitioned. It has no
// /dev/nvidia-modeset.
func machine() fstest.MapFS {
	f := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	return fstest.MapFS{
		"dev/nvidiactl":                                    f(""),
		"dev/nvidia-uvm":                                   f(""),
		"run/nvidia/driver/dev/nvidiactl":                  f(""),
		"run/nvidia/driver/dev/nvidia-uvm":                 f(""),
		"dev/nvidia-uvm-tools":                             f(""),
		"proc/driver/nvidia-caps/mig-minors":               f("config 1\nmonitor 2\ngpu1/gi7/access 66\ngpu1/gi7/ci0/access 67\ngpu1/gi8/access 75\ngpu1/gi8/ci0/access 76\n"),
		"proc/driver/nvidia/gpus/0000:12:00.0/information": f("Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nDevice Minor: \t 5\n"),
	}
}

// checkGolden compares a value, as JSON, with a file in testdata.
func checkGolden(t *testing.T, name string, v any) {
	t.Helper()
	got, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", name+".json")
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, append(got, '\n'), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(string(want)) != string(got) {
		t.Errorf("%s is now\n%s\nwant\n%s", file, got, want)
	}
}

func ask(containers ...[]string) *pluginapi.AllocateRequest {
	req := &pluginapi.AllocateRequest{}
	for _, ids := range containers {
		req.ContainerRequests = append(req.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
	}
	return req
}

// Each strategy's answer to two containers, of which one asks for the devices in no order and one of them twice.
func TestAllocateGolden(t *testing.T) {
	whole := []string(nil)
	snap := partitioned(whole, []string{"1g.10gb", "1g.10gb"}, whole)
	snap.Devices[2].Device.Minor = -1 // its source does not say
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	lists := func(how ...string) func(*Config) { return func(c *Config) { c.DeviceList = how } }
	index := func(c *Config) { c.DeviceID = DeviceIDIndex }
	nodes := func(c *Config) { c.PassDeviceSpecs = true }
	generated := func(c *Config) { c.CDI.Generate = true }
	shared := func(c *Config) {
		c.Sharing.TimeSlicing = TimeSlicing{Resources: []SharedResource{{Name: gpu, Replicas: 2}}}
	}
	gpus := ask([]string{"GPU-2", "GPU-0", "GPU-2"}, []string{"GPU-0"})
	const slice = "nvidia.com/mig-1g.10gb"
	migs := ask([]string{"MIG-1-1", "MIG-1-0"}, []string{"MIG-1-0"})
	for _, c := range []struct {
		name     string
		changes  []func(*Config)
		resource string
		req      *pluginapi.AllocateRequest
	}{
		{"envvar", nil, gpu, gpus},
		{"envvar-index", []func(*Config){index}, gpu, gpus},
		{"envvar-replicas", []func(*Config){shared}, gpu, ask([]string{"GPU-2::1", "GPU-0::0", "GPU-2::0"})},
		{"envvar-mig", []func(*Config){mixed}, slice, migs},
		{"envvar-mig-index", []func(*Config){mixed, index}, slice, migs},
		{"envvar-nodes", []func(*Config){nodes}, gpu, gpus},
		{"envvar-nodes-mig", []func(*Config){nodes, mixed}, slice, migs},
		{"envvar-nodes-driver-root", []func(*Config){nodes, func(c *Config) { c.DriverRoot = "/run/nvidia/driver" }}, gpu, gpus},
		{"envvar-nodes-dev-root", []func(*Config){nodes, func(c *Config) { c.DriverRoot, c.DevRoot = "/run/nvidia/driver", "/" }}, gpu, gpus},
		{"volume-mounts", []func(*Config){lists(ListMounts)}, gpu, gpus},
		{"volume-mounts-mig-index", []func(*Config){lists(ListMounts), mixed, index}, slice, migs},
		{"cdi-cri", []func(*Config){lists(ListCDICRI)}, gpu, gpus},
		{"cdi-cri-generated", []func(*Config){lists(ListCDICRI), generated}, gpu, gpus},
		{"cdi-cri-nodes", []func(*Config){lists(ListCDICRI), nodes}, gpu, gpus},
		{"cdi-cri-mig-index", []func(*Config){lists(ListCDICRI), mixed, index}, slice, migs},
		{"cdi-annotations", []func(*Config){lists(ListCDIAnnotations)}, gpu, gpus},
		{"cdi-annotations-prefix", []func(*Config){lists(ListCDIAnnotations), generated, func(c *Config) {
			c.CDI.AnnotationPrefix, c.CDI.Kind = "cdi.example.com/", "example.com/gpu"
		}}, gpu, gpus},
		{"all", []func(*Config){lists(ListCDICRI, ListCDIAnnotations, ListEnv, ListMounts), nodes}, gpu, gpus},
		{"cdi-and-envvar", []func(*Config){lists(ListEnv, ListCDICRI)}, gpu, gpus},
	} {
		cfg := configured(func(cfg *Config) {
			for _, change := range c.changes {
				change(cfg)
			}
		})
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		resp, err := allocate(testTerms(cfg, machine()), find(Layout(cfg, snap), c.resource), c.req)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		checkGolden(t, "allocate/"+c.name, resp)
	}
}

func TestAllocateRefuses(t *testing.T) {
	shared := configured(func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 4}} })
	nodes := configured(func(c *Config) { c.PassDeviceSpecs = true })
	mixed := configured(func(c *Config) { c.PassDeviceSpecs, c.MIGStrategy = true, MIGMixed })
	snap := partitioned(nil, []string{"1g.10gb", "1g.10gb", "1g.10gb"})
	lost := partitioned(nil, nil)
	lost.Devices[1].Device.Minor = -1
	nowhere := partitioned(nil)
	nowhere.Devices[0].Device.Minor, nowhere.Devices[0].Device.PCI = -1, ""
	const slice = "nvidia.com/mig-1g.10gb"
	for _, c := range []struct {
		name   string
		cfg    Config
		r      Resource
		ids    []string
		reason string
		says   []string
	}{
		{
			"two replicas", shared, find(Layout(shared, snap), gpu),
			[]string{"GPU-0::1", "GPU-1::0"},
			reasonTooManyReplicas,
			[]string{"GPU-0::1 is shared", "may have 1 replica, not 2", "failRequestsGreaterThanOne"},
		},
		{"an unknown replica", shared, find(Layout(shared, snap), gpu), []string{"GPU-0::4"}, reasonUnknownDevice, []string{`"GPU-0::4"`, "GPU-0::0, GPU-0::1"}},
		{"the GPU of replicas", shared, find(Layout(shared, snap), gpu), []string{"GPU-0"}, reasonUnknownDevice, []string{`"GPU-0"`}},
		{"no capability", mixed, find(Layout(mixed, snap), slice), []string{"MIG-1-2"}, reasonNoDeviceNode, []string{"MIG-1-2", "mig-minors has no gpu1/gi9/access"}},
		{"no minor", nodes, find(Layout(nodes, lost), gpu), []string{"GPU-0", "GPU-1"}, reasonNoDeviceNode, []string{"GPU-1", "/proc/driver/nvidia/gpus/0000:11:00.0/information: file does not exist"}},
		{"no minor and no bus", nodes, find(Layout(nodes, nowhere), gpu), []string{"GPU-0"}, reasonNoDeviceNode, []string{"GPU-0", "PCI bus id"}},
	} {
		_, err := allocate(testTerms(c.cfg, machine()), c.r, ask(c.ids))
		r, ok := err.(*refusal) //nolint:errorlint // this is the type it has
		if !ok || r.reason != c.reason || status.Code(err) == codes.Unknown {
			t.Errorf("%s: %v, want %s", c.name, err, c.reason)
			continue
		}
		for _, word := range c.says {
			if !strings.Contains(r.text, word) {
				t.Errorf("%s: %q does not say %q", c.name, r.text, word)
			}
		}
	}
	// One replica is what the limit allows, and several are what it allows when it is off.
	if _, err := allocate(testTerms(shared, nil), find(Layout(shared, snap), gpu), ask([]string{"GPU-0::1"}, []string{"GPU-0::2"})); err != nil {
		t.Error(err)
	}
}

func TestLongListsAreCut(t *testing.T) {
	r := find(Layout(DefaultConfig(), snapshot(40)), gpu)
	if got := names(r.Devices); !strings.HasSuffix(got, "GPU-7 and 32 more") {
		t.Error(got)
	}
}

func TestRandomUUID(t *testing.T) {
	a, b := randomUUID(), randomUUID()
	if a == b || !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(a) {
		t.Errorf("%s and %s", a, b)
	}
}
