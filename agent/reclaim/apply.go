package reclaim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
)

// actionTimeout limits one action. It is less than the 30 s that a pod has to end.
const actionTimeout = 25 * time.Second

// The reasons of events.
const (
	eventNotice    = "GPUReclaimNotice"
	eventReclaimed = "GPUReclaimed"
	eventRestored  = "GPURestored"
)

// errChanged is why an action was not done.
var errChanged = errors.New("changed since it was read; the next run plans anew")

// lateError is an error after the change of an action was made.
type lateError struct{ error }

func (e lateError) Unwrap() error { return e.error }

// apply makes the change of an action, then its Event. It begins nothing after ctx ended, and finishes what it began.
//
// An owner is scaled by two requests: one writes its record, one sets its replicas. Both have the version of the owner as a precondition,
// so of two runs, only the one whose record the owner has scales it. A run that is killed between the two leaves a record of a change that
// did not happen.
func (a *api) apply(ctx context.Context, p Policy, act Action, at time.Time) error {
	if ctx.Err() != nil {
		return fmt.Errorf("not begun: %w", context.Cause(ctx))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), actionTimeout)
	defer cancel()
	err := a.change(ctx, p, act, at)
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w (%w)", errChanged, err)
	}
	if err != nil {
		return err
	}
	if act.Kind == ActionRestore {
		if err = a.removeRecord(ctx, act.revision(), act.owner.Annotations[recordAnnotation], ""); err != nil {
			err = fmt.Errorf("cannot remove annotation %s: %w", recordAnnotation, err)
		}
	}
	if eventErr := a.createEvent(ctx, p, act); eventErr != nil {
		err = errors.Join(err, fmt.Errorf("cannot create an Event: %w", eventErr))
	}
	if err != nil {
		return lateError{err}
	}
	return nil
}

// change makes the change of an action.
func (a *api) change(ctx context.Context, p Policy, act Action, at time.Time) error {
	r := act.revision()
	switch act.Kind {
	case ActionNotify:
		_, err := a.patch(ctx, r, "", map[string]any{noticeAnnotation: at.UTC().Format(time.RFC3339)}, nil)
		return err
	case ActionScale:
		return a.scaleToZero(ctx, p, act, at)
	case ActionSuspend:
		record := act.record(at).String()
		_, err := a.patch(ctx, r, "", map[string]any{recordAnnotation: record, noticeAnnotation: nil}, map[string]any{"suspend": true})
		return err
	case ActionEvict:
		return a.evict(ctx, r)
	case ActionRestore:
		_, err := a.patch(ctx, r, "scale", nil, map[string]any{"replicas": act.Replicas})
		return err
	case ActionResume:
		_, err := a.patch(ctx, r, "", map[string]any{recordAnnotation: nil}, map[string]any{"suspend": false})
		return err
	}
	return fmt.Errorf("unexpected action %q", act.Kind)
}

// scaleToZero writes the record of an owner, then scales it.
func (a *api) scaleToZero(ctx context.Context, p Policy, act Action, at time.Time) error {
	o, r, generation, record := act.owner, act.revision(), act.record(at).Generation, act.record(at).String()
	version, err := a.patch(ctx, r, "", map[string]any{recordAnnotation: record, noticeAnnotation: nil}, nil)
	if err != nil {
		return err
	}
	r.version = version
	// The Deployment controller writes the status of an owner whose annotations changed.
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if r.version == "" {
			now, err := a.get(ctx, o.Ref)
			if err != nil {
				return err
			}
			switch now := ownerOf(now); {
			case now.UID != o.UID || now.Annotations[recordAnnotation] != record:
				return errChanged
			case now.Replicas == 0:
				return nil
			case now.Generation >= generation, optedOut(p, now.Annotations): // somebody changed it in between
				return errChanged
			default:
				r.version = now.ResourceVersion
			}
		}
		_, err := a.patch(ctx, r, "scale", nil, map[string]any{"replicas": 0})
		r.version = ""
		return err
	})
	if refused(err) {
		// Other changes raise the generation too, and then the record would look as if somebody had undone the change.
		if undo := a.removeRecord(ctx, r, record, o.Annotations[noticeAnnotation]); undo != nil && !apierrors.IsInvalid(undo) &&
			!apierrors.IsNotFound(undo) {
			err = fmt.Errorf("%w; annotation %s stays: %w", err, recordAnnotation, undo)
		}
	}
	return err
}

// refused reports whether an error means that nothing was changed. After a timeout, or an error of the API server itself, it may have been.
func refused(err error) bool {
	if errors.Is(err, errChanged) {
		return true
	}
	status, ok := errors.AsType[*apierrors.StatusError](err)
	return ok && status.Status().Code >= 400 && status.Status().Code < 500 && status.Status().Code != http.StatusRequestTimeout
}

// isOrdinary reports whether an error is part of a cluster's life, so that nobody has to act: a PodDisruptionBudget refuses an eviction, or
// an object changed after it was read. A later run sees what is left.
func isOrdinary(err error) bool {
	return errors.Is(err, errChanged) || apierrors.IsTooManyRequests(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err)
}

// revision is an owner or a pod as it was read.
type revision struct {
	Ref
	uid     types.UID
	version string
}

func (act Action) revision() revision {
	if act.owner == nil {
		return revision{act.Ref, act.pod.UID, act.pod.ResourceVersion}
	}
	return revision{act.Ref, act.owner.UID, act.owner.ResourceVersion}
}

// patch changes annotations and fields of the spec, nil for none. A nil value removes an annotation. It returns the new version. The error
// is a conflict if the object has another one.
func (a *api) patch(ctx context.Context, r revision, subresource string, annotations, spec map[string]any) (version string, err error) {
	metadata := map[string]any{"uid": r.uid, "resourceVersion": r.version}
	body := map[string]any{"metadata": metadata}
	if annotations != nil {
		metadata["annotations"] = annotations
	}
	if spec != nil {
		body["spec"] = spec
	}
	return a.send(ctx, r.Ref, subresource, types.MergePatchType, body)
}

// removeRecord removes a record from an object, whatever its version, and writes a notice if that is not empty. The error is
// apierrors.IsInvalid if the object does not have this record.
func (a *api) removeRecord(ctx context.Context, r revision, record, notice string) error {
	path := func(annotation string) string {
		return "/metadata/annotations/" + strings.ReplaceAll(annotation, "/", "~1") // RFC 6901
	}
	body := []map[string]string{
		{"op": "test", "path": "/metadata/uid", "value": string(r.uid)},
		{"op": "test", "path": path(recordAnnotation), "value": record},
		{"op": "remove", "path": path(recordAnnotation)},
	}
	if notice != "" {
		body = append(body, map[string]string{"op": "add", "path": path(noticeAnnotation), "value": notice})
	}
	_, err := a.send(ctx, r.Ref, "", types.JSONPatchType, body)
	return err
}

// send sends a patch once, because client-go repeats some requests up to ten times. It returns the object's new version.
func (a *api) send(ctx context.Context, ref Ref, subresource string, typ types.PatchType, body any) (version string, err error) {
	text, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	r := a.resources[ref.Kind]
	request := r.client.Patch(typ).Namespace(ref.Namespace).Resource(r.name).Name(ref.Name).Param("fieldManager",
		fieldManager).Body(text).MaxRetries(0)
	if subresource != "" {
		request.SubResource(subresource)
	}
	result := request.SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json").Do(ctx)
	if err := result.Error(); err != nil {
		return "", err
	}
	answer, err := result.Raw()
	if err != nil {
		return "", err
	}
	var o metav1.PartialObjectMetadata
	if err := json.Unmarshal(answer, &o); err != nil {
		return "", err
	}
	return o.ResourceVersion, nil
}

// evict evicts a pod once. A PodDisruptionBudget may refuse it.
func (a *api) evict(ctx context.Context, r revision) error {
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &r.uid, ResourceVersion: &r.version}},
	}
	err := a.resources[kindPod].client.Post().Namespace(r.Namespace).Resource("pods").Name(r.Name).SubResource("eviction").Body(
		eviction).MaxRetries(0).Do(ctx).Error()
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok && apierrors.IsTooManyRequests(err) && status.Status().Details != nil {
		for _, c := range status.Status().Details.Causes {
			err = fmt.Errorf("%w: %s", err, c.Message)
		}
	}
	return err
}

// createEvent creates the Event of an action that was done.
func (a *api) createEvent(ctx context.Context, p Policy, act Action) error {
	r := act.revision()
	involved := corev1.ObjectReference{APIVersion: "v1", Kind: r.Kind, Namespace: r.Namespace, Name: r.Name, UID: r.uid}
	if group := kindGroups[r.Kind]; group != "" {
		involved.APIVersion = schema.GroupVersion{Group: group, Version: "v1"}.String()
	}
	typ, reason, message := eventOf(p, act)
	now := metav1.Now()
	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: r.Namespace, GenerateName: r.Name + "."}, // the API server shortens it
		InvolvedObject: involved, Type: typ, Reason: reason, Message: message,
		Source: corev1.EventSource{Component: fieldManager}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: fieldManager,
	}
	return a.resources[kindPod].client.Post().Namespace(r.Namespace).Resource("events").Body(event).MaxRetries(0).Do(ctx).Error()
}

// eventOf returns the texts of the Event of an action.
func eventOf(p Policy, act Action) (typ, reason, message string) {
	gpus := fmt.Sprintf("%.3g GPUs, %s", act.GPUs, act.Reason)
	const undo = "; gpu-node-agent reclaim --undo restores it"
	switch act.Kind {
	case ActionNotify:
		if p.OptOut != "" {
			gpus += "; annotation " + p.OptOut + " prevents it"
		}
		return corev1.EventTypeWarning, eventNotice, gpus
	case ActionScale:
		return corev1.EventTypeNormal, eventReclaimed, fmt.Sprintf("scaled from %d to 0: %s%s", act.Replicas, gpus, undo)
	case ActionSuspend:
		return corev1.EventTypeNormal, eventReclaimed, "suspended: " + gpus + undo
	case ActionEvict:
		return corev1.EventTypeNormal, eventReclaimed, "evicted: " + gpus
	case ActionRestore:
		return corev1.EventTypeNormal, eventRestored, fmt.Sprintf("scaled to %d", act.Replicas)
	case ActionResume:
	}
	return corev1.EventTypeNormal, eventRestored, "resumed"
}

// record returns the record of a change of an owner to no replicas, or of a Job to be suspended.
func (act Action) record(at time.Time) Record {
	o := act.owner
	r := Record{Replicas: o.Replicas, GPUs: act.GPUs, At: at.UTC(), Generation: o.Generation + 1}
	if o.Kind == kindDeployment {
		r.Generation++ // the API server counts a change of a Deployment's annotations as a generation
	}
	return r
}

// String returns the annotation's value.
func (r Record) String() string {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // the year has more than four digits
	}
	return string(text)
}
