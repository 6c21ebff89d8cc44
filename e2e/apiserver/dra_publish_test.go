package apiserver

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// newDRANode creates a node whose agent publishes the simulated GPUs of a profile; plugin has more keys of the plugin section.
func newDRANode(t *testing.T, name, profile, plugin string) machine {
	t.Helper()
	theCluster.grantRules(t, agent, "dra-slices",
		rbac.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}},
		rbac.PolicyRule{
			APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"},
			Verbs: []string{"list", "watch", "create", "update", "delete"},
		},
	)
	n := newMachine(t, name, agent)
	if err := os.Mkdir(n.File("plugins_registry"), 0o700); err != nil { // as the kubelet's plugin watcher does
		t.Fatal(err)
	}
	n.Configure(fmt.Sprintf("source: {sim: {profile: %s}}\nplugin: {api: dra, cdi: {dir: %s}%s}\nhealth: {kubernetes: {kubeconfig: %s}}\n",
		profile, n.File("cdi"), plugin, theCluster.pki.Kubeconfig(agent)))
	t.Cleanup(func() {
		if err := n.deleteSlices(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// resourceSlices returns the slices of the node.
func (n machine) resourceSlices() ([]resourcev1.ResourceSlice, error) {
	list, err := theCluster.client.ResourceV1().ResourceSlices().List(n.T.Context(),
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// deleteSlices deletes the slices of the node, as the kubelet does when it starts.
func (n machine) deleteSlices() error {
	ctx := context.Background() // also after the test
	return theCluster.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
}

// awaitDevices waits until the complete pool of the node has count devices, and the wanted taints on exactly the wanted devices, as
// "key effect", by name. It returns the devices.
func (n machine) awaitDevices(count int, want map[string][]string) map[string]resourcev1.Device {
	n.T.Helper()
	var devices map[string]resourcev1.Device
	n.Eventually(fmt.Sprintf("%d devices, %d of them with taints", count, len(want)), func() error {
		list, err := n.resourceSlices()
		if err != nil {
			return err
		}
		devices = make(map[string]resourcev1.Device)
		tainted := make(map[string][]string)
		for _, s := range list {
			if p := s.Spec.Pool; p.Name != n.name || p.ResourceSliceCount != int64(len(list)) || p.Generation != list[0].Spec.Pool.Generation {
				return fmt.Errorf("incomplete pool: %+v", p)
			}
			for _, d := range s.Spec.Devices {
				devices[d.Name] = d
				for _, taint := range d.Taints {
					if !strings.HasSuffix(taint.Key, "/mig-mode") {
						tainted[d.Name] = append(tainted[d.Name], strings.TrimSuffix(taint.Key+"="+taint.Value, "=")+" "+string(taint.Effect))
					}
				}
			}
		}
		if len(devices) != count || !maps.EqualFunc(tainted, want, slices.Equal[[]string]) {
			return fmt.Errorf("%d devices, taints %v, want %d with %v", len(devices), tainted, count, want)
		}
		return nil
	})
	return devices
}

// The API server accepts the devices of each profile, and the taints of one GPU with all its parts.
func TestDRAPublishesProfiles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		profile, plugin  string
		devices, tainted int // all, and after the failure of GPU 0
		shared           []string
	}{
		{"h100-8", "", 8, 1, nil},
		{"h100-8-mig", "", 8 + 6*7 + 2*4, 8, nil},
		{"h100-16-mig", "", 16 + 16*7, 8, nil},
		{
			"mixed-4", `, sharing: {memory: {resource: nvidia.com/gpu-memory, unit: 1Gi, requireEnforcement: false, devices: ["*L4*"]}}`, 4, 1,
			[]string{"gpu-2", "gpu-3"},
		},
	} {
		t.Run(c.profile, func(t *testing.T) {
			n := newDRANode(t, "dra-"+c.profile, c.profile, c.plugin)
			n.StartAgent()
			devices := n.awaitDevices(c.devices, nil)
			for name, d := range devices {
				if shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations; shared != slices.Contains(c.shared, name) {
					t.Errorf("%s: several claims allowed: %v", name, shared)
				}
			}
			n.Inject(`{"gpu":0,"xid":79}`)
			want := make(map[string][]string)
			for name := range devices {
				if name == "gpu-0" || strings.HasPrefix(name, "gpu-0-") {
					want[name] = []string{"gpu-node-agent/xid=79 NoSchedule"}
				}
			}
			if len(want) != c.tainted {
				t.Errorf("GPU 0 has %d devices, want %d", len(want), c.tainted)
			}
			n.awaitDevices(c.devices, want)
			n.EndAgent()
		})
	}
}

// Taints appear and go with the findings. A restart keeps their times.
func TestDRATaints(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, "dra-taints", "h100-8", "")
	n.StartAgent()
	n.awaitDevices(8, nil)
	n.Inject(`{"gpu":3,"xid":48}`)
	n.awaitDevices(8, map[string][]string{"gpu-3": {"gpu-node-agent/xid=48 NoSchedule"}})
	since := n.taintTime("gpu-3")
	n.Inject(`{"gpu":3,"xid":13}`) // an application's error: no finding
	n.awaitSaved("xid-48")         // publishing does not wait for the disk
	n.KillAgent()
	n.StartAgent()
	n.Eventually("the agent answers after the restart", func() error { _, err := n.Scrape(); return err })
	n.Inject(`{"gpu":5,"recoveryAction":"reboot"}`)
	n.awaitTainted("gpu-3", "gpu-5")
	if after := n.taintTime("gpu-3"); !after.Equal(since) {
		t.Errorf("the restart changed the time of the taint from %v to %v", since, after)
	}
	n.Inject(`{"gpu":5,"recoveryAction":"none"}`)
	n.awaitDevices(8, map[string][]string{"gpu-3": {"gpu-node-agent/xid=48 NoSchedule"}})
	n.Inject(`{"gpu":3,"xid":79}`) // a second taint with the key
	n.awaitDevices(8, map[string][]string{"gpu-3": {"gpu-node-agent/xid=48 NoSchedule", "gpu-node-agent/xid=79 NoSchedule"}})
	if after := n.taintTime("gpu-3"); !after.Equal(since) {
		t.Errorf("another XID changed the time of the taint from %v to %v", since, after)
	}
	n.EndAgent()
	n.awaitTainted("gpu-3") // a driver that is back within 30 s keeps its slices
}

// awaitSaved waits until the state file has a text.
func (n machine) awaitSaved(text string) {
	n.T.Helper()
	n.Eventually(text+" is saved", func() error {
		saved, err := os.ReadFile(n.StateDir() + "/state.sim.json")
		if err == nil && !strings.Contains(string(saved), text) {
			err = fmt.Errorf("the state file has no %s:\n%s", text, saved)
		}
		return err
	})
}

// taintTime returns the time of a device's first taint.
func (n machine) taintTime(device string) *metav1.Time {
	n.T.Helper()
	list, err := n.resourceSlices()
	if err != nil {
		n.T.Fatal(err)
	}
	for _, s := range list {
		for _, d := range s.Spec.Devices {
			if d.Name == device && len(d.Taints) > 0 {
				return d.Taints[0].TimeAdded
			}
		}
	}
	n.T.Fatalf("%s has no taint", device)
	return nil
}

// awaitTainted waits until exactly the named devices have a taint that keeps pods away.
func (n machine) awaitTainted(want ...string) {
	n.T.Helper()
	n.Eventually(fmt.Sprintf("taints of %v", want), func() error {
		list, err := n.resourceSlices()
		if err != nil {
			return err
		}
		var have []string
		for _, s := range list {
			for _, d := range s.Spec.Devices {
				if slices.ContainsFunc(d.Taints, func(t resourcev1.DeviceTaint) bool { return t.Effect != resourcev1.DeviceTaintEffectNone }) {
					have = append(have, d.Name)
				}
			}
		}
		if slices.Sort(have); !slices.Equal(have, want) {
			return fmt.Errorf("tainted %v, want %v", have, want)
		}
		return nil
	})
}

// What the API server misses is there after an outage, and what others change is corrected.
func TestDRAOutage(t *testing.T) {
	n := newDRANode(t, "dra-outage", "h100-8", "")
	n.StartAgent()
	n.awaitDevices(8, nil)
	if err := n.deleteSlices(); err != nil {
		t.Fatal(err)
	}
	n.awaitDevices(8, nil)

	theCluster.stopAPIServer()
	n.Inject(`{"gpu":2,"xid":79}`)
	n.Eventually("the agent counts GPU 2 as unhealthy", func() error { return n.hasUnhealthy(1) })
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	n.awaitTainted("gpu-2")

	theCluster.freeze(t, true)
	n.Inject(`{"gpu":4,"xid":79}`)
	n.Eventually("the agent counts GPU 4 as unhealthy", func() error { return n.hasUnhealthy(2) })
	theCluster.freeze(t, false)
	n.awaitTainted("gpu-2", "gpu-4")

	// A node that is created again has another UID: the garbage collector would delete slices of the former.
	nodes := theCluster.client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), n.name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := n.deleteSlices(); err != nil {
		t.Fatal(err)
	}
	created, err := nodes.Create(t.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.awaitTainted("gpu-2", "gpu-4")
	if list, err := n.resourceSlices(); err != nil || len(list) != 1 || list[0].OwnerReferences[0].UID != created.UID {
		t.Errorf("slices %+v, %v, want one that node %s owns", list, err, created.UID)
	}
	n.EndAgent()
}

// hasUnhealthy checks the number of unhealthy devices in the metrics.
func (n machine) hasUnhealthy(want int) error {
	metrics, err := n.Scrape()
	if err != nil {
		return err
	}
	count := 0
	for _, state := range metrics.States() {
		if state == "unhealthy" {
			count++
		}
	}
	if count != want {
		return fmt.Errorf("%d unhealthy devices, want %d", count, want)
	}
	return nil
}
