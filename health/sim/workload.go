package sim

import "math"

// workload simulates the work of one device, a GPU or a MIG device. It divides time into slots of equal length, each with one job. Its
// values depend on the seed and the time only.
type workload struct {
	seed   uint64
	period float64 // s, length of a slot
	phase  float64 // s into slot 0 at time 0
	length float64 // s, of each job
	share  float64 // of the GPU's compute
	memory float64 // MiB available to jobs
	before float64 // workUntil(0)
}

// First-order lags between a load and its effects, in seconds.
const (
	fastLag = 1.2 // utilization and power
	slowLag = 14  // temperature
)

// pastSlots is how many past slots affect the present: after two, slowLag leaves e^-10 of a job.
const pastSlots = 2

func newWorkload(seed uint64, share, memory float64) workload {
	l := workload{seed: seed, share: share, memory: memory}
	l.period = 70 + 50*l.random(0, 0)
	l.phase = l.period * l.random(0, 1)
	l.length = l.period * (0.45 + 0.3*l.random(0, 4))
	l.before = l.workUntil(0)
	return l
}

// job is a period of work.
type job struct {
	start        float64 // s
	util, memory float64 // 0.36 to 1; MiB
}

// job returns the job of a slot. It starts and ends within the slot.
func (l *workload) job(slot int64) job {
	return job{
		start:  float64(slot)*l.period - l.phase + (l.period-l.length)*l.random(slot, 3),
		util:   meanUtil + l.swing(slot+1) - l.swing(slot),
		memory: l.memory * (0.25 + 0.65*l.random(slot, 6)),
	}
}

const meanUtil = 0.68

// swing makes jobs differ. The utilization of a job is its difference between two slots, so that the sum of all jobs is known.
func (l *workload) swing(slot int64) float64 {
	return 0.28*math.Round(l.random(slot, 5)) + 0.04*l.random(slot, 2)
}

func (l *workload) slot(t float64) int64 { return int64(math.Floor((t + l.phase) / l.period)) }

// level is the load of a device at one moment.
type level struct {
	fast, slow float64 // utilization from 0 to 1, after fastLag and slowLag
	memory     float64 // MiB in use by jobs
}

func (l *workload) at(t float64) (out level) {
	now := l.slot(t)
	for slot := now - pastSlots; slot <= now; slot++ {
		j := l.job(slot)
		since := t - j.start
		out.fast += j.util * (rise(since, fastLag) - rise(since-l.length, fastLag))
		out.slow += j.util * (rise(since, slowLag) - rise(since-l.length, slowLag))
		switch {
		case since <= 0 || since >= l.length:
		case since < 0.1*l.length: // a job first loads its model, then allocates the rest
			out.memory = 0.4 * j.memory
		default:
			out.memory = j.memory
		}
	}
	return out
}

// work returns the integral of level.fast from 0 to t, in seconds at full load.
func (l *workload) work(t float64) float64 { return l.workUntil(t) - l.before }

// workUntil returns the integral of level.fast until t, but for a constant.
func (l *workload) workUntil(t float64) float64 {
	now := l.slot(t)
	work := l.length * (meanUtil*float64(now-1) + l.swing(now-1)) // of the jobs before the last two
	for slot := now - 1; slot <= now; slot++ {
		j := l.job(slot)
		work += j.util * (risen(t-j.start, fastLag) - risen(t-j.start-l.length, fastLag))
	}
	return work
}

// rise returns the step response of a first-order lag, from 0 to 1, at a time after the step.
func rise(after, lag float64) float64 { return -math.Expm1(-max(0, after) / lag) }

// risen returns the integral of rise from 0 on.
func risen(after, lag float64) float64 { return max(0, after) - lag*rise(after, lag) }

// random returns a random number in [0, 1) that depends on the seed, a and b: the finalizer of splitmix64 (Steele, Lea,
// Flood 2014).
func (l *workload) random(a int64, b uint64) float64 {
	x := l.seed + 0x9e3779b97f4a7c15*(uint64(a)*16+b+1)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return float64((x^x>>31)>>11) / (1 << 53)
}
