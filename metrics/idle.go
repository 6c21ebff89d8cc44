package metrics

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// idleTime is how long a container has not used a device that it holds. Time in which its use is unknown does not count.
type idleTime struct {
	measured  bool // its use was measured while the container held the device
	total     time.Duration
	sinceBusy time.Duration

	workKnown      bool          // whether it works is known now
	works          bool          // it works now
	processesKnown bool          // whether it has processes is known now
	withoutProcess time.Duration // since it last had one

	observed  time.Duration // since it was first observed
	fromStart bool          // it was observed since it got the device
	used      bool          // it had a process while it was observed or, while the processes were unknown, has worked

	uid     string    // of the pod; "" if unknown
	updated time.Time // when the kubelet last reported that the container holds the device
	ownAt   time.Time // when its own use was last measured, not the use of all holders

	workAt, processesAt time.Time // when these were last known; at first, when it was first observed
}

// ownUseMemory is how long a container counts as one whose own use is measured. Until then the load of all holders does not make it
// busy: the processes may be unknown for a moment, after a start, during a detach or when the driver does not answer.
const ownUseMemory = 5 * time.Minute

// Identity tells a container from a later one of the same name, such as one of a StatefulSet's next pod.
type Identity struct {
	PodLabels func(namespace, pod string) []Label // as Sources.PodLabels; the UID is compared, if it is known
	Allocated func(podresources.Holder) time.Time // the last allocation of what a container holds; zero if there was none
	Allocates bool                                // Allocated knows every allocation since the agent started
}

// replaced reports whether the container is another one than before, with the same name.
func (i Identity) replaced(before idleTime, c container, holders []podresources.Holder) bool {
	if uid := i.uidOf(c); uid != "" && before.uid != "" && uid != before.uid {
		return true
	}
	return i.allocatedSince(before.updated, c, holders)
}

// allocatedSince reports whether what the container holds was allocated after a time.
func (i Identity) allocatedSince(at time.Time, c container, holders []podresources.Holder) bool {
	return i.Allocated != nil && slices.ContainsFunc(holders,
		func(h podresources.Holder) bool { return containerOf(h) == c && i.Allocated(h).After(at) })
}

// uidOf returns the UID of a container's pod, "" if it is unknown.
func (i Identity) uidOf(c container) string {
	if i.PodLabels == nil {
		return ""
	}
	labels := i.PodLabels(c.namespace, c.pod)
	if n := slices.IndexFunc(labels, isPodUID); n >= 0 {
		return labels[n].Value
	}
	return ""
}

// holdersGap is how long the holders may be unknown at most, so that a container that is new afterwards counts as observed since it got its
// device. The kubelet gives no device to a container while the kubelet does not run.
const holdersGap = time.Minute

// updateIdle adds idle time for each container that holds the device. Time does not count while the container's use of the device
// is unknown. If the pod resources could not be read, the holders stay.
func (t *deviceTotals) updateIdle(d *health.DeviceState, o observation, elapsed time.Duration, restored savedIdleTimes) {
	if o.holders.By == nil && o.holders.Err != "" {
		return
	}
	holders := o.holders.By[d.Device.ID]
	watched := !t.holdersAt.IsZero() && o.at.Sub(t.holdersAt) < holdersGap
	if !o.holders.Settling {
		t.holdersAt = o.at
	}
	var idle map[container]idleTime
	for _, h := range holders {
		c := containerOf(h)
		if _, exists := idle[c]; exists {
			continue // the container holds several replicas
		}
		if idle == nil {
			idle = make(map[container]idleTime)
		}
		i, held := t.idle[c]
		since := elapsed
		if !held {
			i, since = restored.take(heldDevice{d.Device.ID, c}, o), 0
		}
		if o.identity.replaced(i, c, holders) {
			i, since = idleTime{}, 0
		}
		if i.updated.IsZero() {
			i.fromStart = watched || o.identity.allocatedSince(o.started, c, holders)
			i.workAt, i.processesAt = o.at, o.at
		}
		if uid := o.identity.uidOf(c); uid != "" {
			i.uid = uid
		}
		i.updated = o.holders.At
		u := useOf(d, c, o)
		switch {
		case u.measured && !u.ofAll:
			i.ownAt = o.at
		case u.busy && o.at.Sub(i.ownAt) < ownUseMemory:
			u.measured = false
		}
		i.add(u, o.at, since)
		idle[c] = i
	}
	t.idle = idle
}

// add adds the time since the last update, in which the use was as it is now. A time that was unknown for long starts again, as after a
// long restart: the container may have used the device meanwhile.
func (i *idleTime) add(u use, at time.Time, elapsed time.Duration) {
	noWork, noProcesses := at.Sub(i.workAt)-elapsed > continueWithin, at.Sub(i.processesAt)-elapsed > continueWithin
	if noWork {
		i.sinceBusy = 0
	}
	if noProcesses {
		i.withoutProcess = 0
	}
	if noWork && noProcesses {
		i.observed, i.fromStart = 0, false
	}
	if u.measured {
		i.workAt = at
	}
	if u.processesKnown {
		i.processesAt = at
	}
	i.observed += elapsed
	i.used = i.used || u.process || u.measured && u.busy && !u.processesKnown
	i.workKnown, i.works = u.measured, u.measured && u.busy
	switch {
	case !u.measured:
	case u.busy:
		i.measured, i.sinceBusy = true, 0
	default:
		i.measured = true
		i.total += elapsed
		i.sinceBusy += elapsed
	}
	i.processesKnown = u.processesKnown
	switch {
	case !u.processesKnown:
	case u.process:
		i.withoutProcess = 0
	default:
		i.withoutProcess += elapsed
	}
}

// use is how a container uses a device.
type use struct {
	measured, busy          bool
	ofAll                   bool // it is the use of all containers that hold the device
	processesKnown, process bool // whether it has a process
}

// useOf returns how a container uses a device that it holds. The load of a device is its only holder's. Of several holders, the processes
// tell who uses the device; without them its load is everyone's.
func useOf(d *health.DeviceState, c container, o observation) use {
	u, load, known := processesOf(d, c, o)
	shared := false
	for _, h := range o.holders.By[d.Device.ID] {
		shared = shared || containerOf(h) != c
	}
	device, measured := deviceLoad(d, o)
	// It is unknown whose process uses the video engines: its SM share is 0.
	byVideo := u.process && load < o.idleBelow && videoLoad(d) >= o.idleBelow
	if measured && (!shared || !known || byVideo) {
		load, known, u.ofAll = device, true, shared
	}
	u.measured, u.busy = known, load >= o.idleBelow
	return u
}

// deviceLoad returns the load of a device in percent. The driver has no utilization of MIG devices, but DCGM may measure the
// activity of their engines.
func deviceLoad(d *health.DeviceState, o observation) (percent float64, measured bool) {
	if o.snapshot.Source.Status != health.SourceUp {
		return 0, false
	}
	v, measured := d.Sample.Values[health.FieldGPUUtil]
	if !measured {
		v, measured = d.Sample.Values[health.FieldEngineActive]
		v *= 100
	}
	return max(v, videoLoad(d)), measured
}

// videoLoad returns the load of the encoders and decoders of a device in percent, 0 if unknown. The utilization of the GPU is the time in
// which kernels run, and a video that is transcoded needs none.
func videoLoad(d *health.DeviceState) float64 {
	return max(d.Sample.Values[health.FieldEncUtil], d.Sample.Values[health.FieldDecUtil])
}

// processesOf returns what the processes tell of a container: whether it has one, and its load in percent. A process whose
// container is unknown may be the container's, so that nothing is known of a container without another. One of another container of the
// pod, which does not hold the device, uses what this one holds.
func processesOf(d *health.DeviceState, c container, o observation) (u use, percent float64, known bool) {
	usage, listed := o.processes.Of(d.Device.ID)
	if !listed {
		return use{}, 0, false
	}
	if d.Device.Parent != "" { // the driver may not name the MIG device of a process
		more, _ := o.processes.Of(d.Device.Parent)
		usage = slices.Concat(usage, more)
	}
	own, unknown, sm := false, false, true
	for _, p := range usage {
		switch {
		case p.Container == processes.Container{Namespace: c.namespace, Pod: c.pod, Name: c.name}:
			own, sm = true, sm && p.HasSM
			percent += 100 * p.SM
		case p.Container.Namespace == "", p.Container.Namespace == c.namespace && p.Container.Pod == c.pod &&
			!holds(o.holders.By[d.Device.ID], p.Container):
			unknown = true
		}
	}
	u.process, u.processesKnown = own, own || !unknown
	return u, percent, sm && u.processesKnown && (!unknown || percent >= o.idleBelow)
}

// holds reports whether a container is one of the holders.
func holds(holders []podresources.Holder, c processes.Container) bool {
	return slices.ContainsFunc(holders, func(h podresources.Holder) bool { return containerOf(h) == container{c.Namespace, c.Pod, c.Name} })
}

// IdleTime is how long a container has not used a device that it holds.
type IdleTime struct {
	NoWork, NoProcess         time.Duration // since it last worked, and since it last had a process
	WorkKnown, ProcessesKnown bool          // whether NoWork and NoProcess are known now
	Observed                  time.Duration // since it was first observed
	Works                     bool          // it works now
	Used                      bool          // it had a process since then or, while the processes were unknown, has worked
	ObservedFromStart         bool          // since it got the device
}

// NeverUsed reports whether the container has not used the device since it got it; known is false if that is unknown. A device that works
// is used, also if the driver does not list the process; but a short load may come from another process, so it does not count for good.
func (i IdleTime) NeverUsed() (never, known bool) {
	used := i.Used || i.Works
	return !used, used || i.ObservedFromStart && (i.WorkKnown || i.ProcessesKnown)
}

// Held is a device and a container that holds it.
type Held struct {
	Device                    health.DeviceID
	Namespace, Pod, Container string
}

// IdleTimes are the idle times of all containers that hold devices, as of the last update.
type IdleTimes map[Held]IdleTime

// Of returns the idle time of a holder of a device.
func (t IdleTimes) Of(device health.DeviceID, h podresources.Holder) (i IdleTime, ok bool) {
	i, ok = t[Held{device, h.Namespace, h.Pod, h.Container}]
	return i, ok
}

// IdleTimes returns the current idle times. They are empty while the source is not up or the holders are unknown.
func (t *Totals) IdleTimes() IdleTimes {
	if s := t.Snapshots.Load(); s == nil || s.Source.Status != health.SourceUp || t.Holders().Stale(t.now()) != "" {
		return nil
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make(IdleTimes)
	for id := range t.accumulator.devices {
		for c, i := range t.accumulator.devices[id].idle {
			all[Held{id, c.namespace, c.pod, c.name}] = i.exported()
		}
	}
	return all
}

func (i idleTime) exported() IdleTime {
	return IdleTime{
		NoWork: i.sinceBusy, NoProcess: i.withoutProcess, WorkKnown: i.workKnown, ProcessesKnown: i.processesKnown,
		Observed: i.observed, Works: i.works, Used: i.used, ObservedFromStart: i.fromStart,
	}
}
