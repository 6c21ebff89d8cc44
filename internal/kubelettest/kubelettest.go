// Package kubelettest is a stand-in for the kubelet's device manager, for tests and demonstrations. It
// does what a plugin can see of the real one: it empties its directory when it starts, dials the plugin
// back while it registers, follows ListAndWatch, prefers and allocates, and forgets a plugin whose stream
// ends, with the race of kubernetes#127803. Its pod-resources API tells who has which device.
package kubelettest

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Kubelet is a stand-in for one kubelet.
type Kubelet struct {
	dir   string // device-plugins
	pods  string // pod-resources
	state health.Latest[State]

	mu      sync.Mutex // guards everything below, and the order of changes of state
	server  *grpc.Server
	podsAPI *grpc.Server
	serving sync.WaitGroup
	clients map[string]*client // by resource; the newest registration
	all     map[*client]struct{}
	fault   Fault
	heard   func(resource string, registration int, devices []Device)
	named   int // pods that were given a name
}

// Fault is how the kubelet misbehaves from now on. The zero Fault is a good kubelet.
type Fault struct {
	Refuse string // Register fails with this text
	Ignore bool   // Register succeeds, and nothing follows it

	NoPods          bool   // the pod-resources API lists no pods, as just after a start
	DenyPods        string // List fails with this text
	DenyAllocatable string // GetAllocatableResources fails with this text
}

// Start starts a kubelet whose root directory is dir: it serves registrations on
// dir/device-plugins/kubelet.sock, and questions on dir/pod-resources/kubelet.sock. The caller ends it
// with Stop.
func Start(dir string) (*Kubelet, error) {
	k := &Kubelet{dir: filepath.Join(dir, "device-plugins"), pods: filepath.Join(dir, "pod-resources")}
	k.state.Store(&State{})
	return k, k.start()
}

// Restart stops the kubelet and starts it anew: its directory is emptied, kubelet.sock is another one,
// and nothing is registered.
func (k *Kubelet) Restart() error {
	k.Stop()
	return k.start()
}

func (k *Kubelet) start() error {
	if err := os.MkdirAll(k.dir, 0o750); err != nil {
		return err
	}
	if err := empty(k.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(k.pods, 0o750); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(k.pods, "kubelet.sock")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := listen(k.dir)
	if err != nil {
		return err
	}
	podsL, err := listen(k.pods)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	podsAPI := grpc.NewServer(grpc.WaitForHandlers(true))
	podsapi.RegisterPodResourcesListerServer(podsAPI, podResources{kubelet: k})
	pluginapi.RegisterRegistrationServer(server, registration{kubelet: k, server: server})
	k.mu.Lock()
	defer k.mu.Unlock()
	k.server, k.podsAPI, k.clients, k.all = server, podsAPI, map[string]*client{}, map[*client]struct{}{}
	k.update(func(s *State) {
		s.Running, s.Resources = true, map[string]Resource{}
		s.Starts++
	})
	k.serving.Go(func() { _ = server.Serve(l) })
	k.serving.Go(func() { _ = podsAPI.Serve(podsL) })
	return nil
}

func listen(dir string) (net.Listener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "kubelet.sock"), Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // a kubelet that ends leaves its socket behind
	return l, nil
}

// empty removes what the real kubelet removes when it starts: all but directories and its checkpoint.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !e.IsDir() && e.Name() != "kubelet_internal_checkpoint" {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// Stop ends the kubelet as if it were killed: its connections break, and its socket stays behind without
// anybody listening. It may be called twice.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	server, podsAPI, all := k.server, k.podsAPI, k.all
	k.server, k.podsAPI, k.clients, k.all = nil, nil, nil, nil
	k.update(func(s *State) { s.Running, s.Resources = false, nil })
	k.mu.Unlock()
	for c := range all {
		c.close()
	}
	if server != nil {
		server.Stop()
		podsAPI.Stop()
	}
	k.serving.Wait()
}

// SetFault makes the kubelet misbehave, or behave again.
func (k *Kubelet) SetFault(f Fault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fault = f
}

// Hear has f told of every list that a plugin sends from now on, none left out, and on the stream of which
// registration of the resource, counted anew by each kubelet. f must not call the kubelet and not change the devices.
func (k *Kubelet) Hear(f func(resource string, registration int, devices []Device)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.heard = f
}

// Drop closes the connection to the plugin of a resource, as the kubelet does when it has lost track of
// a registration. kubelet.sock stays as it is.
func (k *Kubelet) Drop(resource string) {
	k.mu.Lock()
	c := k.clients[resource]
	k.mu.Unlock()
	if c != nil {
		c.close()
	}
}

// Forget makes the kubelet take the plugin of a resource for gone and leave its stream open, as the race
// of kubernetes#127803 can.
func (k *Kubelet) Forget(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.clients, resource)
	k.disconnected(resource)
}

// registration is the service of one run of the kubelet.
type registration struct {
	pluginapi.UnimplementedRegistrationServer
	kubelet *Kubelet
	server  *grpc.Server // by which a run knows that it is over
}

// Register dials the plugin back and asks for its options before it answers, as the real one does.
func (g registration) Register(ctx context.Context, req *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k := g.kubelet
	k.mu.Lock()
	fault := k.fault
	k.mu.Unlock()
	switch {
	case fault.Refuse != "":
		return nil, status.Error(codes.Unknown, fault.Refuse)
	case req.GetVersion() != pluginapi.Version:
		return nil, status.Errorf(codes.Unknown, "requested API version %q is not supported by kubelet. Supported version is %q",
			req.GetVersion(), pluginapi.Version)
	case fault.Ignore:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.updateResource(req.GetResourceName(), func(r *Resource) { r.Registrations++ })
		return &pluginapi.Empty{}, nil
	}
	c, err := dial(filepath.Join(k.dir, req.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	opts, err := c.api.GetDevicePluginOptions(call, &pluginapi.Empty{})
	if err != nil {
		c.close()
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server != g.server {
		c.close()
		return nil, status.Error(codes.Unavailable, "the kubelet is stopping")
	}
	name := req.GetResourceName()
	k.clients[name], k.all[c] = c, struct{}{}
	k.updateResource(name, func(r *Resource) {
		r.Endpoint, r.Preferred, r.Connected = req.GetEndpoint(), opts.GetGetPreferredAllocationAvailable(), true
		r.Registrations++
	})
	registration := k.state.Load().Resources[name].Registrations
	k.serving.Go(func() { k.follow(context.WithoutCancel(ctx), name, registration, c) })
	return &pluginapi.Empty{}, nil
}

// follow follows a plugin's list until its stream ends.
func (k *Kubelet) follow(ctx context.Context, name string, registration int, c *client) {
	c.list(ctx, func(devices []Device) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.updateResource(name, func(r *Resource) {
			r.Devices = devices
			r.Messages++
		})
		if k.heard != nil {
			k.heard(name, registration, devices)
		}
	})
	c.close()
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.all, c)
	// The real kubelet looks the client up by the resource's name, so the end of an old one takes the
	// newest with it (kubernetes#127803).
	newest := k.clients[name]
	if newest == nil {
		return
	}
	newest.close()
	delete(k.clients, name)
	k.disconnected(name)
}

// disconnected notes that a resource has no plugin any more. k.mu is held.
func (k *Kubelet) disconnected(name string) {
	k.updateResource(name, func(r *Resource) {
		r.Connected = false
		for i := range r.Devices {
			r.Devices[i].Healthy = false
		}
	})
}
