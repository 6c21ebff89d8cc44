package judge

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Observation is an event of devices that a reading has listed: an XID, or a recovery action that the source does not measure. Such a
// recovery action raises a finding or ends it, but is no evidence of a reset.
type Observation struct {
	GPU     health.DeviceID   // "" for an empty Observation, which has all devices judged again
	Devices []health.DeviceID // the GPU, or MIG devices of it

	XID    health.XID             // if Action is nil
	Action *health.RecoveryAction // of the GPU
}

// Observe judges events in turn. Each concerns its GPU and the MIG devices of that; the first after a reload of the driver, all devices.
// DeviceState.Sample keeps what the latest reading measured, and has the XIDs of these events that count.
func Observe(c Config, before []health.DeviceState, events []Observation, rc ReadingContext, now time.Time) []health.DeviceState {
	after := slices.Clone(before)
	for i := range after {
		after[i].Sample.XIDs = nil
	}
	for _, e := range events {
		var unreported map[health.DeviceID][]int
		if rc.DriverReloaded { // only a reset needs them
			unreported = unreportedXIDs(after)
		}
		var concerned []*health.DeviceState
		for i := range after {
			if d := &after[i]; d.Device.GPU() == e.GPU || e.GPU == "" || rc.DriverReloaded {
				concerned = append(concerned, d)
			}
		}
		readingJudge{c: c, rc: rc}.observeAll(concerned, unreported, e, now)
		rc.DriverReloaded = false
	}
	return after
}

// observeAll judges an event of devices, GPUs first, and replaces their states.
func (judge readingJudge) observeAll(devices []*health.DeviceState, unreported map[health.DeviceID][]int, e Observation, now time.Time) {
	all, samples := make(nodeReports), make(map[health.DeviceID]health.Sample)
	for _, d := range devices {
		id := d.Device.ID
		s := health.Sample{Device: id, At: now}
		switch of := slices.Contains(e.Devices, id); {
		case of && e.Action != nil:
			s.Values = map[health.Field]float64{health.FieldRecoveryAction: float64(*e.Action)}
		case of:
			s.XIDs = []health.XID{e.XID}
		}
		w := all[id]
		w.xids, w.unreported = d.XIDs, unreported[id]
		all[id] = w
		samples[id] = all.take(&d.Device, s, judge.rc.Witnesses, now, new(health.SourceProgress))
	}
	gpus := make(map[health.DeviceID]parent)
	for _, d := range devices {
		id := d.Device.ID
		next, r := judge.observe(*d, samples[id], gpus[d.Device.Parent], all[id])
		gpus[id] = parent{d.Memory, next.Memory, r, d.Sample.Presence}
		*d = next
	}
}
