//go:build cluster

package cluster

import (
	"context"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

const (
	etcdRole       = "etcd"
	apiServerRole  = "kube-apiserver"
	controllerRole = "kube-controller-manager"
	schedulerRole  = "kube-scheduler"
	kubeletRole    = "kubelet"
)

// play runs a component of Kubernetes and does not return.
func play(part string) {
	var command *cobra.Command
	switch part {
	case etcdRole:
		etcdmain.Main(os.Args)
		os.Exit(0)
	case apiServerRole:
		command = apiserver.NewAPIServerCommand()
	case controllerRole:
		command = controllers.NewControllerManagerCommand()
	case schedulerRole:
		command = scheduler.NewSchedulerCommand()
	case kubeletRole:
		command = kubelet.NewKubeletCommand(context.Background())
	default:
		println("unknown role:", part)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
