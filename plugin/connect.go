package plugin

import "slices"

// problem is to choose k of n candidates: those best connected with each other and with what is chosen
// already, and among these the ones whose going costs the others least. It is solved exactly up to
// maxExact candidates.
type problem struct {
	k     int
	score [][]int32 // by candidate and candidate: how well connected, 0 with itself
	gain  []int32   // by candidate: how well connected with what is chosen already
	loss  []int32   // by candidate: how well connected with all that could be chosen
}

// maxExact is the number of candidates up to which the best set is found for certain: 16 have 12870 sets of 8.
const maxExact = 16

func newProblem(n, k int) *problem {
	p := &problem{k: k, score: make([][]int32, n), gain: make([]int32, n), loss: make([]int32, n)}
	cells := make([]int32, n*n)
	for i := range p.score {
		p.score[i], cells = cells[:n], cells[n:]
	}
	return p
}

// solve returns the candidates, in their order. Among equally good sets it is the first. It needs
// 0 < k < n.
func (p *problem) solve() []int {
	if len(p.gain) > maxExact {
		return p.approximate()
	}
	e := &exact{n: len(p.gain), k: p.k}
	for i := range p.gain {
		copy(e.score[i][:], p.score[i])
	}
	copy(e.gain[0][:], p.gain)
	copy(e.loss[:], p.loss)
	for _, row := range p.score {
		e.bestScore = max(e.bestScore, slices.Max(row))
	}
	e.leastLoss = slices.Min(p.loss)
	e.walk(0, 0, worthOfSet{})
	set := make([]int, p.k)
	for n := range set {
		set[n] = e.best[n]
	}
	return set
}

// worthOfSet is how good a set is. What it leaves is worth all that there is, less loss, plus inner:
// with the same inner, less loss is more left.
type worthOfSet struct{ inner, loss int32 }

func (w worthOfSet) beats(o worthOfSet) bool {
	return w.inner > o.inner || w.inner == o.inner && w.loss < o.loss
}

// exact walks through the sets in the order of their numbers, but for those that cannot beat the best so far:
// where all GPUs are connected alike, as over NVSwitch, that is nearly all of them. Arrays keep it off the heap.
type exact struct {
	n, k  int
	score [maxExact][maxExact]int32
	loss  [maxExact]int32
	gain  [maxExact][maxExact]int32 // by depth and candidate: how well connected with what is chosen so far
	pick  [maxExact]int
	best  [maxExact]int
	worth worthOfSet
	found bool

	bestScore, leastLoss int32 // of all candidates
}

func (e *exact) walk(depth, from int, w worthOfSet) {
	gain := &e.gain[depth]
	for i := from; i <= e.n-(e.k-depth); i++ {
		e.pick[depth] = i
		with := worthOfSet{w.inner + gain[i], w.loss + e.loss[i]}
		if depth+1 == e.k {
			if !e.found || with.beats(e.worth) {
				e.found, e.worth, e.best = true, with, e.pick
			}
			continue
		}
		next, row, most := &e.gain[depth+1], &e.score[i], int32(0)
		for j := i + 1; j < e.n; j++ {
			next[j] = gain[j] + row[j]
			most = max(most, next[j])
		}
		left := int32(e.k - depth - 1)
		hope := worthOfSet{ // no set that begins like this one is worth more
			with.inner + left*most + left*(left-1)/2*e.bestScore, with.loss + left*e.leastLoss,
		}
		if !e.found || hope.beats(e.worth) {
			e.walk(depth+1, i+1, with)
		}
	}
}

// maxSteps bounds the additions that approximate makes, and with them its time.
const maxSteps = 100_000

// approximate grows a set from each of some candidates, and betters the best by exchanging one for one.
func (p *problem) approximate() []int {
	n := len(p.gain)
	starts := n
	if slices.Max(p.gain) > 0 {
		starts = 1 // what is chosen already is the start
	}
	starts = max(1, min(starts, maxSteps/(n*p.k)))
	var best *growth
	for s := range starts {
		g := p.grow(s * n / starts)
		if best == nil || g.worth.beats(best.worth) {
			best = g
		}
	}
	best.better(p)
	var set []int
	for i, in := range best.in {
		if in {
			set = append(set, i)
		}
	}
	return set
}

// growth is a set that grows.
type growth struct {
	in    []bool
	gain  []int32 // by candidate: how well connected with the set
	worth worthOfSet
}

func (g *growth) add(p *problem, i int) {
	g.worth = worthOfSet{g.worth.inner + g.gain[i], g.worth.loss + p.loss[i]}
	g.in[i] = true
	for j, s := range p.score[i] {
		g.gain[j] += s
	}
}

func (g *growth) remove(p *problem, i int) {
	g.in[i] = false
	for j, s := range p.score[i] {
		g.gain[j] -= s
	}
	g.worth = worthOfSet{g.worth.inner - g.gain[i], g.worth.loss - p.loss[i]}
}

// grow takes the best candidate one by one. Where nothing is chosen yet the first one is start.
func (p *problem) grow(start int) *growth {
	g := &growth{in: make([]bool, len(p.gain)), gain: slices.Clone(p.gain)}
	for n := range p.k {
		best := -1
		for i, in := range g.in {
			if !in && (best < 0 || worthOfSet{g.gain[i], p.loss[i]}.beats(worthOfSet{g.gain[best], p.loss[best]})) {
				best = i
			}
		}
		if n == 0 && g.gain[best] == 0 {
			best = start
		}
		g.add(p, best)
	}
	return g
}

// better exchanges one candidate for another for as long as that helps and there are steps left.
func (g *growth) better(p *problem) {
	n := len(p.gain)
	for steps := maxSteps / 2; steps > 0; steps -= n * p.k {
		out, in, most := -1, -1, g.worth
		for i := range n {
			for j := range n {
				if !g.in[i] || g.in[j] {
					continue
				}
				w := worthOfSet{
					g.worth.inner - g.gain[i] + g.gain[j] - p.score[i][j],
					g.worth.loss - p.loss[i] + p.loss[j],
				}
				if w.beats(most) {
					out, in, most = i, j, w
				}
			}
		}
		if out < 0 {
			return
		}
		g.remove(p, out)
		g.add(p, in)
	}
}
