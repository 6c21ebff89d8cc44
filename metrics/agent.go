package metrics

import (
	"maps"
	"runtime"
	"slices"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

func (s *scrape) collectSource() {
	source := s.Snapshot.Source
	s.Add(sourceUp, boolValue(source.Status == health.SourceUp), nil)
	s.collectChecks(source)
	s.collectEventSources(source.Events)
	s.Add(xidGap, source.XIDGap.Of(s.At).Seconds(), nil)
	s.Add(sourceStalled, boolValue(source.Status == health.SourceStalled), nil)
	s.Add(sourceDetached, boolValue(source.Status == health.SourceDetached), nil)
	s.Add(sourceReconnects, float64(source.Reconnects), nil)
	s.collectPollDurations()
	if s.Snapshot.Polled() {
		s.Add(snapshotAge, s.At.Sub(s.Snapshot.At).Seconds(), nil)
		v := source.Versions
		s.AddWith(sourceInfo, 1, nil, label("driver", v.Driver), label("cuda", v.CUDA), label("dcgm", v.DCGM), label("engine", v.Engine))
	}
}

func (s *scrape) collectChecks(source health.Source) {
	if c := source.Checks.Status; c == health.ChecksUp || c == health.ChecksDown {
		s.Add(sourceChecksUp, boolValue(c == health.ChecksUp), nil)
	}
	for _, i := range source.Incidents { // the IMEX daemon and its domain have one code; the page drops the duplicate
		s.AddWith(sourceIncident, 1, nil, label("system", i.System), label("code", catalog.LookupIncident(i.Code).Name),
			label("severity", i.Severity.String()))
	}
}

func (s *scrape) collectEventSources(all []health.EventSourceState) {
	for _, e := range all {
		if e.Status != health.EventsOff {
			s.AddWith(eventSourceUp, boolValue(e.Status == health.EventsUp), nil, label("witness", e.Witness.String()))
		}
	}
}

func (s *scrape) collectPollDurations() {
	h := &dto.Histogram{SampleCount: &s.polls.count, SampleSum: &s.polls.sum}
	for _, bound := range slices.Sorted(maps.Keys(s.polls.buckets)) {
		n := s.polls.buckets[bound]
		h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: &bound, CumulativeCount: &n})
	}
	s.AddMetric(pollDuration, &dto.Metric{Histogram: h})
}

// collectDRA adds the metrics of the DRA driver while it has the devices, or is to have them.
func (s *scrape) collectDRA() {
	status := &s.DRA
	if !status.Enabled {
		return
	}
	s.Add(draRegistered, boolValue(status.Registered), nil)
	s.Add(draPublished, boolValue(!status.Behind && !status.Published.IsZero()), nil)
	s.Add(draHandover, boolValue(status.Handover), nil)
	since := 0.0
	if !status.HandoverSince.IsZero() {
		since = max(0, s.At.Sub(status.HandoverSince).Seconds()) // the clock may have been set back
	}
	s.Add(draHandoverSeconds, since, nil)
	s.Add(draSlices, float64(status.Slices), nil)
	s.Add(draDevices, float64(status.Devices), nil)
	s.Add(draTainted, float64(status.Tainted), nil)
	if s.Claims != nil {
		s.Add(draPreparedClaims, float64(len(s.Claims.ByUID)), nil)
	}
	for _, reason := range dra.PublishErrors() {
		s.AddWith(draPublishErrors, float64(status.PublishErrors[reason]), nil, label("reason", reason))
	}
	for _, reason := range dra.PrepareErrors() {
		s.AddWith(draPrepareErrors, float64(status.PrepareErrors[reason]), nil, label("reason", reason))
	}
	s.addDurations(draPrepares, status.Prepares)
	s.addDurations(draUnprepares, status.Unprepares)
}

func (s *scrape) addDurations(family int, d dra.Durations) {
	h := &dto.Histogram{SampleSum: &d.Sum}
	bounds, total := dra.DurationBounds(), uint64(0)
	for i, n := range d.Counts {
		total += n
		if i < len(bounds) {
			h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: &bounds[i], CumulativeCount: new(total)})
		}
	}
	h.SampleCount = &total
	s.AddMetric(family, &dto.Metric{Histogram: h})
}

func (s *scrape) collectPlugin() {
	s.Add(pluginEnabled, boolValue(!s.Plugin.Off), nil)
	for i := range s.Plugin.Resources {
		r := &s.Plugin.Resources[i]
		labels := s.Labels(nil, label("resource", r.Name))
		s.Add(pluginRegistered, boolValue(r.Registered), labels)
		s.Add(pluginRegistrations, float64(r.Registrations), labels)
		s.Add(pluginStreams, float64(r.Streams), labels)
		s.Add(pluginMismatches, float64(r.AuditMismatches), labels)
		s.AddWith(pluginDevices, float64(r.Healthy), labels, label("health", "healthy"))
		s.AddWith(pluginDevices, float64(r.Devices-r.Healthy), labels, label("health", "unhealthy"))
		if r.Unschedulable != nil {
			s.Add(unschedulableDevices, float64(r.Unschedulable.Devices), labels)
		}
		s.Add(allocations, float64(r.Allocations), labels)
		for _, reason := range plugin.AllocationErrors() {
			s.AddWith(allocationErrors, float64(r.AllocationErrors[reason]), labels, label("reason", reason))
		}
	}
	s.Add(podResourcesUp, boolValue(s.Holders.Err == ""), nil)
	if !s.Holders.At.IsZero() {
		s.Add(podResourcesAge, s.At.Sub(s.Holders.At).Seconds(), nil)
	}
}

// collectNode adds what the agent knows and does for the node, besides its devices.
func (s *scrape) collectNode() {
	if r := s.CDIRuntime; r != nil {
		s.AddWith(cdiRuntimeInfo, 1, nil, label("version", r.Version), label("cdi", r.Support))
	}
	for _, by := range slices.Sorted(maps.Keys(s.NodeDevices)) {
		s.AddWith(nodeDevices, float64(s.NodeDevices[by]), nil, label("seen_by", string(by)))
	}
	for _, resource := range slices.Sorted(maps.Keys(s.Plugin.OtherPlugins)) {
		s.AddWith(otherPluginDevices, float64(s.Plugin.OtherPlugins[resource]), nil, label("resource", resource))
	}
	if s.Snapshot.Polled() {
		n := 0
		for _, u := range s.UnmatchedRefs {
			n += len(u.Refs)
		}
		s.Add(unmatchedRefs, float64(n), nil)
	}
	if k := &s.Kube; k.On() {
		s.Add(kubernetesWrites, float64(k.Writes), nil)
		s.Add(kubernetesEvents, float64(k.Events), nil)
		s.Add(kubernetesDropped, float64(k.Dropped), nil)
		s.Add(kubernetesErrors, float64(k.Errors), nil)
	}
	if n := &s.NodeObject; n.Enabled {
		s.Add(nodeWrites, float64(n.Writes), nil)
		s.Add(nodeErrors, float64(n.Errors), nil)
		for _, kind := range n.Leftovers() {
			s.AddWith(nodeLeftovers, 1, nil, label("kind", kind))
		}
	}
	if s.PodLabelsStatus.Enabled {
		s.Add(podLabelsUp, boolValue(s.PodLabelsStatus.Up), nil)
	}
	if s.Snapshot != nil {
		for _, b := range s.Snapshot.Bindings {
			if b.Warning.Reason != "" {
				s.AddWith(bindingWarning, 1, nil, label("key", b.Key), label("entry", b.Entry), label("reason", b.Warning.Reason))
			}
		}
	}
	for _, f := range s.Unwritten() {
		s.AddWith(fileUnwritten, unixSeconds(f.Since), nil, label("file", f.Path))
	}
	if s.StateDir.Path != "" {
		s.Add(stateFileRead, boolValue(s.StateDir.Unread.IsZero()), nil)
	}
	s.collectProcessesStatus()
}

// collectAgent adds the series that an agent has also while it waits for another one that serves the node.
func (s *scrape) collectAgent(holder string, waits bool) {
	s.Add(waitsForHolder, boolValue(waits), nil)
	if waits && holder != "" {
		s.AddWith(holderInfo, 1, nil, label("holder", holder))
	}
	s.Add(fieldsUnknown, float64(len(s.cfg.Chosen.Unknown)), nil)
	s.Add(reloadSuccessful, boolValue(s.Reload.OK), nil)
	s.Add(reloadTime, unixSeconds(s.Reload.At), nil)
	s.Add(connectionsDropped, float64(s.ConnectionsDropped), nil)
	s.Add(logDropped, float64(s.LogDropped), nil)
	s.AddWith(buildInfo, 1, nil, label("version", s.Version), label("revision", s.Revision), label("goversion", runtime.Version()))
}
