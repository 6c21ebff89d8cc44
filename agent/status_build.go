package agent

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// known is all that a NodeStatus is made of.
type known struct {
	node     string
	build    Build
	now      time.Time
	notReady []string
	reload   metrics.Reload
	bad      string           // what was wrong with the newest configuration
	snapshot *health.Snapshot // nil before the first
	plugin   plugin.Status
	holders  plugin.Holders
	kube     kube.Status
	memory   statefile.Status
	events   []EventStatus
}

// status looks at what is known now. Like a scrape it asks nobody.
func (a *Agent) status() NodeStatus {
	return statusOf(known{
		node: nodeName(), build: a.build, now: time.Now(), notReady: a.unready(), reload: *a.reloaded.Load(), bad: orEmpty(a.badConfig.Load()),
		snapshot: a.snapshots.Load(), plugin: a.devices.Status(), holders: a.devices.Holders(),
		kube: a.reporter.Status(), memory: a.keeper.Status(), events: a.events.latest(),
	})
}

func statusOf(k known) NodeStatus {
	s := NodeStatus{
		Node: k.node, Version: k.build.Version, Revision: k.build.Revision, Time: k.now.UTC(),
		Ready: len(k.notReady) == 0, NotReady: list(k.notReady), Events: list(k.events),
		Config: configStatus(k), Kubelet: kubeletStatus(k.plugin, k.holders),
		API:    APIStatus{k.kube.Enabled, k.kube.Writes, k.kube.Events, k.kube.Dropped, k.kube.Errors, k.kube.Condition, k.kube.Event},
		Memory: MemoryStatus{k.memory.Path, k.memory.Err, k.memory.Since.UTC(), k.memory.Written.UTC()},
		Source: SourceStatus{Status: health.SourceStarting.String()}, GPUs: []DeviceStatus{},
	}
	if k.snapshot == nil {
		return s
	}
	src := k.snapshot.Source
	s.Source = SourceStatus{
		Kind: src.Kind, Status: src.Status.String(), Since: src.Since.UTC(), Until: src.Until.UTC(), Error: src.Err, Reconnects: src.Reconnects,
		Measured: k.snapshot.At.UTC(), Driver: src.Versions.Driver, CUDA: src.Versions.CUDA, DCGM: src.Versions.DCGM, Engine: src.Versions.Engine,
	}
	s.GPUs = deviceStatuses(k.snapshot.Devices, k.holders)
	return s
}

func configStatus(k known) ConfigStatus {
	c := ConfigStatus{OK: k.reload.OK, Since: k.reload.At.UTC()}
	if !c.OK {
		c.Error = k.bad
	}
	return c
}

// The words of KubeletStatus.Plugin. What an older agent does not say is on.
const (
	pluginOn  = "on"
	pluginOff = "off"
)

func kubeletStatus(p plugin.Status, h plugin.Holders) KubeletStatus {
	k := KubeletStatus{Error: p.Err, AuditError: p.AuditErr, HoldersError: h.Err, Holders: h.At.UTC(), Resources: []ResourceStatus{}, Plugin: pluginOn, Warnings: list(p.Warnings)}
	if p.Off {
		k.Plugin = pluginOff
	}
	for _, r := range p.Resources {
		k.Resources = append(k.Resources, ResourceStatus{
			Name: r.Name, Registered: r.Registered, Error: r.Err, Devices: r.Devices, Healthy: r.Healthy,
			Registrations: r.Registrations, Streams: r.Streams, AuditMismatches: r.AuditMismatches,
			Allocations: r.Allocations, AllocationErrors: r.AllocationErrors,
		})
	}
	return k
}

// deviceStatuses returns the GPUs, each with its MIG devices. One whose GPU is not known stands by itself.
func deviceStatuses(devices []health.DeviceState, h plugin.Holders) []DeviceStatus {
	all := make([]DeviceStatus, 0, len(devices))
	at := make(map[health.DeviceID]int)
	for i := range devices {
		if devices[i].Device.Kind == health.KindGPU {
			at[devices[i].Device.ID] = len(all)
			all = append(all, deviceStatus(&devices[i], h))
		}
	}
	for i := range devices {
		if devices[i].Device.Kind == health.KindGPU {
			continue
		}
		if gpu, ok := at[devices[i].Device.Parent]; ok {
			all[gpu].MIG = append(all[gpu].MIG, deviceStatus(&devices[i], h))
		} else {
			all = append(all, deviceStatus(&devices[i], h))
		}
	}
	for i := range all {
		slices.SortStableFunc(all[i].MIG, func(a, b DeviceStatus) int { return cmp.Or(cmp.Compare(*a.GI, *b.GI), cmp.Compare(*a.CI, *b.CI)) })
	}
	slices.SortStableFunc(all, func(a, b DeviceStatus) int { return cmp.Compare(a.Index, b.Index) })
	return all
}

func deviceStatus(d *health.DeviceState, h plugin.Holders) DeviceStatus {
	s := DeviceStatus{
		UUID: d.Device.ID, Index: d.Device.Index, Model: d.Device.Model, PCI: d.Device.PCI, NUMA: d.Device.NUMA,
		Profile: d.Device.Profile, MIGMode: d.Device.MIGMode, Presence: d.Sample.Presence.String(),
		State: d.Verdict.State.String(), Since: d.Verdict.Since.UTC(),
		Findings: findingStatuses(d.Verdict.Findings), XIDs: []XIDStatus{}, Holders: []HolderStatus{},
		Fields: finite(d.Sample.Values),
	}
	if d.Device.Kind == health.KindMIG {
		s.GI, s.CI, s.MIGIndex = &d.Device.GI, &d.Device.CI, migIndex(&d.Device)
	}
	s.Values = valuesStatus(s.Fields, d.Device.Memory)
	for _, code := range slices.Sorted(maps.Keys(d.XIDCounts)) {
		s.XIDs = append(s.XIDs, XIDStatus{XID: code, Name: health.LookupXID(code).Name, Count: d.XIDCounts[code]})
	}
	if x := d.LastXID; x.Code != 0 {
		s.LastXID = &XIDStatus{XID: x.Code, Name: health.LookupXID(x.Code).Name, Time: x.At.UTC()}
	}
	for _, holder := range h.By[d.Device.ID] {
		s.Holders = append(s.Holders, HolderStatus{holder.Namespace, holder.Pod, holder.Container, holder.Resource, holder.DeviceID})
	}
	return s
}

// migIndex is nil for a GPU and for a MIG device that the driver does not list.
func migIndex(d *health.Device) *int {
	if d.Kind != health.KindMIG || d.MIGIndex < 0 {
		return nil
	}
	return &d.MIGIndex
}

func findingStatuses(findings []health.Finding) []FindingStatus {
	all := make([]FindingStatus, 0, len(findings))
	for _, f := range findings {
		all = append(all, FindingStatus{
			Cause: f.Cause, State: f.State.String(), Reason: f.Reason, Action: f.Action,
			Since: f.Since.UTC(), Clears: f.Clears.String(), From: f.From,
		})
	}
	return all
}

func valuesStatus(fields map[health.Field]float64, memory uint64) ValuesStatus {
	value := func(f health.Field, unit float64) *float64 {
		v, ok := fields[f]
		if !ok {
			return nil
		}
		v *= unit
		return &v
	}
	const mib = 1 << 20
	v := ValuesStatus{
		Temperature: value(health.FieldGPUTemp, 1), MemoryTemperature: value(health.FieldMemoryTemp, 1),
		Power: value(health.FieldPower, 1), Utilization: value(health.FieldGPUUtil, 1), SMClock: value(health.FieldSMClock, 1),
		MemoryUsed: value(health.FieldFBUsed, mib), MemoryTotal: value(health.FieldFBTotal, mib),
	}
	if v.MemoryTotal == nil && memory > 0 {
		total := float64(memory)
		v.MemoryTotal = &total
	}
	return v
}

// finite leaves out what JSON cannot say. The map is one of a snapshot, so it is copied if it must change.
func finite(values map[health.Field]float64) map[health.Field]float64 {
	odd := func(_ health.Field, v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) }
	for f, v := range values {
		if odd(f, v) {
			values = maps.Clone(values)
			maps.DeleteFunc(values, odd)
			break
		}
	}
	return values
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// list is an empty list rather than none: JSON has [] then, not null.
func list[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}
