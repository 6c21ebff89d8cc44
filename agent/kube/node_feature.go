package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// The API of Node Feature Discovery.
const (
	featureAPI  = "nfd.k8s-sigs.io/v1alpha1"
	featureKind = "NodeFeature"
	// featureNodeLabel names the node of a NodeFeature.
	featureNodeLabel = "nfd.node.kubernetes.io/node-name"
)

// nodeFeature is the part of a NodeFeature that the agent reads and writes.
type nodeFeature struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
	Spec            struct {
		Labels map[string]string `json:"labels"`
	} `json:"spec"`
}

// featureWriter writes the labels of the node's NodeFeature, from which Node Feature Discovery labels the node. The Node owns the object,
// so that it is deleted with the node, and not when the agent restarts or is uninstalled: labels stay then.
type featureWriter struct{ *NodeWriter }

func (w *featureWriter) part() partWriter {
	return partWriter{
		of: func(s *NodeState) desiredPart {
			if s.Feature == nil {
				return desiredPart{}
			}
			return desiredPart{s.Feature, len(s.Feature) == 0}
		},
		write: w.write,
	}
}

func (w *featureWriter) write(ctx context.Context, api *client, s *NodeState, _ bool) (warning string, err error) {
	if w.Namespace == "" {
		return "", permanentError{errors.New("POD_NAMESPACE: expected the namespace of the agent's pod, for the NodeFeature")}
	}
	name := featureName(w.Node)
	if len(s.Feature) == 0 {
		deleted, err := api.deleteFeature(ctx, w.Namespace, w.Node)
		if deleted {
			w.countWrite()
		}
		return "", err
	}
	found, err := api.readFeature(ctx, w.Namespace, name)
	exists := err == nil
	if err != nil && !apierrors.IsNotFound(err) {
		return "", err
	}
	if exists && maps.Equal(found.Spec.Labels, s.Feature) && found.Metadata.Labels[featureNodeLabel] == w.Node {
		return "", nil
	}
	node, err := api.nodeMetadata(ctx, w.Node)
	if err != nil {
		return "", err
	}
	object := nodeFeature{TypeMeta: metav1.TypeMeta{APIVersion: featureAPI, Kind: featureKind}}
	object.Metadata = metav1.ObjectMeta{
		Name: name, Namespace: w.Namespace, Labels: map[string]string{featureNodeLabel: w.Node},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
	}
	object.Spec.Labels = s.Feature
	if exists {
		object.Metadata.ResourceVersion = found.Metadata.ResourceVersion
		err = write(ctx, api.feature(api.rest.Put(), w.Namespace, name), object)
	} else if err = write(ctx, api.feature(api.rest.Post(), w.Namespace), object); apierrors.IsNotFound(err) {
		return "", permanentError{fmt.Errorf(
			"the API server does not serve %s, or has no namespace %s; install Node Feature Discovery, or set node.labels.output to api: %w",
			featureAPI, w.Namespace, err)}
	}
	if err != nil {
		return "", err
	}
	w.countWrite()
	return "", nil
}

// featureName returns the name of a node's NodeFeature of the agent.
func featureName(node string) string { return component + "-" + node }

// deleteFeature deletes a node's NodeFeature. It reports whether there was one.
func (c *client) deleteFeature(ctx context.Context, namespace, node string) (deleted bool, err error) {
	err = c.feature(c.rest.Delete(), namespace, featureName(node)).MaxRetries(0).Do(ctx).Error()
	if apierrors.IsNotFound(err) { // the object, or its API
		return false, nil
	}
	return err == nil, err
}

// feature adds the path of nodefeatures, and of one of them if it has a name, to a request.
func (c *client) feature(r *rest.Request, namespace string, name ...string) *rest.Request {
	return r.AbsPath(append([]string{"/apis", featureAPI, "namespaces", namespace, "nodefeatures"}, name...)...)
}

func (c *client) readFeature(ctx context.Context, namespace, name string) (f nodeFeature, err error) {
	text, err := c.feature(c.rest.Get(), namespace, name).SetHeader("Accept", "application/json").MaxRetries(0).DoRaw(ctx)
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	return f, err
}
