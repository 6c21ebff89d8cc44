package dra

import (
	"reflect"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// changed returns another value of a type.
func changed(v reflect.Value) reflect.Value {
	next := reflect.New(v.Type()).Elem()
	next.Set(v)
	switch v.Kind() {
	case reflect.String:
		next.SetString(v.String() + "x")
	case reflect.Bool:
		next.SetBool(!v.Bool())
	case reflect.Int, reflect.Int64:
		next.SetInt(v.Int() + 1)
	case reflect.Uint8, reflect.Uint64:
		next.SetUint(v.Uint() ^ 1)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			next.Set(reflect.ValueOf(v.Interface().(time.Time).Add(time.Hour)))
			break
		}
		for i := range v.NumField() {
			if next.Field(i).CanSet() {
				next.Field(i).Set(changed(v.Field(i)))
			}
		}
	case reflect.Slice:
		next.Set(reflect.Zero(v.Type()))
		if v.Len() == 0 {
			next.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
	default:
		next.Set(reflect.Zero(v.Type()))
	}
	return next
}

// Same is false for every change of a field that changes the pool.
func TestSameFindsEveryChange(t *testing.T) {
	build := func() PoolInput {
		snap := simulated(t, "h100-8-mig")
		snap.Devices[0].Verdict = verdict(finding("xid-79", health.Unhealthy))
		return PoolInput{Config: configured(sharedMemory("1Gi")), Snapshot: snap}
	}
	base := build()
	pool := BuildPool(base)
	check := func(name string, differs bool, in PoolInput) {
		t.Helper()
		if reflect.DeepEqual(BuildPool(in), pool) {
			if differs {
				t.Errorf("%s: the change has no effect", name)
			}
			return
		}
		if in.Same(&base) || base.Same(&in) {
			t.Errorf("%s: the pool differs, and Same is true", name)
		}
	}
	with := func(change func(*health.Snapshot)) PoolInput {
		in, snap := base, *base.Snapshot
		snap.Devices = append([]health.DeviceState(nil), snap.Devices...)
		change(&snap)
		in.Snapshot = &snap
		return in
	}
	for _, device := range []int{0, 1} { // a GPU and a MIG device
		for field := range reflect.TypeFor[health.Device]().Fields() {
			check(field.Name, false, with(func(s *health.Snapshot) {
				f := reflect.ValueOf(&s.Devices[device].Device).Elem().FieldByIndex(field.Index)
				f.Set(changed(f))
			}))
		}
	}
	for field := range reflect.TypeFor[health.Finding]().Fields() {
		if !field.IsExported() {
			continue
		}
		check(field.Name, false, with(func(s *health.Snapshot) {
			v := &s.Devices[0].Verdict
			v.Findings = append([]health.Finding(nil), v.Findings...)
			f := reflect.ValueOf(&v.Findings[0]).Elem().FieldByIndex(field.Index)
			f.Set(changed(f))
		}))
	}
	id := base.Snapshot.Devices[0].Device.ID
	for name, in := range map[string]PoolInput{
		"state":   with(func(s *health.Snapshot) { s.Devices[1].Verdict.State = health.Degraded }),
		"finding": with(func(s *health.Snapshot) { s.Devices[1].Verdict = verdict(finding("lost", health.Degraded)) }),
		"version": with(func(s *health.Snapshot) { s.Source.Versions.Driver = "1.0" }),
		"devices": with(func(s *health.Snapshot) { s.Devices = s.Devices[1:] }),
		"polled":  with(func(s *health.Snapshot) { s.At = time.Time{} }),
		"names":   {Config: base.Config, Snapshot: base.Snapshot, Names: map[health.DeviceID]string{id: "gpu-99"}},
		"roots": {
			Config: base.Config, Snapshot: base.Snapshot,
			PCIeRoots: map[string]string{base.Snapshot.Devices[0].Device.PCI: "pci0000:00"},
		},
		"taints": {Config: base.Config, Snapshot: base.Snapshot, NoTaints: true},
		"shares": {Config: base.Config, Snapshot: base.Snapshot, NoShares: true},
		"config": {Config: configured(func(c *plugin.Config) { c.Exclude = []string{"0"} }), Snapshot: base.Snapshot},
	} {
		check(name, true, in)
	}

	linked := PoolInput{Config: base.Config, Snapshot: simulated(t, "h100-8")}
	unlinked, snap := linked, *linked.Snapshot
	snap.Devices = append([]health.DeviceState(nil), snap.Devices...)
	for i := range snap.Devices {
		snap.Devices[i].Device.Links = nil
	}
	if unlinked.Snapshot = &snap; unlinked.Same(&linked) {
		t.Error("NVLinks changed")
	}

	auto := configured(sharedMemory("1Gi"), enforced(plugin.EnforceAuto, true))
	before := PoolInput{Config: auto, Snapshot: base.Snapshot, Examined: true}
	after := before
	after.Capabilities = &memlimits.Capabilities{}
	if before.Same(&after) {
		t.Error("capabilities changed")
	}
	// The next poll of the same devices.
	again := with(func(s *health.Snapshot) { s.Seq, s.At = s.Seq+1, s.At.Add(time.Second) })
	if !again.Same(&base) {
		t.Error("another poll: not the same")
	}
	if n := testing.AllocsPerRun(10, func() { again.Same(&base) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
