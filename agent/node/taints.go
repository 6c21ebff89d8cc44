package node

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Taints returns the configured taints that the node must have. undecided are the taints of which that is unknown, because the GPUs were
// not measured since the agent started. The verdicts of a snapshot stay while the source is away, and so do the taints.
//
// A detach is an operator's decision about the driver, and affects no taint.
func Taints(config []TaintConfig, s *health.Snapshot) (set, undecided []corev1.Taint) {
	set = []corev1.Taint{}
	var holds map[string]bool
	if s.Polled() {
		holds = conditions(s.Devices)
	}
	for _, c := range config {
		switch {
		case holds == nil:
			undecided = append(undecided, c.Taint())
		case holds[c.When]:
			set = append(set, c.Taint())
		}
	}
	return set, undecided
}

// conditions returns which values of TaintConfig.When hold.
func conditions(devices []health.DeviceState) map[string]bool {
	type gpu struct {
		unhealthy       bool
		migs, migFaults int // MIG devices, and how many of them are unhealthy
	}
	gpus := make(map[health.DeviceID]*gpu)
	unhealthy, cordoned := 0, false
	for i := range devices { // GPUs come before their MIG devices
		d := &devices[i]
		bad := withheld(d.Verdict)
		if bad {
			unhealthy++
		}
		cordoned = cordoned || d.Verdict.Has(health.CauseCordoned)
		if d.Device.Kind == health.KindGPU {
			gpus[d.Device.ID] = &gpu{unhealthy: bad}
		} else if g := gpus[d.Device.Parent]; g != nil {
			g.migs++
			if bad {
				g.migFaults++
			}
		}
	}
	all := len(gpus) > 0
	for _, g := range gpus {
		all = all && (g.unhealthy || g.migs > 0 && g.migFaults == g.migs)
	}
	return map[string]bool{WhenAnyUnhealthy: unhealthy > 0, WhenAllUnhealthy: all, WhenCordoned: cordoned}
}

// withheld reports whether a device is unhealthy, as the kubelet counts it, for another reason than a detach of the driver.
func withheld(v health.Verdict) bool {
	for _, f := range v.Findings {
		if f.State == health.Unhealthy && f.Cause != health.CauseReleased {
			return true
		}
	}
	return false
}
