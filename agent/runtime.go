package agent

import (
	"context"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// followRuntime asks for the container runtime of the node while pods need its support of CDI, until ctx ends.
func (a *Agent) followRuntime(ctx context.Context) error {
	return kube.NewRuntimeFollower(kube.RuntimeOptions{
		Config: &a.runtimeConfig, Node: nodeName(), Log: a.log.Named("kubernetes"),
		Answered: func(r kube.Runtime, err error, away bool) {
			next := cdi.Runtime{Version: r.Version, Kubelet: r.Kubelet, Away: away}
			if err != nil {
				next.Err = err.Error()
			}
			storeChanged(&a.runtime, next)
		},
	}).Run(ctx)
}

// cdiRuntime returns what is known of the container runtime, nil while pods do not need its support of CDI.
func (a *Agent) cdiRuntime() *view.CDIRuntime {
	cfg, runtime := a.pluginConfig.Load(), a.runtime.Load()
	if runtime == nil || !cfg.NeedsCDI() {
		return nil
	}
	return &view.CDIRuntime{Version: runtime.Version, Support: cfg.JudgeRuntime(*runtime).Support.String()}
}
