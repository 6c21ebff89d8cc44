package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// deviceDescs are a field's descriptions: MIG devices and those that somebody holds have labels of their own.
type deviceDescs struct {
	Field
	kind  prometheus.ValueType
	descs [1 << 3]*prometheus.Desc // by variant
}

// variant says which labels a series has. Prometheus takes an empty label for none; leaving it out is
// shorter, and what dcgm-exporter does.
type variant uint8

const (
	variantMIG  variant = 1 << iota // GPU_I_PROFILE and GPU_I_ID
	variantHeld                     // container, namespace and pod
	variantPart                     // vgpu
)

// newDeviceDescs describes a field with dcgm-exporter's labels and those of its own.
func newDeviceDescs(cfg *Config, f Field) deviceDescs {
	d := deviceDescs{Field: f, kind: prometheus.GaugeValue}
	if f.Type == TypeCounter {
		d.kind = prometheus.CounterValue
	}
	for i := range d.descs {
		v := variant(i)
		labels := []string{"gpu", "UUID", "pci_bus_id", "device", "modelName"}
		if v&variantMIG != 0 {
			labels = append(labels, "GPU_I_PROFILE", "GPU_I_ID")
		}
		labels = append(labels, cfg.Compat.HostnameLabel)
		for _, l := range cfg.Chosen.Labels {
			labels = append(labels, l.Name)
		}
		if v&variantHeld != 0 {
			labels = append(labels, "container", "namespace", "pod")
		}
		if v&variantPart != 0 {
			labels = append(labels, "vgpu")
		}
		d.descs[i] = prometheus.NewDesc(f.Name, f.Help, append(labels, ownLabels(f)...), nil)
	}
	return d
}

// row is where one showing of a device's series gets its labels from.
type row struct {
	variant
	labels []string
}

// ownLabels are the labels that only one field has.
func ownLabels(f Field) []string {
	switch {
	case f.ID == health.FieldXID:
		return []string{"err_code", "err_msg"}
	case f.Name == expXIDs:
		return []string{"window_size_in_ms", "xid"}
	case f.Name == expClocks:
		return []string{"window_size_in_ms", "clock_event"}
	case f.Name == expHealth:
		return []string{"health_watch", "health_error_code"}
	case f.Name == expP2P:
		return []string{"peer_gpu", "link_status"}
	}
	return nil
}

// place is where a series belongs: as with dcgm-exporter, a MIG device goes by its GPU's UUID and its GPU
// instance, so that two compute instances of one have the same labels. They have the same values too, but for
// XIDs: the last one of any of them is shown.
type place struct {
	uuid health.DeviceID
	gi   string
}

func placeOf(d health.Device) place { return place{cmp.Or(d.Parent, d.ID), instanceOf(d)} }

// collectFields shows every measured field of every device.
func (s *scrape) collectFields(t *Totals) {
	at := make(map[place][]plugin.Holder)
	hit := make(map[place]*health.DeviceState) // the one with the last XID
	for i := range s.snapshot.Devices {
		d := &s.snapshot.Devices[i]
		p := placeOf(d.Device)
		at[p] = append(at[p], s.holders.By[d.Device.ID]...)
		if was := hit[p]; was == nil || d.LastXID.At.After(was.LastXID.At) {
			hit[p] = d
		}
	}
	seen := make(map[place]bool)
	for i := range s.snapshot.Devices {
		d := &s.snapshot.Devices[i]
		p := placeOf(d.Device)
		if seen[p] {
			continue
		}
		seen[p] = true
		base := row{labels: s.deviceLabels(d, p)}
		if d.Device.Kind == health.KindMIG {
			base.variant = variantMIG
		}
		for _, tail := range s.tails(at[p]) {
			r := row{base.variant | tail.variant, slices.Concat(base.labels, tail.labels)}
			for i := range s.devices {
				from := d
				if s.devices[i].ID == health.FieldXID {
					from = hit[p]
				}
				s.collectField(&s.devices[i], from, r, t)
			}
		}
	}
}

// deviceLabels are the values of a device's labels, without those of a holder.
func (s *scrape) deviceLabels(d *health.DeviceState, p place) []string {
	v := &d.Device
	index := strconv.Itoa(v.Index)
	labels := make([]string, 0, 16)
	labels = append(labels, index, string(p.uuid), v.PCI, "nvidia"+index, v.Model)
	if v.Kind == health.KindMIG {
		labels = append(labels, v.Profile, p.gi)
	}
	labels = append(labels, s.hostname)
	for _, l := range s.cfg.Chosen.Labels {
		text := textOf(l.ID, *v, s.snapshot.Source.Versions)
		if n, ok := d.Sample.Values[l.ID]; ok && !isText(l.ID) {
			text = strconv.FormatFloat(n, 'g', -1, 64)
		}
		labels = append(labels, text)
	}
	return labels
}

// tails are the ends of a device's labels: who holds it. There is one for each time its series are shown,
// and no two are the same.
func (s *scrape) tails(holders []plugin.Holder) []row {
	var named []row
	shared := false
	for _, h := range holders {
		tail := row{variantHeld, []string{h.Container, h.Namespace, h.Pod}}
		if part := partOf(h.DeviceID); part != "" {
			shared = true
			tail = row{variantHeld | variantPart, append(tail.labels, part)}
		}
		if !slices.ContainsFunc(named, func(r row) bool { return slices.Equal(r.labels, tail.labels) }) {
			named = append(named, tail)
		}
	}
	switch {
	case len(named) == 1 && !shared:
		return named
	case s.cfg.Attribution == AttributePerPod:
		// The whole device, then each share of it, as dcgm-exporter with --kubernetes-virtual-gpus.
		return append([]row{{}}, named...)
	default:
		// The values of a shared device are nobody's own. They stay one series whoever comes and goes, and
		// gpu_node_agent_device_allocated tells who shares it.
		return []row{{}}
	}
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

// collectField shows one field of one device, if it is known.
func (s *scrape) collectField(f *deviceDescs, d *health.DeviceState, r row, t *Totals) {
	desc, labels := f.descs[r.variant], slices.Clip(r.labels)
	if f.ID == 0 {
		s.collectMade(f.Name, d, t, func(v float64, more ...string) {
			send(s.out, desc, f.kind, v, append(labels, more...)...)
		})
		return
	}
	v, ok := d.Sample.Values[f.ID]
	if !ok {
		return // a blank is no series, and so is what a lost GPU had
	}
	if f.ID == health.FieldXID {
		labels = append(labels, strconv.Itoa(int(v)), health.LookupXID(int(v)).Name)
	}
	send(s.out, desc, f.kind, v, labels...)
}
