// Package sequence is a model of what operators, pods and faults do to the GPUs of a node: random steps, the containers that hold devices,
// and what must be true of both. It knows neither processes nor sockets, so one model plays against the agent's packages, the built binary
// and a cluster.
package sequence

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Values are the values of the chart that decide who gets which device.
type Values struct {
	DRA      bool   `json:"dra,omitempty"`      // dra.enabled: plugin.api is dra, with the mounts for it
	MIG      string `json:"mig,omitempty"`      // plugin.migStrategy; empty: none
	Sharing  string `json:"sharing,omitempty"`  // the kind of plugin.sharing: timeSlicing, memory, mps; empty: none
	Resource string `json:"resource,omitempty"` // plugin.resource; empty: the default
	NoState  bool   `json:"noState,omitempty"`  // stateDir is empty: nothing outlives the pod

	// With Options.Chart only.
	DRAMounts bool `json:"draMounts,omitempty"` // dra.enabled, but plugin.api is devicePlugin: the first step of the documented switch
	Taints    bool `json:"taints,omitempty"`    // node.taints: an unhealthy GPU taints the node
	Labels    bool `json:"labels,omitempty"`    // node.labels, and health.kubernetes.enabled: the node's condition
	NoHook    bool `json:"noHook,omitempty"`    // rbac.cleanupHook is false: what agents with other values have written of the node stays
}

// The kinds of sharing.
const (
	TimeSlicing = "timeSlicing"
	Memory      = "memory"
	MPS         = "mps"
)

// SamePod reports whether a change between two values needs no new pod: the agent reloads its configuration.
func (v Values) SamePod(other Values) bool {
	return v.mountsDRA() == other.mountsDRA() && v.NoState == other.NoState && (v.Sharing == MPS) == (other.Sharing == MPS) &&
		v.Taints == other.Taints && v.Labels == other.Labels
}

func (v Values) mountsDRA() bool { return v.DRA || v.DRAMounts }

// InPodOf returns the values after a change of the ConfigMap alone: values that need another pod stay as the running pod has them.
func (v Values) InPodOf(running Values) Values {
	v.DRA = running.mountsDRA() && !v.DRAMounts
	v.DRAMounts = running.mountsDRA() && !v.DRA
	v.NoState, v.Taints, v.Labels = running.NoState, running.Taints, running.Labels
	if (v.Sharing == MPS) != (running.Sharing == MPS) || v.DRA && v.Sharing == TimeSlicing {
		v.Sharing = running.Sharing
	}
	return v
}

// Kind is a kind of step.
type Kind string

// The kinds of steps. One that is not possible in the present state, such as the end of a pod without pods, changes nothing, so any part of
// a sequence is a sequence.
const (
	Install   Kind = "install" // a release of the chart
	Upgrade   Kind = "upgrade" // to other values
	Rollback  Kind = "rollback"
	Uninstall Kind = "uninstall"
	Reload    Kind = "reload" // other values that need no new pod

	Kill           Kind = "kill"            // the agent, which starts again
	KubeletRestart Kind = "kubelet-restart" // at once
	KubeletStop    Kind = "kubelet-stop"
	KubeletStart   Kind = "kubelet-start"
	APIDown        Kind = "api-down"
	APIUp          Kind = "api-up"
	DiskFull       Kind = "disk-full"
	DiskFree       Kind = "disk-free"
	Fault          Kind = "fault" // a GPU becomes unhealthy
	Heal           Kind = "heal"

	Pod      Kind = "pod"       // requests an extended resource
	Claim    Kind = "claim"     // a pod with a ResourceClaim
	PodEnd   Kind = "pod-end"   // deleted, with its claim
	PodForce Kind = "pod-force" // deleted by force: its objects are removed before its container ends
)

// Releases is the number of releases of the chart that a sequence may install on the node.
const Releases = 2

// Step is one event.
type Step struct {
	Kind    Kind   `json:"kind"`
	Release int    `json:"release,omitempty"`
	Values  Values `json:"values,omitzero"`
	Pick    uint32 `json:"pick,omitempty"`    // selects a pod, a GPU, a resource or the form of a claim
	Stale   bool   `json:"stale,omitempty"`   // the scheduler has not seen the newest ResourceSlices
	Overlap bool   `json:"overlap,omitempty"` // the next step begins before this one has settled
}

// weights are how often each kind occurs.
func (o Options) weights() map[Kind]int {
	w := map[Kind]int{
		Install: 5, Upgrade: 6, Rollback: 10, Uninstall: 5, Reload: 8,
		Kill: 5, KubeletRestart: 5, KubeletStop: 4, KubeletStart: 10, APIDown: 4, APIUp: 10, DiskFull: 4, DiskFree: 10, Fault: 5, Heal: 10,
		Pod: 16, Claim: 18, PodEnd: 20, PodForce: 12,
	}
	if o.NoDisk {
		delete(w, DiskFull)
		delete(w, DiskFree)
	}
	if o.NoAPI {
		delete(w, APIDown)
		delete(w, APIUp)
	}
	for k := range w {
		if o.Only != nil && !slices.Contains(o.Only, k) {
			delete(w, k)
		}
	}
	return w
}

// Options narrow what a sequence has.
type Options struct {
	NoDisk bool   // no disk can be full
	MPS    bool   // GPUs may be shared by MPS
	Single bool   // there is one release of the chart
	NoAPI  bool   // the API server is never away
	Chart  bool   // values that only the chart has, such as the node's; its stateDir is never empty
	Only   []Kind // play these kinds; nil: all
}

// Random returns an endless generator of steps, equal for equal seeds.
func Random(seed uint64, o Options) func() Step {
	r := rand.New(rand.NewPCG(seed, 31)) //nolint:gosec // reproducible, not secret
	all := o.weights()
	kinds, sum := make([]Kind, 0, len(all)), 0
	for k, w := range all {
		kinds, sum = append(kinds, k), sum+w
	}
	slices.Sort(kinds)
	n := 0
	return func() Step {
		n++
		if n == 1 {
			return Step{Kind: Install, Values: randomValues(r, o)}
		}
		at := r.IntN(sum)
		i := slices.IndexFunc(kinds, func(k Kind) bool { at -= all[k]; return at < 0 })
		s := Step{Kind: kinds[i], Pick: r.Uint32(), Overlap: r.IntN(3) == 0}
		switch s.Kind {
		case Install, Upgrade, Rollback, Reload, Kill:
			if r.IntN(5) == 0 && !o.Single {
				s.Release = 1
			}
		case Uninstall: // the second one sooner
			if r.IntN(2) == 0 && !o.Single {
				s.Release = 1
			}
		case Claim:
			s.Stale = r.IntN(20) == 0
		}
		switch s.Kind {
		case Install, Upgrade, Reload:
			s.Values = randomValues(r, o)
		}
		return s
	}
}

func randomValues(r *rand.Rand, o Options) Values {
	v := Values{DRA: r.IntN(2) == 0, NoState: r.IntN(6) == 0}
	if r.IntN(2) == 0 {
		v.MIG = "mixed"
	}
	if r.IntN(4) == 0 {
		v.Resource = "example.com/gpu"
	}
	kinds := []string{"", "", TimeSlicing, Memory}
	switch {
	case v.DRA:
		kinds = []string{"", "", Memory} // claims ask for the others themselves
	case o.MPS:
		kinds = append(kinds, MPS)
	}
	v.Sharing = kinds[r.IntN(len(kinds))]
	if o.Chart {
		v.NoState, v.DRAMounts = false, !v.DRA && r.IntN(2) == 0
		v.Taints, v.Labels, v.NoHook = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(4) == 0
	}
	return v
}

// String returns the values as words.
func (v Values) String() string {
	words := []string{"devicePlugin"}
	if v.DRA {
		words[0] = "dra"
	}
	for _, w := range []string{v.MIG, v.Sharing, v.Resource} {
		if w != "" {
			words = append(words, w)
		}
	}
	for word, set := range map[string]bool{
		"no-state": v.NoState, "dra-mounts": v.DRAMounts, "taints": v.Taints, "labels": v.Labels,
		"no-hook": v.NoHook,
	} {
		if set {
			words = append(words, word)
		}
	}
	slices.Sort(words[1:])
	return strings.Join(words, ",")
}

// String describes a step.
func (s Step) String() string {
	text := string(s.Kind)
	switch s.Kind {
	case Install, Upgrade, Reload:
		text += fmt.Sprintf(" %c %s", 'a'+s.Release, s.Values)
	case Rollback, Uninstall, Kill:
		text += fmt.Sprintf(" %c", 'a'+s.Release)
	}
	if s.Stale {
		text += " stale"
	}
	if s.Overlap {
		text += " !"
	}
	return text
}

// Format returns steps in a form that Parse reads.
func Format(steps []Step) string {
	text, err := json.Marshal(steps)
	if err != nil {
		panic(err) // a Step is valid JSON
	}
	return string(text)
}

// Parse reads steps.
func Parse(text string) (steps []Step, err error) {
	return steps, json.Unmarshal([]byte(text), &steps)
}

// Shrink returns a shorter part of a failing sequence that fails too, in the given number of tries.
func Shrink(steps []Step, tries int, fails func([]Step) bool) []Step {
	for n := len(steps) / 2; n > 0; n /= 2 {
		for at := 0; at+n <= len(steps) && tries > 0; {
			tries--
			if short := slices.Delete(slices.Clone(steps), at, at+n); fails(short) {
				steps = short
			} else {
				at += n
			}
		}
	}
	return steps
}

// Counts are how often each kind of step was played, and how often it changed something.
type Counts struct{ played, changed map[Kind]int }

// Add counts a step.
func (c *Counts) Add(k Kind, changed bool) {
	if c.played == nil {
		c.played, c.changed = make(map[Kind]int), make(map[Kind]int)
	}
	c.played[k]++
	if changed {
		c.changed[k]++
	}
}

// Merge adds other counts.
func (c *Counts) Merge(other Counts) {
	for k, n := range other.played {
		for i := range n {
			c.Add(k, i < other.changed[k])
		}
	}
}

// Sum returns the number of steps.
func (c *Counts) Sum() (n int) {
	for _, played := range c.played {
		n += played
	}
	return n
}

// Rare returns the kinds that changed something in less than one of a hundred steps.
func (c *Counts) Rare(o Options) (rare []Kind) {
	for k := range o.weights() {
		if 100*c.changed[k] < c.Sum() {
			rare = append(rare, k)
		}
	}
	slices.Sort(rare)
	return rare
}

// String lists the kinds with how often they changed something, and how often they were played.
func (c *Counts) String() string {
	var words []string
	for k := range (Options{}).weights() {
		words = append(words, fmt.Sprintf("%s %d/%d", k, c.changed[k], c.played[k]))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}
