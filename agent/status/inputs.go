package status

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Inputs is the state of the agent's components that a Node is built from.
type Inputs struct {
	Node, Version, Revision string

	Now                 time.Time
	NotReady            []string
	Reload              metrics.Reload
	ConfigError         string   // of the newest configuration; ignored while Reload.OK
	ConfigNotes         []string // on the configuration in force
	UnmatchedRefs       []health.UnmatchedRefs
	Snapshot            *health.Snapshot // nil before the first
	Lock                nodelock.State   // whether this agent may serve the node
	Plugin              plugin.Status
	DRA                 dra.Status
	Claims              *dra.Claims // prepared; nil if unknown
	Holders             podresources.Holders
	Processes           *processes.Snapshot // nil if they are not measured
	Shares              []plugin.ShareUnits // of the shared devices
	IdleTimes           metrics.IdleTimes   // of the holders
	Idle                node.IdleConfig     // by which a holder is idle
	Memory              *memlimits.Snapshot // nil without devices that are shared by memory
	Kube                kube.Status
	NodeObject          kube.NodeStatus
	StartupTaintReasons []string // NodeObject.StartupTaintReasons
	StateDir            statefile.Status
	StateLoss           string // why an earlier process lost the state directory; empty if none did
	Events              []Event
}

// New builds the status from its inputs.
func New(k Inputs) Node {
	s := Node{
		Node: k.Node, Version: k.Version, Revision: k.Revision, Time: k.Now.UTC(),
		Ready: len(k.NotReady) == 0, NotReady: list(k.NotReady), Events: list(k.Events),
		Config:  Config{OK: k.Reload.OK, Since: k.Reload.At.UTC(), Notes: list(k.ConfigNotes)},
		Kubelet: kubeletStatus(k.Lock, k.Plugin, k.Holders), DRA: draStatus(k.DRA, k.Claims, k.Holders),
		API: APIServer{
			k.Kube.Enabled || k.Kube.IdleEnabled, k.Kube.Writes, k.Kube.Events, k.Kube.Dropped, k.Kube.Errors, k.Kube.ConditionErr,
			cmp.Or(k.Kube.EventErr, k.Kube.IdleErr),
		},
		Object: NodeObject{
			k.NodeObject.Enabled, k.NodeObject.Writes, k.NodeObject.Errors, k.NodeObject.LabelsErr, k.NodeObject.FeatureErr, k.NodeObject.TaintsErr,
			k.NodeObject.ConditionErr, k.StartupTaintReasons,
		},
		Memory: StateDir{
			k.StateDir.Path, k.StateDir.Err, k.StateDir.Since.UTC(), k.StateDir.Written.UTC(), k.StateDir.Unread.UTC(), k.StateLoss,
			k.StateDir.Unreserved, k.StateDir.SetAside,
		},
		Bindings: []Binding{},
		Source: Source{
			Status: health.SourceStarting.String(), Checks: Checks{Status: health.ChecksUnknown.String()}, Incidents: []Incident{},
			Events: []EventSource{},
		}, GPUs: []Device{},
	}
	if !k.Reload.OK {
		s.Config.Error = k.ConfigError
	}
	for _, u := range k.UnmatchedRefs {
		s.Config.Notes = append(s.Config.Notes, u.String())
	}
	if k.Snapshot == nil {
		return s
	}
	s.Bindings = Bindings(k.Snapshot.Bindings)
	src := k.Snapshot.Source
	s.Source = Source{
		Kind: src.Kind, Status: src.Status.String(), Since: src.Since.UTC(), Error: src.Err, Reconnects: src.Reconnects,
		Measured: k.Snapshot.At.UTC(), Driver: src.Versions.Driver, CUDA: src.Versions.CUDA, DCGM: src.Versions.DCGM, Engine: src.Versions.Engine,
		Checks:    Checks{src.Checks.Status.String(), src.Checks.Since.UTC(), src.Checks.Err},
		Incidents: incidentsStatus(src.Incidents), Events: eventSourcesStatus(src.Events),
	}
	if src.Status == health.SourceDetached {
		s.Source.Until = src.Detachment.Until.UTC()
	}
	if g := src.XIDGap; !g.Since.IsZero() {
		s.Source.XIDGap = &XIDGap{g.Since.UTC(), g.Until.UTC(), g.Of(k.Now).Seconds()}
	}
	devices := k.Snapshot.Devices
	if s.Source.Outdated = k.Snapshot.Polled() && !k.Snapshot.ValuesCount(k.Now); s.Source.Outdated {
		devices = slices.Clone(devices)
		for i := range devices {
			devices[i].Sample.Values = nil
		}
	}
	s.GPUs = Devices(devices, k.Holders, src.Kind)
	if k.Processes != nil {
		s.ProcessesError = cmp.Or(k.Processes.Err, k.Processes.Warning)
		addUsage(s.GPUs, k.Processes)
	}
	if k.Memory != nil {
		s.MemoryLimitsError = k.Memory.Err
	}
	s.MPSWarning = SingleUserMPS(devices, k.Holders)
	addSharing(s.GPUs, k)
	addIdle(s.GPUs, k, metrics.NewGPUShares(k.Snapshot.Devices, k.Shares, k.Claims))
	return s
}

// addIdle adds how long the holders have not used their devices, and which part of a GPU each has.
func addIdle(devices []Device, k Inputs, shares metrics.GPUShares) {
	for i := range devices {
		d := &devices[i]
		addIdle(d.MIG, k, shares)
		holders := k.Holders.By[d.UUID] // as in d.Holders, in the same order
		parts := shares.Of(d.UUID, holders)
		for j, h := range holders {
			if parts[j] > 0 {
				d.Holders[j].GPUShare = &parts[j]
			}
			if idle, ok := k.IdleTimes.Of(d.UUID, h); ok {
				d.Holders[j].Idle = idleStatus(idle, k.Idle)
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

func kubeletStatus(lock nodelock.State, p plugin.Status, h podresources.Holders) Kubelet {
	k := Kubelet{
		Error: p.Err, AuditError: p.AuditErr, HoldersError: h.Err, Holders: h.At.UTC(), Resources: []Resource{}, Plugin: pluginOn,
		Warnings: []string{},
	}
	if h.Settling {
		k.HoldersError = h.Unknown(h.At)
	}
	if p.Off {
		k.Plugin = pluginOff
	}
	if lock.Waits {
		k.WaitsFor = cmp.Or(lock.Holder, &nodelock.Holder{})
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
