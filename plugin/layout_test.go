package plugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// said writes a layout as one line for each resource: "nvidia.com/gpu: GPU-0 GPU-1".
func said(layout []Resource) []string {
	var lines []string
	for _, r := range layout {
		line := r.Name + ":"
		for _, d := range r.Devices {
			line += " " + d.ID
		}
		lines = append(lines, line)
	}
	return lines
}

func configured(change func(*Config)) Config {
	c := DefaultConfig()
	change(&c)
	return c
}

func TestIncludeAndExclude(t *testing.T) {
	snap := partitioned(nil, nil, nil)
	snap.Devices[2].Device.Model = "NVIDIA L4"
	for _, c := range []struct {
		include, exclude []string
		want             string
	}{
		{nil, nil, "nvidia.com/gpu: GPU-0 GPU-1 GPU-2"},
		{[]string{"*L4*", "0"}, nil, "nvidia.com/gpu: GPU-0 GPU-2"},
		{nil, []string{"11:00.0"}, "nvidia.com/gpu: GPU-0 GPU-2"},
		{[]string{"*H100*"}, []string{"GPU-0"}, "nvidia.com/gpu: GPU-1"},
	} {
		cfg := configured(func(cfg *Config) { cfg.Include, cfg.Exclude = c.include, c.exclude })
		if got := said(Layout(cfg, snap)); len(got) != 1 || got[0] != c.want {
			t.Errorf("%q without %q: %q, want %q", c.include, c.exclude, got, c.want)
		}
	}
	none := configured(func(cfg *Config) { cfg.Include = []string{"7"} })
	if a := arrange(layoutInput{cfg: &none, snap: snap}); a.Resources != nil || !strings.Contains(a.Err, "leave none of the 3 devices") {
		t.Errorf("%+v", a)
	}
}

// The order of a snapshot, of its devices and of what a map gives makes no difference.
func TestLayoutIsDeterministic(t *testing.T) {
	cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	snap := partitioned([]string{"3g.40gb", "1g.10gb", "1g.10gb"}, nil, []string{"1g.10gb", "2g.20gb"})
	want := said(Layout(cfg, snap))
	back := *snap
	back.Devices = slices.Clone(snap.Devices)
	slices.Reverse(back.Devices)
	if got := said(Layout(cfg, &back)); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestConfigOfLayout(t *testing.T) {
	for key, change := range map[string]func(*Config){
		`migStrategy: "all"`:    func(c *Config) { c.MIGStrategy = "all" },
		"resources[0].pattern:": func(c *Config) { c.Resources = []ResourceRule{{"", "a.com/b"}} },
		"resources[0].resource:": func(c *Config) {
			c.Resources = []ResourceRule{{"*", "b"}}
		},
		"include[0]:": func(c *Config) { c.Include = []string{""} },
		"exclude[0]:": func(c *Config) { c.Exclude = []string{"a:b"} },
		"sharing.timeSlicing.resources[0].name: no device is called": func(c *Config) {
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: "nvidia.com/gpus", Replicas: 2}}
		},
		"sharing.timeSlicing.resources[0].replicas: 1 is out of range": func(c *Config) {
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 1}}
		},
		"sharing.timeSlicing.resources[0].devices[0]:": func(c *Config) {
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 2, Devices: []string{""}}}
		},
		"sharing.timeSlicing.resources[0].rename:": func(c *Config) {
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 2, Rename: "x"}}
		},
		"sharing.timeSlicing.resources[0].name: \"nvidia.com/" + strings.Repeat("x", 60) + ".shared\"": func(c *Config) {
			c.Resource = "nvidia.com/" + strings.Repeat("x", 60)
			c.Sharing.TimeSlicing = TimeSlicing{RenameByDefault: true, Resources: []SharedResource{{Name: c.Resource, Replicas: 2}}}
		},
		"deviceList: is empty":            func(c *Config) { c.DeviceList = nil },
		`deviceList[0]: "cdi"`:            func(c *Config) { c.DeviceList = []string{"cdi"} },
		`deviceList[1]: "envvar"`:         func(c *Config) { c.DeviceList = []string{ListEnv, ListEnv} },
		`deviceID: "name"`:                func(c *Config) { c.DeviceID = "name" },
		`driverRoot: "x" is not absolute`: func(c *Config) { c.DriverRoot = "x" },
		"containerDriverRoot:":            func(c *Config) { c.ContainerDriverRoot = "x" },
		"devRoot:":                        func(c *Config) { c.DevRoot = "x" },
		"cdi.kind:":                       func(c *Config) { c.CDI.Kind = "gpu" },
		"cdi.dir:":                        func(c *Config) { c.CDI.Dir = "" },
		"cdi.hookPath: \"/bin/sh\"":       func(c *Config) { c.CDI.HookPath = "/bin/sh" },
		"cdi.hookPath: \"nvidia-ctk\" is": func(c *Config) { c.CDI.HookPath = "nvidia-ctk" },
		"cdi.annotationPrefix:":           func(c *Config) { c.CDI.AnnotationPrefix = "cdi" },
	} {
		key = strings.Replace(key, "is not absolute", "is not an absolute", 1)
		if err := configured(change).Validate(); err == nil || !strings.HasPrefix(err.Error(), key) {
			t.Errorf("%v, want %s", err, key)
		}
	}
}

func benchmarkLayout(b *testing.B, cfg Config, snap *health.Snapshot, devices int) {
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for _, r := range Layout(cfg, snap) {
			n += len(r.Devices)
		}
		if n != devices {
			b.Fatal(n)
		}
	}
}

func BenchmarkLayout8(b *testing.B) { benchmarkLayout(b, DefaultConfig(), snapshot(8), 8) }

func BenchmarkLayout8x10Replicas(b *testing.B) {
	cfg := configured(func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 10}} })
	benchmarkLayout(b, cfg, snapshot(8), 80)
}

func BenchmarkLayout8x7MIG(b *testing.B) {
	cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	seven := slices.Repeat([]string{"1g.10gb"}, 7)
	benchmarkLayout(b, cfg, partitioned(seven, seven, seven, seven, seven, seven, seven, seven), 56)
}
