package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// step is one event of a sequence. A step that is not possible in the current state, such as thaw without freeze, does
// nothing, so any part of a sequence is a sequence.
type step struct {
	kind string
	gpu  int
	arg  string

	immediate bool // the next step follows at once, before the invariants hold
}

// kind is a kind of step.
type kind struct {
	name      string
	weight    int
	gpu       bool     // it has a GPU
	args      []string // one of these
	immediate bool     // its effect on the model does not depend on what the agent has measured
}

func kinds() []kind {
	return []kind{
		{"xid", 6, true, []string{"13", "31", "43", "45"}, true}, // errors of applications: counted only
		{"flood", 3, true, []string{"31", "43"}, true},           // 10,000 at once
		{"fatal", 5, true, nil, false},                           // XID 48
		{"heal", 5, true, nil, false},                            // an operator clears XID 48
		{"lost", 5, true, nil, false},
		{"back", 5, true, nil, false},
		{"remap", 2, true, []string{"true", "false"}, true},
		{"mig", 5, true, []string{"off", "sevenths", "balanced"}, false},
		{"dead", 2, false, nil, false},
		{"hung", 2, false, nil, false},
		{"blind", 2, false, nil, false},
		{"up", 7, false, nil, false},
		{"kubelet-restart", 3, false, nil, true},
		{"kubelet-stop", 2, false, nil, true},
		{"kubelet-start", 4, false, nil, true},
		{"wipe", 2, false, nil, true},
		{"kill-stream", 2, false, nil, true},
		{"forget", 1, false, nil, false},
		{"second-stream", 2, false, nil, true},
		{"slow-stream", 2, false, nil, true},
		{"close-streams", 2, false, nil, true},
		{"freeze", 2, false, nil, true},
		{"thaw", 5, false, nil, true},
		{"reload", 3, false, []string{"0", "1", "2"}, true},
		{"reload-bad", 2, false, []string{"0", "1"}, true},
		{"scrapes", 3, false, nil, false},
		{"disk-full", 2, false, nil, true},
		{"disk-free", 3, false, nil, true},
		{"agent-restart", 2, false, []string{"term", "kill"}, false},
		{"detach", 4, false, []string{"forced", "polite"}, false},
		{"attach", 5, false, nil, false},
		{"expire", 2, false, nil, false},       // a detach expires
		{"detach-often", 1, false, nil, false}, // ten pairs of detach and attach
		{"detach-refused", 1, false, nil, false},
		{"detach-hung", 1, false, nil, false},
		{"empty", 2, false, []string{"short", "long"}, false}, // the source lists no GPU for a while, without an error
		// the source loses all GPUs for a while, as while the driver lists none
		{"all-lost", 2, false, []string{"short", "long"}, false},
		{"checks-down", 2, false, nil, false},                                       // DCGM's health checks fail for a while
		{"clock", 4, false, []string{"-3600", "-60", "0", "60", "3600"}, true},      // of the engine, in seconds ahead
		{"block-log", 1, false, nil, false},                                         // stop reading the agent's standard error
		{"read-log", 3, false, nil, true},                                           // read it again
		{"state-removed", 1, false, nil, false},                                     // remove the state file
		{"state-foreign", 1, false, []string{"garbage", "another", "empty"}, false}, // replace the state file
		{"second-agent", 1, false, []string{"term", "kill"}, false},                 // with the same state file, for a while
		{"reconnect-often", 1, false, nil, false},                                   // a new session per reload
	}
}

// simKinds returns the kinds for simulated GPUs: they have no host engine and no clock of their own, and a reload keeps
// their session.
func simKinds() []kind {
	return kindsExcept("detach-refused", "detach-hung", "clock", "reconnect-often")
}

// hostKinds returns the kinds for a scripted host engine.
func hostKinds() []kind {
	return kindsExcept("flood", "remap", "mig", "kubelet-stop", "kubelet-start", "wipe", "forget", "second-stream", "slow-stream",
		"close-streams",
		"freeze", "thaw", "reload-bad", "disk-full", "disk-free", "block-log", "read-log", "second-agent")
}

// embeddedKinds returns the kinds for a scripted engine in the agent's process. The agent would restart a blind one.
func embeddedKinds() []kind {
	return slices.DeleteFunc(hostKinds(), func(k kind) bool {
		return slices.Contains([]string{"blind", "detach-refused", "detach-hung"}, k.name)
	})
}

// selectKinds returns the kinds in a comma-separated list, or all for an empty list.
func selectKinds(all []kind, names string) []kind {
	if names == "" {
		return all
	}
	return slices.DeleteFunc(all, func(k kind) bool { return !slices.Contains(strings.Split(names, ","), k.name) })
}

func kindsExcept(names ...string) []kind {
	return slices.DeleteFunc(kinds(), func(k kind) bool { return slices.Contains(names, k.name) })
}

const gpus = 8

// calm is the step that reverts all faults and checks for leaks.
const calm = "calm"

// calmInterval is the number of steps between calms.
const calmInterval = 25

// sequence returns an endless generator of steps, equal for equal seeds.
func sequence(seed uint64, all []kind) func() step {
	r := rand.New(rand.NewPCG(seed, 0))
	sum := 0
	for _, k := range all {
		sum += k.weight
	}
	n := 0
	return func() step {
		n++
		if n%calmInterval == 0 {
			return step{kind: calm}
		}
		at := r.IntN(sum)
		i := slices.IndexFunc(all, func(k kind) bool { at -= k.weight; return at < 0 })
		s := step{kind: all[i].name}
		if all[i].gpu {
			s.gpu = r.IntN(gpus)
		}
		if len(all[i].args) > 0 {
			s.arg = all[i].args[r.IntN(len(all[i].args))]
		}
		s.immediate = all[i].immediate && r.IntN(3) == 0 && (n+1)%calmInterval != 0
		return s
	}
}

// kindOf returns the kind of a step.
func kindOf(s step) (kind, bool) {
	all := append(kinds(), mpsKinds()...)
	i := slices.IndexFunc(all, func(k kind) bool { return k.name == s.kind })
	if i < 0 {
		return kind{}, false
	}
	return all[i], true
}

func (s step) String() string {
	words := []string{s.kind}
	if k, known := kindOf(s); known && k.gpu {
		words = append(words, strconv.Itoa(s.gpu))
	}
	if s.arg != "" {
		words = append(words, s.arg)
	}
	if s.immediate {
		words = append(words, "!")
	}
	return strings.Join(words, " ")
}

// parse parses steps in the format of String, separated by commas.
func parse(text string) (all []step, _ error) {
	for part := range strings.SplitSeq(text, ",") {
		words := strings.Fields(part)
		if len(words) == 0 {
			continue
		}
		s, err := parseStep(part, words)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// parseStep parses the words of a step. Errors quote its text.
func parseStep(text string, words []string) (s step, err error) {
	s = step{kind: words[0]}
	words = words[1:]
	if n := len(words); n > 0 && words[n-1] == "!" {
		s.immediate, words = true, words[:n-1]
	}
	k, known := kindOf(s)
	switch {
	case s.kind == calm:
	case !known:
		return s, fmt.Errorf("unknown step %q", s.kind)
	default:
		if k.gpu && len(words) > 0 {
			if s.gpu, err = strconv.Atoi(words[0]); err != nil || s.gpu < 0 || s.gpu >= gpus {
				return s, fmt.Errorf("%q: %q is not a GPU from 0 to %d", text, words[0], gpus-1)
			}
			words = words[1:]
		}
		if len(words) > 0 {
			s.arg, words = words[0], words[1:]
		}
		if s.immediate && !k.immediate {
			return s, fmt.Errorf("%q: the next step must wait for it", text)
		}
		if s.arg == "" && len(k.args) > 0 || s.arg != "" && !slices.Contains(k.args, s.arg) {
			return s, fmt.Errorf("%q: expected one of %s", text, strings.Join(k.args, ", "))
		}
	}
	if len(words) > 0 {
		return s, fmt.Errorf("%q: unexpected %q", text, words[0])
	}
	return s, nil
}

func formatSteps(steps []step) string {
	words := make([]string, len(steps))
	for i, s := range steps {
		words[i] = s.String()
	}
	return strings.Join(words, ", ")
}
