package sim

import "math"

// load is the work that one device is given: a GPU, or a MIG device. Time is cut into slots of a length of
// its own, and most slots hold one job. Everything follows from the seed and the time, so that two polls
// with any others between them see the same; only done is kept, to save summing up the past each time.
type load struct {
	seed   uint64
	period float64 // s, length of a slot
	phase  float64 // s into slot 0 at time 0
	share  float64 // of the GPU's compute
	memory float64 // MiB that jobs can have

	first float64 // at(0).fast
	slots int64   // so many are summed up in done
	done  float64 // work until the end of those slots, s at full load
}

// The first-order lags with which a GPU follows its load, in seconds.
const (
	fastLag = 1.2 // utilization and power
	slowLag = 14  // temperature
)

// pastSlots is how many slots back still matter for slowLag: after two, e^-10 of a job is left.
const pastSlots = 2

func newLoad(seed uint64, share, memory float64) load {
	l := load{seed: seed, share: share, memory: memory}
	l.period = 70 + 50*l.random(0, 0)
	l.phase = l.period * l.random(0, 1)
	l.first = l.at(0).fast
	return l
}

// job is a stretch of work, in seconds since the start. The zero job is none.
type job struct{ start, end, util, memory float64 }

// job returns what runs in a slot, which it never leaves.
func (l *load) job(slot int64) job {
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

func (l *load) slot(t float64) int64 { return int64(math.Floor((t + l.phase) / l.period)) }

// level is the state of a device at one moment, utilizations from 0 to 1.
type level struct {
	fast, slow float64 // utilization with the two lags
	memory     float64 // MiB in use by jobs
}

func (l *load) at(t float64) level {
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
			// First the model is loaded, then the rest is allocated.
			if t < j.start+0.1*(j.end-j.start) {
				out.memory *= 0.4
			}
		}
	}
	return out
}

// work is the integral of utilization from 0 to t, in seconds at full load, where power follows with
// fastLag. For y' = (u-y)/lag the integral of y is that of u less lag times what y has gained.
func (l *load) work(t, fast float64) float64 {
	now := l.slot(t)
	if l.slots > now {
		l.slots, l.done = 0, 0
	}
	for ; l.slots < now; l.slots++ {
		l.done += l.job(l.slots).upTo(math.Inf(1))
	}
	return l.done + l.job(now).upTo(t) - fastLag*(fast-l.first)
}

// upTo is the job's work between 0 and t.
func (j job) upTo(t float64) float64 {
	return j.util * max(0, min(t, j.end)-max(0, j.start))
}

// rise is how far something with a lag has come, from 0 to 1, so long after its cause.
func rise(after, lag float64) float64 {
	if after <= 0 {
		return 0
	}
	return -math.Expm1(-after / lag)
}

// random is one of the load's random numbers, from 0 to below 1: the finalizer of splitmix64 (Steele, Lea,
// Flood 2014) over the seed and two places.
func (l *load) random(a int64, b uint64) float64 {
	x := l.seed + 0x9e3779b97f4a7c15*(uint64(a)*16+b+1)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return float64((x^x>>31)>>11) / (1 << 53)
}
