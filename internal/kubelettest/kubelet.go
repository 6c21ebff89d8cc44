// Package kubelettest provides a stand-in for the kubelet's device manager, for tests and the demo. It behaves as a
// device plugin observes the real one: it empties its directory when it starts, calls the plugin back during
// registration, follows ListAndWatch, allocates preferred devices, and drops a plugin whose stream ends, with the races
// that its version has. Its pod-resources API lists the holders of each device.
package kubelettest

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Version is the version of Kubernetes whose kubelet a stand-in behaves like. They differ in how the kubelet identifies
// the plugins of one resource.
type Version string

const (
	// V136 identifies plugins by resource: a registration replaces the one before, and the end of any stream disconnects
	// the newest plugin (kubernetes#127803).
	V136 Version = "1.36"
	// V137 identifies plugins by resource and socket: a resource may have several, of which the newest serves Allocate. A
	// registration at a connected socket fails, and the kubelet then ignores the end of the socket's stream: it keeps the
	// endpoint and the last list until it restarts.
	V137 Version = "1.37"
)

// Versions returns all versions.
func Versions() []Version { return []Version{V136, V137} }

// Kubelet is a stand-in for one kubelet.
type Kubelet struct {
	version Version
	dir     string // device-plugins
	pods    string // pod-resources
	state   health.Latest[State]

	mu        sync.Mutex // guards everything below, and the order of changes of state
	server    *grpc.Server
	podsAPI   *grpc.Server
	serving   sync.WaitGroup
	clients   map[string][]endpoint // by resource: which the end of a stream disconnects
	connected map[string][]endpoint // by resource: which the device manager keeps; the last one serves Allocate
	all       map[*Client]struct{}
	fault     Fault
	unfaulted chan struct{} // closed by SetFault and Stop
	onDevices func(resource string, registration int, devices []Device)
	podCount  int // generated pod names
}

// Fault is how the kubelet misbehaves. The zero Fault is a correct kubelet.
type Fault struct {
	RegisterError      string // Register fails with this message
	IgnoreRegistration bool   // Register succeeds without effect
	LoseAnswer         bool   // Register connects the plugin, but its answer never comes
	HoldStreams        bool   // ListAndWatch is opened only after the fault
	HoldEnds           bool   // the end of a stream is processed only after the fault, as if the disk blocked the kubelet

	NoPods           bool   // List returns no pods, as just after the start of a kubelet
	ListError        string // List fails with this message
	AllocatableError string // GetAllocatableResources fails with this message
}

// Start starts a kubelet with the root directory dir. It serves registrations on dir/device-plugins/kubelet.sock and pod
// resources on dir/pod-resources/kubelet.sock. It has the newest version. The caller must call Stop.
func Start(dir string) (*Kubelet, error) { return StartVersion(dir, V137) }

// StartVersion is Start for another version.
func StartVersion(dir string, v Version) (*Kubelet, error) {
	k := &Kubelet{
		version: v, dir: filepath.Join(dir, "device-plugins"), pods: filepath.Join(dir, "pod-resources"), unfaulted: make(chan struct{}),
	}
	k.state.Store(&State{})
	return k, k.start()
}

// Restart stops the kubelet and starts a new one, which empties the directory, creates a new kubelet.sock and has no
// registrations.
func (k *Kubelet) Restart() error {
	k.Stop()
	return k.start()
}

// Age makes the kubelet look as if it had started so long before now, as when an agent is installed on a node. Its sockets show its age. A
// restarted kubelet is new.
func (k *Kubelet) Age(d time.Duration) error {
	at := time.Now().Add(-d)
	return os.Chtimes(filepath.Join(k.pods, "kubelet.sock"), at, at)
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
	k.server, k.podsAPI, k.all = server, podsAPI, map[*Client]struct{}{}
	k.clients, k.connected = map[string][]endpoint{}, map[string][]endpoint{}
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
	k.server, k.podsAPI, k.all, k.clients, k.connected = nil, nil, nil, nil, nil
	k.update(func(s *State) { s.Running, s.Resources = false, nil })
	k.wakeOutlasting()
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
	k.wakeOutlasting()
}

// wakeOutlasting lets outlast look again. k.mu must be held.
func (k *Kubelet) wakeOutlasting() {
	close(k.unfaulted)
	k.unfaulted = make(chan struct{})
}

var errStopped = errors.New("the kubelet has stopped")

// outlast waits until the kubelet has no such fault. It fails if ctx ends or the kubelet stops before.
func (k *Kubelet) outlast(ctx context.Context, fault func(Fault) bool) error {
	for {
		k.mu.Lock()
		present, changed, running := fault(k.fault), k.unfaulted, k.server != nil
		k.mu.Unlock()
		switch {
		case !running:
			return errStopped
		case !present:
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
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

// Drop closes the connection to the plugin that serves Allocate of a resource, as the kubelet does when it loses track of
// a registration. kubelet.sock remains.
func (k *Kubelet) Drop(resource string) {
	if _, c, err := k.plugin(resource); err == nil {
		c.Close()
	}
}

// Forget disconnects the plugins of a resource but leaves their streams open, as the race of kubernetes#127803 can.
func (k *Kubelet) Forget(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.clients, resource)
	delete(k.connected, resource)
	k.updateConnected(resource)
}

// KeepEndpoints makes the kubelet ignore the ends of a resource's streams, as it does after a refused registration of
// their socket.
func (k *Kubelet) KeepEndpoints(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.clients, resource)
}
