package health

import (
	"maps"
	"time"
)

// EventAction is a recovery action that an event reported. It replaces the source's until readings have passed Left, because the values of
// DCGM's cache may be two seconds old. An older "none" would count as a reset of a broken GPU, and an older "reset" would break a GPU that
// was reset.
type EventAction struct {
	Action RecoveryAction
	Left   time.Duration // zero if it no longer applies
}

// awaitAction is how long readings must pass until the source's recovery action counts again.
const awaitAction = 5 * time.Second

// replace returns the source's sample with the recovery action of the event, and what applies to the next sample. An unknown
// recovery action stays unknown.
func (a EventAction) replace(s Sample, step time.Duration) (Sample, EventAction) {
	if a.Left <= 0 {
		return s, EventAction{}
	}
	s = s.withAction(a.Action)
	if a.Left -= step; a.Left <= 0 {
		a = EventAction{}
	}
	return s, a
}

// withAction returns the sample with another recovery action, if it has one.
func (s Sample) withAction(a RecoveryAction) Sample {
	if v, ok := s.Values[FieldRecoveryAction]; ok && v != float64(a) {
		s.Values = maps.Clone(s.Values)
		s.Values[FieldRecoveryAction] = float64(a)
	}
	return s
}
