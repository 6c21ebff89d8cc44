package binarytest

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// printedSlices returns the slices that `dra slices -o json` prints.
func (p *process) printedSlices() resourceapi.ResourceSliceList {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), binary, "dra", "slices", "-o", "json", "--socket", p.agentSocket())
	cmd.Env = append(os.Environ(), raceOptions)
	text, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("%v: %v: %s", cmd.Args, err, err.(*exec.ExitError).Stderr) //nolint:errorlint,forcetypeassert // of Output
	}
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal(text, &list); err != nil {
		p.t.Fatalf("%v: %s", err, text)
	}
	return list
}

func devicesOf(list resourceapi.ResourceSliceList) (devices []resourceapi.Device) {
	for _, s := range list.Items {
		devices = append(devices, s.Spec.Devices...)
	}
	return devices
}

// The slices of a node full of MIG devices obey the limits, without a kubelet and an API server.
func TestDRASlicesOfMIGDevices(t *testing.T) {
	t.Parallel()
	p := newProcess(t, "source: {mode: sim, sim: {profile: h100-16-mig, control: DIR/sim.sock}}\nplugin: {kubeletDir: DIR}")
	if out, code := run(t, "dra", "slices", "--socket", p.agentSocket()); code != 1 || !strings.Contains(out, "no agent listens") {
		t.Errorf("exit code %d without an agent: %s", code, out)
	}
	p.launch("NODE_NAME=" + draNodeName)
	p.awaitSource("up")
	p.awaitSocket(p.agentSocket())
	list := p.printedSlices()
	if list.APIVersion != "resource.k8s.io/v1" || list.Kind != "ResourceSliceList" {
		t.Errorf("%s %s", list.APIVersion, list.Kind)
	}
	for _, s := range list.Items {
		if len(s.Spec.Devices) > 64 || *s.Spec.NodeName != draNodeName || s.Spec.Driver != draDriver ||
			s.Spec.Pool.ResourceSliceCount != int64(len(list.Items)) {
			t.Errorf("%d devices of %s in %+v, by %s", len(s.Spec.Devices), *s.Spec.NodeName, s.Spec.Pool, s.Spec.Driver)
		}
	}
	types, names := map[string]int{}, map[string]bool{}
	for _, d := range devicesOf(list) {
		types[*d.Attributes["type"].StringValue]++
		if invalid := validation.IsDNS1123Label(d.Name); names[d.Name] || len(invalid) > 0 {
			t.Errorf("name %q: %v", d.Name, invalid)
		}
		names[d.Name] = true
		for name, a := range d.Attributes {
			for _, v := range []*string{a.StringValue, a.VersionValue} {
				if v != nil && len(*v) > 64 {
					t.Errorf("%s of %s: %d bytes", name, d.Name, len(*v))
				}
			}
		}
	}
	if types["mig-parent"] != 16 || types["mig"] != 112 {
		t.Errorf("%v, want 16 GPUs in MIG mode and 112 MIG devices", types)
	}
}

// Without a kubelet and an API server, the slices have the taints of findings, whose time survives kill -9. A source that is down adds
// none.
func TestDRASlicesTaints(t *testing.T) {
	t.Parallel()
	for _, api := range []string{"dra", "devicePlugin"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			p := newProcess(t, simConfig+"\nplugin: {kubeletDir: DIR, api: "+api+"}")
			p.launch("NODE_NAME=" + draNodeName)
			p.awaitSource("up")
			p.sim("{gpu: 3, xid: 48}")
			p.sim("{gpu: 3, xid: 13}")
			p.awaitState("xid-48")
			p.await("the XID 13", func() bool {
				return slices.ContainsFunc(p.snapshot().Events, func(e status.Event) bool { return e.XID == 13 })
			})
			check := func(when string, since *time.Time) time.Time {
				t.Helper()
				var at time.Time
				devices := devicesOf(p.printedSlices())
				if len(devices) != 8 {
					t.Fatalf("%s: %d devices", when, len(devices))
				}
				for _, d := range devices {
					switch {
					case d.Name != "gpu-3" && len(d.Taints) == 0:
					case d.Name == "gpu-3" && len(d.Taints) == 1 && d.Taints[0].Key == "gpu-node-agent/xid" && d.Taints[0].Value == "48" &&
						d.Taints[0].Effect == resourceapi.DeviceTaintEffectNoSchedule:
						at = d.Taints[0].TimeAdded.Time
					default:
						t.Errorf("%s: %s has %v", when, d.Name, d.Taints)
					}
				}
				if at.IsZero() || since != nil && !at.Equal(*since) {
					t.Errorf("%s: since %v, want %v", when, at, since)
				}
				return at
			}
			since := check("at first", nil)
			p.signal(syscall.SIGKILL)
			<-p.Exited()
			p.launch("NODE_NAME=" + draNodeName)
			p.awaitSource("up")
			p.awaitSocket(p.agentSocket())
			check("after kill -9", &since)
			p.sim("{source: down}")
			p.awaitSource("down")
			check("with the source down", &since)
			if out, code := run(t, "dra", "slices", "--socket", p.agentSocket()); code != 0 || !strings.Contains(out, "DEVICE") ||
				!strings.Contains(out, "gpu-7") {
				t.Errorf("exit code %d: %s", code, out)
			}
		})
	}
}
