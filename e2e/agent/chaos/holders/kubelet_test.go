package holders

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// kubelet is what allocates extended resources to pods. Its methods may be called from any goroutine.
type kubelet interface {
	start() error
	stop() error
	admit(ctx context.Context, p *pod) (ids []string, env map[string]string, err error) // allocates the resources of a pod
	remove(p *pod)                                                                      // a pod has ended
	allocatable() map[string]int                                                        // devices by resource, also devices that pods hold
	free() map[string][]string                                                          // IDs by resource that a pod can get
	hold(p *pod, claim kubelettest.HeldClaim)                                           // lists a claim under its pod
}

// newKubelet returns a kubelet for a directory, which does not run yet. A new kubelet lists no pod for a while.
type newKubelet func(dir string, blind time.Duration) kubelet

// standIn is a stand-in kubelet.
type standIn struct {
	version kubelettest.Version
	dir     string
	blind   time.Duration

	mu    sync.Mutex // guards the fields below
	k     *kubelettest.Kubelet
	sight *time.Timer // ends the fault of a new kubelet
}

// standInOf returns stand-ins of a version.
func standInOf(v kubelettest.Version) newKubelet {
	return func(dir string, blind time.Duration) kubelet { return &standIn{version: v, dir: dir, blind: blind} }
}

func (s *standIn) start() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.k == nil {
		s.k, err = kubelettest.StartVersion(s.dir, s.version)
		return err
	}
	k := s.k
	k.SetFault(kubelettest.Fault{NoPods: true})
	s.sight = time.AfterFunc(s.blind, func() { k.SetFault(kubelettest.Fault{}) })
	return k.Restart()
}

func (s *standIn) stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sight != nil {
		s.sight.Stop()
	}
	s.k.Stop()
	return nil
}

func (s *standIn) kubelet() *kubelettest.Kubelet {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.k
}

func (s *standIn) admit(ctx context.Context, p *pod) (ids []string, env map[string]string, err error) {
	a, err := s.kubelet().AllocateTo(ctx, p.container(), p.resource, p.count)
	return a.Devices, a.Response.GetEnvs(), err
}

func (s *standIn) remove(p *pod) {
	k := s.kubelet()
	for _, a := range k.State().Allocations {
		if a.Container == p.container() {
			k.Free(a.Resource, a.Devices...)
		}
	}
	k.FreeClaims(p.container())
}

func (s *standIn) allocatable() map[string]int {
	all := make(map[string]int)
	for name, r := range s.kubelet().State().Resources {
		all[name] = r.Allocatable()
	}
	return all
}

func (s *standIn) free() map[string][]string {
	all := make(map[string][]string)
	for name, r := range s.kubelet().State().Resources {
		for _, d := range r.Devices {
			if d.Healthy && !slices.Contains(r.Allocated, d.ID) {
				all[name] = append(all[name], d.ID)
			}
		}
	}
	return all
}

func (s *standIn) hold(_ *pod, claim kubelettest.HeldClaim) { s.kubelet().HoldClaim(claim) }

// node is the kubelet of a world with its manager of claims. They start and stop as one process.
type node struct {
	kubelet
	dra *kubelettest.DRA

	mu      sync.RWMutex // held for reading during a call of the kubelet, for writing by its start and stop
	running bool

	process atomic.Pointer[kubeletProcess] // nil while it does not run
}

// kubeletProcess ends the calls that a kubelet makes when it stops.
type kubeletProcess struct {
	ctx context.Context //nolint:containedctx // of the process
	end context.CancelFunc
}

// newProcess notes a process that starts.
func (n *node) newProcess() {
	p := &kubeletProcess{}
	p.ctx, p.end = context.WithCancel(context.Background())
	n.process.Store(p)
}

var errKubeletDown = errors.New("the kubelet does not run")

// call calls the kubelet, unless it is down. The context of its calls ends with it.
func (n *node) call(f func(ctx context.Context) error) error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	p := n.process.Load()
	if !n.running || p == nil {
		return errKubeletDown
	}
	err := f(p.ctx)
	if err != nil && p.ctx.Err() != nil {
		return errKubeletDown
	}
	return err
}

func (n *node) up() bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.running
}

// setRunning starts or stops the kubelet. It reports whether it did.
func (n *node) setRunning(running bool) (changed bool, err error) {
	switch p := n.process.Load(); {
	case (p != nil) == running:
		return false, nil
	case running:
		n.newProcess()
	default:
		n.process.Store(nil)
		p.end()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.running == running {
		return false, nil
	}
	if n.running = running; !running {
		n.dra.Stop()
		return true, n.stop()
	}
	if err := n.start(); err != nil {
		return false, fmt.Errorf("kubelet: %w", err)
	}
	return true, n.dra.Start()
}
