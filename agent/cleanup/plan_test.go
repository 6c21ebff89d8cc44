package cleanup

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
)

const unhealthy, cordoned = "gpu-node-agent/unhealthy:NoSchedule", "gpu-node-agent/cordoned:NoSchedule"

// podOf returns a pod of the newest revision of the DaemonSet ds, changed by f.
func podOf(c configuration, f func(*agentPod)) agentPod {
	p := agentPod{namespace: "gpu", name: "gna-1", uid: "pod", controller: "ds", revision: "new", started: true, config: c}
	if f != nil {
		f(&p)
	}
	return p
}

func agentsOf(c configuration, pods ...agentPod) agents {
	return agents{
		daemonSets: map[types.UID]daemonSet{"ds": {name: "gpu/gna", revision: "new", config: c}},
		pods:       map[string][]agentPod{"n": pods},
	}
}

func TestPlan(t *testing.T) {
	nothing, all := configuration{}, configuration{taints: []string{unhealthy, cordoned}, labels: true, feature: true, condition: true}
	everything := traces{
		NodeTraces: kube.NodeTraces{Node: "n", Taints: []string{cordoned, unhealthy}, Labels: []string{"a/b"}, Condition: true},
		features:   []string{"gpu"}, nodeLabels: map[string]string{"pool": "a"},
	}
	const removesAll = "taints " + cordoned + ", " + unhealthy + "; 1 label; NodeFeature in gpu; condition GPUHealthy"
	unknown := configuration{unknown: "ConfigMap gpu/gna: not found"}
	// without returns agents whose DaemonSet selects nodes, and has no pod.
	without := func(c configuration, s map[string]string, terms ...corev1.NodeSelectorTerm) agents {
		all, pod := agentsOf(c), &corev1.Pod{Spec: corev1.PodSpec{NodeSelector: s}}
		if terms != nil {
			pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
			}}
		}
		set := all.daemonSets["ds"]
		set.affinity = nodeaffinity.GetRequiredNodeAffinity(pod)
		all.daemonSets["ds"] = set
		return all
	}
	pool := func(operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: operator, Values: values}}}
	}
	named := func(name string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: "metadata.name", Operator: corev1.NodeSelectorOpIn,
			Values: []string{name},
		}}}
	}
	elsewhere := agentsOf(nothing, podOf(all, nil)) // an agent that runs decides, wherever its DaemonSet is to run now
	elsewhere.daemonSets = without(nothing, map[string]string{"pool": "b"}).daemonSets
	const mayStart = "configuration of DaemonSet gpu/gna, which may start an agent here: ConfigMap gpu/gna: not found"
	for name, c := range map[string]struct {
		agents agents
		traces traces
		want   string // Item.String
		waits  string
		unsure string // Item.Unknown
		pod    bool   // the agent is to be told
	}{
		"no agent in the cluster": {agents{}, everything, removesAll, "", "", false},
		"nothing configured":      {agentsOf(nothing, podOf(nothing, nil)), everything, removesAll, "", "", true},
		"everything configured":   {agentsOf(all, podOf(all, nil)), everything, "", "", "", true},
		"nothing left":            {agentsOf(nothing, podOf(nothing, nil)), traces{NodeTraces: kube.NodeTraces{Node: "n"}}, "", "", "", true},
		"one taint": {
			agentsOf(nothing, podOf(configuration{taints: []string{unhealthy}}, nil)), everything,
			"taints " + cordoned + "; 1 label; NodeFeature in gpu; condition GPUHealthy", "", "", true,
		},
		"another effect": {
			agentsOf(nothing,
				podOf(configuration{taints: []string{"gpu-node-agent/unhealthy:NoExecute"}, labels: true, feature: true, condition: true}, nil)),
			everything, "taints " + cordoned + ", " + unhealthy, "", "", true,
		},
		"labels only": {
			agentsOf(nothing, podOf(configuration{taints: all.taints, feature: true, condition: true}, nil)),
			everything, "1 label", "", "", true,
		},
		"no pod, DaemonSet has it":      {agentsOf(all), everything, "", "", "", false},
		"no pod, DaemonSet has nothing": {agentsOf(nothing), everything, removesAll, "", "", false},
		"no pod, unknown":               {agentsOf(unknown), everything, removesAll, "", mayStart, false},
		"selected, has it": {
			without(all, map[string]string{"pool": "a"}, pool(corev1.NodeSelectorOpExists), named("m")), everything,
			"", "", "", false,
		},
		"selected, unknown":           {without(unknown, map[string]string{"pool": "a"}), everything, removesAll, "", mayStart, false},
		"not selected, has it":        {without(all, map[string]string{"pool": "b"}), everything, removesAll, "", "", false},
		"not selected, unknown":       {without(unknown, map[string]string{"pool": "b"}), everything, removesAll, "", "", false},
		"other affinity, unknown":     {without(unknown, nil, pool(corev1.NodeSelectorOpIn, "b", "c")), everything, removesAll, "", "", false},
		"affinity to another node":    {without(unknown, nil, named("m")), everything, removesAll, "", "", false},
		"affinity to this node":       {without(unknown, nil, named("m"), named("n")), everything, removesAll, "", mayStart, false},
		"invalid affinity":            {without(unknown, nil, pool("Like", "a")), everything, removesAll, "", mayStart, false},
		"not selected, but runs":      {elsewhere, everything, "", "", "", true},
		"pod decides, not DaemonSets": {agentsOf(all, podOf(nothing, nil)), everything, removesAll, "", "", true},
		"an old revision": {
			agentsOf(nothing, podOf(nothing, func(p *agentPod) { p.revision = "old" })), everything, removesAll,
			"pod gpu/gna-1 is not of the newest revision of its DaemonSet", "", false,
		},
		"the spec is not seen yet": {
			agents{
				map[types.UID]daemonSet{"ds": {name: "gpu/gna"}},
				map[string][]agentPod{"n": {podOf(nothing, func(p *agentPod) { p.revision = "" })}},
			},
			everything, removesAll,
			"not of the newest revision", "", false,
		},
		"ending": {
			agentsOf(nothing, podOf(nothing, func(p *agentPod) { p.ending = true })), everything, removesAll, "pod gpu/gna-1 is ending",
			"", false,
		},
		"ending beside its successor": {
			agentsOf(nothing, podOf(nothing, nil), podOf(nothing, func(p *agentPod) { p.ending = true })), everything,
			removesAll, "is ending", "", false,
		},
		"not started": {
			agentsOf(nothing, podOf(nothing, func(p *agentPod) { p.started = false })), everything, removesAll,
			"pod gpu/gna-1 has not started", "", false,
		},
		"DaemonSet deleted": {
			agents{nil, map[string][]agentPod{"n": {podOf(unknown, nil)}}},
			everything, removesAll, "is about to end", "",
			false,
		},
		"unknown configuration": {
			agentsOf(unknown, podOf(unknown, nil)), everything, removesAll, "", "configuration of pod gpu/gna-1: ConfigMap",
			false,
		},
		"no controller": {
			agentsOf(nothing, podOf(nothing, func(p *agentPod) { p.controller = "" })), everything, removesAll, "",
			"pod gpu/gna-1 has no DaemonSet", false,
		},
		"two releases": {
			agentsOf(nothing, podOf(nothing, nil), podOf(configuration{labels: true, condition: true}, nil)),
			everything, "taints " + cordoned + ", " + unhealthy + "; NodeFeature in gpu", "", "", true,
		},
		"one of them unknown": {
			agentsOf(nothing, podOf(nothing, nil), podOf(unknown, nil)), everything, removesAll, "", "configuration of pod",
			false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			i := plan(c.agents, c.traces)
			if got := i.String(); got != c.want || i.empty() != (got == "") {
				t.Errorf("removes %q, want %q", got, c.want)
			}
			if !strings.Contains(i.Waits, c.waits) || (c.waits == "") != (i.Waits == "") {
				t.Errorf("waits: %q, want %q", i.Waits, c.waits)
			}
			if !strings.Contains(i.Unknown, c.unsure) || (c.unsure == "") != (i.Unknown == "") {
				t.Errorf("unknown: %q, want %q", i.Unknown, c.unsure)
			}
			if (i.pod != nil) != c.pod {
				t.Errorf("tells %v", i.pod)
			}
			if all := slices.Sorted(slices.Values(slices.Concat(i.keep, i.Taints))); !slices.Equal(all, c.traces.Taints) {
				t.Errorf("keeps %v and removes %v of %v", i.keep, i.Taints, c.traces.Taints)
			}
		})
	}
}
