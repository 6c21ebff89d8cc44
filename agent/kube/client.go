package kube

import (
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
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// component names the agent in events and in the API server's audit log.
const component = "gpu-node-agent"

const (
	// requestTimeout limits one request.
	requestTimeout = 10 * time.Second

	// The limits of one node, in requests per second. There may be thousands of nodes.
	requestRate  = 5
	requestBurst = 10
)

// nodeCondition is core/v1's NodeCondition.
type nodeCondition struct {
	Type               string                 `json:"type"`
	Status             metav1.ConditionStatus `json:"status"`
	LastHeartbeatTime  metav1.Time            `json:"lastHeartbeatTime"`
	LastTransitionTime metav1.Time            `json:"lastTransitionTime"`
	Reason             string                 `json:"reason"`
	Message            string                 `json:"message"`
}

// coreEvent is core/v1's Event, which kubectl describe shows. Unlike those of events.k8s.io, its count can be raised.
type coreEvent struct {
	Kind               string            `json:"kind"`
	APIVersion         string            `json:"apiVersion"`
	Metadata           metav1.ObjectMeta `json:"metadata"`
	InvolvedObject     objectReference   `json:"involvedObject"`
	Type               string            `json:"type"`
	Reason             string            `json:"reason"`
	Message            string            `json:"message"`
	Source             eventSource       `json:"source"`
	FirstTimestamp     metav1.Time       `json:"firstTimestamp"`
	LastTimestamp      metav1.Time       `json:"lastTimestamp"`
	Count              int32             `json:"count"`
	ReportingComponent string            `json:"reportingComponent"`
	ReportingInstance  string            `json:"reportingInstance"`
}

type objectReference struct {
	Kind       string    `json:"kind"`
	APIVersion string    `json:"apiVersion"`
	Namespace  string    `json:"namespace,omitempty"`
	Name       string    `json:"name"`
	UID        types.UID `json:"uid,omitempty"`
}

type eventSource struct {
	Component string `json:"component"`
	Host      string `json:"host"`
}

// eventPatch holds the fields that change when an event repeats.
type eventPatch struct {
	Count         int32       `json:"count"`
	LastTimestamp metav1.Time `json:"lastTimestamp"`
	Message       string      `json:"message"`
}

// client makes the requests of this package.
type client struct{ rest rest.Interface }

// connect returns a client for a kubeconfig file, or for the pod's service account if that is "". It makes no request.
func connect(kubeconfig string) (*client, error) {
	c, err := RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return newClient(c)
}

// RESTConfig returns the REST configuration of a kubeconfig file, or of the pod's service account if that is "".
func RESTConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("health.kubernetes.kubeconfig: %w", err)
		}
		return c, nil
	}
	c, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("health.kubernetes.kubeconfig: expected a kubeconfig file, because the agent does not run in a pod with a service account")
	}
	if err != nil {
		return nil, fmt.Errorf("service account of the pod: %w", err)
	}
	return c, nil
}

// Connector returns a function that opens a client of all API groups for a kubeconfig file, or for the pod's service account if that is "". It
// makes no request.
func Connector(kubeconfig func() string) func() (kubernetes.Interface, error) {
	return func() (kubernetes.Interface, error) {
		c, err := RESTConfig(kubeconfig())
		if err != nil {
			return nil, err
		}
		c.QPS, c.Burst = requestRate, requestBurst
		c.UserAgent, c.WarningHandler = component, rest.NoWarnings{}
		return kubernetes.NewForConfig(c)
	}
}

func newClient(c *rest.Config) (*client, error) {
	core := schema.GroupVersion{Version: "v1"}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, core) // for the Status of an error
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

// read makes a request once and decodes the response.
func read(ctx context.Context, r *rest.Request, out any) error {
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return err
	}
	body, err := result.Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(body, out)
}

// write makes a request with a body once. It asks for the object's metadata only, because the response is not used.
func write(ctx context.Context, r *rest.Request, in any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r.SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json")
	return r.Body(body).MaxRetries(0).Do(ctx).Error()
}

// condition returns the node's condition, the zero value if there is none.
func (c *client) condition(ctx context.Context, node string) (nodeCondition, error) {
	var n struct {
		Status struct {
			Conditions []nodeCondition `json:"conditions"`
		} `json:"status"`
	}
	if err := read(ctx, c.rest.Get().Resource("nodes").Name(node), &n); err != nil {
		return nodeCondition{}, err
	}
	i := slices.IndexFunc(n.Status.Conditions, func(c nodeCondition) bool { return c.Type == conditionType })
	if i < 0 {
		return nodeCondition{}, nil
	}
	return n.Status.Conditions[i], nil
}

// patchCondition writes one element of the node's conditions and leaves the others: their merge key is the type.
func (c *client) patchCondition(ctx context.Context, node string, element any) error {
	patch := map[string]any{"status": map[string]any{"conditions": []any{element}}}
	return write(ctx, c.rest.Patch(types.StrategicMergePatchType).Resource("nodes").Name(node).SubResource("status"), patch)
}

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
	err := read(ctx, c.rest.Get().Namespace(namespace).Resource("pods").Name(name), &p)
	return p.Metadata.UID, p.Spec.NodeName, err
}

func (c *client) createEvent(ctx context.Context, e coreEvent) error {
	return write(ctx, c.rest.Post().Namespace(e.Metadata.Namespace).Resource("events"), e)
}

func (c *client) patchEvent(ctx context.Context, namespace, name string, p eventPatch) error {
	return write(ctx, c.rest.Patch(types.MergePatchType).Namespace(namespace).Resource("events").Name(name), p)
}

// permanent reports whether the API server would refuse the same request again.
func permanent(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) ||
		apierrors.IsRequestEntityTooLargeError(err) || apierrors.HasStatusCause(err, "NamespaceTerminating")
}
