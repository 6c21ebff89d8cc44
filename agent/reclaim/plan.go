package reclaim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
)

// kueueQueue is the label of what Kueue suspends and resumes.
const kueueQueue = "kueue.x-k8s.io/queue-name"

// candidate is what an action changes: an owner, or a pod without one, with its pods that hold GPUs.
type candidate struct {
	Ref
	owner  *Owner   // nil for a pod without one
	owners []*Owner // with those between it and the pods, and its own
	pods   []podUse // that hold GPUs, or wait for one
	count  int32    // of all its pods

	reason Reason // why it cannot be changed, whatever its pods do
	text   string
}

// plan returns what a run does. It is pure: the same world has the same plan. Each candidate that holds GPUs and takes part is in Actions
// or in Skipped.
func plan(p Policy, w World) Report {
	r := newReport(w.Now)
	var acts, notices []Action
	skip := func(c *candidate, reason Reason, text string) { r.Skipped = append(r.Skipped, c.skipped(reason, text)) }
	candidates := candidatesOf(p, w)
	for _, c := range candidates {
		if reason, text := c.judge(p, w); reason != "" {
			skip(c, reason, text)
			continue
		}
		switch action, wait := c.action(p, w.Now); {
		case wait > 0:
			skip(c, ReasonNoticed, "the notice period ends in "+duration.HumanDuration(wait))
		case action.Kind == ActionNotify:
			notices = append(notices, action)
		default:
			acts = append(acts, action)
		}
	}
	slices.SortFunc(acts, compareActions)
	slices.SortFunc(notices, compareActions)
	all := slices.Concat(acts, notices) // a notice does not delay what was announced
	n := min(len(all), p.MaxPerRun)
	r.rest = all[n:]
	// Random, because actions that are refused in every run are the most idle ones after a while: they would be the first to replace each
	// other.
	random := rand.New(rand.NewPCG(uint64(w.Now.UnixNano()), 0)) //nolint:gosec // need not be secret
	random.Shuffle(len(r.rest), func(i, j int) { r.rest[i], r.rest[j] = r.rest[j], r.rest[i] })
	for _, a := range r.rest {
		skip(candidates[a.Ref], ReasonLimit, fmt.Sprintf("maxPerRun is %d", p.MaxPerRun))
	}
	r.Actions = append(r.Actions, all[:n]...)
	r.sum()
	slices.SortFunc(r.Skipped, func(a, b Skipped) int {
		return cmp.Or(cmp.Compare(rank(a.Reason), rank(b.Reason)), compareRefs(a.Ref, b.Ref))
	})
	return r
}

// compareActions orders the most idle GPU-hours first.
func compareActions(a, b Action) int {
	return cmp.Or(cmp.Compare(b.GPUHours, a.GPUHours), compareRefs(a.Ref, b.Ref))
}

func compareRefs(a, b Ref) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
}

// reasons are the reasons to leave a candidate alone, in the order in which they count: a candidate with a busy and an idle pod is busy.
//
//nolint:gochecknoglobals // constant
var reasons = []Reason{
	ReasonOptedOut, ReasonUnsupported, ReasonSystem, ReasonEnding, ReasonBusy, ReasonNoAgent, ReasonSourceDown, ReasonUnknown, ReasonNotReady,
	ReasonYoung, ReasonScaledBack, ReasonNoticed, ReasonLimit, ReasonChanged,
}

func rank(r Reason) int { return slices.Index(reasons, r) }

// candidatesOf returns the candidates that take part and hold GPUs.
func candidatesOf(p Policy, w World) map[Ref]*candidate {
	all := make(map[Ref]*candidate)
	uses := newPodUses(p, w)
	outside := make(map[Ref]bool) // because of a pod
	for _, pod := range byName(w.Pods) {
		if !slices.Contains(p.Namespaces, pod.Namespace) || ended(pod) {
			continue
		}
		found := candidateOf(pod, w.Owners)
		c := all[found.Ref]
		if c == nil {
			c = &candidate{Ref: found.Ref}
			all[c.Ref] = c
		}
		c.count++
		use, relevant := uses.of(pod)
		if !relevant {
			continue
		}
		c.pods = append(c.pods, use)
		c.owner, c.owners = cmp.Or(c.owner, found.owner), append(c.owners, found.owners...)
		if rank(found.reason) >= 0 && (c.reason == "" || rank(found.reason) < rank(c.reason)) {
			c.reason, c.text = found.reason, found.text
		}
		if !p.selects(pod) {
			outside[c.Ref] = true
		}
	}
	maps.DeleteFunc(all, func(r Ref, c *candidate) bool {
		return outside[r] || !slices.ContainsFunc(c.pods, func(u podUse) bool { return u.holds })
	})
	return all
}

// byName returns pods in the order of their names, so that the API server's order does not matter.
func byName(pods []corev1.Pod) []*corev1.Pod {
	sorted := make([]*corev1.Pod, len(pods))
	for i := range pods {
		sorted[i] = &pods[i]
	}
	slices.SortFunc(sorted, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return sorted
}

// selects reports whether a pod takes part. The policy is valid.
func (p Policy) selects(pod *corev1.Pod) bool {
	if p.PodSelector == nil {
		return true
	}
	s, err := metav1.LabelSelectorAsSelector(p.PodSelector)
	return err == nil && s.Matches(labels.Set(pod.Labels))
}

// ended reports whether all containers of a pod have ended, so that it holds nothing.
func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// candidateOf returns the candidate of a pod, without pods. If none can be changed, it is the pod's nearest owner with the reason.
func candidateOf(pod *corev1.Pod, owners map[Ref]*Owner) candidate {
	bare := candidate{Ref: Ref{pod.Namespace, kindPod, pod.Name}}
	controller := metav1.GetControllerOf(pod)
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case mirror:
		return bare.refused(ReasonUnsupported, "a static pod, which only its node removes")
	case controller == nil && len(pod.OwnerReferences) > 0:
		return bare.refused(ReasonUnsupported, "has an owner, "+ownerRef(pod.Namespace, pod.OwnerReferences[0]).String()+
			", that is not its controller")
	case controller == nil:
		return bare
	}
	c := candidate{}
	for {
		c.Ref = ownerRef(pod.Namespace, *controller)
		if !slices.Contains([]string{kindDeployment, kindReplicaSet, kindStatefulSet, kindJob}, c.Kind) {
			return c.refused(ReasonUnsupported, "the command does not change a "+c.Kind)
		}
		c.owner = owners[c.Ref]
		if c.owner == nil || c.owner.UID != controller.UID {
			c.owner = nil
			return c.refused(ReasonUnknown, c.String()+", the owner of the pod, was not found")
		}
		c.owners = append(c.owners, c.owner)
		controller = c.owner.Controller
		switch {
		case controller == nil:
			return c
		case c.Kind == kindReplicaSet && ownerRef(c.Namespace, *controller).Kind == kindDeployment: // the next
		case c.Kind == kindJob && ownerRef(c.Namespace, *controller).Kind == kindCronJob:
			if o := owners[ownerRef(c.Namespace, *controller)]; o != nil {
				c.owners = append(c.owners, o)
			}
			return c
		default: // such as a Kubeflow Notebook, whose controller undoes each change and removes the annotation that would tell
			return c.refused(ReasonUnsupported, "the "+c.Kind+" belongs to "+ownerRef(c.Namespace, *controller).String()+
				", which the command does not change")
		}
	}
}

// refused returns the candidate with the reason why it cannot be changed.
func (c candidate) refused(reason Reason, text string) candidate {
	c.reason, c.text = reason, text
	return c
}

// judge returns why the candidate is left alone; "" if all its pods are idle and it may be changed.
func (c *candidate) judge(p Policy, w World) (Reason, string) {
	reason, text := c.reason, c.text
	consider := func(r Reason, why string) {
		if r != "" && (reason == "" || rank(r) < rank(reason)) {
			reason, text = r, why
		}
	}
	if optedOut(p, w.Namespaces[c.Namespace]) {
		consider(ReasonOptedOut, "the namespace has the annotation "+p.OptOut)
	}
	for _, o := range c.owners {
		if optedOut(p, o.Annotations) {
			consider(ReasonOptedOut, o.String()+" has the annotation "+p.OptOut)
		}
		if _, managed := o.Labels[kueueQueue]; managed {
			consider(ReasonUnsupported, "Kueue suspends and resumes it: label "+kueueQueue)
		}
	}
	for _, u := range c.pods {
		why := u.text
		if c.Kind != kindPod {
			why = "pod " + u.pod.Name + ": " + why
		}
		consider(u.reason, why)
	}
	if c.owner != nil {
		consider(c.judgeOwner(p, w))
	}
	return reason, text
}

// judgeOwner returns why the candidate's owner is left alone.
func (c *candidate) judgeOwner(p Policy, w World) (Reason, string) {
	expected := max(c.owner.Replicas, c.owner.Pods)
	switch {
	case c.owner.DeletesVolumes:
		return ReasonUnsupported, "a scale to 0 deletes its volumes: persistentVolumeClaimRetentionPolicy.whenScaled is Delete"
	case c.owner.Suspended:
		return ReasonEnding, "suspended already"
	case c.owner.Replicas == 0:
		return ReasonEnding, "at 0 replicas already"
	case c.count < expected:
		return ReasonNotReady, fmt.Sprintf("%d of %d pods are listed", c.count, expected)
	}
	record, err := recordOf(c.owner.Annotations)
	if err != nil || record == nil || !record.happened(c.owner) { // an invalid one is replaced
		return "", ""
	}
	if until := record.At.Add(p.LeaveFor.Duration); w.Now.Before(until) {
		by := ""
		if c.owner.ChangedBy != "" && c.owner.ChangedBy != fieldManager {
			by = " by " + c.owner.ChangedBy
		}
		return ReasonScaledBack, fmt.Sprintf("changed back%s after %s; left alone until %s", by, rfc3339(record.At), rfc3339(until))
	}
	return "", ""
}

// optedOut reports whether an object with these annotations does not take part.
func optedOut(p Policy, annotations map[string]string) bool {
	return kube.OptedOut(annotations, p.OptOut)
}

// annotations returns the annotations of the owner, or of a pod without an owner.
func (c *candidate) annotations() map[string]string {
	if c.owner != nil {
		return c.owner.Annotations
	}
	return c.pods[0].pod.Annotations
}

// action returns the action on a candidate, all of whose pods are idle, or the rest of its notice period.
func (c *candidate) action(p Policy, now time.Time) (a Action, wait time.Duration) {
	a = Action{Ref: c.Ref, Kind: ActionScale, Evidence: p.Idle.Evidence, owner: c.owner}
	switch c.Kind {
	case kindPod:
		a.Kind, a.pod = ActionEvict, c.pods[0].pod
	case kindJob:
		a.Kind = ActionSuspend
	default:
		a.Replicas = c.owner.Replicas
	}
	a.Pods, a.GPUs, a.GPUHours = c.podNames(), rounded(c.gpus()), rounded(c.gpuHours())
	idle := c.pods[0].idle
	for _, u := range c.pods {
		a.Nodes = append(a.Nodes, u.node)
		idle = min(idle, u.idle)
	}
	slices.Sort(a.Nodes)
	a.Nodes = slices.Compact(a.Nodes)
	a.Idle = idle.Round(time.Millisecond).Seconds()
	a.Reason = evidenceText(p.Idle.Evidence) + " for " + duration.HumanDuration(idle)
	if p.Notice.Duration <= 0 {
		return a, 0
	}
	since := now.Sub(noticeOf(c.annotations()))
	switch {
	case since < 0, since > idle: // none, written while the clock was ahead, or the candidate was busy since
		a.Kind = ActionNotify
		a.Reason += "; reclaimed in " + duration.HumanDuration(p.Notice.Duration)
	case since < p.Notice.Duration:
		return a, p.Notice.Duration - since
	}
	return a, 0
}

func (c *candidate) podNames() []string {
	names := make([]string, len(c.pods))
	for i, u := range c.pods {
		names[i] = u.pod.Name
	}
	return names
}

func (c *candidate) gpus() (sum float64) {
	for _, u := range c.pods {
		sum += u.gpus
	}
	return sum
}

func (c *candidate) gpuHours() (sum float64) {
	for _, u := range c.pods {
		sum += u.gpuHours
	}
	return sum
}

func (c *candidate) skipped(reason Reason, text string) Skipped {
	return Skipped{Ref: c.Ref, Pods: c.podNames(), Reason: reason, Text: text, GPUs: rounded(c.gpus())}
}

// planUndo returns what undoes the actions of earlier runs in the policy's namespaces, without a limit.
func planUndo(p Policy, w World) Report {
	r := newReport(w.Now)
	var all []Action
	for _, o := range w.Owners {
		_, exists := o.Annotations[recordAnnotation]
		// The Deployment controller copies a Deployment's annotations to its ReplicaSets.
		if !exists || !slices.Contains(p.Namespaces, o.Namespace) || o.Kind == kindReplicaSet && o.Controller != nil {
			continue
		}
		if a, text := undo(o); text != "" {
			r.Skipped = append(r.Skipped, Skipped{Ref: o.Ref, Reason: ReasonChanged, Text: text})
		} else {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, compareActions)
	r.Actions = append(r.Actions, all...)
	slices.SortFunc(r.Skipped, func(a, b Skipped) int { return compareRefs(a.Ref, b.Ref) })
	r.sum()
	return r
}

// undo returns the action that undoes the recorded one, or why there is none.
func undo(o *Owner) (Action, string) {
	a := Action{Ref: o.Ref, Kind: ActionRestore, owner: o}
	record, err := recordOf(o.Annotations)
	switch {
	case err != nil:
		return a, err.Error()
	case !record.happened(o):
		return a, "the recorded change did not happen"
	case o.ChangedBy != "" && o.ChangedBy != fieldManager:
		return a, "changed by " + o.ChangedBy + " since"
	case o.Kind == kindJob && !o.Suspended:
		return a, "not suspended any more"
	case o.Kind != kindJob && o.Replicas != 0:
		return a, fmt.Sprintf("%d replicas since", o.Replicas)
	// somebody may have scaled it up and down, which are two changes and do not show in ChangedBy
	case o.Generation > record.Generation+1:
		return a, fmt.Sprintf("changed %d times since, maybe to other replicas and back to 0; it had %d", o.Generation-record.Generation,
			record.Replicas)
	case o.Kind == kindJob:
		a.Kind, a.GPUs, a.Reason = ActionResume, record.GPUs, "suspended at "+rfc3339(record.At)
	default:
		a.Replicas, a.GPUs, a.Reason = record.Replicas, record.GPUs, fmt.Sprintf("%d replicas before %s", record.Replicas, rfc3339(record.At))
	}
	return a, ""
}

// recordOf returns the record in an owner's annotations, nil if there is none.
func recordOf(annotations map[string]string) (*Record, error) {
	text, exists := annotations[recordAnnotation]
	if !exists {
		return nil, nil
	}
	var r Record
	if err := json.Unmarshal([]byte(text), &r); err != nil || r.Replicas < 1 || r.At.IsZero() {
		return nil, fmt.Errorf(`annotation %s: expected {"replicas":N,"gpus":N,"at":"TIME","generation":N}, got %.100q`, recordAnnotation, text)
	}
	return &r, nil
}

// happened reports whether the recorded change was made. The run may have ended after it wrote the record.
func (r Record) happened(o *Owner) bool { return o.Generation >= r.Generation }

// noticeOf returns the time of the first notice. If there is none, it is far in the future.
func noticeOf(annotations map[string]string) time.Time {
	t, err := time.Parse(time.RFC3339, annotations[noticeAnnotation])
	if err != nil {
		return time.Unix(1<<40, 0)
	}
	return t
}

func rfc3339(t time.Time) string { return t.UTC().Format(time.RFC3339) }
