package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// fieldFamily is a field that is shown, and the number of its family.
type fieldFamily struct {
	Field
	number int
}

func (s *shape) declareFields() {
	for _, f := range s.cfg.Chosen.Fields {
		kind := dto.MetricType_GAUGE
		if f.Type == TypeCounter {
			kind = dto.MetricType_COUNTER
		}
		s.fields = append(s.fields, fieldFamily{f, s.declare(f.Name, f.Help, kind)})
		s.events = s.events || f.Name == expXIDs || f.Name == expClocks
	}
	s.window = strconv.FormatInt(s.cfg.Window.Milliseconds(), 10)
}

// place is where a field's series belongs: as with dcgm-exporter, a MIG device goes by its GPU's UUID and its
// GPU instance, so that compute instances of one GPU instance are one. They have the same values too, but for
// XIDs: the last one of any of them is shown, and the counts are of all.
type place struct {
	uuid health.DeviceID
	gi   string
}

func placeOf(d *health.Device) place { return place{cmp.Or(d.Parent, d.ID), instanceOf(d)} }

// spot is what is in a place.
type spot struct {
	place
	devices []int // in the snapshot
	hit     *health.DeviceState
	holders []plugin.Holder
}

// showing is one way in which the fields of a place are shown: with these labels.
type showing struct {
	*spot
	labels []*dto.LabelPair
}

// collectFields shows every measured field of every device.
func (s *scrape) collectFields() {
	for i := range s.snapshot.Devices {
		s.putInPlace(i)
	}
	for i := range s.spots {
		s.show(&s.spots[i])
	}
	byLabels := func(a, b showing) int { return compareLabels(a.labels, b.labels) }
	slices.SortStableFunc(s.shown, byLabels) // so that each family is in order from the start
	s.shown = slices.CompactFunc(s.shown, func(a, b showing) bool { return byLabels(a, b) == 0 })
	for _, x := range s.shown {
		for i := range s.fields {
			s.collectField(&s.fields[i], x)
		}
	}
}

// putInPlace adds a device of the snapshot to the spot where it belongs.
func (s *scrape) putInPlace(i int) {
	d := &s.snapshot.Devices[i]
	p, holders := placeOf(&d.Device), s.holders.By[d.Device.ID]
	n, known := s.at[p]
	if !known {
		s.at[p] = len(s.spots)
		s.spots = append(s.spots, spot{p, []int{i}, d, slices.Clip(holders)})
		return
	}
	x := &s.spots[n]
	x.devices, x.holders = append(x.devices, i), append(x.holders, holders...)
	if d.LastXID.At.After(x.hit.LastXID.At) {
		x.hit = d
	}
}

// first is the device that gives a place its labels.
func (s *scrape) first(x *spot) *health.DeviceState { return &s.snapshot.Devices[x.devices[0]] }

// show notes each way in which the fields of a place are shown: for each holder that has series of its own,
// and for each job.
func (s *scrape) show(x *spot) {
	base, d := s.placeLabels(x), &s.first(x).Device
	var jobs []string
	if s.src.Jobs != nil {
		jobs = s.src.Jobs(d.Index, x.gi)
	}
	for _, tail := range s.tails(x.holders) {
		labels := s.labels(base, tail...)
		shown := 0
		for _, job := range jobs {
			if job != "" {
				s.shown = append(s.shown, showing{x, s.labels(labels, Label{"hpc_job", job})})
				shown++
			}
		}
		if shown == 0 {
			s.shown = append(s.shown, showing{x, labels})
		}
	}
}

// placeLabels are a place's labels, without those of a holder. A label that a place cannot have is left out,
// as dcgm-exporter does.
func (s *scrape) placeLabels(x *spot) []*dto.LabelPair {
	d := s.first(x)
	v := &d.Device
	index := strconv.Itoa(v.Index)
	labels := make([]Label, 0, 16)
	labels = append(labels, Label{"gpu", index}, Label{"UUID", string(x.uuid)}, Label{"pci_bus_id", v.PCI},
		Label{"device", "nvidia" + index}, Label{"modelName", v.Model}, Label{s.cfg.Compat.HostnameLabel, s.src.Hostname})
	if v.Kind == health.KindMIG {
		labels = append(labels, Label{"GPU_I_PROFILE", v.Profile}, Label{"GPU_I_ID", x.gi})
	}
	for _, l := range s.cfg.Chosen.Labels {
		text := textOf(l.ID, *v, s.snapshot.Source.Versions)
		if n, ok := d.Sample.Values[l.ID]; ok && text == "" {
			text = strconv.FormatFloat(n, 'g', -1, 64)
		}
		labels = append(labels, Label{l.Name, text})
	}
	return s.labels(nil, labels...)
}

// tails are the ends of a place's labels: who holds it. There is one for each time its series are shown.
func (s *scrape) tails(holders []plugin.Holder) [][]Label {
	if len(holders) == 0 {
		return [][]Label{nil}
	}
	shared := false
	for i := range holders {
		shared = shared || partOf(holders[i].DeviceID) != "" || userOf(holders[i]) != userOf(holders[0])
	}
	if !shared {
		return [][]Label{s.tail(holders[0])}
	}
	// The values of a shared device are nobody's own. They stay one series whoever comes and goes, and
	// gpu_node_agent_device_allocated tells who shares it.
	tails := [][]Label{nil}
	if s.cfg.Attribution == AttributePerPod {
		// The whole device, then each share of it, as dcgm-exporter with --kubernetes-virtual-gpus.
		for _, h := range holders {
			tails = append(tails, s.tail(h))
		}
	}
	return tails
}

// tail is what a holder adds to the labels. Prometheus takes an empty label for none, and so do we: else two
// series could differ here and be one to it.
func (s *scrape) tail(h plugin.Holder) []Label {
	labels := make([]Label, 0, 8)
	for _, l := range []Label{{"container", h.Container}, {"namespace", h.Namespace}, {"pod", h.Pod}, {"vgpu", partOf(h.DeviceID)}} {
		if l.Value != "" {
			labels = append(labels, l)
		}
	}
	return append(labels, s.podLabels(h)...)
}

// partOf is the number of the replica in one of the kubelet's ids, "" if it is a whole device: GPU-1::3, and
// with GKE's plugin nvidia0/vgpu3.
func partOf(id string) string {
	for _, sep := range []string{"::", "/vgpu"} {
		if _, part, ok := strings.Cut(id, sep); ok {
			return part
		}
	}
	return ""
}

// lastXID is DCGM's field 230. It never returns to 0, so dcgm-exporter shows it for ever; and a GPU that is lost is when
// somebody asks for it. What is measured of such a GPU, or of one that is not measured any more, is gone, but its last XID is
// what we know.
func lastXID(d *health.DeviceState) (code float64, ok bool) {
	if code, ok = d.Sample.Values[health.FieldXID]; ok || d.Sample.Presence == health.Present && !d.Sample.Stale {
		return code, ok
	}
	return float64(d.LastXID.Code), d.LastXID.Code != 0
}

// collectField shows one field of one place, if it is known. A blank is no series, and so is what a lost GPU had.
func (s *scrape) collectField(f *fieldFamily, x showing) {
	switch f.ID {
	case 0:
		s.collectMade(f, x)
	case health.FieldXID:
		if v, ok := lastXID(x.hit); ok {
			s.addWith(f.number, v, x.labels, Label{"err_code", strconv.Itoa(int(v))}, Label{"err_msg", health.LookupXID(int(v)).Name})
		}
	default:
		for _, i := range x.devices {
			if v, ok := s.snapshot.Devices[i].Sample.Values[f.ID]; ok {
				s.add(f.number, v, x.labels)
				return
			}
		}
	}
}
