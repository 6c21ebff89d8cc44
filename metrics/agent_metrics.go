package metrics

import (
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

const namespace = "gpu_node_agent_"

// Type names of metrics.
const (
	gauge     = fields.TypeGauge
	counter   = fields.TypeCounter
	histogram = "histogram"
	summary   = "summary"
)

// MetricInfo describes a metric of the agent.
type MetricInfo struct {
	Name   string
	Type   string // gauge, counter, histogram or summary
	Help   string
	Labels []string // in no particular order
}

// Describe returns the metrics of the agent itself, of its process and of its Go runtime. fields.List describes the fields of DCGM. Labels
// omit the labels of metrics.podLabels, which gpu_node_agent_device_allocated, gpu_node_agent_device_allocated_gpus and the fields have in
// addition. They also omit the labels of metrics.claimLabels, which gpu_node_agent_device_allocated and the fields have.
func Describe() []MetricInfo {
	list := agentMetrics()
	for _, r := range runtimeTable() {
		list = append(list, MetricInfo{"go_" + r.name, r.typ, r.help, nil})
	}
	return list
}

// Numbers of the metrics in agentMetrics.
const (
	deviceState = iota
	deviceFinding
	gpuUnhealthy
	deviceUnhealthySeconds
	healthTransitions
	xidErrors
	lastXID
	lastXIDTime
	deviceAllocated
	deviceAllocatedGPUs
	deviceIdleSeconds
	deviceIdleFor
	deviceNoProcessFor
	deviceNeverUsed
	deviceInfo
	deviceMemory
	deviceGPUs
	deviceProcesses
	deviceProcessMemory
	deviceProcessSM
	shareUnits
	mpsDaemonUp
	mpsDaemonRestarts
	mpsClients
	mpsActiveThreads
	mpsPinnedMemory
	containerMemoryLimit
	containerMemoryUsed

	sourceUp
	sourceChecksUp
	sourceIncident
	eventSourceUp
	xidGap
	sourceStalled
	sourceDetached
	sourceReconnects
	snapshotAge
	sourceInfo
	pollDuration

	pluginEnabled
	pluginRegistered
	pluginRegistrations
	pluginStreams
	pluginMismatches
	pluginDevices
	unschedulableDevices
	allocations
	allocationErrors
	podResourcesUp
	podResourcesAge

	draRegistered
	draPublished
	draHandover
	draHandoverSeconds
	draSlices
	draDevices
	draTainted
	draPreparedClaims
	draPublishErrors
	draPrepareErrors
	draPrepares
	draUnprepares

	cdiRuntimeInfo
	nodeDevices
	otherPluginDevices

	kubernetesWrites
	kubernetesEvents
	kubernetesDropped
	kubernetesErrors
	nodeWrites
	nodeErrors
	nodeLeftovers
	podLabelsUp
	processesUp
	processesWithoutPod
	fileUnwritten
	stateFileRead
	unmatchedRefs
	waitsForHolder
	holderInfo
	fieldsUnknown
	bindingWarning
	reloadSuccessful
	reloadTime
	logDropped
	connectionsDropped
	buildInfo

	processCPU
	processOpenFDs
	processMaxFDs
	processVirtual
	processVirtualMax
	processResident
	processStart

	goGoroutines
	goThreads
	goLastGC
	goInfo
	goPauses

	firstRuntimeMetric // of runtimeTable
)

// agentMetrics lists the metrics of the agent by number.
func agentMetrics() []MetricInfo {
	device := func(more ...string) []string {
		return append([]string{"gpu", "UUID", "GPU_I_PROFILE", "GPU_I_ID", "hostname"}, more...)
	}
	resource := func(more ...string) []string { return append([]string{"resource"}, more...) }
	list := []MetricInfo{
		deviceState: {"device_state", gauge, "Whether the device is in the state. " +
			"The kubelet counts a device as unhealthy exactly while its state is unhealthy.", device("state")},
		deviceFinding: {"device_finding", gauge, "Active findings of the device; always 1.", device("cause", "severity", "action")},
		gpuUnhealthy: {"gpu_unhealthy", gauge, "The worst fault that makes the GPU or a MIG device of it unhealthy; always 1. " +
			"Decisions, such as a cordon, are not faults.", device("cause", "action")},
		deviceUnhealthySeconds: {
			"device_unhealthy_seconds_total", counter,
			"Total time the device was unhealthy since the agent started, in seconds.", device(),
		},
		healthTransitions: {
			"health_transitions_total", counter, "Total number of times the device entered the state since the agent started.",
			device("state"),
		},
		xidErrors: {"xid_errors_total", counter, "Total number of XIDs reported by the device since the agent started. " +
			"Common XIDs of a GPU start at 0.", device("xid")},
		lastXID:     {"last_xid", gauge, "Number of the last XID reported by the device.", device()},
		lastXIDTime: {"last_xid_timestamp_seconds", gauge, "Unix time of the last XID reported by the device.", device()},
		deviceAllocated: {
			"device_allocated", gauge, "Containers that hold the device or a replica of it; always 1.",
			device("namespace", "pod", "container", "resource", "pod_uid"),
		},
		deviceAllocatedGPUs: {
			"device_allocated_gpus", gauge,
			"Part of a GPU that the container has with the device: 1 for a GPU; for a MIG device its memory in eighths of the GPU's; " +
				"for a shared device the part of the units. Containers with one claim have equal parts of it. No series while it is unknown.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		deviceIdleSeconds: {
			"device_idle_seconds_total", counter,
			"Total time the container held the device while it was idle, in seconds: its utilization was below metrics.idleBelow. " +
				"Of a device that several containers hold, the container's own processes count, if they are known.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		deviceIdleFor: {
			"device_idle_for_seconds", gauge,
			"Time since the device was last busy while the container held it, in seconds; 0 while it is busy. " +
				"No series while its work is not measured.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		deviceNoProcessFor: {
			"device_no_process_for_seconds", gauge,
			"Time since the container last had a process on the device while it held it, in seconds; 0 while it has one. " +
				"No series while its processes are unknown.", device("namespace", "pod", "container", "pod_uid"),
		},
		deviceNeverUsed: {
			"device_never_used", gauge,
			"Whether the container has not used the device since it got it: no process was observed or, while the processes are unknown, " +
				"no work, and it does not work now. No series while that is unknown, such as for a container that is older than the agent.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		deviceInfo: {
			"device_info", gauge, "Properties of the device; always 1. The label mig is on or off for a GPU, device for a MIG device.",
			device("model", "pci_bus_id", "numa", "mig", "parent"),
		},
		deviceMemory: {"device_memory_bytes", gauge, "Total framebuffer memory of the device.", device()},
		deviceGPUs: {
			"device_gpus", gauge,
			"Part of a GPU that the device is: for a MIG device its memory in eighths of the GPU's; for a GPU 1 without the parts of its " +
				"MIG devices. The sum is the number of GPUs.", device("model"),
		},
		deviceProcesses: {
			"processes", gauge,
			"Number of processes of the container that use the device; processes of no pod have an empty label pod. " +
				"No series of a device whose processes are unknown.", device("namespace", "pod", "container", "pod_uid"),
		},
		deviceProcessMemory: {
			"process_memory_bytes", gauge, "Framebuffer memory of the device that the container's processes use.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		deviceProcessSM: {
			"process_sm_utilization_ratio", gauge, "Share of the time in which the container's processes ran kernels on the device, 0 to 1.",
			device("namespace", "pod", "container", "pod_uid"),
		},
		shareUnits: {
			"share_units", gauge,
			"Units of a device shared by MPS or by memory: total are offered, free of these are held by no container, with claims by none " +
				"that is prepared, and largest is the largest request of a container that the device can serve now. " +
				"No free and largest while the holders are unknown.",
			device("resource", "sharing", "state"),
		},
		mpsDaemonUp: {
			"mps_daemon_up", gauge,
			"Whether the MPS daemon of the device is ready. No series of a device that MPS does not serve, or that is leaving it.", device(),
		},
		mpsDaemonRestarts: {
			"mps_daemon_restarts_total", counter,
			"Total number of restarts of the device's MPS daemon since mps-daemon started. Each has ended all clients.", device(),
		},
		mpsClients: {"mps_clients", gauge, "Number of MPS clients on the device.", device()},
		mpsActiveThreads: {
			"mps_active_thread_ratio", gauge,
			"Share of the device's SMs that an MPS client can use unless its environment has a lower limit, 0 to 1.", device(),
		},
		mpsPinnedMemory: {
			"mps_pinned_memory_limit_bytes", gauge,
			"Memory of the device that an MPS client can use unless its environment has a lower limit. No series without a limit.", device(),
		},
		containerMemoryLimit: {
			"container_memory_limit_bytes", gauge, "Memory of the device that the container requested, of a device that is shared by memory. " +
				"The label enforcement names what keeps the container within it: driver, mps or none.",
			device("namespace", "pod", "container", "resource", "enforcement", "pod_uid"),
		},
		containerMemoryUsed: {
			"container_memory_used_bytes", gauge, "Memory of the device that the container uses, by the driver's account of its control group.",
			device("namespace", "pod", "container", "resource", "pod_uid"),
		},

		sourceUp: {"source_up", gauge, "Whether the source measures the GPUs.", nil},
		sourceChecksUp: {
			"source_checks_up", gauge, "Whether DCGM's health checks work; the last result while the source is down. " +
				"No series while source.healthSystems is none, or without a result.", nil,
		},
		sourceIncident: {
			"source_incident", gauge, "Incident of DCGM's health checks that names no GPU, such as one of IMEX; always 1.",
			[]string{"system", "code", "severity"},
		},
		eventSourceUp: {
			"event_source_up", gauge, "Whether the event source reports XIDs as they happen. No series for one that is off.", []string{"witness"},
		},
		xidGap: {
			"xid_gap_seconds_total", counter,
			"Total time in which no XID could be seen, so that some may be lost: the connection to the source had failed, or it listed no GPU, " +
				"and no event source was up.", nil,
		},
		sourceStalled:    {"source_stalled", gauge, "Whether a call to the source has not returned in time.", nil},
		sourceDetached:   {"source_detached", gauge, "Whether an operator has detached the driver; source_up is then 0.", nil},
		sourceReconnects: {"source_reconnects_total", counter, "Total number of times the source was reopened.", nil},
		snapshotAge:      {"snapshot_age_seconds", gauge, "Time since the GPUs were last measured.", nil},
		sourceInfo: {
			"source_info", gauge, "Versions of the driver, CUDA, DCGM and the host engine; always 1.",
			[]string{"driver", "cuda", "dcgm", "engine"},
		},
		pollDuration: {"source_poll_duration_seconds", histogram, "Duration of a poll of all devices.", nil},

		pluginEnabled: {
			"plugin_enabled", gauge,
			"Whether the device plugin offers GPUs to the kubelet; 0 if plugin.enabled is false, or if plugin.api is dra.", nil,
		},
		pluginRegistered: {"plugin_registered", gauge, "Whether the resource is registered with the kubelet.", resource()},
		pluginRegistrations: {
			"plugin_registrations_total", counter, "Total number of registrations of the resource with the kubelet.",
			resource(),
		},
		pluginStreams: {"plugin_streams", gauge, "Number of open ListAndWatch streams of the resource.", resource()},
		pluginMismatches: {
			"plugin_audit_mismatches_total", counter,
			"Total number of audits in which the kubelet's devices differed from those sent; " +
				"the resource is then registered again.", resource(),
		},
		pluginDevices: {"plugin_devices", gauge, "Number of devices sent to the kubelet, by health.", resource("health")},
		unschedulableDevices: {
			"unschedulable_devices", gauge,
			"Number of free healthy devices that no new pod can get, because pods hold as many that are unhealthy or no longer offered. " +
				"No series while the holders are unknown.", resource(),
		},
		allocations:      {"allocations_total", counter, "Total number of answered Allocate requests, one per container.", resource()},
		allocationErrors: {"allocation_errors_total", counter, "Total number of refused Allocate requests, by reason.", resource("reason")},
		podResourcesUp:   {"pod_resources_up", gauge, "Whether the kubelet's pod resources could be read.", nil},
		podResourcesAge:  {"pod_resources_age_seconds", gauge, "Time since the kubelet's pod resources were last read.", nil},

		draRegistered: {"dra_registered", gauge, "Whether the DRA driver is registered with the kubelet.", nil},
		draPublished:  {"dra_published", gauge, "Whether the ResourceSlices on the API server are up to date.", nil},
		draHandover: {
			"dra_handover", gauge, "Whether the devices are being handed over between the device plugin and DRA. Meanwhile no new pod gets one.",
			nil,
		},
		draHandoverSeconds: {
			"dra_handover_seconds", gauge,
			"Time since the handover began, also before the agent started; 0 while there is none.", nil,
		},
		draSlices:         {"dra_slices", gauge, "Number of ResourceSlices that the DRA driver publishes.", nil},
		draDevices:        {"dra_devices", gauge, "Number of devices in these slices.", nil},
		draTainted:        {"dra_tainted_devices", gauge, "Number of devices in these slices with a taint NoSchedule or NoExecute.", nil},
		draPreparedClaims: {"dra_prepared_claims", gauge, "Number of prepared claims.", nil},
		draPublishErrors: {
			"dra_publish_errors_total", counter, "Total number of failed tries to publish devices, by reason; they are retried.",
			[]string{"reason"},
		},
		draPrepareErrors: {
			"dra_prepare_errors_total", counter,
			"Total number of times the driver refused to prepare a claim, by reason; the kubelet retries.",
			[]string{"reason"},
		},
		draPrepares:   {"dra_prepare_duration_seconds", histogram, "Duration of a call of the kubelet that prepares claims.", nil},
		draUnprepares: {"dra_unprepare_duration_seconds", histogram, "Duration of a call of the kubelet that unprepares claims.", nil},

		cdiRuntimeInfo: {
			"cdi_runtime_info", gauge,
			"The container runtime of the node, while pods get their devices by CDI names alone, and what it does with CDI: " +
				"supported, ignored, depends (on a setting of the host) or unknown; always 1.",
			[]string{"version", "cdi"},
		},

		nodeDevices: {
			"node_devices", gauge,
			"Number of GPUs, as several parties see them: pci counts GPUs on the PCI bus that are not for virtual machines; driver, GPUs that " +
				"the driver reaches; offered, GPUs with a device that new pods can get; kubelet, GPUs of which the kubelet counts a device, " +
				"with DRA published GPUs. No series for one that is unknown.",
			[]string{"seen_by"},
		},

		otherPluginDevices: {
			"other_plugin_devices", gauge,
			"Number of devices of this node that the kubelet may allocate under a resource that another device plugin serves. Both plugins " +
				"can give them to pods.", resource(),
		},

		kubernetesWrites: {"kubernetes_writes_total", counter, "Total number of writes of the node condition to the API server.", nil},
		kubernetesEvents: {"kubernetes_events_total", counter, "Total number of events written to the API server.", nil},
		kubernetesDropped: {
			"kubernetes_events_dropped_total", counter,
			"Total number of dropped events: too many, or too old when the API server was reachable again.", nil,
		},
		kubernetesErrors: {"kubernetes_errors_total", counter, "Total number of failed requests to the API server; most are retried.", nil},
		nodeWrites: {
			"node_writes_total", counter,
			"Total number of writes of the node's labels, its NodeFeature and its taints to the API server.", nil,
		},
		nodeErrors: {
			"node_errors_total", counter,
			"Total number of failed tries to write the node's labels, its NodeFeature or its taints; all are retried.", nil,
		},
		nodeLeftovers: {
			"node_leftovers", gauge, "Whether earlier agents may have left labels, a NodeFeature (nodefeature), taints or the condition " +
				"GPUHealthy of the node, which this one has no right to remove; always 1. " +
				"No series without such a part. gpu-node-agent cleanup removes them.", []string{"kind"},
		},
		podLabelsUp: {"pod_labels_up", gauge, "Whether the labels of this node's pods could be read from the API server.", nil},
		processesUp: {
			"processes_up", gauge,
			"Whether the processes of the devices can be listed. No series while metrics.processes.enabled is false.", nil,
		},
		processesWithoutPod: {
			"processes_without_pod", gauge, "Number of processes that belong to no pod: of the host, unreadable control group, unknown_pod, " +
				"not_holder of the device, holders_unknown.", []string{"reason"},
		},
		fileUnwritten: {
			"file_unwritten_since_timestamp_seconds", gauge,
			"Unix time since when a file cannot be written: the state (--state-dir), so that a restart loses " +
				"findings, or the checkpoint of claims, so that claims are refused. No series while it can be written.",
			[]string{"file"},
		},
		stateFileRead: {
			"state_file_read", gauge,
			"Whether the state (--state-dir) was read. While it is 0, the verdicts of before the agent's start are unknown.", nil,
		},
		unmatchedRefs: {
			"unmatched_refs", gauge,
			"Number of device references in health.cordon, plugin.include, plugin.exclude and plugin.sharing that match no device of the " +
				"node; gpu-node-agent status lists them.", nil,
		},
		waitsForHolder: {
			"waits_for_holder", gauge,
			"Whether the agent waits for the end of another agent, the holder, which serves the devices of the node. " +
				"Meanwhile the agent exports its own series only.", nil,
		},
		holderInfo: {
			"holder_info", gauge,
			"The pod of the agent that serves the devices of the node, while this one waits for its end; always 1.",
			[]string{"holder"},
		},
		fieldsUnknown: {
			"fields_unknown", gauge,
			"Number of entries of metrics.fields or metrics.fieldsFile that select nothing; check-config lists them.", nil,
		},
		bindingWarning: {
			"index_binding_warning", gauge,
			"Entries of the configuration that name a GPU by its index and may mean another one than was meant: renumbered, the GPU does not " +
				"have the index now; replaced, the card was replaced; incomplete, it was bound while the driver did not list all GPUs; always 1. The " +
				"key has no positions of lists.",
			[]string{"key", "entry", "reason"},
		},
		reloadSuccessful: {"config_last_reload_successful", gauge, "Whether the last reload of the configuration succeeded.", nil},
		reloadTime: {
			"config_last_reload_success_timestamp_seconds", gauge, "Unix time of the last successful reload of the configuration.",
			nil,
		},
		logDropped: {"log_dropped_total", counter, "Total number of log entries dropped because standard error was blocked.", nil},
		connectionsDropped: {
			"http_connections_dropped_total", counter, "Total number of connections to metrics.listen dropped to make room for others.", nil,
		},
		buildInfo: {
			"build_info", gauge, "Version, revision and Go version of the agent; always 1.",
			[]string{"version", "revision", "goversion"},
		},

		// The names and help of client_golang's collectors.
		processCPU:        {"process_cpu_seconds_total", counter, "Total user and system CPU time spent in seconds.", nil},
		processOpenFDs:    {"process_open_fds", gauge, "Number of open file descriptors.", nil},
		processMaxFDs:     {"process_max_fds", gauge, "Maximum number of open file descriptors.", nil},
		processVirtual:    {"process_virtual_memory_bytes", gauge, "Virtual memory size in bytes.", nil},
		processVirtualMax: {"process_virtual_memory_max_bytes", gauge, "Maximum amount of virtual memory available in bytes.", nil},
		processResident:   {"process_resident_memory_bytes", gauge, "Resident memory size in bytes.", nil},
		processStart:      {"process_start_time_seconds", gauge, "Start time of the process since unix epoch in seconds.", nil},

		goGoroutines: {"go_goroutines", gauge, "Number of goroutines that currently exist.", nil},
		goThreads:    {"go_threads", gauge, "Number of OS threads created.", nil},
		goLastGC:     {"go_memstats_last_gc_time_seconds", gauge, "Number of seconds since 1970 of last garbage collection.", nil},
		goInfo:       {"go_info", gauge, "Information about the Go environment.", []string{"version"}},
		goPauses: {
			"go_gc_duration_seconds", summary, "A summary of the wall-time pause (stop-the-world) duration in garbage collection cycles.",
			[]string{"quantile"},
		},
	}
	for i := range processCPU {
		list[i].Name = namespace + list[i].Name
	}
	return list
}

// schema is the part of a page that follows from the configuration. It is immutable.
type schema struct {
	*exposition.Schema
	cfg         *Config
	firstField  int    // number of the first of cfg.Chosen.Fields
	window      string // in milliseconds
	needsEvents bool   // a field is computed from the events in the window
}

// newSchema numbers the agent's metrics first, then the Go runtime's, then the selected fields.
func newSchema(cfg *Config) *schema {
	s := &schema{cfg: cfg, window: strconv.FormatInt(cfg.Window.Milliseconds(), 10)}
	var families []exposition.Family
	add := func(name, help, typ, unit string) {
		kind := dto.MetricType(dto.MetricType_value[strings.ToUpper(typ)])
		families = append(families, exposition.Family{Name: name, Help: help, Type: kind, Unit: unit})
	}
	for _, m := range agentMetrics() {
		add(m.Name, m.Help, m.Type, "")
	}
	for _, r := range runtimeTable() {
		add("go_"+r.name, r.help, r.typ, r.unit)
	}
	s.firstField = len(families)
	for _, f := range cfg.Chosen.Fields {
		add(f.Name, f.Help, f.Type, "")
		s.needsEvents = s.needsEvents || f.Name == fields.XIDErrorsCount || f.Name == fields.ClockEventsCount
	}
	s.Schema = exposition.NewSchema(families)
	return s
}
