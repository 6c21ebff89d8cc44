//go:build !kubelet1.37

package holders

// others are the kubelets that this program has beside the stand-ins. The device manager of Kubernetes takes minutes to build.
func others() []newKubelet { return nil }
