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
	source := s.snapshot.Source
	s.Add(sourceUp, boolValue(source.Status == health.SourceUp), nil)
	s.collectChecks(source)
	s.collectEventSources(source.Events)
	s.Add(xidGap, source.XIDGap.Of(s.now).Seconds(), nil)
	s.Add(sourceStalled, boolValue(source.Status == health.SourceStalled), nil)
	s.Add(sourceDetached, boolValue(source.Status == health.SourceDetached), nil)
	s.Add(sourceReconnects, float64(source.Reconnects), nil)
	s.collectPollDurations()
	if s.snapshot.Polled() {
		s.Add(snapshotAge, s.now.Sub(s.snapshot.At).Seconds(), nil)
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
	if s.src.DRA == nil {
		return
	}
	status := s.src.DRA()
	if !status.Enabled {
		return
	}
	s.Add(draRegistered, boolValue(status.Registered), nil)
	s.Add(draPublished, boolValue(!status.Behind && !status.Published.IsZero()), nil)
	s.Add(draHandover, boolValue(status.Handover), nil)
	since := 0.0
	if !status.HandoverSince.IsZero() {
		since = max(0, s.now.Sub(status.HandoverSince).Seconds()) // the clock may have been set back
	}
	s.Add(draHandoverSeconds, since, nil)
	s.Add(draSlices, float64(status.Slices), nil)
	s.Add(draDevices, float64(status.Devices), nil)
	s.Add(draTainted, float64(status.Tainted), nil)
	if claims := s.src.Claims.Load(); claims != nil {
		s.Add(draPreparedClaims, float64(len(claims.ByUID)), nil)
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

// collectCDIRuntime adds the support of CDI by the container runtime.
func (s *scrape) collectCDIRuntime() {
	if s.src.CDIRuntime == nil {
		return
	}
	if r, needed := s.src.CDIRuntime(); needed {
		s.AddWith(cdiRuntimeInfo, 1, nil, label("version", r.Version), label("cdi", r.Support))
	}
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

func (s *scrape) collectPlugin(status plugin.Status) {
	s.Add(pluginEnabled, boolValue(!status.Off), nil)
	for i := range status.Resources {
		r := &status.Resources[i]
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
	s.Add(podResourcesUp, boolValue(s.holders.Err == ""), nil)
	if !s.holders.At.IsZero() {
		s.Add(podResourcesAge, s.now.Sub(s.holders.At).Seconds(), nil)
	}
}

// collectNode adds what the agent knows and does for the node, besides its devices.
func (s *scrape) collectNode() {
	if s.src.NodeDevices != nil {
		seen := s.src.NodeDevices()
		for _, by := range slices.Sorted(maps.Keys(seen)) {
			s.AddWith(nodeDevices, float64(seen[by]), nil, label("seen_by", string(by)))
		}
	}
	if s.src.OtherPlugins != nil {
		others := s.src.OtherPlugins()
		for _, resource := range slices.Sorted(maps.Keys(others)) {
			s.AddWith(otherPluginDevices, float64(others[resource]), nil, label("resource", resource))
		}
	}
	if s.src.UnmatchedRefs != nil && s.snapshot.Polled() {
		n := 0
		for _, u := range s.src.UnmatchedRefs() {
			n += len(u.Refs)
		}
		s.Add(unmatchedRefs, float64(n), nil)
	}
	if s.src.Kubernetes != nil {
		if k, enabled := s.src.Kubernetes(); enabled {
			s.Add(kubernetesWrites, float64(k.Writes), nil)
			s.Add(kubernetesEvents, float64(k.Events), nil)
			s.Add(kubernetesDropped, float64(k.Dropped), nil)
			s.Add(kubernetesErrors, float64(k.Errors), nil)
		}
	}
	if s.src.NodeWrites != nil {
		if n, enabled := s.src.NodeWrites(); enabled {
			s.Add(nodeWrites, float64(n.Writes), nil)
			s.Add(nodeErrors, float64(n.Errors), nil)
			for _, kind := range n.Leftovers {
				s.AddWith(nodeLeftovers, 1, nil, label("kind", kind))
			}
		}
	}
	s.addIfEnabled(podLabelsUp, s.src.PodLabelsUp)
	if s.snapshot != nil {
		for _, b := range s.snapshot.Bindings {
			if b.Warning.Reason != "" {
				s.AddWith(bindingWarning, 1, nil, label("key", b.Key), label("entry", b.Entry), label("reason", b.Warning.Reason))
			}
		}
	}
	if s.src.Unwritten != nil {
		for _, f := range s.src.Unwritten() {
			s.AddWith(fileUnwritten, unixSeconds(f.Since), nil, label("file", f.Path))
		}
	}
	s.addIfEnabled(stateFileRead, s.src.StateFileRead)
	s.collectProcessesStatus()
}

// collectAgent adds the series that an agent has also while it waits for another one that serves the node.
func (s *scrape) collectAgent(holder string, waits bool) {
	s.Add(waitsForHolder, boolValue(waits), nil)
	if waits && holder != "" {
		s.AddWith(holderInfo, 1, nil, label("holder", holder))
	}
	r := s.src.Reload()
	s.Add(fieldsUnknown, float64(len(s.cfg.Chosen.Unknown)), nil)
	s.Add(reloadSuccessful, boolValue(r.OK), nil)
	s.Add(reloadTime, unixSeconds(r.At), nil)
	s.Add(connectionsDropped, float64(s.src.ConnectionsDropped()), nil)
	if s.src.LogDropped != nil {
		s.Add(logDropped, float64(s.src.LogDropped()), nil)
	}
	s.AddWith(buildInfo, 1, nil, label("version", s.src.Version), label("revision", s.src.Revision), label("goversion", runtime.Version()))
}

func (s *scrape) addIfEnabled(family int, status func() (up, enabled bool)) {
	if status == nil {
		return
	}
	if up, enabled := status(); enabled {
		s.Add(family, boolValue(up), nil)
	}
}
