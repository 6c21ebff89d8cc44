package health

import (
	"slices"
	"time"
)

// Witnesses that report one XID are paired by order and count, for each device and number: the n-th XID of one witness is the
// n-th of another. Times cannot pair them, because each witness has its own clock and delay. Whichever witness reports an XID
// first makes it count; it is then awaited from the others, whose reports of it count no more. A reset in between does not
// matter.
//
// A witness may lose an XID. What is awaited from it therefore expires: see awaitSource and awaitEvents. Until then, its next
// XID with the same number and device is taken for the lost one, and does not count if no other witness reports it. Nothing else
// is lost. An XID counts twice only if a witness reports it later than that.

// AwaitedXIDs are XIDs with one number that count already and that a witness has not reported yet.
type AwaitedXIDs struct {
	Code    int
	Witness Witness // that has not reported them
	Count   int
	Left    time.Duration // WitnessSource: how long the source must measure, without reporting them, until they expire
	Since   time.Time     // an EventSource: when they began to be awaited
}

const (
	// An XID is awaited from the source for awaitSource plus awaitXID for each XID that is awaited on any device: DCGM reads one
	// event per second from all GPUs together (dcgm/OBSERVED.md#xid-rate), and on a loaded node less. Only time during which the
	// source measures counts, and at most maxStep per reading, so that a source that stalls or restarts loses nothing.
	awaitSource = 15 * time.Second
	awaitXID    = 2 * time.Second
	maxStep     = 2 * time.Second

	// awaitEvents is how long an XID is awaited from an event source. These report XIDs within milliseconds, and lose them
	// while they are down.
	awaitEvents = 10 * time.Second

	maxAwaited = 256 // entries of a device; above it the oldest are dropped
	maxBatches = 8   // entries of one number and witness; above it the newest two merge
)

// elapsedStep returns the time that a reading of the source passes for what is awaited from the source: none if the source
// measures nothing, as while DCGM is blind, or if the device has no earlier sample.
func elapsedStep(measures bool, before, now time.Time) time.Duration {
	if !measures || before.IsZero() {
		return 0
	}
	return min(max(0, now.Sub(before)), maxStep)
}

// awaitedFromSource returns how many XIDs the source has not reported yet when it has none of the reading's.
func awaitedFromSource(before []DeviceState, samples map[DeviceID]Sample) int {
	n := 0
	for i := range before {
		for _, a := range before[i].Awaited {
			if a.Witness == WitnessSource {
				n += a.Count
			}
		}
	}
	for _, s := range samples {
		for _, x := range s.XIDs {
			if x.Witness != WitnessSource {
				n++
			}
		}
	}
	return n
}

// pairing is the state of pairing the XIDs of one device.
type pairing struct {
	awaited []AwaitedXIDs // oldest first
	counted []XID         // that no other witness reported before
	twins   []XID         // the others
}

// pairXIDs pairs a device's XIDs, oldest first, with those that are awaited. Those that count are awaited for wait from the
// source, and from the other witnesses.
func (rc ReadingContext) pairXIDs(awaited []AwaitedXIDs, xids []XID, wait, step time.Duration, now time.Time) pairing {
	if len(awaited) == 0 && len(xids) == 0 {
		return pairing{}
	}
	p := pairing{awaited: slices.DeleteFunc(slices.Clone(awaited), func(a AwaitedXIDs) bool {
		return a.Witness != WitnessSource && now.Sub(a.Since) >= awaitEvents
	})}
	for _, x := range xids {
		if p.takeAwaited(x) {
			p.twins = append(p.twins, x)
			continue
		}
		p.counted = append(p.counted, x)
		if x.Witness != WitnessSource {
			p.await(AwaitedXIDs{Code: x.Code, Witness: WitnessSource, Count: 1, Left: wait})
		}
		for _, w := range rc.Witnesses {
			if w != x.Witness {
				p.await(AwaitedXIDs{Code: x.Code, Witness: w, Count: 1, Since: now})
			}
		}
	}
	for i := range p.awaited {
		if a := &p.awaited[i]; a.Witness == WitnessSource {
			a.Left -= step
		}
	}
	p.awaited = slices.DeleteFunc(p.awaited, func(a AwaitedXIDs) bool { return a.Witness == WitnessSource && a.Left <= 0 })
	if len(p.awaited) == 0 {
		p.awaited = nil
	}
	return p
}

// takeAwaited removes the oldest awaited XID that x is the report of. It returns false if there is none.
func (p *pairing) takeAwaited(x XID) bool {
	i := slices.IndexFunc(p.awaited, func(a AwaitedXIDs) bool { return a.Code == x.Code && a.Witness == x.Witness })
	if i < 0 {
		return false
	}
	if p.awaited[i].Count--; p.awaited[i].Count <= 0 {
		p.awaited = slices.Delete(p.awaited, i, i+1)
	}
	return true
}

// await adds awaited XIDs, in bounded space: those that expire at about the same time are one entry, and so are those of a
// storm.
func (p *pairing) await(x AwaitedXIDs) {
	batches, newest := 0, -1
	for i := range p.awaited {
		if a := &p.awaited[i]; a.Code == x.Code && a.Witness == x.Witness {
			batches++
			newest = i
		}
	}
	if newest >= 0 {
		a := &p.awaited[newest]
		if batches >= maxBatches || (x.Left-a.Left).Abs() < time.Second && x.Since.Sub(a.Since) < time.Second {
			a.Count, a.Left, a.Since = a.Count+x.Count, max(a.Left, x.Left), x.Since
			return
		}
	}
	p.awaited = append(p.awaited, x)
	p.awaited = p.awaited[max(0, len(p.awaited)-maxAwaited):]
}

// unreportedXIDs returns the numbers of the XIDs that the source has not reported yet, by device, so its values may be older
// than these XIDs. An XID of a MIG device that affects the whole GPU is also in those of the GPU.
func unreportedXIDs(before []DeviceState) map[DeviceID][]int {
	var all map[DeviceID][]int
	for i := range before {
		d := &before[i]
		for _, a := range d.Awaited {
			if a.Witness != WitnessSource {
				continue
			}
			if all == nil {
				all = make(map[DeviceID][]int)
			}
			all[d.Device.ID] = append(all[d.Device.ID], a.Code)
			if d.Device.Kind == KindMIG && LookupXID(a.Code).WholeGPU {
				all[d.Device.Parent] = append(all[d.Device.Parent], a.Code)
			}
		}
	}
	return all
}
