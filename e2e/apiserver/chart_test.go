package apiserver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/manifests"
)

// The release of the chart, and the service account of its agents.
const (
	releaseNamespace = "gpu"
	agentsAccount    = "system:serviceaccount:gpu:gna-gpu-node-agent"
)

// installChart creates the objects of the chart that concern the API server only, with the values of a file in ci.
func installChart(t *testing.T, values string) {
	t.Helper()
	helm, chart := filepath.Join(t.TempDir(), "helm"), filepath.Join("..", "..", "charts", "gpu-node-agent")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", helm, "helm.sh/helm/v4/cmd/helm")
	build.Dir = filepath.Join("..", "helm")
	build.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false") // the Makefile's flags; -modfile is for this module
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	template := exec.CommandContext(t.Context(), helm, "template", "gna", chart, "-n", releaseNamespace, "-f",
		filepath.Join(chart, "ci", values))
	var stderr strings.Builder
	template.Stderr = &stderr
	out, err := template.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", template, err, stderr.String())
	}
	objects, err := manifests.Parse(string(out))
	if err != nil {
		t.Fatal(err)
	}
	c := newCreator(t)
	for _, object := range objects {
		if slices.Contains([]string{
			"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ValidatingAdmissionPolicy",
			"ValidatingAdmissionPolicyBinding", "DeviceClass",
		}, object.GetKind()) {
			if namespace := object.GetNamespace(); namespace != "" {
				createNamespace(t, namespace)
			}
			created, err := c.create(t.Context(), object, false)
			if err != nil {
				t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
			}
			t.Cleanup(func() { c.remove(t, created) })
		}
	}
}

// createNamespace creates a namespace unless it exists.
func createNamespace(t *testing.T, name string) {
	t.Helper()
	_, err := theCluster.client.CoreV1().Namespaces().Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// refusedByPolicy returns an error unless a policy of the chart refused a request.
func refusedByPolicy(err error, policy string) error {
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'gpu.gna-gpu-node-agent-"+policy+"'") {
		return nil
	}
	return fmt.Errorf("error %q, want a refusal by the policy %s", fmt.Sprint(err), policy)
}

// adminConfig returns a configuration with the rights of the admin.
func adminConfig(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", theCluster.pki.Kubeconfig(admin))
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 100, 100
	return config
}

// accountConfig returns a configuration of a service account with a token for a pod on a node; "" for a token without a pod.
func accountConfig(t *testing.T, account, nodeName string) *rest.Config {
	t.Helper()
	config := adminConfig(t)
	config.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	if nodeName != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {nodeName}}
	}
	return config
}

// agentClient returns a client of the agents' service account: see accountConfig.
func agentClient(t *testing.T, nodeName string) *kubernetes.Clientset {
	t.Helper()
	client, err := kubernetes.NewForConfig(accountConfig(t, agentsAccount, nodeName))
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// creator creates objects of any kind.
type creator struct {
	client *dynamic.DynamicClient
	mapper meta.RESTMapper
}

func newCreator(t *testing.T) creator {
	t.Helper()
	client, err := dynamic.NewForConfig(adminConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	return creator{client, restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(theCluster.client.Discovery()))}
}

// create creates an object, with dryRun only as far as the API server checks it, and returns how the API server stores it.
func (c creator) create(ctx context.Context, object *unstructured.Unstructured, dryRun bool) (*unstructured.Unstructured, error) {
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, err
	}
	options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	if dryRun {
		options.DryRun = []string{metav1.DryRunAll}
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return c.client.Resource(mapping.Resource).Create(ctx, object, options)
	}
	namespace := object.GetNamespace()
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	return c.client.Resource(mapping.Resource).Namespace(namespace).Create(ctx, object, options)
}

func (c creator) remove(t *testing.T, object *unstructured.Unstructured) {
	t.Helper()
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err == nil {
		var objects dynamic.ResourceInterface = c.client.Resource(mapping.Resource)
		if namespace := object.GetNamespace(); namespace != "" {
			objects = c.client.Resource(mapping.Resource).Namespace(namespace)
		}
		err = objects.Delete(context.Background(), object.GetName(), metav1.DeleteOptions{})
	}
	if err != nil {
		t.Error(err)
	}
}
