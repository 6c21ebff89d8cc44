package prefer

import "slices"

// graph is the problem to choose size of its candidates: the set that is best connected within itself and with the
// devices already chosen, and among equals the one that costs the rest least. It has at most maxExact candidates.
type graph struct {
	size  int
	score [][]int32 // by candidate and candidate; 0 with itself
	gain  []int32   // by candidate: score with the devices already chosen
	loss  []int32   // by candidate: score with all devices that can be chosen
}

// maxExact limits the candidates of a search, which visits every set: 16 have 12870 sets of 8. No machine has more GPUs that are linked. Of
// more, health and order decide.
const maxExact = 16

func newGraph(candidates, size int) *graph {
	return &graph{size, newMatrix(candidates), make([]int32, candidates), make([]int32, candidates)}
}

// best returns the candidates of the best set, ascending; of equal sets the first. It needs 0 < size < candidates.
func (g *graph) best() []int {
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
