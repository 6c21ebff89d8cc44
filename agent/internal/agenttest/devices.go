// Package agenttest has what the tests of the agent's packages share: devices, certificates, and a client of the web
// server.
package agenttest

import (
	"strconv"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Now returns the time of the test devices.
func Now() time.Time { return time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC) }

// Ago returns a time before Now.
func Ago(d time.Duration) time.Time { return Now().Add(-d) }

// GPU returns a healthy GPU.
func GPU(index int) health.DeviceState {
	return health.DeviceState{
		Device: health.Device{
			ID: health.DeviceID("GPU-" + strconv.Itoa(index)), Index: index, Model: "NVIDIA H100 80GB HBM3", PCI: "00000000:1B:00.0",
			NUMA: []int{0}, Memory: 80 << 30, GI: -1, CI: -1, MIGIndex: -1,
		},
		Sample: health.Sample{Presence: health.Present, Values: map[health.Field]float64{
			health.FieldGPUTemp: 51, health.FieldPower: 312.4, health.FieldGPUUtil: 87, health.FieldSMClock: 1980,
			health.FieldFBUsed: 40 << 10, health.FieldFBTotal: 80 << 10,
		}},
		Verdict: health.Verdict{State: health.Healthy, Since: Ago(3 * time.Hour)},
	}
}

// MIG returns a healthy MIG device with a GPU instance.
func MIG(index, gi int) health.DeviceState {
	d := GPU(index)
	d.Device.Parent, d.Device.Kind, d.Device.Profile = d.Device.ID, health.KindMIG, "1g.10gb"
	d.Device.ID = health.DeviceID("MIG-" + strconv.Itoa(index) + "-" + strconv.Itoa(gi))
	d.Device.GI, d.Device.CI, d.Device.MIGIndex, d.Device.Memory = gi, 0, gi%7, 10<<30
	d.Sample.Values = map[health.Field]float64{health.FieldFBUsed: 1 << 10}
	return d
}

// Lost makes a device lost.
func Lost(d health.DeviceState, since time.Time) health.DeviceState {
	d.Sample = health.Sample{Presence: health.Lost}
	return withFinding(d, since, health.Finding{
		Cause: health.CauseLost, State: health.Unhealthy, Reason: "the GPU is lost: the driver cannot reach it any more",
		Action: health.ActionRebootNode,
	})
}

// Hot makes a device too hot.
func Hot(d health.DeviceState, since time.Time) health.DeviceState {
	return withFinding(d, since, health.Finding{
		Cause: "temperature", State: health.Degraded, Reason: "the GPU is at 94 °C, the limit is 90 °C", Action: health.ActionCheckCooling,
	})
}

func withFinding(d health.DeviceState, since time.Time, f health.Finding) health.DeviceState {
	f.Since = since
	d.Verdict = health.Verdict{State: f.State, Since: since, Findings: []health.Finding{f}}
	return d
}

// Node returns a snapshot of a node with a healthy GPU, a lost one, and a hot one with MIG devices.
func Node() *health.Snapshot {
	lost := Lost(GPU(1), Ago(90*time.Second))
	lost.XIDs = healthtest.Counted(map[int]uint64{79: 1, 31: 2}, health.XID{Code: 79, At: Ago(95 * time.Second)})
	gpu, mig := Hot(GPU(2), Ago(time.Minute)), Hot(MIG(2, 7), Ago(time.Minute))
	mig.Verdict.Findings[0].From = gpu.Device.ID
	return &health.Snapshot{
		Seq: 7, At: Ago(time.Second), Devices: []health.DeviceState{GPU(0), lost, gpu, mig, MIG(2, 8)},
		Source: health.Source{
			Kind: "dcgm", Status: health.SourceUp, Since: Ago(26 * time.Hour), Reconnects: 2,
			Versions: health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.0"},
		},
	}
}

// Holders returns the containers that hold the devices of Node.
func Holders() podresources.Holders {
	return podresources.Holders{At: Ago(2 * time.Second), By: map[health.DeviceID][]podresources.Holder{
		"GPU-0": {
			{Namespace: "training", Pod: "llm-0", Container: "torch", Resource: "nvidia.com/gpu", DeviceID: "GPU-0::0"},
			{Namespace: "training", Pod: "llm-0", Container: "torch", Resource: "nvidia.com/gpu", DeviceID: "GPU-0::1"},
			{Namespace: "web", Pod: "chat-1", Container: "vllm", Resource: "nvidia.com/gpu", DeviceID: "GPU-0::2"},
		},
		"MIG-2-8": {{Namespace: "nb", Pod: "ada", Container: "main", Resource: "nvidia.com/gpu", DeviceID: "MIG-2-8"}},
	}}
}

// MIGReading returns a reading of two GPUs, the second with MIG devices. The IDs of their GPU instances are not their
// indexes, as with the driver: the 3g.20gb is 1:0 and has GPU instance 1.
func MIGReading() *health.Reading {
	r := &health.Reading{}
	add := func(d health.Device) {
		r.Devices = append(r.Devices, d)
		r.Samples = append(r.Samples, health.Sample{Device: d.ID, At: Now(), Presence: health.Present})
	}
	for i := range 2 {
		d := GPU(i).Device
		d.MIGMode = i == 1
		add(d)
	}
	for i, m := range []struct {
		id      health.DeviceID
		gi      int
		profile string
	}{{"MIG-3g", 1, "3g.20gb"}, {"MIG-2g", 5, "2g.10gb"}} {
		d := MIG(1, m.gi).Device
		d.ID, d.Profile, d.MIGIndex = m.id, m.profile, i
		add(d)
	}
	return r
}

// Judge judges a reading and adds the decisions. Every device is held.
func Judge(c judge.Config, before []health.DeviceState, r *health.Reading, now time.Time) []health.DeviceState {
	return judge.View(c, judge.Measure(c, before, r, judge.ReadingContext{}, now), judge.ViewContext{}, now)
}
