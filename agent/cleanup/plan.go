package cleanup

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// configuration is what an agent's configuration lets it write to its node.
type configuration struct {
	taints                     []string // KEY:EFFECT
	labels, feature, condition bool
	unknown                    string // why it is unknown; "" if it is known
}

// daemonSet is a DaemonSet of agents.
type daemonSet struct {
	name     string // NAMESPACE/NAME
	revision string // the hash of its newest revision; "" while its controller has not seen the newest spec
	config   configuration
	affinity nodeaffinity.RequiredNodeAffinity // its pods' node selector and required node affinity; matches all nodes if it is zero
}

// selects reports whether the DaemonSet selects a node. Taints do not count: they come and go.
func (d daemonSet) selects(t traces) bool {
	ok, err := d.affinity.Match(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: t.Node, Labels: t.nodeLabels}})
	return ok || err != nil // an invalid term is no reason to remove something
}

// agentPod is a pod of an agent that has not ended.
type agentPod struct {
	namespace, name string
	uid             types.UID
	controller      types.UID // of its DaemonSet; "" for none
	revision        string    // the hash of its revision
	ending          bool
	started         bool // its container has started at least once
	config          configuration
}

func (p agentPod) String() string { return p.namespace + "/" + p.name }

// agents are the agents of a cluster.
type agents struct {
	daemonSets map[types.UID]daemonSet
	pods       map[string][]agentPod // by node
}

// traces are what agents have written to a node.
type traces struct {
	kube.NodeTraces
	features   []string          // the namespaces of its NodeFeatures
	nodeLabels map[string]string // all labels of the node, whoever set them
}

// Item is what is to be removed from a node, or was.
type Item struct {
	Node      string   `json:"node"`
	Taints    []string `json:"taints,omitempty"`       // KEY:EFFECT
	Labels    []string `json:"labels,omitempty"`       // keys
	Features  []string `json:"nodeFeatures,omitempty"` // namespaces
	Condition bool     `json:"condition,omitempty"`    // GPUHealthy

	Waits   string `json:"waits,omitempty"`   // why nothing is removed yet
	Unknown string `json:"unknown,omitempty"` // why nothing is removed at all
	Done    bool   `json:"done"`              // false in a dry run
	Error   string `json:"error,omitempty"`   // why it failed

	keep []string  // KEY:EFFECT of the taints that stay
	pod  *agentPod // the node's agent, if it runs with the configuration that the plan is for
}

// empty reports whether there is nothing to remove.
func (i Item) empty() bool {
	return len(i.Taints)+len(i.Labels)+len(i.Features) == 0 && !i.Condition
}

// String describes what is removed.
func (i Item) String() string {
	var parts []string
	if len(i.Taints) > 0 {
		parts = append(parts, "taints "+strings.Join(i.Taints, ", "))
	}
	if len(i.Labels) > 0 {
		parts = append(parts, status.Plural(len(i.Labels), "label"))
	}
	if len(i.Features) > 0 {
		parts = append(parts, "NodeFeature in "+strings.Join(i.Features, ", "))
	}
	if i.Condition {
		parts = append(parts, "condition GPUHealthy")
	}
	return strings.Join(parts, "; ")
}

// plan returns what is to be removed from a node: what agents have written and no configuration of its agents has. A node without an agent
// keeps what the DaemonSets that select it have configured, because these may be about to start one.
//
// The node waits while one of its agents may still write by another configuration. It keeps everything if a configuration is unknown.
func plan(all agents, t traces) Item {
	var configs []configuration
	var waits, unknown []string
	var pod *agentPod
	for i := range all.pods[t.Node] {
		p := &all.pods[t.Node][i]
		set, exists := all.daemonSets[p.controller]
		switch {
		case p.controller == "":
			unknown = append(unknown, fmt.Sprintf("pod %v has no DaemonSet, so its configuration may be another than its file", p))
		case p.ending:
			waits = append(waits, fmt.Sprintf("pod %v is ending", p))
		case !exists:
			waits = append(waits, fmt.Sprintf("pod %v is about to end, because its DaemonSet is deleted", p))
		case p.revision != set.revision || set.revision == "":
			waits = append(waits, fmt.Sprintf("pod %v is not of the newest revision of its DaemonSet", p))
		case p.config.unknown != "":
			unknown = append(unknown, fmt.Sprintf("configuration of pod %v: %s", p, p.config.unknown))
		case !p.started:
			waits = append(waits, fmt.Sprintf("pod %v has not started", p))
		default:
			pod = p
		}
		configs = append(configs, p.config)
	}
	if len(configs) == 0 {
		for _, set := range all.daemonSets {
			if !set.selects(t) {
				continue
			}
			if set.config.unknown != "" {
				unknown = append(unknown, fmt.Sprintf("configuration of DaemonSet %s, which may start an agent here: %s", set.name, set.config.unknown))
			}
			configs = append(configs, set.config)
		}
	}
	item := Item{Node: t.Node}
	has := func(f func(configuration) bool) bool { return slices.ContainsFunc(configs, f) }
	for _, id := range t.Taints {
		if has(func(c configuration) bool { return slices.Contains(c.taints, id) }) {
			item.keep = append(item.keep, id)
		} else {
			item.Taints = append(item.Taints, id)
		}
	}
	if !has(func(c configuration) bool { return c.labels }) {
		item.Labels = t.Labels
	}
	if !has(func(c configuration) bool { return c.feature }) {
		item.Features = t.features
	}
	item.Condition = t.Condition && !has(func(c configuration) bool { return c.condition })
	slices.Sort(waits)
	slices.Sort(unknown)
	if item.Waits = strings.Join(waits, "; "); item.Waits == "" {
		item.Unknown = strings.Join(unknown, "; ")
	}
	if item.Waits == "" && item.Unknown == "" {
		item.pod = pod
	}
	return item
}
