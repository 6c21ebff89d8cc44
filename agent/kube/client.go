package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// component is who says so, in events and in the API server's audit log.
const component = "gpu-node-agent"

const (
	// requestTimeout is how long the API server may take for one request.
	requestTimeout = 10 * time.Second

	// What one node asks at most, in requests a second. There may be thousands of nodes.
	requestRate  = 5
	requestBurst = 10
)

// condition is core/v1's NodeCondition.
type condition struct {
	Type               string      `json:"type"`
	Status             string      `json:"status"`
	LastHeartbeatTime  metav1.Time `json:"lastHeartbeatTime"`
	LastTransitionTime metav1.Time `json:"lastTransitionTime"`
	Reason             string      `json:"reason"`
	Message            string      `json:"message"`
}

// event is core/v1's Event: the one that kubectl describe shows, and whose count can be raised.
type event struct {
	Kind               string            `json:"kind"`
	APIVersion         string            `json:"apiVersion"`
	Metadata           metav1.ObjectMeta `json:"metadata"`
	InvolvedObject     reference         `json:"involvedObject"`
	Type               string            `json:"type"`
	Reason             string            `json:"reason"`
	Message            string            `json:"message"`
	Source             source            `json:"source"`
	FirstTimestamp     metav1.Time       `json:"firstTimestamp"`
	LastTimestamp      metav1.Time       `json:"lastTimestamp"`
	Count              int32             `json:"count"`
	ReportingComponent string            `json:"reportingComponent"`
	ReportingInstance  string            `json:"reportingInstance"`
}

type reference struct {
	Kind       string    `json:"kind"`
	APIVersion string    `json:"apiVersion"`
	Namespace  string    `json:"namespace,omitempty"`
	Name       string    `json:"name"`
	UID        types.UID `json:"uid,omitempty"`
}

type source struct {
	Component string `json:"component"`
	Host      string `json:"host"`
}

// eventPatch is what changes when it happens again.
type eventPatch struct {
	Count         int32       `json:"count"`
	LastTimestamp metav1.Time `json:"lastTimestamp"`
	Message       string      `json:"message"`
}

// client makes the few requests that there are.
type client struct{ rest rest.Interface }

// connect returns a client by a kubeconfig, or by what a pod is given if that is "". It asks nobody yet.
func connect(kubeconfig string) (*client, error) {
	c, err := Reach(kubeconfig)
	if err != nil {
		return nil, err
	}
	return newClient(c)
}

// Reach returns how to reach the API server by a kubeconfig, or by what a pod is given if that is "".
func Reach(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("health.kubernetes.kubeconfig: %w", err)
		}
		return c, nil
	}
	c, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("health.kubernetes.kubeconfig: this is no pod with a service account; name a kubeconfig file")
	}
	if err != nil {
		return nil, fmt.Errorf("the pod's service account: %w", err)
	}
	return c, nil
}

func newClient(c *rest.Config) (*client, error) {
	core := schema.GroupVersion{Version: "v1"}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, core) // for the Status that every error is
	c.APIPath, c.GroupVersion = "/api", &core
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.QPS, c.Burst = requestRate, requestBurst
	c.Timeout, c.UserAgent, c.WarningHandler = requestTimeout, component, rest.NoWarnings{}
	r, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, err
	}
	return &client{r}, nil
}

// do makes a request once and decodes the answer into out, unless that is nil.
func do(ctx context.Context, r *rest.Request, out any) error {
	if out == nil { // an answer to a write is the whole object: all but its name is left away
		r = r.SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json")
	}
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return err
	}
	body, err := result.Raw()
	if err != nil || out == nil {
		return err
	}
	return json.Unmarshal(body, out)
}

// condition returns the node's condition as it stands, the zero one if there is none.
func (c *client) condition(ctx context.Context, node string) (condition, error) {
	var n struct {
		Status struct {
			Conditions []condition `json:"conditions"`
		} `json:"status"`
	}
	if err := do(ctx, c.rest.Get().Resource("nodes").Name(node), &n); err != nil {
		return condition{}, err
	}
	i := slices.IndexFunc(n.Status.Conditions, func(c condition) bool { return c.Type == conditionType })
	if i < 0 {
		return condition{}, nil
	}
	return n.Status.Conditions[i], nil
}

// patchCondition writes one element of the node's conditions, and no other: their merge key is the type.
func (c *client) patchCondition(ctx context.Context, node string, element any) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{element}}})
	if err != nil {
		return err
	}
	return do(ctx, c.rest.Patch(types.StrategicMergePatchType).Resource("nodes").Name(node).SubResource("status").Body(body), nil)
}

// removal is the element that takes the condition away.
func removal() map[string]string { return map[string]string{"$patch": "delete", "type": conditionType} }

// pod returns a pod's UID and the node that it is bound to.
func (c *client) pod(ctx context.Context, namespace, name string) (types.UID, string, error) {
	var p struct {
		Metadata struct {
			UID types.UID `json:"uid"`
		} `json:"metadata"`
		Spec struct {
			NodeName string `json:"nodeName"`
		} `json:"spec"`
	}
	err := do(ctx, c.rest.Get().Namespace(namespace).Resource("pods").Name(name), &p)
	return p.Metadata.UID, p.Spec.NodeName, err
}

func (c *client) createEvent(ctx context.Context, e event) error {
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return do(ctx, c.rest.Post().Namespace(e.Metadata.Namespace).Resource("events").Body(body), nil)
}

func (c *client) patchEvent(ctx context.Context, namespace, name string, p eventPatch) error {
	body, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return do(ctx, c.rest.Patch(types.MergePatchType).Namespace(namespace).Resource("events").Name(name).Body(body), nil)
}

// class tells errors apart that mean something else to a person: an outage has one, however it shows.
func class(err error) metav1.StatusReason {
	return cmp.Or(apierrors.ReasonForError(err), "Unreachable")
}

// hopeless tells whether the same request would be refused again, whatever else changes.
func hopeless(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) ||
		apierrors.IsRequestEntityTooLargeError(err) || apierrors.HasStatusCause(err, "NamespaceTerminating")
}
