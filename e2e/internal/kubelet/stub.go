package kubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	stub "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// RegisterTwice registers a plugin with one device twice at the same socket, and ends the plugin. A kubelet since 1.37
// refuses the second registration and does not notice the plugin's end.
func (k *Kubelet) RegisterTwice(ctx context.Context, resource v1.ResourceName, socket string) (err error) {
	log := klog.Background()
	plugin := stub.NewDevicePluginStub(log, []*pluginapi.Device{{ID: "stub", Health: pluginapi.Healthy}}, socket, string(resource), false,
		false)
	if err := plugin.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plugin.Stop(log)) }()
	register := func() error {
		return plugin.Register(ctx, filepath.Join(filepath.Dir(socket), "kubelet.sock"), string(resource), "")
	}
	if err := register(); err != nil {
		return err
	}
	if _, err := process.Await(ctx, 10*time.Second, func(context.Context) error {
		if _, allocatable := k.Count(resource); allocatable != 1 {
			return fmt.Errorf("kubelet has %d allocatable devices, want 1", allocatable)
		}
		return nil
	}); err != nil {
		return err
	}
	err = register()
	switch {
	case Minor < 37:
		return err
	case err == nil:
		return fmt.Errorf("kubelet 1.%d accepted a second registration at %s", Minor, socket)
	}
	return nil
}
