package plugin

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestConfig(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Errorf("the default: %v", err)
	}
	long := strings.Repeat("x", 64)
	for _, c := range []struct {
		resource, dir string
		errs          []string // the start of each line, and a word of it
	}{
		{"nvidia.com/mig-1g.10gb.me", "/k", nil},
		{"nvidia.com/A_100", "/k", nil},
		{"nvidia.com/" + long[:63], "/k", nil},
		{"", "/k", []string{`resource: "" is empty; use DOMAIN/NAME such as nvidia.com/gpu`}},
		{"gpu", "/k", []string{`resource: "gpu" has no domain`}},
		{"/gpu", "/k", []string{`resource: "/gpu" has no domain`}},
		{"nvidia.com/", "/k", []string{`resource: "nvidia.com/" has no name`}},
		{"nvidia.com/a/b", "/k", []string{`resource: "nvidia.com/a/b" has more than one slash`}},
		{"kubernetes.io/gpu", "/k", []string{`resource: "kubernetes.io/gpu" belongs to Kubernetes`}},
		{"x.kubernetes.io/gpu", "/k", []string{`resource: "x.kubernetes.io/gpu" belongs to Kubernetes`}},
		{"requests.nvidia.com/gpu", "/k", []string{`resource: "requests.nvidia.com/gpu" starts with requests.`}},
		{"NVIDIA.com/gpu", "/k", []string{`resource: "NVIDIA.com/gpu" has a domain that is not made of`}},
		{"nvidia..com/gpu", "/k", []string{`resource: "nvidia..com/gpu" has a domain that is not made of`}},
		{"nvidia.com/gpu-", "/k", []string{`resource: "nvidia.com/gpu-" has a name that is not made of`}},
		{"nvidia.com/gpü", "/k", []string{`resource: "nvidia.com/gpü" has a name that is not made of`}},
		{"nvidia.com/" + long, "/k", []string{`resource: "nvidia.com/` + long + `" has a name of 64 characters, 63 are allowed`}},
		{strings.Repeat("a.", 121) + "b/c", "/k", nil},
		{strings.Repeat("a.", 122) + "b/c", "/k", []string{`resource: "a.a.a.`}},
		{"nvidia.com/gpu", "k", []string{`kubeletDir: "k" is not an absolute path`}},
		{"nvidia.com/gpu", "", []string{`kubeletDir: "" is not an absolute path`}},
		{"nvidia.com/gpu", "/" + strings.Repeat("d", 56), nil},
		{"nvidia.com/gpu", "/" + strings.Repeat("d", 57), []string{`kubeletDir: the path of the socket /ddd`}},
		{"gpu", "k", []string{"resource: ", "kubeletDir: "}},
	} {
		var lines []string
		cfg := DefaultConfig()
		cfg.Resource, cfg.KubeletDir = c.resource, c.dir
		if err := cfg.Validate(); err != nil {
			lines = strings.Split(err.Error(), "\n")
		}
		if !slices.EqualFunc(lines, c.errs, strings.HasPrefix) {
			t.Errorf("%q in %q: %q, want %q", c.resource, c.dir, lines, c.errs)
		}
	}
}

func TestSocketPath(t *testing.T) {
	c := DefaultConfig()
	long := "nvidia.com/" + strings.Repeat("x", 62)
	if got := c.socketPath(c.Resource); got != "/var/lib/kubelet/device-plugins/gpu-node-agent-nvidia.com_gpu.sock" {
		t.Error(got)
	}
	if a, b := c.socketPath(long+"a"), c.socketPath(long+"b"); a == b || len(a) > 100 {
		t.Errorf("%s and %s", a, b)
	}
}

func TestLayout(t *testing.T) {
	cfg := Config{Enabled: true, Resource: gpu, KubeletDir: "/k"}
	mig := health.DeviceState{Device: health.Device{ID: "MIG-1", Parent: "GPU-0", Kind: health.KindMIG}}
	two := snapshot(2)
	two.Devices = []health.DeviceState{two.Devices[1], two.Devices[0], mig}
	two.Devices[1].Device.MIGMode = true
	two.Devices[1].Device.NUMA = []int{0, 1}
	two.Devices[0].Device.NUMA = []int{-1}
	dev := func(id, h string, numa ...int64) *pluginapi.Device {
		d := &pluginapi.Device{ID: id, Health: h}
		for _, n := range numa {
			if d.Topology == nil {
				d.Topology = &pluginapi.TopologyInfo{}
			}
			d.Topology.Nodes = append(d.Topology.Nodes, &pluginapi.NUMANode{ID: n})
		}
		return d
	}
	never := snapshot(2)
	never.At = time.Time{}
	for _, c := range []struct {
		name string
		snap *health.Snapshot
		want []*pluginapi.Device // nil: no resource
	}{
		{"no snapshot", nil, nil},
		{"never polled", never, nil},
		{"no GPUs", snapshot(0), nil},
		{"by index, GPUs only, MIG mode or not", two, []*pluginapi.Device{dev("GPU-0", "Healthy", 0, 1), dev("GPU-1", "Healthy")}},
		{"unknown", with(snapshot(1), 0, health.Unknown), []*pluginapi.Device{dev("GPU-0", "Healthy", 0)}},
		{"degraded", with(snapshot(1), 0, health.Degraded), []*pluginapi.Device{dev("GPU-0", "Healthy", 0)}},
		{"unhealthy", with(snapshot(2), 1, health.Unhealthy), []*pluginapi.Device{dev("GPU-0", "Healthy", 0), dev("GPU-1", "Unhealthy", 1)}},
	} {
		layout := Layout(cfg, c.snap)
		if c.want == nil {
			if len(layout) != 0 {
				t.Errorf("%s: %+v, want no resource", c.name, layout)
			}
			continue
		}
		if len(layout) != 1 || layout[0].Name != gpu || !sameMessage(layout[0].message(), c.want) {
			t.Errorf("%s: %v, want %v", c.name, layout[0].message(), c.want)
		}
	}
}

func TestSameMessage(t *testing.T) {
	base := snapshot(2)
	list := func(s *health.Snapshot) []*pluginapi.Device {
		return find(Layout(DefaultConfig(), s), gpu).message()
	}
	numa := with(base, 1, health.Healthy)
	numa.Devices[1].Device.NUMA = []int{0}
	values := with(base, 1, health.Degraded)
	values.Devices[1].Sample.Values = map[health.Field]float64{health.FieldGPUTemp: 40}
	for name, c := range map[string]struct {
		snap *health.Snapshot
		same bool
	}{
		"values and degraded": {values, true},
		"unhealthy":           {with(base, 1, health.Unhealthy), false},
		"NUMA":                {numa, false},
		"one more":            {snapshot(3), false},
		"none":                {snapshot(0), false},
	} {
		if got := sameMessage(list(base), list(c.snap)); got != c.same {
			t.Errorf("%s: same = %v", name, got)
		}
	}
}

func TestAllocate(t *testing.T) {
	r := find(Layout(DefaultConfig(), with(with(snapshot(4), 3, health.Unhealthy), 2, health.Degraded)), gpu)
	bare := r
	bare.Devices = slices.Clone(r.Devices)
	bare.Devices[3] = Device{ID: "GPU-3", State: &health.DeviceState{Verdict: health.Verdict{State: health.Unhealthy}}}
	for _, c := range []struct {
		name       string
		r          Resource
		containers [][]string
		want       []string // NVIDIA_VISIBLE_DEVICES of each
		code       codes.Code
		reason     string
		text       []string // what the error says
	}{
		{name: "the request's order", r: r, containers: [][]string{{"GPU-1", "GPU-0"}}, want: []string{"GPU-1,GPU-0"}},
		{name: "no duplicates", r: r, containers: [][]string{{"GPU-1", "GPU-0", "GPU-1"}}, want: []string{"GPU-1,GPU-0"}},
		{name: "degraded", r: r, containers: [][]string{{"GPU-2"}}, want: []string{"GPU-2"}},
		{name: "two containers", r: r, containers: [][]string{{"GPU-1"}, {"GPU-0"}}, want: []string{"GPU-1", "GPU-0"}},
		{name: "nothing asked for is nothing given", r: r, containers: [][]string{{}}, want: []string{"void"}},
		{
			name: "unknown", r: r, containers: [][]string{{"GPU-1", "GPU-9"}},
			code: codes.InvalidArgument, reason: reasonUnknownDevice, text: []string{gpu, `"GPU-9"`, "GPU-0, GPU-1, GPU-2, GPU-3"},
		},
		{
			name: "unknown where there is none", r: Resource{Name: gpu}, containers: [][]string{{"GPU-1"}},
			code: codes.InvalidArgument, reason: reasonUnknownDevice, text: []string{gpu, `"GPU-1"`, "none"},
		},
		{
			name: "unhealthy", r: r, containers: [][]string{{"GPU-1"}, {"GPU-3"}},
			code: codes.FailedPrecondition, reason: reasonUnhealthyDevice, text: []string{gpu, "GPU-3", "fallen off the bus (xid-79)"},
		},
		{
			name: "unhealthy for no reason", r: bare, containers: [][]string{{"GPU-3"}},
			code: codes.FailedPrecondition, reason: reasonUnhealthyDevice, text: []string{"GPU-3", "no reason is known"},
		},
	} {
		req := &pluginapi.AllocateRequest{}
		for _, ids := range c.containers {
			req.ContainerRequests = append(req.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
		}
		resp, err := allocate(testTerms(DefaultConfig(), nil), c.r, req)
		if status.Code(err) != c.code {
			t.Errorf("%s: %v, want %v", c.name, err, c.code)
			continue
		}
		if err != nil {
			refused := serverOf(gpu, nil, nil)
			refused.counts.refuse(err)
			if _, by := refused.counts.read(); by[c.reason] != 1 {
				t.Errorf("%s: counted as %v, want %s", c.name, by, c.reason)
			}
			for _, word := range c.text {
				if !strings.Contains(status.Convert(err).Message(), word) {
					t.Errorf("%s: %q does not say %q", c.name, err, word)
				}
			}
			continue
		}
		var got []string
		for _, cr := range resp.ContainerResponses {
			if len(cr.Envs) != 1 {
				t.Errorf("%s: %v", c.name, cr.Envs)
			}
			got = append(got, cr.Envs["NVIDIA_VISIBLE_DEVICES"])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestDiff(t *testing.T) {
	a, b, moved := target{"a/x", "/k"}, target{"b/x", "/k"}, target{"a/x", "/l"}
	for _, c := range []struct{ have, want, stop, start []target }{
		{nil, nil, nil, nil},
		{nil, []target{a}, nil, []target{a}},
		{[]target{a, b}, []target{b, a}, nil, nil},
		{[]target{a}, []target{b}, []target{a}, []target{b}},
		{[]target{a, b}, []target{moved, b}, []target{a}, []target{moved}},
		{[]target{a, b}, nil, []target{a, b}, nil},
	} {
		stop, start := diff(c.have, c.want)
		if !reflect.DeepEqual(stop, c.stop) || !reflect.DeepEqual(start, c.start) {
			t.Errorf("%v to %v: stop %v, start %v", c.have, c.want, stop, start)
		}
	}
}

func benchmarkAllocate(b *testing.B, n int) {
	s := serverOf(gpu, &health.Latest[Config]{}, &health.Latest[health.Snapshot]{})
	cfg := DefaultConfig()
	s.layouts.cfg.Store(&cfg)
	s.layouts.snapshots.Store(snapshot(n))
	req := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{}}}
	for i := range n {
		req.ContainerRequests[0].DevicesIds = append(req.ContainerRequests[0].DevicesIds, id(i))
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Allocate(b.Context(), req); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAllocate8(b *testing.B)  { benchmarkAllocate(b, 8) }
func BenchmarkAllocate16(b *testing.B) { benchmarkAllocate(b, 16) }
