package kubelettest

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// client is the kubelet's connection to one registration of a plugin.
type client struct {
	api   pluginapi.DevicePluginClient
	close func() // may be called more than once
}

func dial(path string) (*client, error) {
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, err
	}
	return &client{
		api: pluginapi.NewDevicePluginClient(conn),
		// Closing a connection can only fail by having been closed.
		close: sync.OnceFunc(func() { _ = conn.Close() }),
	}, nil
}

// list hands every list of the plugin to receive until the stream ends, for whatever reason. Closing the
// client ends it.
func (c *client) list(ctx context.Context, receive func([]Device)) {
	stream, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return
	}
	for {
		resp, err := stream.Recv()
		if err != nil {
			return
		}
		var devices []Device
		for _, d := range resp.GetDevices() {
			device := Device{ID: d.GetID(), Healthy: d.GetHealth() == pluginapi.Healthy}
			for _, n := range d.GetTopology().GetNodes() {
				device.NUMA = append(device.NUMA, int(n.GetID()))
			}
			devices = append(devices, device)
		}
		receive(devices)
	}
}
