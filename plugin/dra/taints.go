package dra

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// The taints that are no finding's. Their time is taintEpoch.
const (
	TaintMIGMode = Domain + "/mig-mode" // a GPU in MIG mode: only its MIG devices can be allocated
	// TaintWithheld means that a container has the device, its GPU or a part of it otherwise than by a claim of the driver, or that the
	// container runtime ignores CDI devices.
	TaintWithheld     = Domain + "/withheld"
	TaintMemoryLimits = Domain + "/memory-limits" // nothing enforces the limits of shares yet, see plugin.sharing.memory.requireEnforcement
)

// taintEpoch is the time of taints that begin with the device: it does not change over restarts.
func taintEpoch() metav1.Time { return metav1.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) }

// TaintXID is the key of the taints of XIDs; their value is the code. So a claim can tolerate one XID, or each.
const TaintXID = Domain + "/xid"

// findingTaint returns the key and the value of the taint of a finding. A cause that cannot be in a label is changed: a device without the
// taint would be allocated.
func findingTaint(cause string) resourceapi.DeviceTaint {
	if xid, ok := health.XIDOfCause(cause); ok {
		return resourceapi.DeviceTaint{Key: TaintXID, Value: strconv.Itoa(xid)}
	}
	key := Domain + "/" + cause
	if len(validation.IsQualifiedName(key)) == 0 {
		return resourceapi.DeviceTaint{Key: key}
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(cause)) // cannot fail
	name := dnsLabel(cause)
	return resourceapi.DeviceTaint{Key: fmt.Sprintf("%s/%s-%08x", Domain, strings.Trim(name[:min(len(name), 40)]+"-x", "-"), hash.Sum32())}
}

// compareTaints compares what identifies taints: keys, then values, of which shorter numbers come first.
func compareTaints(x, y resourceapi.DeviceTaint) int {
	return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(len(x.Value), len(y.Value)), cmp.Compare(x.Value, y.Value))
}

// indexTaint returns the position of the taint with the key and the value of another one, -1 if there is none.
func indexTaint(all []resourceapi.DeviceTaint, taint resourceapi.DeviceTaint) int {
	return slices.IndexFunc(all, func(t resourceapi.DeviceTaint) bool { return compareTaints(t, taint) == 0 })
}

// taints returns the taints of a device: one for each finding, and those above. If there are too many, the worst remain.
func (b *builder) taints(s *plugin.SelectedDevice) []resourceapi.DeviceTaint {
	var all []resourceapi.DeviceTaint
	add := func(taint resourceapi.DeviceTaint, effect resourceapi.DeviceTaintEffect, at metav1.Time) {
		taint.Effect, taint.TimeAdded = effect, &at
		switch i := indexTaint(all, taint); {
		case i < 0:
			all = append(all, taint)
		case severity(effect) > severity(all[i].Effect):
			all[i] = taint
		}
	}
	addFixed := func(key string) {
		add(resourceapi.DeviceTaint{Key: key}, resourceapi.DeviceTaintEffectNoSchedule, taintEpoch())
	}
	if s.State.Device.Kind == health.KindGPU && s.State.Device.MIGMode {
		addFixed(TaintMIGMode)
	}
	if s.Memory != nil && s.Memory.Blocked != "" && !b.NoShares {
		addFixed(TaintMemoryLimits)
		if !b.Examined || b.Capabilities != nil { // else only until the node is examined
			b.warnings.Addf(s.State.Device.Name(), "no claim gets a share: %s", s.Memory.Blocked)
		}
	}
	switch answer := b.Offers[s.State.Device.ID]; answer.Code() {
	case offer.NoCDI: // the session reports it
		addFixed(TaintWithheld)
	case offer.Held:
		addFixed(TaintWithheld)
		b.withheld = append(b.withheld, fmt.Sprintf("%s is not offered to new claims: %s", s.State.Device.Name(), answer.Reason()))
	}
	for i := range s.State.Verdict.Findings {
		f := &s.State.Verdict.Findings[i]
		effect := resourceapi.DeviceTaintEffectNone
		switch {
		case f.State != health.Unhealthy:
		case b.Config.DRA.Evicts(f.Cause):
			effect = resourceapi.DeviceTaintEffectNoExecute
		default:
			effect = resourceapi.DeviceTaintEffectNoSchedule
		}
		add(findingTaint(f.Cause), effect, taintTime(f.Since))
	}
	return worstTaints(all)
}

// worstTaints returns as many of the worst taints as a device can have, by key and value.
func worstTaints(all []resourceapi.DeviceTaint) []resourceapi.DeviceTaint {
	slices.SortStableFunc(all, func(x, y resourceapi.DeviceTaint) int { return cmp.Compare(severity(y.Effect), severity(x.Effect)) })
	all = all[:min(len(all), resourceapi.DeviceTaintsMaxLength)]
	slices.SortFunc(all, compareTaints)
	return all
}

// addTaints adds the taints of before that are not among taints, or there with a weaker effect.
func addTaints(taints, before []resourceapi.DeviceTaint) []resourceapi.DeviceTaint {
	for _, old := range before {
		switch i := indexTaint(taints, old); {
		case i < 0:
			taints = append(taints, old)
		case severity(old.Effect) > severity(taints[i].Effect):
			taints[i] = old
		}
	}
	return worstTaints(taints)
}

// taintTime returns when a taint was added, in whole seconds as the API server stores it.
func taintTime(since time.Time) metav1.Time {
	if since.Year() < 1971 || since.Year() > 9998 { // a clock that is not set; four digits at most, in any zone
		return taintEpoch()
	}
	return metav1.NewTime(since.UTC().Truncate(time.Second))
}

func severity(e resourceapi.DeviceTaintEffect) int {
	return slices.Index([]resourceapi.DeviceTaintEffect{
		resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
	}, e)
}

// worstTaint returns the name of the worst taint.
func worstTaint(taints []resourceapi.DeviceTaint) string {
	return taintName(slices.MaxFunc(taints,
		func(x, y resourceapi.DeviceTaint) int { return cmp.Compare(severity(x.Effect), severity(y.Effect)) }))
}

// taintName returns key=value, or the key of a taint without a value.
func taintName(t resourceapi.DeviceTaint) string { return strings.TrimSuffix(t.Key+"="+t.Value, "=") }
