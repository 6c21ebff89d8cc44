package sim

import "math"

// workload simulates the work of one device, a GPU or a MIG device. It divides time into slots of equal length; most
// slots hold one job. Its values depend on the seed and the time only, whatever polls came before. done is a cache: it
// saves summing up the past in each poll.
type workload struct {
	seed   uint64
	period float64 // s, length of a slot
	phase  float64 // s into slot 0 at time 0
	share  float64 // of the GPU's compute
	memory float64 // MiB available to jobs

	first float64 // at(0).fast
	slots int64   // number of slots summed up in done
	done  float64 // work until the end of those slots, s at full load
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
	l.first = l.at(0).fast
	return l
}

// job is a period of work, in seconds since the start. The zero job means that a slot is idle.
type job struct{ start, end, util, memory float64 }

// job returns the job of a slot. It starts and ends within the slot.
func (l *workload) job(slot int64) job {
	if l.random(slot, 2) < 0.2 {
		return job{}
	}
	start := float64(slot)*l.period - l.phase + l.period*(0.02+0.13*l.random(slot, 3))
	return job{
		start:  start,
		end:    start + l.period*(0.4+0.45*l.random(slot, 4)),
		util:   0.35 + 0.65*math.Sqrt(l.random(slot, 5)),
		memory: l.memory * (0.25 + 0.65*l.random(slot, 6)),
	}
}

func (l *workload) slot(t float64) int64 { return int64(math.Floor((t + l.phase) / l.period)) }

// level is the load of a device at one moment.
type level struct {
	fast, slow float64 // utilization from 0 to 1, after fastLag and slowLag
	memory     float64 // MiB in use by jobs
}

func (l *workload) at(t float64) level {
	var (
		out level
		now = l.slot(t)
	)
	for slot := now - pastSlots; slot <= now; slot++ {
		j := l.job(slot)
		if j.end == j.start || t <= j.start {
			continue
		}
		out.fast += j.util * (rise(t-j.start, fastLag) - rise(t-j.end, fastLag))
		out.slow += j.util * (rise(t-j.start, slowLag) - rise(t-j.end, slowLag))
		if t < j.end {
			out.memory = j.memory
			// A job first loads its model, then allocates the rest.
			if t < j.start+0.1*(j.end-j.start) {
				out.memory *= 0.4
			}
		}
	}
	return out
}

// work returns the integral of level.fast from 0 to t, in seconds at full load; fast is its value at t. From y' = (u-y)/lag follows that
// the integral of y is the integral of u minus lag times the increase of y.
func (l *workload) work(t, fast float64) float64 {
	now := l.slot(t)
	if l.slots > now {
		l.slots, l.done = 0, 0
	}
	for ; l.slots < now; l.slots++ {
		l.done += l.job(l.slots).upTo(math.Inf(1))
	}
	return l.done + l.job(now).upTo(t) - fastLag*(fast-l.first)
}

// upTo returns the job's work between 0 and t.
func (j job) upTo(t float64) float64 {
	return j.util * max(0, min(t, j.end)-max(0, j.start))
}

// rise returns the step response of a first-order lag, from 0 to 1, at a time after the step.
func rise(after, lag float64) float64 {
	if after <= 0 {
		return 0
	}
	return -math.Expm1(-after / lag)
}

// random returns a random number in [0, 1) that depends on the seed, a and b: the finalizer of splitmix64 (Steele, Lea,
// Flood 2014).
func (l *workload) random(a int64, b uint64) float64 {
	x := l.seed + 0x9e3779b97f4a7c15*(uint64(a)*16+b+1)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return float64((x^x>>31)>>11) / (1 << 53)
}
