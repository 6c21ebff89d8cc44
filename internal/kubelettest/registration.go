package kubelettest

import (
	"context"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registrationServer serves the Registration API of one run of the kubelet.
type registrationServer struct {
	pluginapi.UnimplementedRegistrationServer
	kubelet *Kubelet
	server  *grpc.Server // identifies the run
}

// Register connects to the plugin and requests its options before it responds, as the real one does.
func (r registrationServer) Register(ctx context.Context, req *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k, name := r.kubelet, req.GetResourceName()
	fault := k.currentFault()
	switch {
	case fault.RegisterError != "":
		return nil, status.Error(codes.Unknown, fault.RegisterError)
	case req.GetVersion() != pluginapi.Version:
		return nil, status.Errorf(codes.Unknown, "requested API version %q is not supported by kubelet. Supported version is %q",
			req.GetVersion(), pluginapi.Version)
	case fault.IgnoreRegistration:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.updateResource(name, func(r *Resource) { r.Registrations++ })
		return &pluginapi.Empty{}, nil
	}
	c, err := Dial(filepath.Join(k.dir, req.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	opts, err := c.api.GetDevicePluginOptions(call, &pluginapi.Empty{})
	if err != nil {
		c.Close()
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server != r.server {
		c.Close()
		return nil, status.Error(codes.Unavailable, "the kubelet is stopping")
	}
	k.clients[name], k.all[c] = c, struct{}{}
	k.updateResource(name, func(r *Resource) {
		r.Endpoint, r.Preferred, r.Connected = req.GetEndpoint(), opts.GetGetPreferredAllocationAvailable(), true
		r.Registrations++
	})
	registration := k.state.Load().Resources[name].Registrations
	k.serving.Go(func() { k.follow(context.WithoutCancel(ctx), name, registration, c) })
	return &pluginapi.Empty{}, nil
}

// follow stores a plugin's lists of devices until its stream ends.
func (k *Kubelet) follow(ctx context.Context, name string, registration int, c *Client) {
	_ = c.Devices(ctx, func(devices []Device) bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.updateResource(name, func(r *Resource) {
			r.Devices = devices
			r.Messages++
		})
		if k.onDevices != nil {
			k.onDevices(name, registration, devices)
		}
		return true
	})
	c.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.all, c)
	// The real kubelet looks the client up by resource, so the end of an old stream also disconnects the newest client
	// (kubernetes#127803).
	newest := k.clients[name]
	if newest == nil {
		return
	}
	newest.Close()
	delete(k.clients, name)
	k.setDisconnected(name)
}

// setDisconnected records that a resource has no plugin. k.mu must be held.
func (k *Kubelet) setDisconnected(name string) {
	k.updateResource(name, func(r *Resource) {
		r.Connected = false
		for i := range r.Devices {
			r.Devices[i].Healthy = false
		}
	})
}
