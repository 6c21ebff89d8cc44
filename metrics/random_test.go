package metrics

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// generator generates random nodes, including inconsistent ones that no driver reports.
type generator struct {
	*rand.Rand
	text string // may appear anywhere
}

func (g generator) anyText() string {
	texts := []string{"", "a", "b", "GPU-a", "::1", "\xff", "\"\\\n", "ü", g.text}
	return texts[g.IntN(len(texts))]
}

func (g generator) anyValue() float64 {
	values := []float64{0, 1, 31, -1, math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat64, float64(g.IntN(1 << 20))}
	return values[g.IntN(len(values))]
}

func (g generator) state() health.State { return health.States()[g.IntN(len(health.States()))] }

func (g generator) device() health.DeviceState {
	d := health.DeviceState{
		Device: health.Device{
			ID: health.DeviceID(g.anyText()), Kind: health.Kind(g.IntN(2)), Index: g.IntN(3) - 1, PCI: g.anyText(), Model: g.anyText(),
			NUMA: make([]int, g.IntN(2)), Memory: uint64(g.IntN(2)), Profile: g.anyText(), GI: g.IntN(2), CI: g.IntN(2),
		},
		Sample: health.Sample{Values: make(map[health.Field]float64), Checked: g.IntN(2) == 0},
	}
	if g.IntN(2) == 0 {
		d.Device.Parent = health.DeviceID(g.anyText())
	}
	for _, f := range fields.List(nil) {
		if g.IntN(3) > 0 {
			d.Sample.Values[f.ID] = g.anyValue()
		}
	}
	for range g.IntN(3) {
		d.Device.Links = append(d.Device.Links, health.Link{Peer: health.DeviceID(g.anyText()), NVLinks: g.IntN(2)})
		d.Sample.Incidents = append(d.Sample.Incidents, health.Incident{
			System: g.anyText(), Code: g.IntN(5),
			Severity: health.Severity(g.IntN(2)),
		})
		d.Sample.XIDs = append(d.Sample.XIDs, health.XID{Code: g.IntN(3), At: now})
		d.Verdict.Findings = append(d.Verdict.Findings, health.Finding{Cause: g.anyText(), State: g.state(), Action: health.Action(g.anyText())})
	}
	d.Verdict.State = g.state()
	counts := map[int]uint64{g.IntN(200): uint64(g.IntN(3)), 31: uint64(g.IntN(9))}
	d.XIDs = healthtest.Counted(counts, health.XID{Code: g.IntN(2), At: now.Add(time.Duration(g.IntN(3)) * time.Second)})
	return d
}

func (g generator) snapshot() *health.Snapshot {
	s := &health.Snapshot{At: now, Source: health.Source{
		Status: health.SourceStatus(g.IntN(4)), Polls: uint64(g.IntN(3)),
		Versions: health.Versions{Driver: g.anyText()},
	}}
	s.Source.Checks.Status = health.ChecksStatus(g.IntN(4))
	for range g.IntN(4) {
		s.Source.Incidents = append(s.Source.Incidents, health.Incident{
			System: g.anyText(), Code: g.IntN(3),
			Severity: health.Severity(g.IntN(2)),
		})
	}
	for range g.IntN(9) {
		s.Devices = append(s.Devices, g.device())
	}
	return s
}

func (g generator) holders(s *health.Snapshot) podresources.Holders {
	h := podresources.Holders{At: now, Err: g.anyText(), By: make(map[health.DeviceID][]podresources.Holder)}
	for _, d := range s.Devices {
		for range g.IntN(4) {
			h.By[d.Device.ID] = append(h.By[d.Device.ID], podresources.Holder{
				Namespace: g.anyText(), Pod: g.anyText(), Container: g.anyText(), Resource: g.anyText(), DeviceID: g.anyText(),
			})
		}
	}
	return h
}

func (g generator) labels() []Label {
	names := []string{
		"", "team", "team", "pod_uid", "gpu", "__name__", "xid", "err_code", "hpc_job", "state", "DCGM_FI_DRIVER_VERSION", "0",
		"a-b", g.text,
	}
	labels := make([]Label, g.IntN(5))
	for i := range labels {
		labels[i] = label(names[g.IntN(len(names))], g.anyText())
	}
	return labels
}

func (g generator) config() *Config {
	var c Config
	generations := [][]string{both[:1], both[1:], both}[g.IntN(3)]
	switch g.IntN(3) {
	case 0:
		c = *namedConfig(generations, fields.SetDefault)
	case 1:
		c = *namedConfig(generations, fields.SetDefault, fields.SetProfiling, fields.SetOptional)
	default:
		var all []string
		for _, f := range fields.List(nil) {
			all = append(all, f.Name, f.Name49)
		}
		c = *namedConfig(generations, all...)
	}
	if g.IntN(2) == 0 {
		c.Attribution = AttributePerPod
	}
	return &c
}

func (g generator) sources() testSource {
	s := g.snapshot()
	src := configuredSources(s, g.config())
	h := g.holders(s)
	src.Holders = h
	src.Totals.Holders, src.Totals.now = func() podresources.Holders { return h }, func() time.Time { return now.Add(time.Minute) }
	src.Totals.update(s)
	src.Node = g.anyText()
	src.PodLabels = func(string, string) []Label { return g.labels() }
	src.Jobs = func(int, string) []string { return []string{g.anyText(), g.anyText()}[:g.IntN(3)] }
	status := plugin.Status{}
	for range g.IntN(3) {
		status.Resources = append(status.Resources, plugin.ResourceStatus{
			Name:             g.anyText(),
			AllocationErrors: map[string]uint64{g.anyText(): uint64(g.IntN(2))},
		})
	}
	src.Plugin = status
	return src
}
