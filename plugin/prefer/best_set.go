package prefer

import "slices"

// graph is the problem to choose size of its candidates: the set that is best connected within itself and with the
// devices already chosen, and among equals the one that costs the rest least. Up to maxExact candidates the solution
// is exact.
type graph struct {
	size  int
	score [][]int32 // by candidate and candidate; 0 with itself
	gain  []int32   // by candidate: score with the devices already chosen
	loss  []int32   // by candidate: score with all devices that can be chosen
}

// maxExact is the largest number of candidates for an exact search: 16 have 12870 sets of 8.
const maxExact = 16

func newGraph(candidates, size int) *graph {
	return &graph{size, newMatrix(candidates), make([]int32, candidates), make([]int32, candidates)}
}

// best returns the candidates of the best set, ascending; of equal sets the first. It needs 0 < size < candidates.
func (g *graph) best() []int {
	if len(g.gain) > maxExact {
		return g.approximate()
	}
	s := &search{candidates: len(g.gain), size: g.size, leastLoss: slices.Min(g.loss)}
	for i, row := range g.score {
		copy(s.score[i][:], row)
		s.bestScore = max(s.bestScore, slices.Max(row))
	}
	copy(s.gain[0][:], g.gain)
	copy(s.loss[:], g.loss)
	s.extend(0, 0, setScore{})
	return slices.Clone(s.best[:g.size])
}

// setScore compares sets. The score of the rest is the total, less loss, plus inner: for equal inner, a smaller loss
// leaves a better rest.
type setScore struct{ inner, loss int32 }

func (s setScore) beats(o setScore) bool {
	return s.inner > o.inner || s.inner == o.inner && s.loss < o.loss
}

// search visits the sets in lexical order and skips sets that cannot beat the best one so far: nearly all of them where
// every GPU has the same links, as with NVSwitch. Arrays keep it off the heap.
type search struct {
	candidates, size int
	score            [maxExact][maxExact]int32
	loss             [maxExact]int32
	gain             [maxExact][maxExact]int32 // by depth and candidate: score with the set so far
	current, best    [maxExact]int
	found            bool
	bestSet          setScore

	bestScore, leastLoss int32 // of all candidates
}

// extend adds each candidate from the given one on to the set, and recurs until the set is complete.
func (s *search) extend(depth, from int, set setScore) {
	gain := &s.gain[depth]
	for i := from; i <= s.candidates-(s.size-depth); i++ {
		s.current[depth] = i
		with := setScore{set.inner + gain[i], set.loss + s.loss[i]}
		if depth+1 == s.size {
			if !s.found || with.beats(s.bestSet) {
				s.found, s.bestSet, s.best = true, with, s.current
			}
			continue
		}
		next, row, most := &s.gain[depth+1], &s.score[i], int32(0)
		for j := i + 1; j < s.candidates; j++ {
			next[j] = gain[j] + row[j]
			most = max(most, next[j])
		}
		left := int32(s.size - depth - 1)
		bound := setScore{with.inner + left*most + left*(left-1)/2*s.bestScore, with.loss + left*s.leastLoss}
		if !s.found || bound.beats(s.bestSet) {
			s.extend(depth+1, i+1, with)
		}
	}
}

// maxSteps limits the additions of approximate, and with them its time.
const maxSteps = 100_000

// approximate grows a set from each of several candidates and improves the best one by exchanges.
func (g *graph) approximate() []int {
	n := len(g.gain)
	starts := max(1, min(n, maxSteps/(n*g.size)))
	if slices.Max(g.gain) > 0 {
		starts = 1 // the set grows from the devices already chosen
	}
	var best *growingSet
	for s := range starts {
		set := g.grow(s * n / starts)
		if best == nil || set.score.beats(best.score) {
			best = set
		}
	}
	best.improve()
	var members []int
	for i, in := range best.has {
		if in {
			members = append(members, i)
		}
	}
	return members
}

// growingSet is a set of candidates under construction.
type growingSet struct {
	*graph
	has   []bool
	gain  []int32 // by candidate: score with the set
	score setScore
}

func (s *growingSet) add(i int) {
	s.score = setScore{s.score.inner + s.gain[i], s.score.loss + s.loss[i]}
	s.has[i] = true
	for j, score := range s.graph.score[i] {
		s.gain[j] += score
	}
}

func (s *growingSet) remove(i int) {
	s.has[i] = false
	for j, score := range s.graph.score[i] {
		s.gain[j] -= score
	}
	s.score = setScore{s.score.inner - s.gain[i], s.score.loss - s.loss[i]}
}

// grow adds the best candidate until the set is complete. If no candidate is connected yet, start is the first.
func (g *graph) grow(start int) *growingSet {
	s := &growingSet{graph: g, has: make([]bool, len(g.gain)), gain: slices.Clone(g.gain)}
	for n := range g.size {
		best := -1
		for i, has := range s.has {
			if !has && (best < 0 || setScore{s.gain[i], g.loss[i]}.beats(setScore{s.gain[best], g.loss[best]})) {
				best = i
			}
		}
		if n == 0 && s.gain[best] == 0 {
			best = start
		}
		s.add(best)
	}
	return s
}

// improve exchanges one member for another candidate for as long as that helps and maxSteps allows.
func (s *growingSet) improve() {
	n := len(s.gain)
	for steps := maxSteps / 2; steps > 0; steps -= n * s.size {
		out, in, best := -1, -1, s.score
		for i := range n {
			for j := range n {
				if !s.has[i] || s.has[j] {
					continue
				}
				exchanged := setScore{
					s.score.inner - s.gain[i] + s.gain[j] - s.graph.score[i][j],
					s.score.loss - s.loss[i] + s.loss[j],
				}
				if exchanged.beats(best) {
					out, in, best = i, j, exchanged
				}
			}
		}
		if out < 0 {
			return
		}
		s.remove(out)
		s.add(in)
	}
}
