package view

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

func TestNotOffered(t *testing.T) {
	pending := plugin.ResourceStatus{Name: "nvidia.com/mig-1g.10gb", Registered: true, Devices: 7}
	published := dra.Status{Enabled: true, Registered: true, Published: now, Devices: 8}
	serving := func(change func(*dra.Status)) func(*View) {
		return func(v *View) {
			v.PluginConfig.API, v.Plugin, v.DRA = plugin.APIDRA, plugin.Status{Off: true}, published
			change(&v.DRA)
		}
	}
	off := func(change func(*View)) func(*View) { // another plugin offers the devices
		return func(v *View) {
			v.PluginConfig.Enabled, v.Plugin = false, plugin.Status{Off: true}
			change(v)
		}
	}
	for name, c := range map[string]struct {
		change func(*View)
		want   []string
	}{
		"audited": {func(*View) {}, nil},
		"nothing": {func(v *View) { v.Plugin = plugin.Status{} }, []string{"plugin: no device"}},
		"one is not": {
			func(v *View) { v.Plugin.Resources = append(v.Plugin.Resources, pending) },
			[]string{"plugin: nvidia.com/mig-1g.10gb: not audited: the kubelet"},
		},
		"cannot be": {func(v *View) {
			v.Plugin = plugin.Status{AuditErr: "denied", Resources: []plugin.ResourceStatus{pending}}
		}, []string{"plugin: nvidia.com/mig-1g.10gb: not audited: denied"}},
		"without devices": {func(v *View) { v.Plugin.Resources[0].Devices = 0 }, []string{"plugin: no device"}},
		"not registered":  {func(v *View) { v.Plugin.Resources[0].Registered = false }, []string{"plugin: nvidia.com/gpu: not registered"}},
		"not ready":       {func(v *View) { v.Snapshot = nil }, []string{"source: starting"}},

		"published":           {serving(func(*dra.Status) {}), nil},
		"handover":            {serving(func(s *dra.Status) { s.Handover = true }), []string{"dra: the devices are being handed over"}},
		"driver not accepted": {serving(func(s *dra.Status) { s.Registered = false }), []string{"dra: the kubelet"}},
		"never published": {
			serving(func(s *dra.Status) { s.Published = dra.Status{}.Published }),
			[]string{"dra: the devices are not published"},
		},
		"behind": {
			serving(func(s *dra.Status) { s.Behind, s.PublishErr = true, "forbidden" }),
			[]string{"dra: the devices are not published: forbidden"},
		},
		"no devices": {serving(func(s *dra.Status) { s.Devices = 0 }), []string{"dra: no device"}},
		"no driver": {
			serving(func(s *dra.Status) { *s = dra.Status{} }),
			[]string{"dra: the devices are being", "dra: the kubelet", "dra: the devices are not", "dra: no device"},
		},

		"listed": {off(func(*View) {}), nil},
		"lost":   {off(func(v *View) { v.Snapshot.Devices[0].Sample.Presence = health.Lost }), []string{"source: the driver lists no GPU"}},
		"one of two": {off(func(v *View) {
			v.Snapshot.Devices = append(v.Snapshot.Devices, health.DeviceState{Sample: health.Sample{Presence: health.Lost}})
		}), nil},
		"no GPU":   {off(func(v *View) { v.Snapshot.Devices = nil }), []string{"source: the driver lists no GPU"}},
		"none yet": {off(func(v *View) { v.Snapshot = nil }), []string{"source: starting", "source: the driver lists no GPU"}},
	} {
		t.Run(name, func(t *testing.T) {
			v := working()
			c.change(&v)
			if got := v.NotOffered(); !slices.EqualFunc(got, c.want, strings.HasPrefix) {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
