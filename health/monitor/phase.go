package monitor

import "time"

const (
	// measurePeriod is how often an engine measures the values that health is judged by (health/dcgm, healthInterval).
	measurePeriod = time.Second

	// measureJitter is how far from its moment of the period a measurement may happen, on a machine that is busy.
	measureJitter = 50 * time.Millisecond

	// phaseWidth is the width of a phase that is not narrowed further: the edges of a narrower one would be jitter.
	phaseWidth = measureJitter

	// maxStreak is the number of reads in a row that can see a measurement if there is one per period: jitter makes two of one.
	maxStreak = 3

	// readMargin is how long a read may take to reach the engine and return.
	readMargin = 20 * time.Millisecond
)

// phase is at which moment of each measurePeriod an engine measures, as learned from reads of it. It uses the monotonic times of the
// reads only: the engine's clock may step, or be another machine's. The zero phase is unknown.
type phase struct {
	after, by time.Time // a measurement came after `after` and no later than `by`
	streak    int       // of observed measurements, without a moment between them at which there was none
}

func (p *phase) known() bool { return !p.by.IsZero() }

// narrow reports whether more reads would tell nothing new. One measurement came after p.after and one by p.by, so each comes after p.after
// - measureJitter and no later than p.by + measureJitter.
func (p *phase) narrow() bool { return p.by.Sub(p.after) <= phaseWidth }

// shift moves the phase by whole periods, so that it lies around t.
func (p *phase) shift(t time.Time) {
	middle := p.after.Add(p.by.Sub(p.after) / 2)
	by := t.Sub(middle).Round(measurePeriod)
	p.after, p.by = p.after.Add(by), p.by.Add(by)
}

// observe learns from two reads, one after the other: whether the engine has measured after the earlier and by the later.
func (p *phase) observe(earlier, later time.Time, measured bool) {
	width := later.Sub(earlier)
	if width > measurePeriod*3/4 {
		return // it says little, or nothing, of the phase
	}
	if p.streak++; !measured {
		p.streak = 0
	}
	if p.streak > maxStreak {
		*p = phase{streak: p.streak} // another client of the engine has it measure more often: there is nothing to follow
		return
	}
	if !p.known() {
		if measured {
			p.after, p.by = earlier, later
		}
		return
	}
	p.shift(earlier.Add(width / 2))
	switch overlap := earlier.Before(p.by) && p.after.Before(later); {
	case measured && !overlap:
		if !earlier.Before(p.by.Add(measureJitter)) || !p.after.Add(-measureJitter).Before(later) {
			p.after, p.by = earlier, later // the phase has changed
		}
	case !overlap || p.narrow():
	case measured:
		p.after, p.by = latest(p.after, earlier), earliest(p.by, later)
	case later.Before(p.by): // it came, or will come, after the later read
		p.after = latest(p.after, later)
	case p.after.Before(earlier):
		p.by = earlier
	}
}

// next returns the first moment from t on at which the engine has just measured; or t if the phase is unknown.
func (p *phase) next(t time.Time) time.Time { return p.nextOf(p.by.Add(measureJitter), t) }

// middle returns the first moment from t on at which a read halves the phase. It must be known.
func (p *phase) middle(t time.Time) time.Time {
	return p.nextOf(p.after.Add(p.by.Sub(p.after)/2), t)
}

// before returns the first moment from t on at which the engine is about to measure: a read then finds a phase that has become earlier.
// It must be known.
func (p *phase) before(t time.Time) time.Time {
	return p.nextOf(p.after.Add(-measureJitter-readMargin), t)
}

// untilAfter returns the time from t until the engine may measure, but for jitter.
func (p *phase) untilAfter(t time.Time) time.Duration { return p.nextOf(p.after, t).Sub(t) }

// nextOf returns the first of the moments one period apart, of which one is m, that is not before t.
func (p *phase) nextOf(m, t time.Time) time.Time {
	if !p.known() {
		return t
	}
	return t.Add(inPeriod(m.Sub(t)))
}

// inPeriod returns d without whole periods, from 0 on.
func inPeriod(d time.Duration) time.Duration {
	return (d%measurePeriod + measurePeriod) % measurePeriod
}

func latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
