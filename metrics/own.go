package metrics

import dto "github.com/prometheus/client_model/go"

// ownFamilies are the numbers of the families that are the agent's own.
type ownFamilies struct {
	deviceState, deviceFinding, unhealthy, transitions, xidErrors, lastXID, lastXIDTime int
	allocated, idle, idleFor, info, memory                                              int

	sourceUp, sourceStalled, sourceDetached, reconnects, age, version, poll int

	enabled, registered, registrations, streams, mismatches, devices int
	allocations, allocationErrors, holdersUp, holdersAge             int

	kubernetesWrites, kubernetesEvents, kubernetesDropped, kubernetesErrors int

	podLabelsUp, stateFileUp, fieldsUnknown, reloadOK, reloadTime, logDropped, build int
}

func (s *shape) declareOwn() {
	gauge := func(name, help string) int { return s.declare(namespace+"_"+name, help, dto.MetricType_GAUGE) }
	counter := func(name, help string) int { return s.declare(namespace+"_"+name, help, dto.MetricType_COUNTER) }
	s.own = ownFamilies{
		deviceState: gauge("device_state", "1 for the state that the device is in, 0 for the others. "+
			"The kubelet is told that a device is unhealthy exactly when its state is unhealthy."),
		deviceFinding: gauge("device_finding", "1 for each thing that is wrong with the device, while it is."),
		unhealthy:     counter("device_unhealthy_seconds_total", "Seconds that the device was unhealthy since the agent started."),
		transitions:   counter("health_transitions_total", "Times that the device has come into the state since the agent started."),
		xidErrors: counter("xid_errors_total", "XIDs that the device has reported since the agent started. "+
			"A GPU has the common ones from the start, at 0."),
		lastXID:     gauge("last_xid", "Number of the last XID that the device has reported."),
		lastXIDTime: gauge("last_xid_timestamp_seconds", "When the device has reported its last XID."),
		allocated:   gauge("device_allocated", "1 for each container that holds the device, or a share of it."),
		idle: counter("device_idle_seconds_total", "Seconds that the container has held the device while it was idle: "+
			"its utilization was under metrics.idleBelow."),
		idleFor: gauge("device_idle_for_seconds", "Seconds since the device was last busy while the container has held it; 0 while it is busy."),
		info:    gauge("device_info", "What the device is. MIG is on, off, or device for a part of a GPU."),
		memory:  gauge("device_memory_bytes", "Framebuffer memory of the device: all of it, free or not."),

		sourceUp:      gauge("source_up", "1 while the GPUs are measured, 0 while they cannot be."),
		sourceStalled: gauge("source_stalled", "1 while a call to the source of measurements hangs."),
		sourceDetached: gauge("source_detached", "1 while the GPUs' driver is let go of because an operator has said so: "+
			"then source_up is 0."),
		reconnects: counter("source_reconnects_total", "Times that the source was opened again after the first time."),
		age:        gauge("snapshot_age_seconds", "Seconds since the GPUs were last measured."),
		version:    gauge("source_info", "Versions of the software below the agent."),
		poll: s.declare(namespace+"_source_poll_duration_seconds", "How long it took to measure all devices.",
			dto.MetricType_HISTOGRAM),

		enabled:       gauge("plugin_enabled", "1 if GPUs are offered to the kubelet, 0 if plugin.enabled is false: another device plugin does that."),
		registered:    gauge("plugin_registered", "1 while the kubelet has the resource from us."),
		registrations: counter("plugin_registrations_total", "Times that the resource was registered with the kubelet."),
		streams:       gauge("plugin_streams", "Open ListAndWatch streams of the resource."),
		mismatches: counter("plugin_audit_mismatches_total", "Times that the kubelet did not have what it was told, "+
			"and was registered with again."),
		devices:          gauge("plugin_devices", "Devices that the kubelet is told of, by the health it is told."),
		allocations:      counter("allocations_total", "Allocate requests that were answered, one for each container."),
		allocationErrors: counter("allocation_errors_total", "Allocate requests that were refused."),
		holdersUp:        gauge("pod_resources_up", "1 while the kubelet tells who holds which device, 0 while it does not."),
		holdersAge:       gauge("pod_resources_age_seconds", "Seconds since the kubelet has told who holds which device."),

		kubernetesWrites:  counter("kubernetes_writes_total", "Times that the node's condition was written to the API server."),
		kubernetesEvents:  counter("kubernetes_events_total", "Events that were written to the API server."),
		kubernetesDropped: counter("kubernetes_events_dropped_total", "Events that were given up: too many, or too old once the API server was back."),
		kubernetesErrors:  counter("kubernetes_errors_total", "Requests to the API server that failed. Most are made again."),
		podLabelsUp:       gauge("pod_labels_up", "1 while the API server tells the labels of this node's pods, 0 while it does not."),
		stateFileUp:       gauge("state_file_up", "1 while health.stateFile holds what a restart is not to forget, 0 while it cannot be written."),

		fieldsUnknown: gauge("fields_unknown", "Entries of metrics.fields or metrics.fieldsFile that are not shown; check-config names them."),
		reloadOK:      gauge("config_last_reload_successful", "1 if the configuration as it was last read is in force, 0 if it was bad."),
		reloadTime:    gauge("config_last_reload_success_timestamp_seconds", "When the configuration in force was read."),
		logDropped:    counter("log_dropped_total", "Log entries that were dropped because standard error did not take them."),
		build:         gauge("build_info", "What the agent's binary is."),
	}
}
