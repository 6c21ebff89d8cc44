package holders

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// pod is a pod with one container, which requests an extended resource or has a claim.
type pod struct {
	name     string
	resource string // empty for a claim
	count    int
	claim    *resourceapi.ResourceClaim // nil for a resource
	stale    bool                       // the scheduler has not seen the newest slices

	delete  func() // ends deleted; it may be called twice
	forced  bool   // valid after deleted
	ended   chan struct{}
	deleted context.Context //nolint:containedctx // ends when the pod is deleted

	// Guarded by cluster.mu.
	bound bool
	holds []sequence.Hold // of its container; nil while it does not run
}

func (p *pod) container() kubelettest.Container {
	return kubelettest.Container{Namespace: namespace, Pod: p.name, Name: "main"}
}

// cluster schedules and runs pods. It is what is true: the devices that containers really have.
type cluster struct {
	node      *node
	api       *apiservertest.Server
	scheduler *scheduler
	devices   sequence.Node
	second    time.Duration // shortened
	cdiDir    string
	byName    map[string]string // devices by their names in slices
	log       func(string, ...any)

	workers   sync.WaitGroup
	admission sync.Mutex // the kubelet admits one pod at a time

	mu        sync.Mutex // guards the fields below
	rng       *rand.Rand
	number    int
	pods      []*pod
	apiDown   bool
	violation error // the first
}

// pause returns a random time of at most n seconds.
func (c *cluster) pause(n float64) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.rng.Float64() * n * float64(c.second))
}

func (c *cluster) isAPIUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.apiDown
}

func (c *cluster) violate(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.violation == nil {
		c.violation = err
	}
}

// held returns what containers have.
func (c *cluster) held() (all []sequence.Hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heldLocked()
}

func (c *cluster) heldLocked() (all []sequence.Hold) {
	for _, p := range c.pods {
		all = append(all, p.holds...)
	}
	return all
}

// run gives a container what it got. Nothing may be given twice.
func (c *cluster) run(p *pod, holds []sequence.Hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.holds = holds
	if err := c.devices.CheckHeld(c.heldLocked()); err != nil && c.violation == nil {
		c.violation = err
	}
	c.log("  pod %s runs with %v", p.name, holds)
}

// end ends a container.
func (c *cluster) end(p *pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.holds != nil {
		c.log("  pod %s ends", p.name)
	}
	p.holds = nil
}

// maxPods is more than fit.
const maxPods = 12

// start creates a pod; it reports whether there is room for one.
func (c *cluster) start(ctx context.Context, resource string, form int, stale bool) bool {
	c.mu.Lock()
	if len(c.pods) >= maxPods {
		c.mu.Unlock()
		return false
	}
	c.number++
	p := &pod{name: fmt.Sprintf("p%d", c.number), resource: resource, count: 1, stale: stale, ended: make(chan struct{})}
	p.deleted, p.delete = context.WithCancel(context.WithoutCancel(ctx))
	if resource == "" {
		p.claim = newClaim(p.name, form)
		c.api.Put(p.claim)
	} else if form%4 == 0 && !strings.Contains(resource, ".shared") {
		p.count = 2
	}
	c.pods = append(c.pods, p)
	c.mu.Unlock()
	c.workers.Go(func() {
		defer close(p.ended)
		if p.claim != nil {
			c.runClaim(ctx, p)
		} else {
			c.runResource(p)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pods = slices.DeleteFunc(c.pods, func(o *pod) bool { return o == p })
	})
	return true
}

// remove deletes a pod; it reports whether there is one.
func (c *cluster) remove(pick uint32, force bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var live []*pod
	for _, p := range c.pods {
		if p.deleted.Err() == nil && (!force || p.holds != nil) && (!force || !c.apiDown) {
			live = append(live, p)
		}
	}
	if len(live) == 0 {
		return false
	}
	p := live[int(pick)%len(live)]
	p.forced = force
	for i := range p.holds {
		p.holds[i].Orphan = force
	}
	if force && p.claim != nil {
		c.api.Delete("resourceclaims", namespace, p.claim.Name)
	}
	p.delete()
	return true
}

// wait waits; it reports whether the pod still exists.
func wait(p *pod, d time.Duration) bool {
	select {
	case <-p.deleted.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// requested returns what bound pods request of a resource.
func (c *cluster) requested(resource string) (n int) {
	for _, p := range c.pods {
		if p.bound && p.resource == resource {
			n += p.count
		}
	}
	return n
}

// runResource runs a pod that requests an extended resource, until it is deleted.
func (c *cluster) runResource(p *pod) {
	for !c.bind(p) {
		if !wait(p, c.pause(.5)) {
			return
		}
	}
	var ids []string
	var env map[string]string
	for {
		err := c.node.call(func(ctx context.Context) (err error) {
			c.admission.Lock()
			defer c.admission.Unlock()
			ids, env, err = c.node.admit(ctx, p)
			if err == nil {
				c.run(p, c.grantedBy(p, ids, env))
			}
			return err
		})
		if err == errKubeletDown { //nolint:errorlint // not wrapped
			if !wait(p, c.pause(.5)) {
				return
			}
			continue
		}
		if err != nil { // UnexpectedAdmissionError: the pod has failed
			c.log("  pod %s is not admitted: %v", p.name, err)
			_ = c.node.call(func(context.Context) error { c.node.remove(p); return nil })
			return
		}
		break
	}
	<-p.deleted.Done()
	c.endContainer(p)
	c.untilDone(func() error { return c.node.call(func(context.Context) error { c.node.remove(p); return nil }) })
}

// endContainer waits for the end of the container of a deleted pod: it is the kubelet that ends it.
func (c *cluster) endContainer(p *pod) {
	<-time.After(c.pause(1))
	c.untilDone(func() error { return c.node.call(func(context.Context) error { c.end(p); return nil }) })
}

// untilDone repeats what fails, as the kubelet does.
func (c *cluster) untilDone(f func() error) {
	for f() != nil {
		<-time.After(c.pause(1))
	}
}

// bind schedules a pod to the node if its resource is there.
func (c *cluster) bind(p *pod) bool {
	if !c.isAPIUp() {
		return false
	}
	n := 0
	if c.node.call(func(context.Context) error { n = c.node.allocatable()[p.resource]; return nil }) != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p.bound = n-c.requested(p.resource) >= p.count
	return p.bound
}

// grantedBy returns what the plugin gave for these IDs. The environment has the device that the container runtime gives it.
func (c *cluster) grantedBy(p *pod, ids []string, env map[string]string) (holds []sequence.Hold) {
	visible := strings.Split(env["NVIDIA_VISIBLE_DEVICES"], ",")
	for _, id := range ids {
		h := sequence.IDHold(p.resource, id)
		if h.Pod = p.name; !slices.Contains(visible, h.Device) {
			c.violate(fmt.Errorf("pod %s has the ID %s and the devices %v", p.name, id, visible))
		}
		holds = append(holds, h)
	}
	return holds
}

// runClaim runs a pod with a claim, until it is deleted.
func (c *cluster) runClaim(ctx context.Context, p *pod) {
	claim := kubelettest.Claim{Namespace: namespace, Name: p.claim.Name, UID: string(p.claim.UID)}
	removeClaim := func() {
		if p.forced {
			return
		}
		for !c.isAPIUp() {
			<-time.After(c.pause(1))
		}
		c.api.Delete("resourceclaims", namespace, p.claim.Name)
	}
	for !c.allocate(ctx, p) {
		if !wait(p, c.pause(.5)) {
			removeClaim()
			return
		}
	}
	for {
		err := c.node.call(func(ctx context.Context) error {
			if !c.isAPIUp() {
				return errKubeletDown // it fetches the claim first
			}
			devices, err := c.node.dra.Prepare(ctx, draDriver, claim)
			if err != nil {
				return err
			}
			held := kubelettest.HeldClaim{Container: p.container(), Claim: claim.Name, Driver: draDriver, Pool: nodeName}
			for _, d := range devices {
				held.Devices = append(held.Devices, kubelettest.HeldDevice{Name: d.Name, ShareID: d.ShareID, CDI: d.CDI})
			}
			c.node.hold(p, held)
			c.run(p, c.injected(p, devices))
			return nil
		})
		if err == nil {
			<-p.deleted.Done()
			break
		}
		c.log("  claim of %s: %v", p.name, err)
		if !wait(p, c.second/4+c.pause(.5)) {
			break
		}
	}
	if p.forced {
		_ = c.node.call(func(context.Context) error { c.node.remove(p); return nil }) // the kubelet lists no pod that is not on the API server
	}
	c.endContainer(p)
	c.untilDone(func() error {
		return c.node.call(func(ctx context.Context) error {
			c.node.remove(p)
			return c.node.dra.Unprepare(ctx, draDriver, claim)
		})
	})
	removeClaim()
}

// allocate schedules a pod with a claim.
func (c *cluster) allocate(ctx context.Context, p *pod) bool {
	if !c.isAPIUp() {
		return false
	}
	c.mu.Lock() // one after the other, as the scheduler
	defer c.mu.Unlock()
	if p.deleted.Err() != nil {
		return false
	}
	ok, err := c.scheduler.allocate(ctx, p.claim, p.stale)
	if err != nil && c.violation == nil {
		c.violation = fmt.Errorf("the scheduler: %w", err)
	}
	p.bound = ok
	return ok
}

// injected returns what the CDI specs give to the container of a claim.
func (c *cluster) injected(p *pod, devices []kubelettest.PreparedDevice) (holds []sequence.Hold) {
	env := c.specEnv(p)
	for _, d := range devices {
		i := slices.IndexFunc(p.claim.Status.Allocation.Devices.Results,
			func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Device == d.Name })
		device := env["GPU_NODE_AGENT_DEVICE_"+strings.ToUpper(strings.ReplaceAll(d.Name, "-", "_"))]
		h := sequence.ResultHold(p.name, device, p.claim.Status.Allocation.Devices.Results[i])
		if h.Device == "" {
			c.violate(fmt.Errorf("pod %s has %s by a claim, and no CDI spec names its device", p.name, d.Name))
		}
		holds = append(holds, h)
	}
	return holds
}

// specEnv returns the environment in the CDI spec of a pod's claim.
func (c *cluster) specEnv(p *pod) map[string]string {
	env := make(map[string]string)
	files, _ := filepath.Glob(filepath.Join(c.cdiDir, "*_"+string(p.claim.UID)+".json"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		var spec struct {
			Devices []struct {
				ContainerEdits struct{ Env []string } `json:"containerEdits"`
			} `json:"devices"`
		}
		if err := json.Unmarshal(text, &spec); err != nil {
			c.violate(fmt.Errorf("%s: %w", file, err))
		}
		for _, d := range spec.Devices {
			for _, e := range d.ContainerEdits.Env {
				name, value, _ := strings.Cut(e, "=")
				env[name] = value
			}
		}
	}
	return env
}

// allocated returns what the scheduler has given to claims, whether a container has it or not.
func (c *cluster) allocated() []sequence.Hold { return sequence.Allocated(c.api.Claims(), c.byName) }

// offers returns what a new pod can get now.
func (c *cluster) offers() (all []sequence.Hold) {
	_ = c.node.call(func(context.Context) error {
		for resource, ids := range c.node.free() {
			for _, id := range ids {
				all = append(all, sequence.IDHold(resource, id))
			}
		}
		return nil
	})
	if !c.node.up() || !c.isAPIUp() && !c.node.dra.Connected(draDriver) {
		return all // no pod gets what is in the slices, and the kubelet wipes them when it and the API server are back
	}
	return append(all, sequence.Offered(c.api.Slices(), c.allocated())...)
}
