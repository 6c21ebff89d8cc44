// Package apiserver tests the agent's node condition, events, pod labels and ResourceSlices against a real kube-apiserver and etcd. The
// kubelet is its own device manager, as in package devicemanager; no containers run.
package apiserver

import (
	"flag"
	"os"
	"testing"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

const (
	etcdRole      = "etcd"
	apiServerRole = "kube-apiserver"
)

// theCluster is shared by all tests, because it takes seconds to start.
var theCluster *cluster

// Tests that need the API server for themselves run first, the others in parallel, because they mostly wait.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "4"); err != nil { // the default; go test -parallel overrides it
		panic(err)
	}
	switch os.Getenv(process.RoleEnv) {
	case etcdRole:
		etcdmain.Main(os.Args)
	case apiServerRole:
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	default:
		os.Exit(node.Main(m, func(dir string) (after func(), err error) {
			theCluster, err = newCluster(dir)
			return func() { theCluster.stop() }, err
		}))
	}
}
