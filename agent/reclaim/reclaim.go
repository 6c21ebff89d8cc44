// Package reclaim gives back GPUs that pods hold and do not use: `gpu-node-agent reclaim`, one run for a CronJob.
//
//	agents (/api/v1/snapshot) ─┐
//	API server ────────────────┼─► World ─► plan ─► Report ─► table or JSON
//	policy file ───────────────┘                      └─────► apply: scale, suspend, evict, notify
//
// plan.go is pure. Without --apply a run changes nothing.
package reclaim

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// World is what a plan is made from.
type World struct {
	Now time.Time
	Objects
	Agents map[string]Agent // by node
}

// Objects is what the API server has of the policy's namespaces.
type Objects struct {
	Namespaces map[string]map[string]string // the annotations of each namespace; nil for one that has none
	Pods       []corev1.Pod                 // all, whatever Policy.PodSelector, because an owner is idle only if all its pods are
	Owners     map[Ref]*Owner               // all Deployments, ReplicaSets, StatefulSets, Jobs and CronJobs, also those without pods
}

// Agent is the response of the agent on a node.
type Agent struct {
	Status status.Node
	Err    error // why there is none
}

// Ref names an object.
type Ref struct {
	Namespace string `json:"namespace"`
	Kind      string `json:"kind"` // Deployment, StatefulSet, ReplicaSet, Job, CronJob, Pod, or another owner's KIND.GROUP
	Name      string `json:"name"`
}

// The kinds of objects. A Job of another API group is another kind.
const (
	kindDeployment  = "Deployment"
	kindReplicaSet  = "ReplicaSet"
	kindStatefulSet = "StatefulSet"
	kindJob         = "Job"
	kindCronJob     = "CronJob"
	kindPod         = "Pod"
	kindNamespace   = "Namespace"
)

// kindGroups are the API groups of the kinds of owners.
//
//nolint:gochecknoglobals // constant
var kindGroups = map[string]string{
	kindDeployment: "apps", kindReplicaSet: "apps", kindStatefulSet: "apps", kindJob: "batch", kindCronJob: "batch",
}

// groupOf returns the API group of a version such as apps/v1. The group of v1 is "".
func groupOf(apiVersion string) string {
	group, _, named := strings.Cut(apiVersion, "/")
	if !named {
		return ""
	}
	return group
}

// ownerRef returns the Ref of an owner in a namespace. A kind of another API group than those above has its group: Job.batch.volcano.sh.
func ownerRef(namespace string, o metav1.OwnerReference) Ref {
	if group := groupOf(o.APIVersion); group != "" && group != kindGroups[o.Kind] {
		return Ref{namespace, o.Kind + "." + group, o.Name}
	}
	return Ref{namespace, o.Kind, o.Name}
}

// String returns a text like "Deployment team-a/web".
func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// The annotations that a run writes on an owner or on a pod without one.
const (
	recordAnnotation = "gpu-node-agent/reclaimed"      // Record as JSON
	noticeAnnotation = "gpu-node-agent/reclaim-notice" // the time of the first notice, RFC 3339
)

// Record is what an owner was scaled from. It is written before the owner is changed.
type Record struct {
	Replicas   int32     `json:"replicas"` // of a Job 1
	GPUs       float64   `json:"gpus"`     // that its pods held, as in Action
	At         time.Time `json:"at"`
	Generation int64     `json:"generation"` // that the change creates; greater than the owner's: the change did not happen
}

// Owner is the controller of pods.
type Owner struct {
	Ref
	UID             types.UID
	ResourceVersion string
	Generation      int64
	Labels          map[string]string
	Annotations     map[string]string
	Controller      *metav1.OwnerReference // its own, such as the Deployment of a ReplicaSet
	Replicas        int32                  // desired; of a Job 1
	Pods            int32                  // as its controller counts them, without pods that end
	Suspended       bool                   // of a Job
	DeletesVolumes  bool                   // of a StatefulSet that is scaled down
	// ChangedBy is the field manager that last set the replicas or the suspension; "" if unknown, as after a change by the subresource scale.
	ChangedBy string
}

// Report is the result of a run.
type Report struct {
	Time    time.Time `json:"time"`
	DryRun  bool      `json:"dryRun"`
	Actions []Action  `json:"actions"`
	Skipped []Skipped `json:"skipped"` // idle pods and owners without an action
	Errors  []string  `json:"errors"`  // agents that did not respond, and objects that could not be read

	GPUs      float64 `json:"gpus"`          // that the actions give back; announced actions do so after the notice
	GPUHours  float64 `json:"gpuHours"`      // for which these have been idle
	Announced float64 `json:"announcedGPUs"` // of GPUs, the part of the notices
	Restored  float64 `json:"restoredGPUs"`  // that the actions of an undo take again

	rest []Action // above Policy.MaxPerRun, in random order
}

// ActionKind is what an action does.
type ActionKind string

// The kinds of actions.
const (
	ActionNotify  ActionKind = "notify"  // announce the action that follows after Policy.Notice
	ActionScale   ActionKind = "scale"   // a Deployment, ReplicaSet or StatefulSet, to 0
	ActionSuspend ActionKind = "suspend" // a Job
	ActionEvict   ActionKind = "evict"   // a pod without a controller
	ActionRestore ActionKind = "restore" // undo a scale
	ActionResume  ActionKind = "resume"  // undo a suspend
)

// Action is one change.
type Action struct {
	Kind ActionKind `json:"action"`
	Ref
	Replicas int32 `json:"replicas,omitempty"` // before the change; of a restore after it

	Pods     []string `json:"pods,omitempty"`
	Nodes    []string `json:"nodes,omitempty"`
	GPUs     float64  `json:"gpus"`        // that the pods hold, of an undo held before; a share of a GPU counts as its part
	GPUHours float64  `json:"gpuHours"`    // for which these have been idle
	Idle     float64  `json:"idleSeconds"` // the least of its pods and devices
	Evidence string   `json:"evidence,omitempty"`
	Reason   string   `json:"reason,omitempty"` // for people

	Done  bool   `json:"done"`            // false in a dry run
	Error string `json:"error,omitempty"` // why it failed

	owner *Owner      // nil for ActionEvict
	pod   *corev1.Pod // of ActionEvict
}

// Skipped is an owner or a pod that is left alone.
type Skipped struct {
	Ref
	Pods   []string `json:"pods,omitempty"`
	GPUs   float64  `json:"gpus"` // that the pods hold, as far as their agents respond
	Reason Reason   `json:"reason"`
	Text   string   `json:"text"` // for people
}

// Reason is why an owner or a pod is left alone.
type Reason string

// The reasons.
const (
	ReasonBusy        Reason = "busy"
	ReasonUnknown     Reason = "unknown"     // its use is not measured
	ReasonYoung       Reason = "young"       // younger than Policy.MinimumAge, or not idle for long enough
	ReasonNotReady    Reason = "notReady"    // the pod is not, or was not yet, Ready
	ReasonOptedOut    Reason = "optedOut"    // by the annotation
	ReasonNoAgent     Reason = "noAgent"     // the agent of the node does not respond
	ReasonSourceDown  Reason = "sourceDown"  // the agent cannot measure now
	ReasonNoticed     Reason = "noticed"     // the notice period has not ended
	ReasonLimit       Reason = "limit"       // Policy.MaxPerRun
	ReasonScaledBack  Reason = "scaledBack"  // somebody undid an earlier action
	ReasonUnsupported Reason = "unsupported" // an owner of another kind
	ReasonChanged     Reason = "changed"     // undo: somebody changed it since
	ReasonEnding      Reason = "ending"      // a pod is being deleted, or the owner is at 0 replicas already
	ReasonSystem      Reason = "system"      // the pod has a priority class of the system
)

// cluster is what a run needs of the API server.
type cluster interface {
	// findAgents returns the base URL of the agent on each node. An error names what is wrong with the selection; of a node without an
	// agent there is none.
	findAgents(ctx context.Context) (map[string]string, error)
	// readObjects returns the objects of the policy's namespaces, and what could not be read, such as a namespace that does not exist.
	// It leaves out all pods of a namespace of which something could not be read.
	readObjects(ctx context.Context, p Policy) (Objects, []string)
	// apply makes the change of an action with its Event. at is the time of its Record or notice.
	apply(ctx context.Context, p Policy, a Action, at time.Time) error
}

// agentSelection finds the pods of the agents.
type agentSelection struct {
	Namespace string // of the agents' pods
	Selector  string // their labels
	Scheme    string // http, https
	Port      int    // 0: the container port named metrics
}
