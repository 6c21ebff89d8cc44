// Package kubelettest provides a stand-in for the kubelet's device manager, for tests and the demo. It behaves as a
// device plugin observes the real one: it empties its directory when it starts, calls the plugin back during
// registration, follows ListAndWatch, allocates preferred devices, and drops a plugin whose stream ends, including the
// race of kubernetes#127803. Its pod-resources API lists the holders of each device.
package kubelettest

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Kubelet is a stand-in for one kubelet.
type Kubelet struct {
	dir   string // device-plugins
	pods  string // pod-resources
	state health.Latest[State]

	mu        sync.Mutex // guards everything below, and the order of changes of state
	server    *grpc.Server
	podsAPI   *grpc.Server
	serving   sync.WaitGroup
	clients   map[string]*Client // by resource; the newest registration
	all       map[*Client]struct{}
	fault     Fault
	onDevices func(resource string, registration int, devices []Device)
	podCount  int // generated pod names
}

// Fault is how the kubelet misbehaves. The zero Fault is a correct kubelet.
type Fault struct {
	RegisterError      string // Register fails with this message
	IgnoreRegistration bool   // Register succeeds without effect

	NoPods           bool   // List returns no pods, as just after the start of a kubelet
	ListError        string // List fails with this message
	AllocatableError string // GetAllocatableResources fails with this message
}

// Start starts a kubelet with the root directory dir. It serves registrations on dir/device-plugins/kubelet.sock and pod
// resources on dir/pod-resources/kubelet.sock. The caller must call Stop.
func Start(dir string) (*Kubelet, error) {
	k := &Kubelet{dir: filepath.Join(dir, "device-plugins"), pods: filepath.Join(dir, "pod-resources")}
	k.state.Store(&State{})
	return k, k.start()
}

// Restart stops the kubelet and starts a new one, which empties the directory, creates a new kubelet.sock and has no
// registrations.
func (k *Kubelet) Restart() error {
	k.Stop()
	return k.start()
}

func (k *Kubelet) start() error {
	for _, dir := range []string{k.dir, k.pods} {
		if err := errors.Join(os.MkdirAll(dir, 0o750), removeFiles(dir)); err != nil {
			return err
		}
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
	pluginapi.RegisterRegistrationServer(server, registrationServer{kubelet: k, server: server})
	k.mu.Lock()
	defer k.mu.Unlock()
	k.server, k.podsAPI, k.clients, k.all = server, podsAPI, map[string]*Client{}, map[*Client]struct{}{}
	k.update(func(s *State) { s.Running, s.Resources = true, map[string]Resource{} })
	k.serving.Go(func() { _ = server.Serve(l) })
	k.serving.Go(func() { _ = podsAPI.Serve(podsL) })
	return nil
}

func listen(dir string) (net.Listener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "kubelet.sock"), Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // a kubelet leaves its socket behind
	return l, nil
}

// removeFiles removes what the real kubelet removes when it starts: everything except directories and its checkpoint.
func removeFiles(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !e.IsDir() && e.Name() != "kubelet_internal_checkpoint" {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// Stop stops the kubelet as if it were killed: its connections break and its socket remains. Stop may be called twice.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	server, podsAPI, all := k.server, k.podsAPI, k.all
	k.server, k.podsAPI, k.clients, k.all = nil, nil, nil, nil
	k.update(func(s *State) { s.Running, s.Resources = false, nil })
	k.mu.Unlock()
	for c := range all {
		c.Close()
	}
	if server != nil {
		server.Stop()
		podsAPI.Stop()
	}
	k.serving.Wait()
}

// SetFault replaces the kubelet's fault.
func (k *Kubelet) SetFault(f Fault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fault = f
}

func (k *Kubelet) currentFault() Fault {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.fault
}

// OnDevices registers f, which is called with every list that a plugin sends and with the number of the resource's
// registration that the stream belongs to; each kubelet counts anew. f must not call the kubelet or modify the devices.
func (k *Kubelet) OnDevices(f func(resource string, registration int, devices []Device)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.onDevices = f
}

// Drop closes the connection to the plugin of a resource, as the kubelet does when it loses track of a registration.
// kubelet.sock remains.
func (k *Kubelet) Drop(resource string) {
	k.mu.Lock()
	c := k.clients[resource]
	k.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// Forget disconnects the plugin of a resource but leaves its stream open, as the race of kubernetes#127803 can.
func (k *Kubelet) Forget(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.clients, resource)
	k.setDisconnected(resource)
}
