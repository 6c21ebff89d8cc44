package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
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

	// Of a driver, which reads each claim of a pod that starts while the kubelet waits: the kubelet's rate.
	claimRate  = 50
	claimBurst = 100
)

// errNoAccount is why there is no access to the API server in a pod whose configuration needs none.
var errNoAccount = errors.New("a service account")

// RESTConfig returns the REST configuration of health.kubernetes.kubeconfig, or of the pod's service account if that is "".
func RESTConfig(kubeconfig string) (*rest.Config, error) {
	return RESTConfigOf("health.kubernetes.kubeconfig", kubeconfig)
}

// RESTConfigOf returns the REST configuration of a kubeconfig file, or of the pod's service account if that is "". Errors name the key that
// configures the file.
func RESTConfigOf(key, kubeconfig string) (c *rest.Config, err error) {
	if kubeconfig != "" {
		if c, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
	} else if c, err = rest.InClusterConfig(); err != nil {
		return nil, accountError(key, err)
	}
	return configure(c), nil
}

// accountError says why there is no service account, and that the key can name a file instead.
func accountError(key string, err error) error {
	if errors.Is(err, rest.ErrNotInCluster) || errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: expected a kubeconfig file, because %s does not run in a pod with a token of %w", key, component, errNoAccount)
	}
	return fmt.Errorf("service account of the pod: %w", err)
}

func configure(c *rest.Config) *rest.Config {
	c.QPS, c.Burst = requestRate, requestBurst
	c.UserAgent, c.WarningHandler = component, rest.NoWarnings{}
	return c
}

// OperatorRESTConfig returns the REST configuration of an operator's command, as kubectl finds it. A kubeconfig file and a context in it
// are used if they are not "". In a pod without such a file, it is the service account's.
func OperatorRESTConfig(kubeconfig, context string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context}).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("access to the API server: expected $KUBECONFIG, ~/.kube/config, --kubeconfig, or a pod with a service account")
	}
	if err != nil {
		return nil, fmt.Errorf("access to the API server: %w", err)
	}
	return configure(c), nil
}

// Connector returns a function that opens a client of all API groups for a kubeconfig file, or for the pod's service account if that is "".
// It makes no request.
func Connector(kubeconfig func() string) func() (kubernetes.Interface, error) {
	return func() (kubernetes.Interface, error) {
		c, err := RESTConfig(kubeconfig())
		if err != nil {
			return nil, err
		}
		c.QPS, c.Burst = claimRate, claimBurst
		return kubernetes.NewForConfig(c)
	}
}

// metadataOnly asks for an object's metadata.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

// client makes the requests of this package, each once, because the writers have their own pauses between attempts. The typed methods of
// client-go repeat a request up to ten times, and cannot ask for an object's metadata only.
type client struct{ rest rest.Interface }

// connect returns a client for a kubeconfig file, or for the pod's service account if that is "". It makes no request.
func connect(kubeconfig string) (*client, error) {
	c, err := RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return newClient(c)
}

// currentClient is the client for a kubeconfig file that may become another one.
type currentClient struct {
	api        *client // nil before the first
	kubeconfig string  // of api
}

// open opens a client, unless the last one is for this kubeconfig file. After an error the last one stays.
func (c *currentClient) open(kubeconfig string, connect func(kubeconfig string) (*client, error)) error {
	if c.api != nil && c.kubeconfig == kubeconfig {
		return nil
	}
	api, err := connect(kubeconfig)
	if err == nil {
		c.api, c.kubeconfig = api, kubeconfig
	}
	return err
}

func newClient(c *rest.Config) (*client, error) {
	c.Timeout = requestTimeout
	core, err := typedcorev1.NewForConfig(c)
	if err != nil {
		return nil, err
	}
	return &client{core.RESTClient()}, nil
}

// read makes a request and decodes the response.
func read(ctx context.Context, r *rest.Request, out runtime.Object) error {
	return r.MaxRetries(0).Do(ctx).Into(out)
}

// write makes a request with a body. It asks for the object's metadata only, because the response is not used.
func write(ctx context.Context, r *rest.Request, in any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r.SetHeader("Accept", metadataOnly)
	return r.Body(body).MaxRetries(0).Do(ctx).Error()
}

// condition returns the node's condition, the zero value if there is none.
func (c *client) condition(ctx context.Context, node string) (corev1.NodeCondition, error) {
	var n corev1.Node
	if err := read(ctx, c.rest.Get().Resource("nodes").Name(node), &n); err != nil {
		return corev1.NodeCondition{}, err
	}
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == conditionType })
	if i < 0 {
		return corev1.NodeCondition{}, nil
	}
	return n.Status.Conditions[i], nil
}

// patchCondition writes one element of the node's conditions and leaves the others: their merge key is the type.
func (c *client) patchCondition(ctx context.Context, node string, element any) error {
	patch := map[string]any{"status": map[string]any{"conditions": []any{element}}}
	return write(ctx, c.rest.Patch(types.StrategicMergePatchType).Resource("nodes").Name(node).SubResource("status"), patch)
}

// deleteCondition removes the node's condition.
func (c *client) deleteCondition(ctx context.Context, node string) error {
	return c.patchCondition(ctx, node, map[string]string{"$patch": "delete", "type": conditionType})
}

func (c *client) pod(ctx context.Context, namespace, name string) (p corev1.Pod, err error) {
	err = read(ctx, c.rest.Get().Namespace(namespace).Resource("pods").Name(name), &p)
	return p, err
}

func (c *client) createEvent(ctx context.Context, e corev1.Event) error {
	return write(ctx, c.rest.Post().Namespace(e.Namespace).Resource("events"), e)
}

// event returns an event. It reads by a patch that changes nothing, so that it needs no other right than patchEvent.
func (c *client) event(ctx context.Context, namespace, name string) (e corev1.Event, err error) {
	err = read(ctx, c.rest.Patch(types.MergePatchType).Namespace(namespace).Resource("events").Name(name).Body([]byte("{}")), &e)
	return e, err
}

// patchEvent changes fields of an event.
func (c *client) patchEvent(ctx context.Context, namespace, name string, fields map[string]any) error {
	return write(ctx, c.rest.Patch(types.MergePatchType).Namespace(namespace).Resource("events").Name(name), fields)
}

// permanent reports whether the API server would refuse the same request again.
func permanent(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) ||
		apierrors.IsRequestEntityTooLargeError(err) || apierrors.HasStatusCause(err, "NamespaceTerminating")
}
