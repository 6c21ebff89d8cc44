package agent

import (
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// newReporter returns what tells the API server.
func (a *Agent) newReporter(remembered []health.DeviceState) *kube.Reporter {
	return kube.New(kube.Options{
		Config: &a.health, Snapshots: &a.snapshots, Node: nodeName(), Holders: a.podsHolding,
		Remembered: remembered, Log: a.log.Named("kubernetes"),
	})
}

// podsHolding returns the pods that hold a device.
func (a *Agent) podsHolding(id health.DeviceID) []kube.Pod {
	var pods []kube.Pod
	for _, h := range a.devices.Holders().By[id] {
		pods = append(pods, kube.Pod{Namespace: h.Namespace, Name: h.Pod})
	}
	return pods
}
