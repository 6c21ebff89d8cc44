package kube

import (
	"cmp"
	"context"
	"os"

	corev1 "k8s.io/api/core/v1"
)

// NodeName returns the Kubernetes node's name if the pod has it in NODE_NAME, else the host's.
func NodeName() string {
	host, _ := os.Hostname() // "" on failure
	return cmp.Or(os.Getenv("NODE_NAME"), host)
}

// RuntimeVersion returns the container runtime of a node, as its kubelet reports it: containerd://2.1.4.
func RuntimeVersion(ctx context.Context, kubeconfig, node string) (string, error) {
	c, err := connect(kubeconfig)
	if err != nil {
		return "", err
	}
	var n corev1.Node
	if err := read(ctx, c.rest.Get().Resource("nodes").Name(node), &n); err != nil {
		return "", err
	}
	return n.Status.NodeInfo.ContainerRuntimeVersion, nil
}
