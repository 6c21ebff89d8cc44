package kubelettest

import (
	"context"
	"errors"
	"io"
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
		receive(devicesOf(resp))
	}
}

// Client speaks to a plugin's socket as the kubelet does, beside whatever kubelet there is.
type Client struct{ *client }

// Dial returns a client of the plugin that listens on a socket. It connects with the first call.
func Dial(socket string) (Client, error) {
	c, err := dial(socket)
	return Client{c}, err
}

// Close ends the calls that are open, streams too. It may be called more than once.
func (c Client) Close() { c.close() }

// Devices opens a ListAndWatch of its own and hands on every list until receive returns false.
func (c Client) Devices(ctx context.Context, receive func([]Device) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case !receive(devicesOf(resp)):
			return nil
		}
	}
}

// Ignore opens a ListAndWatch and reads nothing of it until Close: a stream that is as slow as can be.
func (c Client) Ignore(ctx context.Context) error {
	_, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	return err
}

// Allocate asks for these devices for one container.
func (c Client) Allocate(ctx context.Context, ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	resp, err := c.api.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	switch {
	case err != nil:
		return nil, err
	case len(resp.GetContainerResponses()) != 1:
		return nil, errors.New("the plugin has not answered for one container")
	}
	return resp.GetContainerResponses()[0], nil
}

// Prefer asks which n of the free devices the plugin would take for one container.
func (c Client) Prefer(ctx context.Context, free []string, n int) ([]string, error) {
	resp, err := c.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: free, AllocationSize: int32(min(n, 1<<30))}},
	})
	switch {
	case err != nil:
		return nil, err
	case len(resp.GetContainerResponses()) != 1:
		return nil, errors.New("the plugin has not answered for one container")
	}
	return resp.GetContainerResponses()[0].GetDeviceIDs(), nil
}

func devicesOf(resp *pluginapi.ListAndWatchResponse) []Device {
	var devices []Device
	for _, d := range resp.GetDevices() {
		device := Device{ID: d.GetID(), Healthy: d.GetHealth() == pluginapi.Healthy}
		for _, n := range d.GetTopology().GetNodes() {
			device.NUMA = append(device.NUMA, int(n.GetID()))
		}
		devices = append(devices, device)
	}
	return devices
}
