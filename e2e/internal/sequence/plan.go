package sequence

import (
	"fmt"
	"slices"
)

// State is what steps have made of a node with one release of the chart.
type State struct {
	Installed      bool
	Values         Values
	History        []Values // before Values, the oldest first
	Plugin, Claims int      // pods whose containers have devices, by API, and that are not deleted
	Pending        int      // others that are not deleted
	Unhealthy      int      // GPUs
	KubeletDown    bool
}

// Limits of a State.
const (
	MaxPods      = 5
	MaxUnhealthy = 2 // GPUs, so that pods can run
)

// After returns the state after a step, and whether the step changes something. Whether a pod runs, and which one ends, is a forecast.
func (s State) After(step Step) (after State, changed bool) {
	after = s
	switch step.Kind {
	case Install, Upgrade, Rollback, Uninstall, Reload:
		return s.afterHelm(step)
	case Kill:
		return after, s.Installed
	case KubeletRestart:
		return after, !s.KubeletDown
	case KubeletStop:
		after.KubeletDown = true
		return after, !s.KubeletDown
	case KubeletStart:
		after.KubeletDown = false
		return after, s.KubeletDown
	case Fault: // the agent simulates it
		after.Unhealthy++
		return after, s.Installed && !s.KubeletDown && s.Unhealthy < MaxUnhealthy
	case Heal:
		after.Unhealthy--
		return after, s.Installed && !s.KubeletDown && s.Unhealthy > 0
	case Pod, Claim:
		can := s.Installed && !s.KubeletDown && s.Values.DRA == (step.Kind == Claim) && s.others() == 0
		switch {
		case !can:
			after.Pending++
		case step.Kind == Claim:
			after.Claims++
		default:
			after.Plugin++
		}
		return after, s.Plugin+s.Claims+s.Pending < MaxPods
	case PodEnd, PodForce:
		group, found := s.Ends(step)
		if !found {
			return s, false
		}
		*after.group(group)--
		return after, true
	}
	return s, false
}

// Group is a group of the pods of a State.
type Group int

// The groups.
const (
	PluginPods Group = iota
	ClaimPods
	PendingPods
	Groups // their number
)

func (s *State) group(g Group) *int {
	return [Groups]*int{&s.Plugin, &s.Claims, &s.Pending}[g]
}

// Ends returns the group whose pod a step ends. PodForce chooses no pending pod: without a container, force makes no difference.
func (s State) Ends(step Step) (g Group, found bool) {
	for i := range Groups {
		g := (Group(step.Pick%uint32(Groups)) + i) % Groups
		if *s.group(g) > 0 && (step.Kind == PodEnd || g != PendingPods) {
			return g, true
		}
	}
	return 0, false
}

// others returns the number of pods by the API that the values do not have.
func (s State) others() int {
	if s.Values.DRA {
		return s.Plugin
	}
	return s.Claims
}

// afterHelm is After for what helm does. Nobody does it while the only node's kubelet is down: no pod can become ready.
func (s State) afterHelm(step Step) (after State, changed bool) {
	after = s
	if s.KubeletDown || s.Installed == (step.Kind == Install) {
		return s, false
	}
	switch step.Kind {
	case Install:
		after.Installed, after.Values, after.History = true, step.Values, nil
	case Uninstall:
		after.Installed, after.History = false, nil
	case Rollback:
		if len(s.History) == 0 {
			return s, false
		}
		last := len(s.History) - 1
		after.Values, after.History = s.History[last], slices.Clone(s.History[:last])
	default:
		after.Values, after.History = step.Values, append(slices.Clone(s.History), s.Values)
		if step.Kind == Reload {
			after.Values = step.Values.InPodOf(s.Values)
		}
		changed = s.Values != after.Values
		return after, changed
	}
	return after, true
}

// Situations returns what a step that changed something is an example of.
func Situations(before State, step Step, after State) (all []string) {
	add := func(kind string, is bool) {
		if is {
			all = append(all, kind)
		}
	}
	kind := string(step.Kind)
	switch step.Kind {
	case Pod, Claim:
		add(kind, after.Plugin > before.Plugin || after.Claims > before.Claims)
		return all
	case PodEnd, PodForce:
		add(kind, after.Plugin < before.Plugin || after.Claims < before.Claims)
		return all
	}
	add(kind, true)
	if !slices.Contains(besidePods(), step.Kind) {
		return all
	}
	add(kind+withPlugin, before.Plugin > 0)
	add(kind+withClaims, before.Claims > 0)
	add(kind+withNone, before.Plugin+before.Claims == 0)
	if step.Kind != Upgrade && step.Kind != Rollback {
		return all
	}
	from, to := before.Values, after.Values
	add("renamed"+withPlugin, from.Resource != to.Resource && before.Plugin > 0)
	add("dra on"+withPlugin, !from.DRA && to.DRA && before.Plugin > 0)
	add("dra on"+withNone, !from.DRA && to.DRA && before.Plugin == 0)
	add("dra off"+withClaims, from.DRA && !to.DRA && before.Claims > 0)
	add("dra off"+withNone, from.DRA && !to.DRA && before.Claims == 0)
	dropsTaints := from.Taints && !to.Taints && before.Unhealthy > 0
	add(kind+" drops taints", dropsTaints && !to.NoHook)
	add("drops taints without the hook", dropsTaints && to.NoHook)
	add(kind+" drops labels", from.Labels && !to.Labels && !to.NoHook)
	return all
}

// besidePods returns the kinds for which it makes a difference what pods have.
func besidePods() []Kind {
	return []Kind{Install, Upgrade, Rollback, Uninstall, Kill, KubeletRestart, KubeletStop}
}

const (
	withPlugin = " with pods of the device plugin"
	withClaims = " with pods of claims"
	withNone   = " without pods"
)

// AllSituations returns all that Situations can return with these options.
func AllSituations(o Options) (all []string) {
	for k := range o.weights() {
		all = append(all, string(k))
	}
	for _, k := range besidePods() {
		for _, with := range []string{withPlugin, withClaims, withNone} {
			all = append(all, string(k)+with)
		}
	}
	for _, k := range []Kind{Upgrade, Rollback} {
		all = append(all, string(k)+" drops taints", string(k)+" drops labels")
	}
	all = append(all, "drops taints without the hook", "renamed"+withPlugin, "dra on"+withPlugin, "dra on"+withNone, "dra off"+withClaims,
		"dra off"+withNone)
	slices.Sort(all)
	return all
}

// Plan makes a sequence that has each situation.
type Plan struct {
	random  func() Step
	missing map[string]bool
	next    []Step // on the way to a situation that is missing
}

// NewPlan returns a plan. Equal seeds give equal steps where the states are equal.
func NewPlan(seed uint64, o Options) *Plan {
	p := &Plan{random: Random(seed, o), missing: make(map[string]bool)}
	for _, s := range AllSituations(o) {
		p.missing[s] = true
	}
	return p
}

// Missing returns the situations that did not occur yet.
func (p *Plan) Missing() (all []string) {
	for s := range p.missing {
		all = append(all, s)
	}
	slices.Sort(all)
	return all
}

// Played notes a step that changed something.
func (p *Plan) Played(before State, step Step, after State) {
	for _, s := range Situations(before, step, after) {
		delete(p.missing, s)
	}
}

// The plan is the best of some random walks, or of more if none has a situation that is missing.
const (
	walks     = 400
	moreWalks = 10_000
	maxWalk   = 8 // steps
)

// Next returns a step that changes something.
func (p *Plan) Next(s State) Step {
	if len(p.next) > 0 {
		if _, changes := s.After(p.next[0]); !changes {
			p.next = nil // the node is in another state than the forecast
		}
	}
	if len(p.next) == 0 {
		p.next = p.walk(s)
	}
	next := p.next[0]
	p.next = p.next[1:]
	return next
}

// walk returns the walk with the most missing situations for each of its steps, or any step if none is missing.
func (p *Plan) walk(from State) (best []Step) {
	var most float64
	for n := 0; n < walks || most == 0 && n < moreWalks; n++ {
		s, found := from, make(map[string]bool)
		var steps []Step
		for len(steps) < maxWalk {
			step, after := p.change(s)
			steps = append(steps, step)
			for _, situation := range Situations(s, step, after) {
				if p.missing[situation] {
					found[situation] = true
				}
			}
			s = after
			if rate := float64(len(found)) / float64(len(steps)); best == nil || rate > most {
				most, best = rate, slices.Clone(steps)
			}
			if len(p.missing) == 0 {
				return steps
			}
		}
	}
	return best
}

// change returns a random step that changes something, and the state after it.
func (p *Plan) change(s State) (Step, State) {
	for {
		step := p.random()
		if after, changes := s.After(step); changes {
			return step, after
		}
	}
}

// String describes the state.
func (s State) String() string {
	text := "not installed"
	if s.Installed {
		text = s.Values.String()
	}
	if s.KubeletDown {
		text += ", kubelet down"
	}
	return fmt.Sprintf("%s; pods: %d of the device plugin, %d of claims, %d pending; unhealthy: %d", text, s.Plugin, s.Claims, s.Pending,
		s.Unhealthy)
}
