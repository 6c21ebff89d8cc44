// Package apiserver holds what the agent tells Kubernetes against a real API server on a real etcd. The
// kubelet is its own device manager, as in package devicemanager; there are no containers.
package apiserver

import (
	"flag"
	"fmt"
	"io"
	"os"
	"testing"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/binary"
)

// role, in the environment, makes this very program one of the parts below: it holds their code anyway, and
// two programs less are to be linked.
const role = "GPU_NODE_AGENT_E2E_ROLE"

const (
	etcdRole      = "etcd"
	apiServerRole = "kube-apiserver"
)

// agentBinary is the program under test: $AGENT_BIN, or what TestMain builds from this repository.
var agentBinary string

// theCluster is what all tests share: it takes seconds to start.
var theCluster *cluster

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case etcdRole:
		etcdmain.Main(os.Args)
		return
	case apiServerRole:
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	dir, err := os.MkdirTemp("", "gpu-node-agent-e2e")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	if agentBinary, err = binary.Agent(dir); err != nil {
		return fail(err)
	}
	if err := quiet(); err != nil {
		return fail(err)
	}
	theCluster, err = newCluster(dir)
	if err != nil {
		return fail(err)
	}
	defer theCluster.stop()
	return m.Run()
}

// quiet keeps the kubelet's log off the screen: its code logs through a logger of the process.
func quiet() error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	klog.SetOutput(io.Discard)
	return flags.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})
}
