package node

import (
	"reflect"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// deviceWith returns a GPU, or the MIG device of a parent, with findings.
func deviceWith(id, parent health.DeviceID, findings ...health.Finding) health.DeviceState {
	d := health.DeviceState{Device: health.Device{ID: id, Parent: parent}, Verdict: health.Verdict{State: health.Healthy, Findings: findings}}
	if parent != "" {
		d.Device.Kind = health.KindMIG
	}
	for _, f := range findings {
		d.Verdict.State = max(d.Verdict.State, f.State)
	}
	return d
}

func TestTaints(t *testing.T) {
	device := deviceWith
	lost := health.Finding{Cause: "lost", State: health.Unhealthy}
	hot := health.Finding{Cause: "temperature", State: health.Degraded}
	cordoned := health.Finding{Cause: health.CauseCordoned, State: health.Unhealthy}
	released := health.Finding{Cause: health.CauseReleased, State: health.Unhealthy}
	inherited := func(f health.Finding) health.Finding {
		f.From = "GPU-0"
		return f
	}
	unmeasured := device("GPU-0", "")
	unmeasured.Verdict.State = health.Unknown

	const anyBad, allBad, cordon = WhenAnyUnhealthy, WhenAllUnhealthy, WhenCordoned
	tests := map[string]struct {
		devices []health.DeviceState
		want    []string // the values of TaintConfig.When that hold
	}{
		"healthy":                    {[]health.DeviceState{device("GPU-0", ""), device("GPU-1", "")}, nil},
		"no GPU":                     {nil, nil},
		"degraded":                   {[]health.DeviceState{device("GPU-0", "", hot)}, nil},
		"unmeasured":                 {[]health.DeviceState{unmeasured}, nil},
		"one of two":                 {[]health.DeviceState{device("GPU-0", "", lost), device("GPU-1", "")}, []string{anyBad}},
		"one unhealthy, one unknown": {[]health.DeviceState{unmeasured, device("GPU-1", "", lost)}, []string{anyBad}},
		"both":                       {[]health.DeviceState{device("GPU-0", "", lost), device("GPU-1", "", lost, hot)}, []string{anyBad, allBad}},
		"cordoned":                   {[]health.DeviceState{device("GPU-0", "", cordoned), device("GPU-1", "")}, []string{anyBad, cordon}},
		"all cordoned or lost": {
			[]health.DeviceState{device("GPU-0", "", cordoned), device("GPU-1", "", lost)},
			[]string{anyBad, allBad, cordon},
		},
		"detached":              {[]health.DeviceState{device("GPU-0", "", released), device("GPU-1", "", released)}, nil},
		"detached and cordoned": {[]health.DeviceState{device("GPU-0", "", cordoned, released)}, []string{anyBad, allBad, cordon}},
		"detached and lost":     {[]health.DeviceState{device("GPU-0", "", lost, released), device("GPU-1", "", released)}, []string{anyBad}},
		"one MIG device": {
			[]health.DeviceState{device("GPU-0", ""), device("MIG-0", "GPU-0", lost), device("MIG-1", "GPU-0")},
			[]string{anyBad},
		},
		"all MIG devices": {
			[]health.DeviceState{device("GPU-0", ""), device("MIG-0", "GPU-0", lost), device("MIG-1", "GPU-0", lost)},
			[]string{anyBad, allBad},
		},
		"the only MIG device": {
			[]health.DeviceState{device("GPU-0", ""), device("MIG-0", "GPU-0", lost)},
			[]string{anyBad, allBad},
		},
		"all MIG devices of one GPU": {
			[]health.DeviceState{device("GPU-0", ""), device("GPU-1", ""), device("MIG-0", "GPU-0", lost)},
			[]string{anyBad},
		},
		"GPU with MIG devices": {
			[]health.DeviceState{device("GPU-0", "", lost), device("MIG-0", "GPU-0", inherited(lost)), device("MIG-1", "GPU-0", inherited(lost))},
			[]string{anyBad, allBad},
		},
		"MIG device cordoned": {
			[]health.DeviceState{device("GPU-0", ""), device("MIG-0", "GPU-0", cordoned), device("MIG-1", "GPU-0")},
			[]string{anyBad, cordon},
		},
	}
	var config []TaintConfig
	for _, when := range []string{anyBad, allBad, cordon} {
		config = append(config, TaintConfig{When: when, Key: "gpu/" + when, Value: "x", Effect: "NoSchedule"})
	}
	for name, c := range tests {
		t.Run(name, func(t *testing.T) {
			for _, status := range []health.SourceStatus{
				health.SourceUp, health.SourceDown, health.SourceStalled, health.SourceStarting,
				health.SourceDetached,
			} {
				s := &health.Snapshot{At: time.Now(), Source: health.Source{Status: status}, Devices: c.devices}
				set, undecided := Taints(config, s)
				want := []corev1.Taint{} // not nil, which leaves the node's taints as they are
				for _, when := range c.want {
					want = append(want, corev1.Taint{Key: "gpu/" + when, Value: "x", Effect: corev1.TaintEffectNoSchedule})
				}
				if !reflect.DeepEqual(set, want) || len(undecided) != 0 {
					t.Errorf("%v: %v, want %v; undecided %v", status, set, want, undecided)
				}
			}
			s := &health.Snapshot{Devices: c.devices} // restored, not measured
			for _, s := range []*health.Snapshot{nil, s} {
				if set, undecided := Taints(config, s); len(set) != 0 || set == nil || len(undecided) != len(config) {
					t.Errorf("before the first poll: %v, undecided %v", set, undecided)
				}
			}
			if set, undecided := Taints(nil, s); len(set)+len(undecided) != 0 || set == nil {
				t.Errorf("without configuration: %v %v", set, undecided)
			}
		})
	}
}
