package status

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// New returns the status. idle are the idle times of the holders, and c is by which of them a holder is idle.
func New(v *view.View, idle metrics.IdleTimes, c node.IdleConfig, events []Event) Node {
	problems := v.Problems()
	s := Node{
		Node: v.Node, Version: v.Version, Revision: v.Revision, Time: v.At.UTC(),
		Ready: problems.Ready(), NotReady: list(problems.Texts(view.Unready)), Problems: list(problems), Events: list(events),
		Config:  Config{OK: v.Reload.OK, Since: v.Reload.At.UTC(), Error: v.Reload.Err, Notes: list(v.Notes)},
		Kubelet: kubeletStatus(v), DRA: draStatus(v.DRA, v.Claims, v.Holders),
		API: APIServer{
			v.Kube.On(), v.Kube.Writes, v.Kube.Events, v.Kube.Dropped, v.Kube.Errors, v.Kube.ConditionErr,
			cmp.Or(v.Kube.EventErr, v.Kube.IdleErr),
		},
		Object: NodeObject{
			v.NodeObject.Enabled, v.NodeObject.Writes, v.NodeObject.Errors, v.NodeObject.LabelsErr, v.NodeObject.FeatureErr, v.NodeObject.TaintsErr,
			v.NodeObject.ConditionErr, v.StartupTaintReasons(),
		},
		Memory: StateDir{
			v.StateDir.Path, v.StateDir.Err, v.StateDir.Since.UTC(), v.StateDir.Written.UTC(), v.StateDir.Unread.UTC(), v.StateLoss,
			v.StateDir.Unreserved, v.StateDir.SetAside,
		},
		Bindings: []Binding{},
		Source: Source{
			Status: health.SourceStarting.String(), Checks: Checks{Status: health.ChecksUnknown.String()}, Incidents: []Incident{},
			Events: []EventSource{},
		}, GPUs: []Device{},
	}
	for _, u := range v.UnmatchedRefs {
		s.Config.Notes = append(s.Config.Notes, u.String())
	}
	if v.Snapshot == nil {
		return s
	}
	s.Bindings = Bindings(v.Snapshot.Bindings)
	src := v.Snapshot.Source
	s.Source = Source{
		Kind: src.Kind, Status: src.Status.String(), Since: src.Since.UTC(), Error: src.Err, Reconnects: src.Reconnects,
		Measured: v.Snapshot.At.UTC(), Driver: src.Versions.Driver, CUDA: src.Versions.CUDA, DCGM: src.Versions.DCGM, Engine: src.Versions.Engine,
		Checks:    Checks{src.Checks.Status.String(), src.Checks.Since.UTC(), src.Checks.Err},
		Incidents: incidentsStatus(src.Incidents), Events: eventSourcesStatus(src.Events),
	}
	if src.Status == health.SourceDetached {
		s.Source.Until = src.Detachment.Until.UTC()
	}
	if g := src.XIDGap; !g.Since.IsZero() {
		s.Source.XIDGap = &XIDGap{g.Since.UTC(), g.Until.UTC(), g.Of(v.At).Seconds()}
	}
	devices := v.Snapshot.Devices
	if s.Source.Outdated = v.Snapshot.Polled() && !v.Snapshot.ValuesCount(v.At); s.Source.Outdated {
		devices = slices.Clone(devices)
		for i := range devices {
			devices[i].Sample.Values = nil
		}
	}
	s.GPUs = Devices(devices, v.Holders, src.Kind)
	if v.Processes != nil {
		s.ProcessesError = cmp.Or(v.Processes.Err, v.Processes.Warning)
		addUsage(s.GPUs, v.Processes)
	}
	if v.Memory != nil {
		s.MemoryLimitsError = v.Memory.Err
	}
	s.MPSWarning = v.SingleUserMPS()
	addSharing(s.GPUs, v)
	addHolding(s.GPUs, v.Holders, metrics.NewGPUShares(v.Snapshot.Devices, v.Shares, v.Claims), idle, c)
	return s
}

// addHolding adds how long the holders have not used their devices, and which part of a GPU each has.
func addHolding(devices []Device, held podresources.Holders, shares metrics.GPUShares, idle metrics.IdleTimes, c node.IdleConfig) {
	for i := range devices {
		d := &devices[i]
		addHolding(d.MIG, held, shares, idle, c)
		holders := held.By[d.UUID] // as in d.Holders, in the same order
		parts := shares.Of(d.UUID, holders)
		for j, h := range holders {
			if parts[j] > 0 {
				d.Holders[j].GPUShare = &parts[j]
			}
			if i, ok := idle.Of(d.UUID, h); ok {
				d.Holders[j].Idle = idleStatus(i, c)
			}
		}
	}
}

// idleStatus returns nil while nothing is known.
func idleStatus(i metrics.IdleTime, c node.IdleConfig) *Idle {
	if !i.WorkKnown && !i.ProcessesKnown {
		return nil
	}
	s := &Idle{Observed: i.Observed.Seconds()}
	if i.WorkKnown {
		s.NoWork = new(i.NoWork.Seconds())
	}
	if i.ProcessesKnown {
		s.NoProcess = new(i.NoProcess.Seconds())
	}
	never, known := i.NeverUsed()
	s.NeverUsed = never && known
	if _, idle := c.Idle(i); idle {
		s.Evidence = c.Resolved()
	}
	return s
}

// addUsage adds the processes of the devices. The processes of a GPU in MIG mode belong to its MIG devices.
func addUsage(devices []Device, p *processes.Snapshot) {
	for i := range devices {
		d := &devices[i]
		addUsage(d.MIG, p)
		usage, measured := p.Of(d.UUID)
		if !measured || len(usage) == 0 && d.MIGMode {
			continue
		}
		all := make([]Usage, len(usage))
		for i, u := range usage {
			all[i] = Usage{Namespace: u.Container.Namespace, Pod: u.Container.Pod, Container: u.Container.Name, Processes: u.Processes}
			if u.HasMemory {
				all[i].Memory = &u.Memory
			}
			if percent := 100 * u.SM; u.HasSM {
				all[i].SM = &percent
			}
		}
		d.Processes = &all
	}
}

func incidentsStatus(incidents []health.Incident) []Incident {
	all := make([]Incident, 0, len(incidents))
	for _, i := range incidents {
		info := catalog.LookupIncident(i.Code)
		all = append(all, Incident{i.System, info.Name, i.Severity.String(), i.Message, info.Action, info.Action.Advice()})
	}
	return all
}

func eventSourcesStatus(states []health.EventSourceState) []EventSource {
	all := make([]EventSource, 0, len(states))
	for _, s := range states {
		all = append(all, EventSource{s.Witness.String(), s.Status.String(), s.Since.UTC(), s.Err})
	}
	return all
}

// The values of Kubelet.Plugin.
const (
	pluginOn  = "on"
	pluginOff = "off"
)

func kubeletStatus(v *view.View) Kubelet {
	p := &v.Plugin
	k := Kubelet{
		Error: p.Err, AuditError: p.AuditErr, HoldersError: v.HoldersErr(), Holders: v.Holders.At.UTC(), Resources: []Resource{},
		Plugin: pluginOn, Warnings: []string{},
	}
	if p.Off {
		k.Plugin = pluginOff
	}
	if v.Lock.Waits {
		k.WaitsFor = cmp.Or(v.Lock.Holder, &nodelock.Holder{})
	}
	k.Warnings = append(k.Warnings, plugin.OtherPluginTexts(p.OtherPlugins)...)
	for _, r := range p.Resources {
		s := Resource{
			Name: r.Name, Registered: r.Registered, Error: r.Err, Devices: r.Devices, Healthy: r.Healthy,
			Registrations: r.Registrations, Streams: r.Streams, AuditMismatches: r.AuditMismatches,
			Allocations: r.Allocations, AllocationErrors: r.AllocationErrors,
		}
		if u := r.Unschedulable; u != nil {
			s.Unschedulable = &u.Devices
			for _, pod := range u.Pods {
				s.BlockingPods = append(s.BlockingPods, Pod{pod.Namespace, pod.Name})
			}
			if u.Devices > 0 {
				k.Warnings = append(k.Warnings, u.String()) // before the layout's
			}
		}
		k.Resources = append(k.Resources, s)
	}
	k.Warnings = append(k.Warnings, p.Warnings...)
	return k
}

// Devices returns the GPUs by index, each with its MIG devices. A MIG device without a listed parent is an element of its
// own. source is the kind of the source.
func Devices(devices []health.DeviceState, h podresources.Holders, source string) []Device {
	all := make([]Device, 0, len(devices))
	at := make(map[health.DeviceID]int)
	for i := range devices {
		if devices[i].Device.Kind == health.KindGPU {
			at[devices[i].Device.ID] = len(all)
			all = append(all, deviceStatus(&devices[i], h, source))
		}
	}
	for i := range devices {
		if devices[i].Device.Kind == health.KindGPU {
			continue
		}
		if gpu, ok := at[devices[i].Device.Parent]; ok {
			all[gpu].MIG = append(all[gpu].MIG, deviceStatus(&devices[i], h, source))
		} else {
			all = append(all, deviceStatus(&devices[i], h, source))
		}
	}
	for i := range all {
		slices.SortStableFunc(all[i].MIG, func(a, b Device) int { return cmp.Or(cmp.Compare(*a.GI, *b.GI), cmp.Compare(*a.CI, *b.CI)) })
	}
	slices.SortStableFunc(all, func(a, b Device) int {
		return health.CompareIndex(&health.Device{Index: a.Index}, &health.Device{Index: b.Index})
	})
	return all
}

func deviceStatus(d *health.DeviceState, h podresources.Holders, source string) Device {
	s := Device{
		UUID: d.Device.ID, Index: d.Device.Index, Model: d.Device.Model, PCI: d.Device.PCI, NUMA: d.Device.NUMA,
		Profile: d.Device.Profile, MIGMode: d.Device.MIGMode, Presence: d.Sample.Presence.String(),
		State: d.Verdict.State.String(), Since: d.Verdict.Since.UTC(),
		Findings: Findings(d.Verdict.Findings), XIDs: []XID{}, Holders: []Holder{},
		Fields: finite(d.Sample.Values),
	}
	if d.Device.Kind == health.KindMIG {
		s.GI, s.CI, s.MIGIndex = &d.Device.GI, &d.Device.CI, migIndex(&d.Device)
	}
	s.Values = valuesStatus(s.Fields, d.Device.Memory)
	for _, code := range slices.Sorted(maps.Keys(d.XIDs.Codes)) {
		t := d.XIDs.Codes[code]
		s.XIDs = append(s.XIDs, XID{
			XID: code, Name: catalog.LookupXID(code).Name, Count: t.Total, Source: xidSource(t.Newest.Witness, source),
		})
	}
	if x := d.XIDs.Newest(); x.Code != 0 {
		s.LastXID = &XID{
			XID: x.Code, Name: catalog.LookupXID(x.Code).Name, Time: x.At.UTC(), Source: xidSource(x.Witness, source),
			Process: x.Detail.Process, PID: x.Detail.PID,
		}
	}
	for _, holder := range h.By[d.Device.ID] {
		s.Holders = append(s.Holders, holderStatus(holder))
	}
	for _, holder := range h.Admin[d.Device.ID] {
		s.AdminHolders = append(s.AdminHolders, holderStatus(holder))
	}
	return s
}

func holderStatus(h podresources.Holder) Holder {
	s := Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: h.Resource, Device: h.DeviceID}
	if h.ByClaim() {
		s.Claim = &Claim{h.Claim.Name, h.Claim.Driver, h.Claim.Pool, h.Claim.ShareID}
	}
	return s
}

// xidSource returns XID.Source.
func xidSource(w health.Witness, source string) string {
	if w == health.WitnessSource {
		return source
	}
	return w.String()
}

// gpuIndex returns nil if another GPU has the index.
func gpuIndex(d *health.Device) *int {
	if d.Index < 0 {
		return nil
	}
	return &d.Index
}

// migIndex returns nil for a GPU and for a MIG device that the driver does not list.
func migIndex(d *health.Device) *int {
	if d.Kind != health.KindMIG || d.MIGIndex < 0 {
		return nil
	}
	return &d.MIGIndex
}

// Findings returns findings as the status shows them.
func Findings(findings []health.Finding) []Finding {
	all := make([]Finding, 0, len(findings))
	for _, f := range findings {
		all = append(all, Finding{
			Cause: f.Cause, State: f.State.String(), Reason: f.Reason, Action: f.Action, Advice: f.Advice(),
			Since: f.Since.UTC(), Clears: f.Clears.String(), From: f.From,
		})
	}
	return all
}

func valuesStatus(fields map[health.Field]float64, memory uint64) Values {
	value := func(f health.Field, unit float64) *float64 {
		v, ok := fields[f]
		if !ok {
			return nil
		}
		v *= unit
		return &v
	}
	const mib = 1 << 20
	v := Values{
		Temperature: value(health.FieldGPUTemp, 1), MemoryTemperature: value(health.FieldMemoryTemp, 1),
		Power: value(health.FieldPower, 1), Utilization: value(health.FieldGPUUtil, 1),
		// With the names of dcgm-exporter 4.9, DCGM measures the fields in base units instead.
		SMClock:     cmp.Or(value(health.FieldSMClock, 1), value(health.FieldSMClockHertz, 1e-6)),
		MemoryUsed:  cmp.Or(value(health.FieldFBUsed, mib), value(health.FieldFBUsedBytes, 1)),
		MemoryTotal: value(health.FieldFBTotal, mib),
	}
	if v.Utilization == nil { // the driver has none for a partitioned GPU and its MIG devices
		v.Utilization = value(health.FieldEngineActive, 100)
	}
	if v.MemoryTotal == nil && memory > 0 {
		total := float64(memory)
		v.MemoryTotal = &total
	}
	return v
}

// finite removes values that JSON cannot represent. The map belongs to a snapshot, so it is copied before a change.
func finite(values map[health.Field]float64) map[health.Field]float64 {
	notFinite := func(_ health.Field, v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) }
	for f, v := range values {
		if notFinite(f, v) {
			values = maps.Clone(values)
			maps.DeleteFunc(values, notFinite)
			break
		}
	}
	return values
}

// list replaces nil by an empty slice, which is [] in JSON, not null.
func list[T any](s []T) []T { return append([]T{}, s...) }
