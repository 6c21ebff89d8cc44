package agent

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestSharingWarnings(t *testing.T) {
	s := &health.Snapshot{Devices: []health.DeviceState{
		{Device: health.Device{ID: "GPU-a", Index: 0}, MPS: &health.MPSDaemon{PID: 41}},
		{Device: health.Device{ID: "GPU-b", Index: 1}, MPS: &health.MPSDaemon{PID: 42, MultiUser: true}},
		{Device: health.Device{ID: "GPU-c", Index: 2}, MPS: &health.MPSDaemon{PID: 43}}, // no pod holds it
		{Device: health.Device{ID: "GPU-d", Index: 3}},
	}}
	holders := podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
		"GPU-a": {{Namespace: "team", Pod: "a"}, {Namespace: "team", Pod: "b"}}, "GPU-b": {{Pod: "a"}, {Pod: "b"}},
	}}
	shares := []plugin.ShareUnits{
		{Device: "GPU-d", Sharing: plugin.SharingMemory, Enforcement: memlimits.None, Reason: "driver 580"},
		{Device: "GPU-b", Sharing: plugin.SharingMemory, Enforcement: memlimits.Driver},
		{Device: "GPU-a", Sharing: plugin.SharingMPS},
	}
	for enforcement, want := range map[string]int{plugin.EnforceDriver: 2, plugin.EnforceAuto: 1, plugin.EnforceNone: 1} {
		all := sharingWarnings(s, holders, shares, enforcement)
		if len(all) != want || !strings.Contains(all[0], "GPU-a") || strings.Contains(all[0], "GPU-b") || strings.Contains(all[0], "GPU-c") {
			t.Errorf("%s: %q", enforcement, all)
		}
		if want == 2 && (!strings.Contains(all[1], "GPU-d") || !strings.Contains(all[1], "driver 580") || strings.Contains(all[1], "GPU-b")) {
			t.Errorf("%q", all)
		}
	}
	if all := sharingWarnings(nil, holders, shares, plugin.EnforceDriver); all != nil {
		t.Errorf("before the first snapshot: %q", all)
	}
}
