package sim

// conditions are what events have done to a GPU; nil where none has.
type conditions struct {
	lost        *bool
	stale       *bool
	recovery    *int // the driver's number
	remap       *bool
	remapFailed *bool
	doubleBits  *int
	retired     *int // pages
	slowed      *bool
	temperature *float64 // °C; 0: simulated
	incidents   incidents
	mig         *string
}

// over lays c over what is below it.
func (c conditions) over(below conditions) conditions {
	return conditions{
		lost:        first(c.lost, below.lost),
		stale:       first(c.stale, below.stale),
		recovery:    first(c.recovery, below.recovery),
		remap:       first(c.remap, below.remap),
		remapFailed: first(c.remapFailed, below.remapFailed),
		doubleBits:  first(c.doubleBits, below.doubleBits),
		retired:     first(c.retired, below.retired),
		slowed:      first(c.slowed, below.slowed),
		temperature: first(c.temperature, below.temperature),
		incidents:   c.incidents.over(below.incidents),
		mig:         first(c.mig, below.mig),
	}
}

func first[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

// is returns what p points to, the zero value if to nothing.
func is[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
