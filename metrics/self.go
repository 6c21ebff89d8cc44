package metrics

import (
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// commonXIDs are those whose series begin at 0. The first error of a series that is not there before it is
// none to rate(), so those that alerts are written for are there from the start; all of them on each device
// would be thousands of series. For others there is last_xid_timestamp_seconds.
func commonXIDs() []int { return []int{13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120} }

// ownDevice is a device with the labels that our own series of it have.
type ownDevice struct {
	*health.DeviceState
	view   *deviceView
	labels []*dto.LabelPair
}

// codeCount is how often there was an XID.
type codeCount struct {
	code string
	n    uint64
}

// collectDevices shows what the agent itself knows of each device. One that is there twice is shown once.
func (s *scrape) collectDevices() {
	for i := range s.snapshot.Devices {
		d := &s.snapshot.Devices[i]
		v := &d.Device
		s.owned = append(s.owned, ownDevice{d, &s.views[i], s.labels(nil,
			Label{"gpu", strconv.Itoa(v.Index)}, Label{"UUID", string(v.ID)}, Label{"GPU_I_PROFILE", v.Profile},
			Label{"GPU_I_ID", instanceOf(v)}, Label{s.cfg.Compat.HostnameLabel, s.src.Hostname})})
	}
	slices.SortStableFunc(s.owned, func(a, b ownDevice) int { return compareLabels(a.labels, b.labels) })
	for i, d := range s.owned {
		if i == 0 || compareLabels(d.labels, s.owned[i-1].labels) != 0 {
			s.collectHealth(d)
			s.collectXIDs(d)
			s.collectHolders(d)
			s.collectInfo(d)
		}
	}
}

func (s *scrape) collectHealth(d ownDevice) {
	for _, state := range health.States() {
		// One list for both: the families have the same labels.
		labels := s.labels(d.labels, Label{"state", state.String()})
		s.add(s.own.deviceState, truth(state == d.Verdict.State), labels)
		if d.view.known {
			s.add(s.own.transitions, float64(d.view.transitions[state]), labels)
		}
	}
	if d.view.known {
		s.add(s.own.unhealthy, d.view.unhealthy, d.labels)
	}
	for _, f := range d.Verdict.Findings {
		s.addWith(s.own.deviceFinding, 1, d.labels, Label{"cause", f.Cause}, Label{"severity", f.State.String()}, Label{"action", string(f.Action)})
	}
}

func (s *scrape) collectXIDs(d ownDevice) {
	s.codes = s.codes[:0]
	if d.Device.Kind == health.KindGPU {
		for _, code := range commonXIDs() {
			if d.XIDCounts[code] == 0 {
				s.codes = append(s.codes, codeCount{code: strconv.Itoa(code)})
			}
		}
	}
	for code, n := range d.XIDCounts {
		if n > 0 {
			s.codes = append(s.codes, codeCount{strconv.Itoa(code), n})
		}
	}
	slices.SortFunc(s.codes, func(a, b codeCount) int { return strings.Compare(a.code, b.code) })
	for _, c := range s.codes {
		s.addWith(s.own.xidErrors, float64(c.n), d.labels, Label{"xid", c.code})
	}
	if d.LastXID.Code != 0 {
		s.add(s.own.lastXID, float64(d.LastXID.Code), d.labels)
		s.add(s.own.lastXIDTime, seconds(d.LastXID.At), d.labels)
	}
}

// collectHolders shows each container once for each resource, however many replicas it has.
func (s *scrape) collectHolders(d ownDevice) {
	holders := s.holders.By[d.Device.ID]
	for i, h := range holders {
		// They are in order; what is not is left out as any series that is there already.
		u, same := userOf(h), i > 0 && userOf(h) == userOf(holders[i-1])
		if same && h.Resource == holders[i-1].Resource {
			continue
		}
		who := []Label{{"namespace", h.Namespace}, {"pod", h.Pod}, {"container", h.Container}, {"resource", h.Resource}}
		s.addWith(s.own.allocated, 1, s.labels(d.labels, who...), s.podLabels(h)...)
		if idle := d.view.idle[u]; idle.known && !same {
			labels := s.labels(d.labels, append(who[:3:3], s.podUID(h)...)...)
			s.add(s.own.idle, idle.total.Seconds(), labels)
			s.add(s.own.idleFor, idle.last.Seconds(), labels)
		}
	}
}

func (s *scrape) collectInfo(d ownDevice) {
	v := &d.Device
	mig := "off"
	switch {
	case v.Kind == health.KindMIG:
		mig = "device"
	case v.MIGMode:
		mig = "on"
	}
	numa := make([]string, len(v.NUMA))
	for i, n := range v.NUMA {
		numa[i] = strconv.Itoa(n)
	}
	s.addWith(s.own.info, 1, d.labels, Label{"model", v.Model}, Label{"pci_bus_id", v.PCI}, Label{"numa", strings.Join(numa, ",")},
		Label{"mig", mig}, Label{"parent", string(v.Parent)})
	if v.Memory > 0 {
		s.add(s.own.memory, float64(v.Memory), d.labels)
	}
}

func (s *scrape) collectSource() {
	source := s.snapshot.Source
	s.add(s.own.sourceUp, truth(source.Status == health.SourceUp), nil)
	s.add(s.own.sourceStalled, truth(source.Status == health.SourceStalled), nil)
	s.add(s.own.sourceDetached, truth(source.Status == health.SourceDetached), nil)
	s.add(s.own.reconnects, float64(source.Reconnects), nil)
	s.collectPolls()
	if s.snapshot.Polled() {
		s.add(s.own.age, s.now.Sub(s.snapshot.At).Seconds(), nil)
		v := source.Versions
		s.addWith(s.own.version, 1, nil, Label{"driver", v.Driver}, Label{"cuda", v.CUDA}, Label{"dcgm", v.DCGM}, Label{"engine", v.Engine})
	}
}

// collectPolls shows the only histogram.
func (s *scrape) collectPolls() {
	h := &dto.Histogram{SampleCount: &s.poll.count, SampleSum: &s.poll.sum}
	for _, bound := range slices.Sorted(maps.Keys(s.poll.buckets)) {
		n := s.poll.buckets[bound]
		h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: &bound, CumulativeCount: &n})
	}
	f := s.made[s.own.poll]
	f.Metric = append(f.Metric, &dto.Metric{Histogram: h})
}

func (s *scrape) collectPlugin(status plugin.Status) {
	s.add(s.own.enabled, truth(!status.Off), nil)
	for i := range status.Resources {
		r := &status.Resources[i]
		labels := s.labels(nil, Label{"resource", r.Name})
		s.add(s.own.registered, truth(r.Registered), labels)
		s.add(s.own.registrations, float64(r.Registrations), labels)
		s.add(s.own.streams, float64(r.Streams), labels)
		s.add(s.own.mismatches, float64(r.AuditMismatches), labels)
		s.addWith(s.own.devices, float64(r.Healthy), labels, Label{"health", "healthy"})
		s.addWith(s.own.devices, float64(r.Devices-r.Healthy), labels, Label{"health", "unhealthy"})
		s.add(s.own.allocations, float64(r.Allocations), labels)
		for _, reason := range plugin.AllocationErrors() {
			if r.AllocationErrors[reason] == 0 {
				s.addWith(s.own.allocationErrors, 0, labels, Label{"reason", reason})
			}
		}
		for reason, n := range r.AllocationErrors {
			if n > 0 {
				s.addWith(s.own.allocationErrors, float64(n), labels, Label{"reason", reason})
			}
		}
	}
	s.add(s.own.holdersUp, truth(s.holders.Err == ""), nil)
	if !s.holders.At.IsZero() {
		s.add(s.own.holdersAge, s.now.Sub(s.holders.At).Seconds(), nil)
	}
}

func (s *scrape) collectAgent() {
	if s.src.Kubernetes != nil {
		if k, on := s.src.Kubernetes(); on {
			s.add(s.own.kubernetesWrites, float64(k.Writes), nil)
			s.add(s.own.kubernetesEvents, float64(k.Events), nil)
			s.add(s.own.kubernetesDropped, float64(k.Dropped), nil)
			s.add(s.own.kubernetesErrors, float64(k.Errors), nil)
		}
	}
	s.collectPart(s.own.podLabelsUp, s.src.PodLabelsUp)
	s.collectPart(s.own.stateFileUp, s.src.StateFileUp)
	r := s.src.Reload()
	s.add(s.own.fieldsUnknown, float64(len(s.cfg.Chosen.Unknown)), nil)
	s.add(s.own.reloadOK, truth(r.OK), nil)
	s.add(s.own.reloadTime, seconds(r.At), nil)
	if s.src.LogDropped != nil {
		s.add(s.own.logDropped, float64(s.src.LogDropped()), nil)
	}
	s.addWith(s.own.build, 1, nil, Label{"version", s.src.Version}, Label{"revision", s.src.Revision}, Label{"goversion", runtime.Version()})
}

func (s *scrape) collectPart(number int, state func() (up, on bool)) {
	if state == nil {
		return
	}
	if up, on := state(); on {
		s.add(number, truth(up), nil)
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
