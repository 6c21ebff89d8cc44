package health

import (
	"slices"
	"time"
)

// The former pairing and history of XIDs, for ledger_random_test.go.
//
// Several witnesses report one XID. Their reports are paired by order and count, for each device and number: the n-th XID of one witness is
// the n-th of another. Times cannot pair them, because each witness has its own clock and delay. The first report makes the XID count. The
// XID is then awaited from the other witnesses, and their reports of it do not count. A reset in between does not matter.
//
// A witness may lose an XID, so an awaited XID expires: see awaitSource and awaitEvents. Until then, the witness' next XID with the same
// number and device is taken for the lost one, and does not count if no other witness reports it. Nothing else is lost. An XID counts twice
// only if a witness reports it after it has expired, or under another number: NVML and DCGM call the numbers that they lack 999, the kernel
// log does not.

// AwaitedXIDs are XIDs with one number that count already and that a witness has not reported yet.
type AwaitedXIDs struct {
	Code    int
	Witness Witness // that has not reported them
	Count   int

	// Since and Newest are when the first and the last of them began to be awaited. For WitnessSource, zero means before the agent's start or
	// before a detach.
	Since, Newest time.Time

	// For WitnessSource: how long the source must still measure without reporting them until they expire, and by how much this time was
	// extended.
	Left, Extended time.Duration
}

const (
	// An XID is awaited from the source for awaitSource. The time begins anew whenever the source reports any XID: DCGM reads one event per
	// second from all GPUs together (dcgm/OBSERVED.md#xid-rate), so while it reports XIDs it may have unread ones. DCGM reads in order. While
	// it reports XIDs that have been awaited for longer, the extensions may add up to maxBehind. Otherwise they may add up to maxExtension,
	// because the source may report older XIDs that an event source missed. Only time in which the source measures counts, and at most maxStep
	// per reading, so a source that stalls or restarts loses nothing.
	awaitSource = 15 * time.Second

	// awaitEvents is how long an XID is awaited from an event source. These report XIDs within milliseconds, and lose them
	// while they are down.
	awaitEvents = 10 * time.Second

	maxAwaited = 256 // entries of a device; above it the oldest are dropped
)

// pairing is the state of pairing the XIDs of one device.
type pairing struct {
	awaited []AwaitedXIDs // oldest first
	counted []XID         // XIDs that no other witness reported before
	twins   []XID         // the others
	taken   []AwaitedXIDs // the entries that the twins were taken from
}

// pairXIDs pairs a device's XIDs, oldest first, with the awaited ones. XIDs that count are then awaited from the other witnesses.
func (rc ReadingContext) pairXIDs(awaited []AwaitedXIDs, xids []XID, now time.Time) pairing {
	if len(awaited) == 0 && len(xids) == 0 {
		return pairing{} // the usual case
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
			p.await(AwaitedXIDs{Code: x.Code, Witness: WitnessSource, Count: 1, Since: now, Newest: now, Left: awaitSource})
		}
		for _, w := range rc.Witnesses {
			if w != x.Witness {
				p.await(AwaitedXIDs{Code: x.Code, Witness: w, Count: 1, Since: now, Newest: now})
			}
		}
	}
	return p
}

// progress is what a reading shows of the XIDs that the source has not reported yet.
type progress struct {
	reports  bool      // the source reports XIDs
	behind   bool      // among them are XIDs that were awaited
	position time.Time // AwaitedXIDs.Since of the oldest of these
}

// add adds the pairing of one device.
func (s *progress) add(p pairing) {
	s.reports = s.reports || len(p.counted)+len(p.taken) > 0
	for _, a := range p.taken {
		if !s.behind || a.Since.Before(s.position) {
			s.behind, s.position = true, a.Since
		}
	}
}

// extension returns by how much XIDs that are still awaited may be extended in total.
func (s *progress) extension(a AwaitedXIDs) time.Duration {
	switch {
	case !s.reports:
		return 0
	case s.behind && !s.position.After(a.Newest):
		return maxBehind
	}
	return maxExtension
}

// passTime removes the XIDs that the source did not report in time.
func passTime(awaited []AwaitedXIDs, step time.Duration, s *progress) []AwaitedXIDs {
	if step == 0 {
		return awaited
	}
	awaited = slices.Clone(awaited)
	for i := range awaited {
		a := &awaited[i]
		if a.Witness != WitnessSource {
			continue
		}
		a.Left -= step
		if missing := awaitSource - a.Left; missing > 0 && a.Extended < s.extension(*a) {
			a.Left, a.Extended = awaitSource, a.Extended+missing
		}
	}
	return slices.DeleteFunc(awaited, func(a AwaitedXIDs) bool { return a.Witness == WitnessSource && a.Left <= 0 })
}

// takeAwaited removes the oldest awaited XID that x reports. It returns false if there is none.
func (p *pairing) takeAwaited(x XID) bool {
	i := slices.IndexFunc(p.awaited, func(a AwaitedXIDs) bool { return a.Code == x.Code && a.Witness == x.Witness })
	if i < 0 {
		return false
	}
	p.taken = append(p.taken, p.awaited[i])
	if p.awaited[i].Count--; p.awaited[i].Count <= 0 {
		p.awaited = slices.Delete(p.awaited, i, i+1)
	}
	return true
}

// await adds awaited XIDs. XIDs that expire within the same second share an entry, so a storm needs little space.
func (p *pairing) await(x AwaitedXIDs) {
	span := time.Second
	if x.Witness == WitnessSource {
		span = maxSpan
	}
	for i := range p.awaited {
		a := &p.awaited[i]
		if a.Code == x.Code && a.Witness == x.Witness && x.Left-a.Left < time.Second && x.Since.Sub(a.Since) < span {
			a.Count, a.Newest = a.Count+x.Count, x.Newest
			return
		}
	}
	p.awaited = append(p.awaited, x)
	p.awaited = p.awaited[max(0, len(p.awaited)-maxAwaited):]
}

// maxXIDHistory is how many of the newest XIDs of the stream a device remembered.
const maxXIDHistory = 1024

func appendHistory(history []XID, added ...[]XID) []XID {
	all := slices.Clone(history)
	for _, x := range slices.Concat(added...) {
		if !slices.ContainsFunc(all, x.SameEvent) {
			all = append(all, x)
		}
	}
	return all[max(0, len(all)-maxXIDHistory):]
}
