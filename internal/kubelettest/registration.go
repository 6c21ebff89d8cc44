package kubelettest

import (
	"context"
	"path/filepath"
	"slices"
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
	e := endpoint{k.identity(req.GetEndpoint()), req.GetEndpoint(), c}
	registration, err := k.connect(ctx, r.server, req, e)
	if err != nil {
		return nil, err
	}
	k.serving.Go(func() { k.follow(context.WithoutCancel(ctx), r.server, name, registration, e) })
	return &pluginapi.Empty{}, k.outlast(ctx, func(f Fault) bool { return f.LoseAnswer })
}

// endpoint is the connection to a plugin of a resource. Its identity tells it apart from the resource's others.
type endpoint struct {
	identity string
	socket   string // its base name
	client   *Client
}

// identity returns the identity of the plugin with this socket.
func (k *Kubelet) identity(socket string) string {
	if k.version == V136 {
		return ""
	}
	return socket
}

// without returns the endpoints with another identity.
func without(all []endpoint, identity string) []endpoint {
	return slices.DeleteFunc(slices.Clone(all), func(e endpoint) bool { return e.identity == identity })
}

// connect connects a plugin with the device manager of one run of the kubelet. Like the real one, it adds the client first
// and removes all clients with its identity after a failure.
func (k *Kubelet) connect(ctx context.Context, run *grpc.Server, req *pluginapi.RegisterRequest, e endpoint) (registration int, err error) {
	name := req.GetResourceName()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server != run {
		e.client.Close()
		return 0, status.Error(codes.Unavailable, "the kubelet is stopping")
	}
	if k.version == V136 {
		delete(k.clients, name)
	}
	k.clients[name] = append(k.clients[name], e)
	k.all[e.client] = struct{}{} // also after a failure: the real one does not close it
	k.mu.Unlock()
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	opts, err := e.client.api.GetDevicePluginOptions(call, &pluginapi.Empty{})
	k.mu.Lock()
	if k.server != run {
		return 0, status.Error(codes.Unavailable, "the kubelet is stopping")
	}
	if err == nil && k.version != V136 && slices.ContainsFunc(k.connected[name], func(c endpoint) bool { return c.identity == e.identity }) {
		err = status.Errorf(codes.Unknown, "device plugin already connected: %s", filepath.Join(k.dir, req.GetEndpoint()))
	}
	if err != nil {
		k.clients[name] = without(k.clients[name], e.identity)
		return 0, err
	}
	k.connected[name] = append(without(k.connected[name], e.identity), e)
	k.updateResource(name, func(r *Resource) {
		r.Endpoint, r.Preferred = req.GetEndpoint(), opts.GetGetPreferredAllocationAvailable()
		r.Registrations++
	})
	k.updateConnected(name)
	return k.state.Load().Resources[name].Registrations, nil
}

// follow stores a plugin's lists of devices until its stream ends, and then disconnects the plugin of its identity, if
// there still is one.
func (k *Kubelet) follow(ctx context.Context, run *grpc.Server, name string, registration int, e endpoint) {
	if k.outlast(ctx, func(f Fault) bool { return f.HoldStreams }) != nil {
		return
	}
	_ = e.client.Devices(ctx, func(devices []Device) bool {
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
	_ = k.outlast(ctx, func(f Fault) bool { return f.HoldEnds }) // after Stop there is nothing left to do
	k.mu.Lock()
	defer k.mu.Unlock()
	i := slices.IndexFunc(k.clients[name], func(c endpoint) bool { return c.identity == e.identity })
	if k.server != run || i < 0 {
		return
	}
	k.clients[name][i].client.Close()
	delete(k.all, k.clients[name][i].client)
	k.clients[name] = without(k.clients[name], e.identity)
	k.connected[name] = without(k.connected[name], e.identity)
	k.updateConnected(name)
}

// updateConnected updates a resource after a change of its endpoints. k.mu must be held.
func (k *Kubelet) updateConnected(name string) {
	k.updateResource(name, func(r *Resource) {
		r.Endpoints = nil
		for _, e := range k.connected[name] {
			r.Endpoints = append(r.Endpoints, e.socket)
		}
		r.Connected = len(r.Endpoints) > 0
		for i := range r.Devices {
			r.Devices[i].Healthy = r.Devices[i].Healthy && r.Connected
		}
	})
}
