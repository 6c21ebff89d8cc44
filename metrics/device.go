package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// commonXIDs returns the XIDs whose series start at 0 on every GPU. rate() misses the first error of a series that did
// not exist before, so the XIDs that alerts use exist from the start. All XIDs of all devices would be thousands of
// series; for the others alerts use last_xid_timestamp_seconds.
func commonXIDs() []int { return []int{13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120} }

// labeledDevice is a device with the labels of the agent's own series.
type labeledDevice struct {
	*health.DeviceState
	totals *deviceTotalsView
	labels []*dto.LabelPair
}

type xidCount struct {
	xid string
	n   uint64
}

// collectDevices adds the agent's own metrics of each device. Of two devices with the same labels it drops the second.
func (s *scrape) collectDevices() {
	for i := range s.Snapshot.Devices {
		state := &s.Snapshot.Devices[i]
		d := &state.Device
		s.devices = append(s.devices, labeledDevice{state, &s.totals[i], s.Labels(nil,
			label("gpu", d.IndexText()), label("UUID", string(d.ID)), label("GPU_I_PROFILE", d.Profile),
			label("GPU_I_ID", gpuInstance(d)), label(s.cfg.Compat.HostnameLabel, s.Node))})
	}
	slices.SortStableFunc(s.devices, func(a, b labeledDevice) int { return exposition.CompareLabels(a.labels, b.labels) })
	for i, d := range s.devices {
		if i == 0 || exposition.CompareLabels(d.labels, s.devices[i-1].labels) != 0 {
			s.collectHealth(d)
			s.collectXIDs(d)
			s.collectHolders(d)
			s.collectProperties(d)
			s.collectProcesses(d)
			s.collectShares(d)
		}
	}
	s.collectUnhealthyGPUs()
}

// collectUnhealthyGPUs adds one series for each GPU with a fault. The series has the GPU's own worst fault. Without one, it has the fault
// of its MIG devices with the strongest action; faults of MPS daemons come last. A MIG device without a listed parent has a series of its
// own.
func (s *scrape) collectUnhealthyGPUs() {
	faults := make(map[int]*health.Finding) // by index in s.devices
	for i, d := range s.devices {
		f := faultOf(d.Verdict)
		if f == nil {
			continue
		}
		gpu := i
		if d.Device.Parent != "" {
			isParent := func(p labeledDevice) bool { return p.Device.ID == d.Device.Parent }
			if n := slices.IndexFunc(s.devices, isParent); n >= 0 {
				gpu = n
			}
		}
		if own := faultOf(s.devices[gpu].Verdict); own != nil {
			faults[gpu] = own
		} else if other := faults[gpu]; other == nil || other.OfMPS() && !f.OfMPS() ||
			other.OfMPS() == f.OfMPS() && cmp.Or(f.Action.Compare(other.Action), f.Since.Compare(other.Since)) < 0 {
			faults[gpu] = f
		}
	}
	for i, d := range s.devices {
		if f := faults[i]; f != nil {
			s.AddWith(gpuUnhealthy, 1, d.labels, label("cause", f.Cause), label("action", string(f.Action)))
		}
	}
}

// faultOf returns the worst finding that makes a device unhealthy, nil if there is none or if it is a decision.
func faultOf(v health.Verdict) *health.Finding {
	if v.State != health.Unhealthy || len(v.Findings) == 0 || v.Decided() {
		return nil
	}
	return &v.Findings[0]
}

func (s *scrape) collectHealth(d labeledDevice) {
	for _, state := range health.States() {
		labels := s.Labels(d.labels, label("state", state.String())) // both series share one list
		s.Add(deviceState, boolValue(state == d.Verdict.State), labels)
		if d.totals.exists {
			s.Add(healthTransitions, float64(d.totals.transitions[state]), labels)
		}
	}
	if d.totals.exists {
		s.Add(deviceUnhealthySeconds, d.totals.unhealthy.Seconds(), d.labels)
	}
	for _, f := range d.Verdict.Findings {
		s.AddWith(deviceFinding, 1, d.labels, label("cause", f.Cause), label("severity", f.State.String()), label("action", string(f.Action)))
	}
}

func (s *scrape) collectXIDs(d labeledDevice) {
	s.xidCounts = s.xidCounts[:0]
	if d.Device.Kind == health.KindGPU {
		for _, code := range commonXIDs() {
			if d.XIDs.Codes[code].Total == 0 {
				s.xidCounts = append(s.xidCounts, xidCount{xid: strconv.Itoa(code)})
			}
		}
	}
	for code, t := range d.XIDs.Codes {
		if t.Total > 0 {
			s.xidCounts = append(s.xidCounts, xidCount{strconv.Itoa(code), t.Total})
		}
	}
	slices.SortFunc(s.xidCounts, func(a, b xidCount) int { return strings.Compare(a.xid, b.xid) })
	for _, c := range s.xidCounts {
		s.AddWith(xidErrors, float64(c.n), d.labels, label("xid", c.xid))
	}
	if x := d.XIDs.Newest(); x.Code != 0 {
		s.Add(lastXID, float64(x.Code), d.labels)
		s.Add(lastXIDTime, unixSeconds(x.At), d.labels)
	}
}

// collectHolders adds each container once per resource or claim, however many replicas or shares it holds.
func (s *scrape) collectHolders(d labeledDevice) {
	holders := s.Holders.By[d.Device.ID]
	s.gpuParts = s.gpuShares.appendTo(s.gpuParts[:0], d.Device.ID, holders)
	for i, h := range holders {
		// Holders are sorted. If they were not, the page would drop the duplicate series.
		c, sameContainer := containerOf(h), i > 0 && containerOf(h) == containerOf(holders[i-1])
		if sameContainer && h.Resource == holders[i-1].Resource && h.Claim.Name == holders[i-1].Claim.Name {
			continue
		}
		holder := []Label{label("namespace", h.Namespace), label("pod", h.Pod), label("container", h.Container), label("resource", h.Resource)}
		if h.ByClaim() {
			holder = append(holder, s.claimLabels(h)...)
		}
		s.AddWith(deviceAllocated, 1, s.Labels(d.labels, holder...), s.labelsOfPod(h)...)
		if !sameContainer {
			if gpus := gpusOf(holders[i:], s.gpuParts[i:]); gpus > 0 {
				s.AddWith(deviceAllocatedGPUs, gpus, s.Labels(d.labels, holder[:3]...), s.labelsOfPod(h)...)
			}
			s.collectIdle(d.totals.idle[c], s.Labels(d.labels, append(holder[:3:3], s.uidOfPod(h)...)...))
		}
	}
}

// gpusOf returns the part of a GPU that the container of the first holder has, 0 if it is unknown. The holders are sorted.
func gpusOf(holders []podresources.Holder, parts []float64) (gpus float64) {
	for i, h := range holders {
		if containerOf(h) != containerOf(holders[0]) {
			break
		}
		if parts[i] == 0 {
			return 0
		}
		gpus += parts[i]
	}
	return gpus
}

func (s *scrape) collectIdle(idle idleTime, labels []*dto.LabelPair) {
	if idle.measured {
		s.Add(deviceIdleSeconds, idle.total.Seconds(), labels)
	}
	if idle.workKnown {
		s.Add(deviceIdleFor, idle.sinceBusy.Seconds(), labels)
	}
	if idle.processesKnown {
		s.Add(deviceNoProcessFor, idle.withoutProcess.Seconds(), labels)
	}
	if never, known := idle.exported().NeverUsed(); known {
		s.Add(deviceNeverUsed, boolValue(never), labels)
	}
}

func (s *scrape) collectProperties(d labeledDevice) {
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
	s.AddWith(deviceInfo, 1, d.labels, label("model", v.Model), label("pci_bus_id", v.PCI), label("numa", strings.Join(numa, ",")),
		label("mig", mig), label("parent", string(v.Parent)))
	if v.Memory > 0 {
		s.Add(deviceMemory, float64(v.Memory), d.labels)
	}
	s.AddWith(deviceGPUs, s.gpuShares.withoutMIG(v), d.labels, label("model", v.Model))
}
