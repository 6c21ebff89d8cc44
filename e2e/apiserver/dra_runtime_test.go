package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// On a runtime that ignores CDI no slice appears, also if the API server starts after the agent. A runtime that becomes one takes published
// devices: they are tainted, and then removed.
func TestDRARuntimeIgnoresCDI(t *testing.T) {
	n := newDRANode(t, "dra-runtime", "h100-8", "")
	n.setRuntime("containerd://1.6.36")
	before := n.sliceVersion()
	const reason = "dra: the container runtime containerd://1.6.36 ignores CDI devices"
	n.StartAgent()
	n.awaitNotReady(reason)
	n.EndAgent()
	n.wantSliceEvents(before)

	theCluster.stopAPIServer()
	n.StartAgent()
	n.awaitNotReady("dra: the driver is starting; it is about to learn which container runtime the node has")
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	before = n.sliceVersion() // no watch reaches back over the restart
	if list, err := n.resourceSlices(); err != nil || len(list) > 0 {
		t.Errorf("%d slices, %v", len(list), err)
	}
	n.awaitNotReady(reason)
	n.EndAgent()
	n.wantSliceEvents(before)
	n.setRuntime("containerd://2.1.4")
	n.StartAgent()
	n.awaitDevices(8, nil)
	n.KillAgent()
	n.wantSliceEvents(before, "ADDED 0 of 8 withheld")

	before = n.sliceVersion()
	n.setRuntime("containerd://1.6.36")
	n.StartAgent()
	n.Eventually("no slice", func() error {
		list, err := n.resourceSlices()
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("%d slices", len(list))
		}
		return err
	})
	n.awaitNotReady(reason)
	n.EndAgent()
	n.wantSliceEvents(before, "MODIFIED 8 of 8 withheld", "DELETED 8 of 8 withheld")
}

// setRuntime sets the container runtime that the kubelet reports.
func (n machine) setRuntime(version string) {
	n.T.Helper()
	nodes := theCluster.client.CoreV1().Nodes()
	object, err := nodes.Get(n.T.Context(), n.name, metav1.GetOptions{})
	if err == nil {
		object.Status.NodeInfo.ContainerRuntimeVersion, object.Status.NodeInfo.KubeletVersion = version, "v1.37.0"
		_, err = nodes.UpdateStatus(n.T.Context(), object, metav1.UpdateOptions{})
	}
	if err != nil {
		n.T.Fatal(err)
	}
}

// awaitNotReady waits until the agent is not ready for a reason.
func (n machine) awaitNotReady(reason string) {
	n.T.Helper()
	n.Eventually("not ready: "+reason, func() error {
		page, err := n.Page("/readyz", http.StatusServiceUnavailable)
		if err == nil && !strings.Contains(page, reason) {
			err = errors.New(page)
		}
		return err
	})
}

// sliceVersion returns the version of the slices on the API server, from which wantSliceEvents counts.
func (n machine) sliceVersion() string {
	n.T.Helper()
	list, err := theCluster.client.ResourceV1().ResourceSlices().List(n.T.Context(), metav1.ListOptions{})
	if err != nil {
		n.T.Fatal(err)
	}
	return list.ResourceVersion
}

// wantSliceEvents checks everything that has happened to slices of the node since a version: each event with the number of withheld
// devices.
func (n machine) wantSliceEvents(since string, want ...string) {
	n.T.Helper()
	w, err := theCluster.client.ResourceV1().ResourceSlices().Watch(n.T.Context(), metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + n.name, ResourceVersion: since, TimeoutSeconds: new(int64(2)),
	})
	if err != nil {
		n.T.Fatal(err)
	}
	defer w.Stop()
	var have []string
	for e := range w.ResultChan() { // until the API server ends it
		slice, ok := e.Object.(*resourcev1.ResourceSlice)
		if !ok {
			n.T.Fatalf("%s %v", e.Type, e.Object)
		}
		withheld := 0
		for _, d := range slice.Spec.Devices {
			if slices.ContainsFunc(d.Taints, func(t resourcev1.DeviceTaint) bool {
				return t.Key == "gpu-node-agent/withheld" && t.Effect == resourcev1.DeviceTaintEffectNoSchedule
			}) {
				withheld++
			}
		}
		have = append(have, fmt.Sprintf("%s %d of %d withheld", e.Type, withheld, len(slice.Spec.Devices)))
	}
	if !slices.Equal(have, want) {
		n.T.Errorf("events %q, want %q", have, want)
	}
}
