package status

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The JSON has the number and the pods, and the page and the table name the pods, before other warnings. An unknown
// number has no key.
func TestUnschedulableDevicesAreShown(t *testing.T) {
	for name, c := range map[string]struct {
		lost *plugin.Unschedulable
		json string // part of the resource; "": no key
	}{
		"unknown": {nil, ""},
		"none":    {&plugin.Unschedulable{Resource: "nvidia.com/gpu"}, `"unschedulable":0}`},
		"some": {
			&plugin.Unschedulable{Resource: "nvidia.com/gpu", Devices: 1, Pods: []plugin.Pod{{Namespace: "ml", Name: "train"}}},
			`"unschedulable":1,"blockingPods":[{"namespace":"ml","pod":"train"}]}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := testInputs()
			k.Plugin.Resources[0].Unschedulable = c.lost
			s := newNode(k)
			text, err := json.Marshal(s.Kubelet)
			if err != nil || strings.Contains(string(text), "unschedulable") != (c.json != "") || !strings.Contains(string(text), c.json) {
				t.Errorf("%s, %v; want %s", text, err, c.json)
			}
			wanted := c.lost != nil && c.lost.Devices > 0
			for part, shown := range map[string]string{"page": pageOf(t, k), "table": s.Table(false, terminal.Output{})} {
				lost, other := strings.Index(shown, "end pod ml/train"), strings.Index(shown, "GPU 2 is left out")
				if lost >= 0 != wanted || lost > other {
					t.Errorf("%s: at %d, other warnings at %d:\n%s", part, lost, other, shown)
				}
			}
		})
	}
}
