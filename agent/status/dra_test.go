package status

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// draInputs returns the inputs of a node that serves three claims.
func draInputs() inputs {
	k := testInputs()
	k.DRA = dra.Status{
		Enabled: true, DriverName: "gpu.example.com", Pool: "node-1", Registered: true, Devices: 3, Slices: 1, Tainted: 1,
		Published: agenttest.Ago(time.Minute), Behind: true, PublishErr: "slices is forbidden", DroppedFeatures: []string{"DRADeviceTaints"},
		Warning: "base spec is missing",
	}
	claim := func(name string, admin bool, devices ...string) dra.Claim {
		c := dra.Claim{UID: types.UID(name + "-uid"), Namespace: "team", Name: name, Prepared: agenttest.Ago(time.Hour)}
		for _, d := range devices {
			c.Devices = append(c.Devices, dra.ClaimDevice{Name: d, Admin: admin})
		}
		return c
	}
	k.Claims = &dra.Claims{ByUID: map[types.UID]dra.Claim{
		"b-uid": claim("b", false, "gpu-1"), "a-uid": claim("a", false, "gpu-0", "gpu-2"), "watch-uid": claim("watch", true, "gpu-0"),
	}}
	holder := func(pod, container, claim, device string) podresources.Holder {
		return podresources.Holder{
			Namespace: "team", Pod: pod, Container: container, DeviceID: device,
			Claim: podresources.ClaimRef{Name: claim, Driver: "gpu.example.com", Pool: "node-1"},
		}
	}
	k.Holders.By = map[health.DeviceID][]podresources.Holder{
		"GPU-0": {holder("train-1", "main", "a", "gpu-0"), holder("train-1", "side", "a", "gpu-0")},
		"GPU-2": {holder("train-0", "main", "a", "gpu-2"), {Namespace: "team", Pod: "classic", Resource: "nvidia.com/gpu", DeviceID: "GPU-2"}},
	}
	k.Holders.Admin = map[health.DeviceID][]podresources.Holder{"GPU-0": {holder("monitor", "main", "watch", "gpu-0")}}
	return k
}

func TestDRAStatus(t *testing.T) {
	node := newNode(draInputs())
	d := node.DRA
	if d.Driver != "gpu.example.com" || !d.Registered || d.Tainted != 1 || !d.Behind ||
		!slices.Equal(d.DroppedFeatures, []string{"DRADeviceTaints"}) {
		t.Errorf("%+v", d)
	}
	var got []string
	for _, c := range d.Claims {
		text := c.Name + " " + strings.Join(c.Devices, ",")
		for _, p := range c.Pods {
			text += " " + p.Pod
		}
		if c.Admin {
			text += " admin"
		}
		got = append(got, text)
	}
	if want := []string{"a gpu-0,gpu-2 train-0 train-1", "b gpu-1", "watch gpu-0 monitor admin"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	parts := []string{
		"gpu.example.com", "3 devices in 1 slice, 1 tainted", "slices is forbidden", "DRADeviceTaints", "base spec is missing",
		"team/a: gpu-0, gpu-2 for train-0, train-1", "team/watch: gpu-0 for monitor (adminAccess)",
	}
	agenttest.MustContain(t, node.Table(false, terminal.Output{}), append(parts, "dra ")...)
	agenttest.MustContain(t, node.Table(true, terminal.Output{}), "team/a")
	agenttest.MustContain(t, pageOf(t, draInputs()), parts...)
}

func TestDRAStatusWhileOff(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*inputs)
		shown  bool
		part   string
	}{
		"off":       {func(k *inputs) { k.DRA, k.Claims = dra.Status{}, nil }, false, "gpu.example.com"},
		"no claims": {func(k *inputs) { k.DRA, k.Claims = dra.Status{}, &dra.Claims{} }, false, "gpu.example.com"},
		"claims":    {func(k *inputs) { k.DRA = dra.Status{} }, true, "team/a"},
		"waiting":   {func(k *inputs) { k.DRA, k.Claims = dra.Status{Enabled: true, Err: "waiting for pods"}, nil }, true, "waiting for pods"},
	} {
		k := draInputs()
		c.change(&k)
		node := newNode(k)
		text, err := json.Marshal(node)
		if err != nil {
			t.Fatal(err)
		}
		if shown := strings.Contains(string(text), `"dra":{`); shown != c.shown {
			t.Errorf("%s: in the JSON: %v", name, shown)
		}
		for what, view := range map[string]string{"table": node.Table(false, terminal.Output{}), "page": pageOf(t, k)} {
			if strings.Contains(view, c.part) != c.shown || strings.Contains(view, "0 devices in 0 slices") {
				t.Errorf("%s: %s:\n%s", name, what, view)
			}
		}
	}
}

func TestPluginOffText(t *testing.T) {
	for name, c := range map[string]struct {
		node Node
		want string // empty: on
	}{
		"on":  {Node{Kubelet: Kubelet{Plugin: pluginOn}, DRA: &DRA{}}, ""},
		"off": {Node{Kubelet: Kubelet{Plugin: pluginOff}}, "plugin.enabled"},
		"dra": {Node{Kubelet: Kubelet{Plugin: pluginOff}, DRA: &DRA{}}, "plugin.api"},
	} {
		if text := pluginOffText(c.node); (text == "") != (c.want == "") || !strings.Contains(text, c.want) {
			t.Errorf("%s: %q", name, text)
		}
	}
}
