package metrics

import (
	"slices"
	"strconv"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// entityKey identifies what the series of fields belong to: a GPU or a GPU instance. As in dcgm-exporter, the labels of
// a MIG device are its GPU's UUID and its GPU instance, so the compute instances of a GPU instance share their series.
// They also have the same values, except for XIDs: the last one of any of them counts, and counts are added up.
type entityKey struct {
	uuid health.DeviceID
	gi   string
}

func entityKeyOf(d *health.Device) entityKey {
	return entityKey{d.GPU(), gpuInstance(d)}
}

// entity holds the devices of an entityKey.
type entity struct {
	entityKey
	devices []int // indices in the snapshot
	lastXID *health.DeviceState
	holders []podresources.Holder
}

// labelSet is one set of labels with which the fields of an entity are exported.
type labelSet struct {
	*entity
	labels []*dto.LabelPair
}

// collectFields adds every measured field of every device.
func (s *scrape) collectFields() {
	for i := range s.Snapshot.Devices {
		s.addToEntity(i)
	}
	for i := range s.entities {
		s.addLabelSets(&s.entities[i])
	}
	// Sorting the label sets once yields all families in order.
	byLabels := func(a, b labelSet) int { return exposition.CompareLabels(a.labels, b.labels) }
	slices.SortStableFunc(s.labelSets, byLabels)
	s.labelSets = slices.CompactFunc(s.labelSets, func(a, b labelSet) bool { return byLabels(a, b) == 0 })
	for _, set := range s.labelSets {
		for i := range s.cfg.Chosen.Fields {
			s.collectField(&s.cfg.Chosen.Fields[i], s.firstField+i, set)
		}
	}
}

// addToEntity adds a device of the snapshot to its entity.
func (s *scrape) addToEntity(i int) {
	d := &s.Snapshot.Devices[i]
	key, holders := entityKeyOf(&d.Device), s.Holders.By[d.Device.ID]
	n, exists := s.entityByKey[key]
	if !exists {
		s.entityByKey[key] = len(s.entities)
		s.entities = append(s.entities, entity{key, []int{i}, d, slices.Clip(holders)})
		return
	}
	e := &s.entities[n]
	e.devices, e.holders = append(e.devices, i), append(e.holders, holders...)
	if laterXID(d, e.lastXID) {
		e.lastXID = d
	}
}

// laterXID reports whether d's last XID is later than other's. other may have none.
func laterXID(d, other *health.DeviceState) bool {
	xid, _ := lastXIDValue(d)
	otherXID, _ := lastXIDValue(other)
	if xid == 0 || otherXID == 0 {
		return xid != 0
	}
	return d.XIDs.Newest().At.After(other.XIDs.Newest().At)
}

// firstDevice returns the device that determines an entity's labels.
func (s *scrape) firstDevice(e *entity) *health.DeviceState { return &s.Snapshot.Devices[e.devices[0]] }

// addLabelSets adds the label sets of an entity: one for each attribution and job.
func (s *scrape) addLabelSets(e *entity) {
	base, d := s.entityLabels(e), &s.firstDevice(e).Device
	var jobs []string
	if s.src.Jobs != nil && d.Index >= 0 {
		jobs = slices.DeleteFunc(slices.Clone(s.src.Jobs(d.Index, e.gi)), func(job string) bool { return job == "" })
	}
	for _, holder := range s.attributions(e.holders) {
		labels := s.Labels(base, holder...)
		if len(jobs) == 0 {
			s.labelSets = append(s.labelSets, labelSet{e, labels})
		}
		for _, job := range jobs {
			s.labelSets = append(s.labelSets, labelSet{e, s.Labels(labels, label("hpc_job", job))})
		}
	}
}

// entityLabels returns an entity's labels, except its holders'. As in dcgm-exporter, a GPU lacks the labels of a MIG device.
func (s *scrape) entityLabels(e *entity) []*dto.LabelPair {
	state := s.firstDevice(e)
	d := &state.Device
	labels := make([]Label, 0, 16)
	labels = append(labels, label("gpu", d.IndexText()), label("UUID", string(e.uuid)), label("pci_bus_id", d.PCI),
		label("device", nodeLabel(d)), label("modelName", d.Model), label(s.cfg.Compat.HostnameLabel, s.Node))
	if d.Kind == health.KindMIG {
		labels = append(labels, label("GPU_I_PROFILE", d.Profile), label("GPU_I_ID", e.gi))
	}
	return s.Labels(nil, s.addFieldLabels(labels, *d, state.Sample.Values)...)
}

// nodeLabel returns the label device of dcgm-exporter, empty without an index.
func nodeLabel(d *health.Device) string {
	if d.Index < 0 {
		return ""
	}
	return "nvidia" + d.IndexText()
}

// addFieldLabels adds the labels that are fields of a device or entity.
func (s *scrape) addFieldLabels(labels []Label, d health.Device, values map[health.Field]float64) []Label {
	for i := range s.cfg.Chosen.Labels {
		f := &s.cfg.Chosen.Labels[i]
		value := fields.Text(f.ID, d, s.Snapshot.Source.Versions)
		if n, ok := f.Value(values); ok && value == "" {
			value = strconv.FormatFloat(n, 'g', -1, 64)
		}
		if value != "" {
			labels = append(labels, label(f.Name, value))
		}
	}
	return labels
}

// collectField adds one field of an entity, unless its value is unknown.
func (s *scrape) collectField(f *fields.Field, family int, set labelSet) {
	switch f.ID {
	case 0:
		s.collectComputed(f.Name, family, set)
	case health.FieldXID:
		if v, ok := lastXIDValue(set.lastXID); ok {
			s.AddWith(family, v, set.labels, label("err_code", strconv.Itoa(int(v))), label("err_msg", xidMessage(int(v))))
		}
	default:
		for _, i := range set.devices {
			if v, ok := f.Value(s.Snapshot.Devices[i].Sample.Values); ok {
				s.Add(family, v, set.labels)
				return
			}
		}
	}
}

// xidMessage returns the label err_msg of an XID. Alerts and dashboards for dcgm-exporter match it, so it has dcgm-exporter's
// text; findings and events have the agent's own.
func xidMessage(code int) string {
	if code < 0 || code >= len(xidMessages) {
		return "Unknown Error"
	}
	return xidMessages[code]
}

// lastXIDValue returns field 230, which is 0 before the first XID. DCGM never resets the field, so dcgm-exporter exports it until it
// restarts. The snapshot's last XID takes its place where an older XID, 0 or no value would mislead: after an event source reported it
// first, while the XID is still a finding, and on a lost GPU, which has no measurements.
func lastXIDValue(d *health.DeviceState) (code float64, ok bool) {
	newest := d.XIDs.Newest()
	if newest.Code != 0 && newest.Witness != health.WitnessSource {
		return float64(newest.Code), true
	}
	if code, ok = d.Sample.Values[health.FieldXID]; code != 0 {
		return code, true
	}
	if xid := d.Verdict.LastXID(); xid != 0 {
		return float64(xid), true
	}
	if unmeasured := d.Sample.Presence != health.Present || d.Sample.Stale; !ok && unmeasured && newest.Code != 0 {
		return float64(newest.Code), true
	}
	return 0, ok
}

// xidMessages are dcgm-exporter's names of the XIDs, by number (xidErrCodeToText in its internal/pkg/collector/xid_errors.go,
// Apache-2.0). TestXIDMessagesMatchDCGMExporter compares them with it. Its text of 45 continues with the beginning of a sentence.
//
//nolint:gochecknoglobals // a table of constants
var xidMessages = [...]string{
	"No Error", "Invalid or corrupted push buffer stream", "Invalid or corrupted push buffer stream",
	"Invalid or corrupted push buffer stream", "Invalid or corrupted push buffer stream", "Unused",
	"Invalid or corrupted push buffer stream", "Invalid or corrupted push buffer address", "GPU stopped processing",
	"Driver error programming GPU", "Unused", "Invalid or corrupted push buffer stream",
	"Driver error handling GPU exception", "Graphics Engine Exception", "Unused", "Unused", "Display engine hung",
	"Unused", "Bus mastering disabled in PCI Config Space", "Display Engine error",
	"Invalid or corrupted Mpeg push buffer", "Invalid or corrupted Motion Estimation push buffer",
	"Invalid or corrupted Video Processor push buffer", "Unused", "GPU semaphore timeout",
	"Invalid or illegal push buffer stream", "Framebuffer timeout", "Video processor exception",
	"Video processor exception", "Video processor exception", "GPU semaphore access error", "GPU memory page fault",
	"Invalid or corrupted push buffer stream", "Internal micro-controller error", "Video processor exception",
	"Video processor exception", "Video processor exception", "Driver firmware error", "Driver firmware error",
	"Unused", "Unused", "Unused", "Video processor exception", "GPU stopped processing",
	"Graphics Engine fault during context switch", "Preemptive cleanup, due to previous errors",
	"GPU stopped processing", "Video processor exception", "Double Bit ECC Error", "Unused", "Unused", "Unused",
	"Unused", "Unused", "Auxiliary power is not connected to the GPU board", "Unused", "Display Engine error",
	"Error programming video memory interface", "Unstable video memory interface detected",
	"Internal micro-controller error", "Video processor exception", "Internal micro-controller breakpoint/warning",
	"Internal micro-controller halt", "ECC page retirement or row remapping recording event",
	"ECC page retirement or row remapper recording failure", "Video processor exception", "Illegal access by driver",
	"Illegal access by driver", "NVDEC0 Exception", "Graphics Engine class error", "CE3: Unknown Error",
	"CE4: Unknown Error", "CE5: Unknown Error", "NVENC2 Error", "NVLINK Error", "CE6: Unknown Error",
	"CE7: Unknown Error", "CE8: Unknown Error", "vGPU Start Error", "GPU has fallen off the bus",
	"Corrupted data sent to GPU", "VGA Subsystem Error", "NVJPG0 Error", "NVDEC1 Error", "NVDEC2 Error",
	"CE9: Unknown Error", "OFA Exception", "Reserved", "NVDEC3 Error", "NVDEC4 Error", "Reserved", "Reserved",
	"High single-bit ECC error rate", "Non-fatal violation of provisioned InfoROM wear limit", "Contained ECC error",
	"Uncontained ECC error", "NVDEC5 Error", "NVDEC6 Error", "NVDEC7 Error", "NVJPG1 Error", "NVJPG2 Error",
	"NVJPG3 Error", "NVJPG4 Error", "NVJPG5 Error", "NVJPG6 Error", "NVJPG7 Error", "SMBPBI Test Message",
	"SMBPBI Test Message Silent", "Reserved", "Context Switch Timeout Error", "Security Fault Error",
	"Display Bundle Error Event", "Display Supervisor Error", "DP Link Training Error",
	"Display Pipeline Underflow Error", "Display Core Channel Error", "Display Window Channel Error",
	"Display Cursor Channel Error", "Display Pixel Pipeline Error", "GSP RPC Timeout", "GSP Error", "C2C Link Error",
	"SPI PMU RPC Read Failure", "SPI PMU RPC Write Failure", "SPI PMU RPC Erase Failure", "Inforom FS Failure",
	"Robust Channel CE10 Error", "Robust Channel CE11 Error", "Robust Channel CE12 Error", "Robust Channel CE13 Error",
	"Robust Channel CE14 Error", "Robust Channel CE15 Error", "Robust Channel CE16 Error", "Robust Channel CE17 Error",
	"Robust Channel CE18 Error", "Robust Channel CE19 Error", "ALI Training Fail", "NVLink Privilege Error",
	"Robust Channel DLA Error", "Robust Channel OFA1 Error", "Unrecovered ECC Error", "Robust Channel Fast Path Error",
	"Robust Channel NVENVC3 Error", "GPU Initialization Failure", "NVLINK: Saw Error", "NVLINK: RLW Error",
	"NVLINK: TLW Error", "NVLINK: TREX Error", "NVLINK: NVLPW_CTRL Error", "NVLINK: NETIR Error", "NVLINK: MSE Error",
	"Robust Channel Key rotation Error", "Robust Channel DLA SMMU Error", "Robust Channel DLA timeout Error",
	"GPU Recovery Action Changed", "NVLINK: SW Defined Error", "Resource Retirement Event",
	"Resource Retirement Failure", "GPU Fatal Timeout", "Robust Channel CHI Non-Data Error", "Channel Retirement Event",
	"Channel Retirement Failure", "Power Smoothing HW Circuitry Reengaged", "Power Smoothing HW Circuitry Disengaged",
	"Power Smoothing HW Circuitry Low Lifetime", "Power Smoothing HW Circuitry Lifetime Exhausted",
	"NVLINK Secure Crypto Error", "PCIE Fatal Timeout",
	"Reduced GPU Memory Capacity (Errors found in write protection region)", "Internal micro-controller halt",
	"NVLINK: Interrupt seen in CC mode", "Uncorrectable DRAM Error", "Uncorrectable SRAM Error",
}
