package metrics

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// odd draws nodes as no driver has them.
type odd struct {
	*rand.Rand
	text string // to be put anywhere
}

func (o odd) word() string {
	words := []string{"", "a", "b", "GPU-a", "::1", "\xff", "\"\\\n", "ü", o.text}
	return words[o.IntN(len(words))]
}

func (o odd) value() float64 {
	values := []float64{0, 1, 31, -1, math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat64, float64(o.IntN(1 << 20))}
	return values[o.IntN(len(values))]
}

func (o odd) state() health.State { return health.States()[o.IntN(len(health.States()))] }

func (o odd) device() health.DeviceState {
	d := health.DeviceState{
		Device: health.Device{
			ID: health.DeviceID(o.word()), Kind: health.Kind(o.IntN(2)), Index: o.IntN(3) - 1, PCI: o.word(), Model: o.word(),
			NUMA: make([]int, o.IntN(2)), Memory: uint64(o.IntN(2)), Profile: o.word(), GI: o.IntN(2), CI: o.IntN(2),
		},
		Sample: health.Sample{Values: make(map[health.Field]float64), Checked: o.IntN(2) == 0},
	}
	if o.IntN(2) == 0 {
		d.Device.Parent = health.DeviceID(o.word())
	}
	for _, k := range fieldTable {
		if o.IntN(3) > 0 {
			d.Sample.Values[k.id] = o.value()
		}
	}
	for range o.IntN(3) {
		d.Device.Links = append(d.Device.Links, health.Link{Peer: health.DeviceID(o.word()), NVLinks: o.IntN(2)})
		d.Sample.Incidents = append(d.Sample.Incidents, health.Incident{System: o.word(), Code: o.IntN(5), Severity: health.Severity(o.IntN(2))})
		d.Sample.XIDs = append(d.Sample.XIDs, health.XID{Code: o.IntN(3), At: now})
		d.Verdict.Findings = append(d.Verdict.Findings, health.Finding{Cause: o.word(), State: o.state(), Action: health.Action(o.word())})
	}
	d.Verdict.State = o.state()
	d.XIDCounts = map[int]uint64{o.IntN(200): uint64(o.IntN(3)), 31: uint64(o.IntN(9))}
	d.LastXID = health.XID{Code: o.IntN(2), At: now.Add(time.Duration(o.IntN(3)) * time.Second)}
	return d
}

func (o odd) snapshot() *health.Snapshot {
	s := &health.Snapshot{At: now, Source: health.Source{Status: health.SourceStatus(o.IntN(4)), Polls: uint64(o.IntN(3)), Versions: health.Versions{Driver: o.word()}}}
	for range o.IntN(9) {
		s.Devices = append(s.Devices, o.device())
	}
	return s
}

func (o odd) holders(s *health.Snapshot) plugin.Holders {
	h := plugin.Holders{At: now, Err: o.word(), By: make(map[health.DeviceID][]plugin.Holder)}
	for _, d := range s.Devices {
		for range o.IntN(4) {
			h.By[d.Device.ID] = append(h.By[d.Device.ID], plugin.Holder{
				Namespace: o.word(), Pod: o.word(), Container: o.word(), Resource: o.word(), DeviceID: o.word(),
			})
		}
	}
	return h
}

func (o odd) labels() []Label {
	names := []string{"", "team", "team", "pod_uid", "gpu", "__name__", "xid", "err_code", "hpc_job", "state", "DCGM_FI_DRIVER_VERSION", "0", "a-b", o.text}
	labels := make([]Label, o.IntN(5))
	for i := range labels {
		labels[i] = Label{names[o.IntN(len(names))], o.word()}
	}
	return labels
}

func (o odd) config() *Config {
	var c Config
	switch o.IntN(3) {
	case 0:
		c = *config(SetDefault)
	case 1:
		c = *config(SetDefault, SetProfiling, SetOptional)
	default:
		var all []string
		for _, k := range fieldTable {
			all = append(all, k.name, k.renamed)
		}
		c = *config(all...)
	}
	if o.IntN(2) == 0 {
		c.Attribution = AttributePerPod
	}
	return &c
}

func (o odd) sources() Sources {
	s := o.snapshot()
	src := sourcesOf(s, o.config())
	h := o.holders(s)
	src.Holders = func() plugin.Holders { return h }
	src.Totals.holders, src.Totals.now = src.Holders, func() time.Time { return now.Add(time.Minute) }
	src.Totals.fold(s)
	src.Hostname = o.word()
	src.PodLabels = func(string, string) []Label { return o.labels() }
	src.Jobs = func(int, string) []string { return []string{o.word(), o.word()}[:o.IntN(3)] }
	status := plugin.Status{}
	for range o.IntN(3) {
		status.Resources = append(status.Resources, plugin.ResourceStatus{Name: o.word(), AllocationErrors: map[string]uint64{o.word(): uint64(o.IntN(2))}})
	}
	src.Plugin = func() plugin.Status { return status }
	return src
}
