package metrics

import (
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// ownDescs describe the agent's own series.
type ownDescs struct {
	deviceState, deviceFinding, unhealthy, transitions, xidErrors, lastXID, lastXIDTime *prometheus.Desc
	allocated, idle, idleFor, info, memory                                              *prometheus.Desc

	sourceUp, sourceStalled, reconnects, age, version, poll *prometheus.Desc

	registered, registrations, streams, mismatches, devices *prometheus.Desc
	allocations, allocationErrors, holdersUp, holdersAge    *prometheus.Desc

	fieldsUnknown, reloadOK, reloadTime, build *prometheus.Desc
}

func newOwnDescs(hostname string) ownDescs {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	device := func(labels ...string) []string {
		return append([]string{"gpu", "UUID", "GPU_I_PROFILE", "GPU_I_ID", hostname}, labels...)
	}
	return ownDescs{
		deviceState: desc("device_state", "1 for the state that the device is in, 0 for the others. "+
			"The kubelet is told that a device is unhealthy exactly when its state is unhealthy.", device("state")...),
		deviceFinding: desc("device_finding", "1 for each thing that is wrong with the device, while it is.",
			device("cause", "severity", "action")...),
		unhealthy: desc("device_unhealthy_seconds_total", "Seconds that the device was unhealthy since the agent started.", device()...),
		transitions: desc("health_transitions_total", "Times that the device has come into the state since the agent started.",
			device("state")...),
		xidErrors: desc("xid_errors_total", "XIDs that the device has reported since the agent started. "+
			"A GPU has the common ones from the start, at 0.", device("xid")...),
		lastXID:     desc("last_xid", "Number of the last XID that the device has reported.", device()...),
		lastXIDTime: desc("last_xid_timestamp_seconds", "When the device has reported its last XID.", device()...),
		allocated: desc("device_allocated", "1 for each container that holds the device, or a share of it.",
			device("resource", "namespace", "pod", "container")...),
		idle: desc("device_idle_seconds_total", "Seconds that the container has held the device while it was idle: "+
			"its utilization was under metrics.idleBelow.", device("namespace", "pod", "container")...),
		idleFor: desc("device_idle_for_seconds", "Seconds since the device was last busy while the container has held it; 0 while it is busy.",
			device("namespace", "pod", "container")...),
		info: desc("device_info", "What the device is. MIG is on, off, or device for a part of a GPU.",
			device("model", "pci_bus_id", "numa", "mig", "parent")...),
		memory: desc("device_memory_bytes", "Framebuffer memory of the device.", device()...),

		sourceUp:      desc("source_up", "1 while the GPUs are measured, 0 while they cannot be."),
		sourceStalled: desc("source_stalled", "1 while a call to the source of measurements hangs."),
		reconnects:    desc("source_reconnects_total", "Times that the source was opened again after the first time."),
		age:           desc("snapshot_age_seconds", "Seconds since the GPUs were last measured."),
		version:       desc("source_info", "Versions of the software below the agent.", "driver", "cuda", "dcgm", "engine"),
		poll:          desc("source_poll_duration_seconds", "How long it took to measure all devices."),

		registered:    desc("plugin_registered", "1 while the kubelet has the resource from us.", "resource"),
		registrations: desc("plugin_registrations_total", "Times that the resource was registered with the kubelet.", "resource"),
		streams:       desc("plugin_streams", "Open ListAndWatch streams of the resource.", "resource"),
		mismatches: desc("plugin_audit_mismatches_total", "Times that the kubelet did not have what it was told, "+
			"and was registered with again.", "resource"),
		devices:          desc("plugin_devices", "Devices that the kubelet is told of, by the health it is told.", "resource", "health"),
		allocations:      desc("allocations_total", "Allocate requests that were answered, by container.", "resource"),
		allocationErrors: desc("allocation_errors_total", "Allocate requests that were refused.", "resource", "reason"),
		holdersUp:        desc("pod_resources_up", "1 while the kubelet tells who holds which device, 0 while it does not."),
		holdersAge:       desc("pod_resources_age_seconds", "Seconds since the kubelet has told who holds which device."),

		fieldsUnknown: desc("fields_unknown", "Entries of metrics.fields or metrics.fieldsFile that are not shown; check-config names them."),
		reloadOK:      desc("config_last_reload_successful", "1 if the configuration as it was last read is in force, 0 if it was bad."),
		reloadTime:    desc("config_last_reload_success_timestamp_seconds", "When the configuration in force was read."),
		build:         desc("build_info", "What the agent's binary is.", "version", "revision", "goversion"),
	}
}

// commonXIDs are those whose series begin at 0. The first error of a series that is not there before it is
// none to rate(), so those that alerts are written for are there from the start; all of them on each device
// would be thousands of series. For others there is last_xid_timestamp_seconds.
func commonXIDs() []int { return []int{13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120} }

// collectDevices shows what the agent itself knows of each device.
func (s *scrape) collectDevices(totals *Totals) {
	for i := range s.snapshot.Devices {
		d := &s.snapshot.Devices[i]
		device := func(labels ...string) []string {
			v := &d.Device
			all := make([]string, 0, 10)
			return append(append(all, strconv.Itoa(v.Index), string(v.ID), v.Profile, instanceOf(*v), s.hostname), labels...)
		}
		t := totals.device(d.Device.ID)
		for _, state := range health.States() {
			s.gauge(s.own.deviceState, truth(state == d.Verdict.State), device(state.String())...)
			if t.known {
				s.counter(s.own.transitions, float64(t.transitions[state]), device(state.String())...)
			}
		}
		if t.known {
			s.counter(s.own.unhealthy, t.unhealthy, device()...)
		}
		for _, f := range d.Verdict.Findings {
			s.gauge(s.own.deviceFinding, 1, device(f.Cause, f.State.String(), f.Action)...)
		}
		s.collectXIDs(d, device)
		s.collectHolders(d, t, device)
		s.collectInfo(d.Device, device)
	}
}

func (s *scrape) collectXIDs(d *health.DeviceState, device func(...string) []string) {
	if d.Device.Kind == health.KindGPU {
		for _, code := range commonXIDs() {
			if d.XIDCounts[code] == 0 {
				s.counter(s.own.xidErrors, 0, device(strconv.Itoa(code))...)
			}
		}
	}
	for code, n := range d.XIDCounts {
		if n > 0 {
			s.counter(s.own.xidErrors, float64(n), device(strconv.Itoa(code))...)
		}
	}
	if d.LastXID.Code != 0 {
		s.gauge(s.own.lastXID, float64(d.LastXID.Code), device()...)
		s.gauge(s.own.lastXIDTime, seconds(d.LastXID.At), device()...)
	}
}

// collectHolders shows each container once for each resource, however many replicas it has.
func (s *scrape) collectHolders(d *health.DeviceState, t deviceView, device func(...string) []string) {
	type holding struct {
		user
		resource string
	}
	shown, users := make(map[holding]bool), make(map[user]bool)
	for _, h := range s.holders.By[d.Device.ID] {
		u := userOf(h)
		if k := (holding{u, h.Resource}); !shown[k] {
			shown[k] = true
			s.gauge(s.own.allocated, 1, device(h.Resource, h.Namespace, h.Pod, h.Container)...)
		}
		if i := t.idle[u]; i.known && !users[u] {
			users[u] = true
			s.counter(s.own.idle, i.total.Seconds(), device(h.Namespace, h.Pod, h.Container)...)
			s.gauge(s.own.idleFor, i.last.Seconds(), device(h.Namespace, h.Pod, h.Container)...)
		}
	}
}

func (s *scrape) collectInfo(d health.Device, device func(...string) []string) {
	mig := "off"
	switch {
	case d.Kind == health.KindMIG:
		mig = "device"
	case d.MIGMode:
		mig = "on"
	}
	numa := make([]string, len(d.NUMA))
	for i, n := range d.NUMA {
		numa[i] = strconv.Itoa(n)
	}
	s.gauge(s.own.info, 1, device(d.Model, d.PCI, strings.Join(numa, ","), mig, string(d.Parent))...)
	if d.Memory > 0 {
		s.gauge(s.own.memory, float64(d.Memory), device()...)
	}
}

func (s *scrape) collectSource(now time.Time, t *Totals) {
	source := s.snapshot.Source
	s.gauge(s.own.sourceUp, truth(source.Status == health.SourceUp))
	s.gauge(s.own.sourceStalled, truth(source.Status == health.SourceStalled))
	s.counter(s.own.reconnects, float64(source.Reconnects))
	p := t.polls()
	s.out <- prometheus.MustNewConstHistogram(s.own.poll, p.count, p.sum, p.buckets)
	if s.snapshot.Polled() {
		s.gauge(s.own.age, now.Sub(s.snapshot.At).Seconds())
		v := source.Versions
		s.gauge(s.own.version, 1, v.Driver, v.CUDA, v.DCGM, v.Engine)
	}
}

func (s *scrape) collectPlugin(status plugin.Status, now time.Time) {
	for _, r := range status.Resources {
		s.gauge(s.own.registered, truth(r.Registered), r.Name)
		s.counter(s.own.registrations, float64(r.Registrations), r.Name)
		s.gauge(s.own.streams, float64(r.Streams), r.Name)
		s.counter(s.own.mismatches, float64(r.AuditMismatches), r.Name)
		s.gauge(s.own.devices, float64(r.Healthy), r.Name, "healthy")
		s.gauge(s.own.devices, float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		s.counter(s.own.allocations, float64(r.Allocations), r.Name)
		for _, reason := range plugin.AllocationErrors() {
			if r.AllocationErrors[reason] == 0 {
				s.counter(s.own.allocationErrors, 0, r.Name, reason)
			}
		}
		for reason, n := range r.AllocationErrors {
			if n > 0 {
				s.counter(s.own.allocationErrors, float64(n), r.Name, reason)
			}
		}
	}
	s.gauge(s.own.holdersUp, truth(s.holders.Err == ""))
	if !s.holders.At.IsZero() {
		s.gauge(s.own.holdersAge, now.Sub(s.holders.At).Seconds())
	}
}

func (s *scrape) collectAgent(src Sources) {
	r := src.Reload()
	s.gauge(s.own.fieldsUnknown, float64(len(s.cfg.Chosen.Unknown)))
	s.gauge(s.own.reloadOK, truth(r.OK))
	s.gauge(s.own.reloadTime, seconds(r.At))
	s.gauge(s.own.build, 1, src.Version, src.Revision, runtime.Version())
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
