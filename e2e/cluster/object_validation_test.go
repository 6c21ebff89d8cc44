//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/manifests"
)

// monitoring returns a resource of Prometheus' operator, for which there is no typed client.
func monitoring(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "monitoring.coreos.com", Version: "v1", Resource: resource}
}

// installCustomResources installs the custom resources of Prometheus' operator.
func (c *cluster) installCustomResources() error {
	files, err := filepath.Glob(c.file(operatorCRDs, "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := c.create(context.Background(), text, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return c.wait(c.kubelet, "custom resources are served", func(ctx context.Context) error {
		var errs []error
		for _, resource := range []string{"servicemonitors", "podmonitors", "prometheusrules"} {
			_, err := c.dynamic.Resource(monitoring(resource)).List(ctx, metav1.ListOptions{})
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// validateObjects lets the API server validate the chart's objects for each values file in a dry run. An unknown
// field is an error.
func validateObjects(t *testing.T) {
	makeNamespace(t)
	createNamespace(t, research, nil) // of the policy in cluster-values.yaml
	files, err := filepath.Glob(filepath.Join(chart, "ci", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no values files: %v", err)
	}
	for _, file := range append(files, "testdata/values.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text := helm(t, "template", release, chart, "-n", namespace, "-f", file)
			dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}
			if err := theCluster.create(t.Context(), []byte(text), dry); err != nil {
				t.Error(err)
			}
		})
	}
}

func makeNamespace(t *testing.T) {
	t.Helper()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := theCluster.client.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// create creates the objects of a file.
func (c *cluster) create(ctx context.Context, text []byte, options metav1.CreateOptions) error {
	objects, err := manifests.Parse(string(text))
	if err != nil {
		return err
	}
	return c.createObjects(ctx, options, objects...)
}

func (c *cluster) createObjects(ctx context.Context, options metav1.CreateOptions, objects ...*unstructured.Unstructured) error {
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	var errs []error
	for _, object := range objects {
		client, err := c.resource(mapper, object)
		if err == nil {
			_, err = client.Create(ctx, object, options)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err))
		}
	}
	return errors.Join(errs...)
}

// resource returns a client for the kind and the namespace of an object.
func (c *cluster) resource(mapper meta.RESTMapper, object *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	kind := object.GroupVersionKind()
	mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		return c.dynamic.Resource(mapping.Resource).Namespace(object.GetNamespace()), nil
	}
	return c.dynamic.Resource(mapping.Resource), nil
}
