package metrics

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Idle times continue after a restart of the agent, because a daily roll-out would otherwise hide idle times of weeks. The time
// in between does not count. A saved time belongs to a container, not to its name:
//   - It ends with the boot.
//   - It does not continue if the plugin has allocated the device since the restart: no pod gets a device while the plugin is
//     down. It does not continue if the pod's UID is another one.
//   - Without the plugin and without the UID, nothing tells a pod from the next one of a StatefulSet. The time then continues
//     only after a short restart.
const (
	continueWithin           = 15 * time.Minute
	continueUnverifiedWithin = 2 * time.Minute
)

// heldDevice is a device and a container that holds it.
type heldDevice struct {
	device health.DeviceID
	container
}

// savedIdleTime is the part of idleTime that outlives a restart.
type savedIdleTime struct {
	uid       string
	updated   time.Time // idleTime.updated in the process that observed it
	restored  time.Time // when this process read it; zero if the process observed it itself
	measured  bool
	sinceBusy time.Duration

	withoutProcess time.Duration

	observed        time.Duration
	fromStart, used bool
}

type savedIdleTimes map[heldDevice]savedIdleTime

// take removes and returns the saved time of a container, with which its time continues. It returns the zero idleTime if there is none, or
// if the time may be another container's.
func (s savedIdleTimes) take(h heldDevice, o observation) idleTime {
	saved, ok := s[h]
	delete(s, h)
	limit := continueUnverifiedWithin
	if uid := o.identity.uidOf(h.container); o.identity.Allocates || uid != "" && uid == saved.uid {
		limit = continueWithin
	}
	if !ok || o.at.Sub(saved.updated) > limit {
		return idleTime{}
	}
	return idleTime{
		measured: saved.measured, sinceBusy: saved.sinceBusy, withoutProcess: saved.withoutProcess,
		observed: saved.observed, fromStart: saved.fromStart, used: saved.used,
		uid: saved.uid, updated: saved.restored, ownAt: saved.restored,
		workAt: saved.restored, processesAt: saved.restored,
	}
}

// maxSavedIdleTimes limits the saved times. A node has at most some hundred shares of devices.
const maxSavedIdleTimes = 1000

// toSave returns the idle times to save: the ones above 0, and the restored ones that may still continue.
func (a *accumulator) toSave(now time.Time) savedIdleTimes {
	all := make(savedIdleTimes)
	for h, saved := range a.restored {
		if now.Sub(saved.updated) <= continueWithin {
			all[h] = saved
		}
	}
	for device := range a.devices {
		for c, i := range a.devices[device].idle {
			if i.sinceBusy > 0 || i.withoutProcess > 0 {
				all[heldDevice{device, c}] = savedIdleTime{
					uid: i.uid, updated: i.updated, measured: i.measured, sinceBusy: i.sinceBusy, withoutProcess: i.withoutProcess,
					observed: i.observed, fromStart: i.fromStart, used: i.used,
				}
			}
		}
	}
	return all
}

// saveInterval is how often growing idle times are saved.
const saveInterval = 5 * time.Minute

// exceeds reports whether a saved time would continue wrongly after a crash: it is longer than the time now, its container has ended, or
// its container counts as one that has not used the device, and has used it since. Short times do not matter: a device that is busy now and
// then is not saved each time.
func (s savedIdleTimes) exceeds(now savedIdleTimes) bool {
	const short = time.Minute
	for h, was := range s {
		is := now[h]
		if is.used && !was.used || was.sinceBusy > max(short, is.sinceBusy) || was.withoutProcess > max(short, is.withoutProcess) {
			return true
		}
	}
	return false
}

// save publishes the idle times for the state file: at most once per saveInterval if they only grow.
func (t *Totals) save(last bool) {
	now := t.now()
	t.mu.RLock()
	all := t.accumulator.toSave(now)
	t.mu.RUnlock()
	due := last || now.Sub(t.publishedAt) >= saveInterval
	if len(all) == 0 && len(t.published) == 0 || !due && !t.published.exceeds(all) {
		return
	}
	text, err := json.Marshal(all)
	if err != nil {
		return // impossible: all values have texts
	}
	t.published, t.publishedAt = all, now
	t.saved.Store(&text)
}

// Saved holds the idle times for Restore, empty before there are any.
func (t *Totals) Saved() *health.Latest[[]byte] { return &t.saved }

// Restore continues the idle times that an earlier process of the same boot has saved. While Run runs, the times of containers that it has
// observed begin with its start.
func (t *Totals) Restore(text []byte) error {
	all := make(savedIdleTimes)
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("idle times: %w", err)
	}
	now := t.now()
	for h, saved := range all {
		// The time on this process's monotonic clock, so that a later step of the wall clock does not matter. A time ahead of now
		// means that the clock was set back by at least the difference.
		age := now.Sub(saved.updated).Abs()
		if age > continueWithin {
			delete(all, h)
			continue
		}
		saved.updated, saved.restored = now.Add(-age), now
		all[h] = saved
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.accumulator.restored = all
	return nil
}

// savedIdleEntry is a savedIdleTime in the state file.
type savedIdleEntry struct {
	Device         health.DeviceID `json:"device"`
	Namespace      string          `json:"namespace"`
	Pod            string          `json:"pod"`
	Container      string          `json:"container"`
	UID            string          `json:"uid,omitempty"`
	Updated        time.Time       `json:"updated"`
	Measured       bool            `json:"measured,omitempty"`
	SinceBusy      time.Duration   `json:"sinceBusyNanoseconds,omitempty"`
	WithoutProcess time.Duration   `json:"withoutProcessNanoseconds,omitempty"`
	Observed       time.Duration   `json:"observedNanoseconds,omitempty"`
	FromStart      bool            `json:"fromStart,omitempty"`
	Used           bool            `json:"used,omitempty"`
}

// MarshalJSON writes the longest times if there are too many, in an order that depends on nothing else.
func (s savedIdleTimes) MarshalJSON() ([]byte, error) {
	list := make([]savedIdleEntry, 0, len(s))
	for h, i := range s {
		list = append(list, savedIdleEntry{
			h.device, h.namespace, h.pod, h.name, i.uid, i.updated, i.measured, i.sinceBusy, i.withoutProcess, i.observed, i.fromStart, i.used,
		})
	}
	slices.SortFunc(list, func(a, b savedIdleEntry) int {
		return cmp.Or(-cmp.Compare(max(a.SinceBusy, a.WithoutProcess), max(b.SinceBusy, b.WithoutProcess)), cmp.Compare(a.Device, b.Device),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
	})
	return json.Marshal(list[:min(len(list), maxSavedIdleTimes)])
}

// UnmarshalJSON ignores unknown keys and entries that MarshalJSON does not write.
func (s *savedIdleTimes) UnmarshalJSON(text []byte) error {
	var list []savedIdleEntry
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	all := make(savedIdleTimes)
	for _, e := range list[:min(len(list), maxSavedIdleTimes)] {
		if e.Device == "" || e.Pod == "" || e.SinceBusy < 0 || e.WithoutProcess < 0 || e.Observed < max(e.SinceBusy, e.WithoutProcess) {
			continue
		}
		all[heldDevice{e.Device, container{e.Namespace, e.Pod, e.Container}}] = savedIdleTime{
			uid: e.UID, updated: e.Updated, measured: e.Measured, sinceBusy: e.SinceBusy, withoutProcess: e.WithoutProcess,
			observed: e.Observed, fromStart: e.FromStart, used: e.Used,
		}
	}
	*s = all
	return nil
}
