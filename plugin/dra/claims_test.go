package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const (
	testNode = "node1"
	gib      = uint64(1) << 30
)

// claimNode is a node with a preparer, whose processes can be killed and restarted.
type claimNode struct {
	t       testing.TB
	dir     string
	cfg     plugin.Config
	api     *fake.Clientset
	down    error // of the API server
	boot    string
	mps     *health.Latest[mps.Desired]
	faults  diskFaults
	prepare *preparer
	stop    func()

	mu      sync.Mutex // guards the fields below
	snap    health.Snapshot
	holders podresources.Holders
	noMPS   bool // no MPS daemon becomes ready

	noPlugin bool

	options Options
	claims  *health.Latest[Claims]
	snaps   health.Latest[health.Snapshot]
	config  health.Latest[plugin.Config]
}

// diskFaults make writes fail.
type diskFaults struct {
	mu     sync.Mutex // guards the fields below
	full   bool       // writing fails
	killAt int        // the process dies at this operation, counted down; 0: never
	after  bool       // it dies after the operation
	dead   bool
}

var errKilled = errors.New("the process was killed")

func (f *diskFaults) set(edit func(*diskFaults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit(f)
}

func (f *diskFaults) setFull(full bool) { f.set(func(f *diskFaults) { f.full = full }) }

// state returns what is wrong now.
func (f *diskFaults) state() (full, dead bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.full, f.dead
}

func (f *diskFaults) do(writes bool, operation func() error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return errKilled
	}
	if f.killAt > 0 {
		if f.killAt--; f.killAt == 0 {
			f.dead = true
			if f.after {
				_ = operation()
			}
			return errKilled
		}
	}
	if f.full && writes {
		return &os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}
	}
	return operation()
}

func newClaimNode(t testing.TB, edit ...func(*plugin.Config)) *claimNode {
	n := &claimNode{
		t: t, dir: t.TempDir(), cfg: plugin.DefaultConfig(), api: fake.NewClientset(), boot: "boot-1",
		mps: &health.Latest[mps.Desired]{},
	}
	n.cfg.API, n.cfg.KubeletDir, n.cfg.CDI.Dir = plugin.APIDRA, n.dir, filepath.Join(n.dir, "cdi")
	for _, e := range edit {
		e(&n.cfg)
	}
	n.snap = health.Snapshot{At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: healthtest.NodeDevices()}
	n.holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}}
	n.api.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, runtime.Object, error) { return n.down != nil, nil, n.down })
	n.start()
	t.Cleanup(func() { n.stop() })
	return n
}

// start starts a process.
func (n *claimNode) start() {
	n.t.Helper()
	n.faults.set(func(f *diskFaults) { f.dead, f.killAt = false, 0 })
	faults := &n.faults
	n.claims = &health.Latest[Claims]{}
	n.options = Options{
		Config: &n.config, Snapshots: &n.snaps, Node: testNode, BootID: n.boot, MPS: n.mps, Log: zap.NewNop(),
		Connect:   func() (kubernetes.Interface, error) { return n.api, nil },
		Simulated: func() bool { return true },
		Holders:   &health.Latest[podresources.Holders]{}, NoPlugin: func() bool { return n.noPlugin },
		Ask: func(context.Context, time.Duration) podresources.Holders {
			n.mu.Lock()
			defer n.mu.Unlock()
			h := n.holders
			if h.By != nil {
				h.At = time.Now()
			}
			n.options.Holders.Store(&h)
			return h
		},
	}
	n.options.Holders.Store(&podresources.Holders{})
	p := newPreparer(&n.options, n.claims)
	p.timing.unprepare = 10 * time.Millisecond
	inner := p.disk
	p.disk = disk{
		writeFile: func(path string, text []byte) (w durable.Written, err error) {
			err = faults.do(true, func() (err error) { w, err = inner.writeFile(path, text); return err })
			return w, err
		},
		writeSpec: func(dir, uid string, d []cdi.ClaimDevice) error {
			return faults.do(true, func() error { return inner.writeSpec(dir, uid, d) })
		},
		removeSpec: func(dir, uid string) error {
			return faults.do(false, func() error { return inner.removeSpec(dir, uid) })
		},
	}
	p.capabilities = &health.Latest[memlimits.Capabilities]{}
	p.capabilities.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{
		"GPU-0": "", "GPU-1": "the driver is too old",
		"GPU-2": "",
	}})
	n.prepare = p
	n.config.Store(&n.cfg)
	if err := p.open(n.pluginDir()); err != nil {
		n.t.Fatal(err)
	}
	n.update(func(*health.Snapshot) {})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	running.Go(func() { n.runMPS(ctx) })
	n.stop = func() {
		cancel()
		running.Wait()
	}
}

func (n *claimNode) pluginDir() string { return filepath.Join(n.dir, "plugins", n.cfg.DRA.DriverName) }

// restart ends the process and starts another, in another boot if that has another name.
func (n *claimNode) restart(boot string) {
	n.t.Helper()
	n.stop()
	n.boot = boot
	n.start()
}

// update changes the snapshot and what follows from it.
func (n *claimNode) update(edit func(*health.Snapshot)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	next := n.snap
	next.Devices = slices.Clone(next.Devices)
	edit(&next)
	n.snap = next
	cfg := n.cfg
	pool := BuildPool(PoolInput{
		Config: &cfg, Snapshot: &next, Names: n.prepare.names(), Capabilities: n.prepare.capabilities.Load(),
		Examined: true,
	})
	n.config.Store(&cfg)
	n.snaps.Store(&next)
	n.prepare.update(&cfg, &next, &pool)
}

// device changes a device.
func (n *claimNode) device(id health.DeviceID, edit func(*health.DeviceState)) {
	n.update(func(s *health.Snapshot) {
		for i := range s.Devices {
			if s.Devices[i].Device.ID == id {
				edit(&s.Devices[i])
			}
		}
	})
}

// runMPS makes the desired daemons ready.
func (n *claimNode) runMPS(ctx context.Context) {
	for {
		desired, changed := n.mps.Watch()
		if desired != nil {
			n.update(func(s *health.Snapshot) {
				if n.noMPS {
					return
				}
				for i := range s.Devices {
					s.Devices[i].MPS = nil
					for _, d := range desired.Daemons {
						if d.Device == s.Devices[i].Device.ID {
							s.Devices[i].MPS = &health.MPSDaemon{Ready: true, ThreadPercentage: float64(d.ThreadPercentage), PinnedMemory: d.PinnedMemory}
						}
					}
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// stopMPS makes no other daemon ready.
func (n *claimNode) stopMPS() { n.update(func(*health.Snapshot) { n.noMPS = true }) }

// result is an allocated device; edits change it.
func result(device string, edits ...func(*resourceapi.DeviceRequestAllocationResult)) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: plugin.DefaultDRADriver, Pool: testNode, Device: device}
	for _, e := range edits {
		e(&r)
	}
	return r
}

func asAdmin(r *resourceapi.DeviceRequestAllocationResult) { r.AdminAccess = new(true) }

func byRequest(name string) func(*resourceapi.DeviceRequestAllocationResult) {
	return func(r *resourceapi.DeviceRequestAllocationResult) { r.Request = name }
}

func tolerating(tolerations ...resourceapi.DeviceToleration) func(*resourceapi.DeviceRequestAllocationResult) {
	return func(r *resourceapi.DeviceRequestAllocationResult) { r.Tolerations = tolerations }
}

func share(id types.UID, memory uint64) func(*resourceapi.DeviceRequestAllocationResult) {
	return func(r *resourceapi.DeviceRequestAllocationResult) {
		r.ShareID = new(id)
		r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": *resource.NewQuantity(int64(memory),
			resource.BinarySI)} //nolint:gosec // small
	}
}

// claim returns an allocated claim, whose UID is derived from its name.
func claim(name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: "p"}},
		},
	}
}

func withConfig(c *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, parameters string,
	requests ...string,
) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: plugin.DefaultDRADriver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	})
	return c
}

// create adds claims to the API server.
func (n *claimNode) create(claims ...*resourceapi.ResourceClaim) {
	n.t.Helper()
	for _, c := range claims {
		if err := n.api.Tracker().Add(c); err != nil {
			n.t.Fatal(err)
		}
	}
}

// remove removes a claim from the API server.
func (n *claimNode) remove(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	gvr := resourceapi.SchemeGroupVersion.WithResource("resourceclaims")
	if err := n.api.Tracker().Delete(gvr, c.Namespace, c.Name); err != nil && !apierrors.IsNotFound(err) {
		n.t.Fatal(err)
	}
}

// call prepares a claim.
func (n *claimNode) call(c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	n.t.Helper()
	results, err := n.prepare.PrepareResourceClaims(n.t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil || len(results) != 1 {
		n.t.Fatalf("%v, %v", results, err)
	}
	return results[c.UID]
}

// must prepares a claim and returns the CDI names.
func (n *claimNode) must(c *resourceapi.ResourceClaim) (names []string) {
	n.t.Helper()
	r := n.call(c)
	if r.Err != nil {
		n.t.Fatal(r.Err)
	}
	for _, d := range r.Devices {
		names = append(names, d.CDIDeviceIDs...)
	}
	return names
}

// refused checks that a claim is refused for a reason, by a text with these parts.
func (n *claimNode) refused(c *resourceapi.ResourceClaim, reason string, parts ...string) {
	n.t.Helper()
	err := n.call(c).Err
	r, ok := errors.AsType[*claimRefusal](err)
	if !ok || r.reason != reason {
		n.t.Fatalf("got %v, want a refusal by %s", err, reason)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			n.t.Errorf("%q lacks %q", err, part)
		}
	}
}

func (n *claimNode) unprepare(c *resourceapi.ResourceClaim) error {
	n.t.Helper()
	results, err := n.prepare.UnprepareResourceClaims(n.t.Context(), []kubeletplugin.NamespacedObject{
		{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID},
	})
	if _, exists := results[c.UID]; err != nil || !exists {
		n.t.Fatalf("%v, %v", results, err)
	}
	return results[c.UID]
}

// prepared returns the UIDs in the checkpoint. Its file has the same, unless removals could not be written.
func (n *claimNode) prepared() []types.UID {
	n.t.Helper()
	c, err := readCheckpoint(n.pluginDir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	if memory, s := n.claims.Load(), n.prepare.state.Load(); s.unwritten {
		for uid := range memory.ByUID {
			if _, exists := c.Claims[uid]; !exists {
				n.t.Fatalf("memory has %v, the file %v", memory.ByUID, c.Claims)
			}
		}
		c.Claims = memory.ByUID
	} else if c.BootID != n.boot {
		c.Claims = nil
	} else if memory != nil && !maps.EqualFunc(memory.ByUID, c.Claims, func(a, b Claim) bool { return a.UID == b.UID }) {
		n.t.Fatalf("memory has %v, the file %v", memory.ByUID, c.Claims)
	}
	return slices.Sorted(maps.Keys(c.Claims))
}

// specs returns the UIDs of the claims with a CDI spec, which the CDI library must accept.
func (n *claimNode) specs() []string {
	n.t.Helper()
	uids, err := cdi.ClaimSpecs(n.cfg.CDI.Dir)
	if err != nil {
		n.t.Fatal(err)
	}
	return uids
}

// edits returns the environment and the mounts of CDI names.
func (n *claimNode) edits(names ...string) (env, mounts []string) {
	n.t.Helper()
	found := 0
	for _, uid := range n.specs() {
		path, _ := cdi.ClaimSpecPath(n.cfg.CDI.Dir, uid)
		text, err := os.ReadFile(path)
		if err != nil {
			n.t.Fatal(err)
		}
		var spec struct {
			Kind    string
			Devices []struct {
				Name           string
				ContainerEdits struct {
					Env    []string
					Mounts []struct{ HostPath, ContainerPath string }
				}
			}
		}
		if err := json.Unmarshal(text, &spec); err != nil {
			n.t.Fatal(err)
		}
		for _, d := range spec.Devices {
			if !slices.Contains(names, spec.Kind+"="+d.Name) {
				continue
			}
			found++
			env = append(env, d.ContainerEdits.Env...)
			for _, m := range d.ContainerEdits.Mounts {
				mounts = append(mounts, m.HostPath+":"+m.ContainerPath)
			}
		}
	}
	slices.Sort(names)
	if found != len(slices.Compact(names)) {
		n.t.Fatalf("%d of %v are in specs", found, names)
	}
	slices.Sort(env)
	return slices.Compact(env), mounts
}

func unhealthy(cause string) func(*health.DeviceState) {
	return func(d *health.DeviceState) {
		d.Verdict = health.Verdict{State: health.Unhealthy, Findings: []health.Finding{
			{Cause: cause, State: health.Unhealthy, Reason: "GPU has fallen off the bus", Action: health.ActionResetGPU},
		}}
	}
}

func shareMemory(c *plugin.Config) { c.Sharing.Memory.Resource = "nvidia.com/gpu-memory" }

// mig0 is the name of the first MIG device.
const mig0 = "gpu-3-mig-1g10gb-19-0"

// A claim gets its devices by names that contain its UID, again after a restart, and nothing remains of it.
func TestPrepareIsIdempotent(t *testing.T) {
	n := newClaimNode(t)
	c := claim("a", result("gpu-1"), result(mig0, byRequest("part/small")))
	n.create(c)
	names := n.must(c)
	want := []string{"k8s.gpu-node-agent/claim=uid-a-gpu-1", "k8s.gpu-node-agent/claim=uid-a-" + mig0}
	if !slices.Equal(names, want) {
		t.Fatalf("got %v, want %v", names, want)
	}
	env, mounts := n.edits(slices.Clone(names)...)
	wantEnv := []string{
		"GPU_NODE_AGENT_DEVICE_GPU_1=GPU-1", "GPU_NODE_AGENT_DEVICE_GPU_3_MIG_1G10GB_19_0=MIG-0",
		"NVIDIA_VISIBLE_DEVICES=void",
	}
	if !slices.Equal(env, wantEnv) || mounts != nil {
		t.Errorf("got %v and %v, want %v", env, mounts, wantEnv)
	}
	if got := n.claims.Load().ByUID["uid-a"].Devices; len(got) != 2 || got[1].Request != "part" || got[1].Parent != "GPU-3" ||
		got[0].Device != "GPU-1" {
		t.Errorf("got %+v", got)
	}
	n.device("GPU-1", unhealthy("xid-79")) // a prepared claim is answered nevertheless
	for _, boot := range []string{"boot-1", "boot-1"} {
		n.restart(boot)
		if again := n.must(c); !slices.Equal(again, want) {
			t.Errorf("got %v, want %v", again, want)
		}
	}
	if err := n.unprepare(c); err != nil {
		t.Fatal(err)
	}
	if err := n.unprepare(c); err != nil {
		t.Errorf("again: %v", err)
	}
	if uids, specs := n.prepared(), n.specs(); len(uids)+len(specs) > 0 {
		t.Errorf("left: %v, %v", uids, specs)
	}
}

func TestPrepareRefuses(t *testing.T) {
	tests := map[string]struct {
		config func(*plugin.Config)
		edit   func(*claimNode)
		claim  *resourceapi.ResourceClaim
		reason string
		parts  []string
	}{
		"unknown device": {claim: claim("a", result("gpu-9")), reason: reasonUnknownDevice, parts: []string{"gpu-9", "gpu-0"}},
		"another pool": {
			claim:  claim("a", result("gpu-0", func(r *resourceapi.DeviceRequestAllocationResult) { r.Pool = "node2" })),
			reason: reasonUnknownDevice, parts: []string{"node2"},
		},
		"unhealthy": {
			edit: func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) }, claim: claim("a", result("gpu-0")),
			reason: reasonUnhealthyDevice, parts: []string{"gpu-0", "fallen off", "xid-79", health.ActionResetGPU.Advice()},
		},
		"another taint tolerated": {
			edit: func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) }, reason: reasonUnhealthyDevice,
			claim: claim("a", result("gpu-0",
				tolerating(resourceapi.DeviceToleration{Key: "gpu-node-agent/xid", Value: "48", Operator: resourceapi.DeviceTolerationOpEqual}))),
		},
		"NoSchedule tolerated of a cause that evicts": {
			config: func(c *plugin.Config) { c.DRA.EvictOn = []string{"xid=79"} },
			edit:   func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) }, reason: reasonUnhealthyDevice,
			claim: claim("a", result("gpu-0", tolerating(resourceapi.DeviceToleration{
				Key: "gpu-node-agent/xid", Operator: resourceapi.DeviceTolerationOpExists, Effect: resourceapi.DeviceTaintEffectNoSchedule,
			}))),
		},
		"MIG mode": {claim: claim("a", result("gpu-3")), reason: reasonMIGMode, parts: []string{"gpu-3"}},
		"detached, as admin": {
			edit: func(n *claimNode) {
				n.update(func(s *health.Snapshot) {
					s.Source.Detachment = health.Detachment{Since: time.Now(), Until: time.Now()}
				})
			},
			claim: claim("a", result("gpu-0", asAdmin)), reason: reasonDetached,
		},
		"one GPU twice":  {claim: claim("a", result("gpu-0"), result("gpu-0", byRequest("b"))), reason: reasonConfiguration},
		"two of one MIG": {claim: claim("a", result(mig0), result(mig0, byRequest("b"))), reason: reasonConfiguration},
		"another kind": {
			claim: withConfig(claim("a", result("gpu-0")), "FromClaim",
				`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig"}`), reason: reasonConfiguration,
			parts: []string{"VfioDeviceConfig"},
		},
		"MIG config of GPU": {claim: withConfig(claim("a", result("gpu-0")), "FromClaim",
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`, "gpu"), reason: reasonConfiguration},
		"two devices by MPS": {
			claim: withConfig(claim("a", result("gpu-0"), result("gpu-1")), "FromClass", gpuConfigMPS), reason: reasonConfiguration,
			parts: []string{"gpu-0", "gpu-1"},
		},
		"share by MPS": {
			config: shareMemory, claim: withConfig(claim("a", result("gpu-0", share("s", gib))), "FromClass", gpuConfigMPS),
			reason: reasonConfiguration,
		},
		"no MPS daemon": {
			edit: (*claimNode).stopMPS, claim: withConfig(claim("a", result("gpu-0")), "FromClass", gpuConfigMPS),
			reason: reasonMPSNotReady,
		},
		"MPS of others": {edit: func(n *claimNode) {
			n.stopMPS()
			n.device("GPU-0", func(d *health.DeviceState) { d.MPS = &health.MPSDaemon{Leaving: true} })
		}, claim: claim("a", result("gpu-0")), reason: reasonMPSNotReady},
		"share too large": {
			config: shareMemory, claim: claim("a", result("gpu-0", share("s", 81*gib))), reason: reasonConfiguration,
			parts: []string{"82944 MiB"},
		},
		"share of nothing": {config: shareMemory, claim: claim("a", result("gpu-0", share("s", 0))), reason: reasonMemory},
		"share of unknown size": {
			config: shareMemory, claim: claim("a",
				result("gpu-0", func(r *resourceapi.DeviceRequestAllocationResult) { r.ShareID = new(types.UID("s")) })),
			reason: reasonMemory, parts: []string{"found 0 bytes"},
		},
		"share of less than 1 MiB": {
			config: shareMemory, claim: claim("a", result("gpu-0", share("s", 1<<20-1))), reason: reasonMemory,
			parts: []string{"1048575 bytes"},
		},
		"shares of several sizes": {
			config: shareMemory, claim: claim("a", result("gpu-0", share("s", gib)), result("gpu-2", share("t", 2*gib))), reason: reasonMemory,
			parts: []string{"request gpu", "1024 MiB of gpu-0 and 2048 MiB of gpu-2"},
		},
		"not enforced": {
			config: func(c *plugin.Config) { shareMemory(c); c.Sharing.Memory.RequireEnforcement = true },
			claim:  claim("a", result("gpu-1", share("s", gib))), reason: reasonMemoryNotEnforced, parts: []string{"the driver is too old"},
		},
		"releasing": {edit: func(n *claimNode) { n.prepare.releasing(true) }, claim: claim("a", result("gpu-0")), reason: reasonReleasing},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, func(c *plugin.Config) {
				if test.config != nil {
					test.config(c)
				}
			})
			if test.edit != nil {
				test.edit(n)
			}
			n.prepare.timing.mps = 20 * time.Millisecond
			n.refused(test.claim, test.reason, test.parts...)
			var s Status
			n.prepare.status(&s)
			if s.PrepareErrors[test.reason] != 1 || !slices.Contains(PrepareErrors(), test.reason) {
				t.Errorf("counted %v", s.PrepareErrors)
			}
			if err := n.unprepare(test.claim); err != nil || len(n.prepared())+len(n.specs()) > 0 {
				t.Errorf("%v: left: %v, %v", err, n.prepared(), n.specs())
			}
		})
	}
}

const gpuConfigMPS = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS",` +
	`"mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi"}}}`

func TestPrepareAccepts(t *testing.T) {
	tests := map[string]struct {
		config func(*plugin.Config)
		edit   func(*claimNode)
		claim  *resourceapi.ResourceClaim
		env    []string
		mounts int
	}{
		"unhealthy, as admin": {edit: func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) }, claim: claim("a", result("gpu-0", asAdmin))},
		"unhealthy, tolerated": {
			edit: func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) },
			claim: claim("a", result("gpu-0",
				tolerating(resourceapi.DeviceToleration{Key: "gpu-node-agent/xid", Value: "79", Operator: resourceapi.DeviceTolerationOpEqual}))),
		},
		"unhealthy, any XID tolerated": {
			edit: func(n *claimNode) { n.device("GPU-0", unhealthy("xid-79")) },
			claim: claim("a", result("gpu-0",
				tolerating(resourceapi.DeviceToleration{Key: "gpu-node-agent/xid", Operator: resourceapi.DeviceTolerationOpExists}))),
		},
		"MIG mode, as admin": {claim: claim("a", result("gpu-3", asAdmin))},
		"twice, as admin":    {claim: claim("a", result("gpu-0", asAdmin), result("gpu-0", asAdmin, byRequest("b")))},
		"another driver's device": {
			claim: claim("a", result("gpu-0"), result("nic-0", func(r *resourceapi.DeviceRequestAllocationResult) { r.Driver = "nic.example.com" })),
		},
		"no device of the driver": {claim: claim("a", result("nic-0",
			func(r *resourceapi.DeviceRequestAllocationResult) { r.Driver = "nic.example.com" }))},
		"share by the driver": {
			config: shareMemory, claim: claim("a", result("gpu-0", share("s", 10*gib))),
			env: []string{
				"GPU_NODE_AGENT_MEMORY_LIMIT_MIB=10240", "GPU_NODE_AGENT_MEMORY_FRACTION=0.1250", "NVIDIA_GPU_MEMORY_LIMIT=10240",
				"NVIDIA_GPU_MEMORY_REQUEST=0",
			},
		},
		"share of a device that is not shared any more": {
			claim: claim("a", result("gpu-0", share("s", 10*gib))), env: []string{"GPU_NODE_AGENT_MEMORY_LIMIT_MIB=10240"},
		},
		"share without enforcement": {
			config: shareMemory, claim: claim("a", result("gpu-1", share("s", 10*gib))), env: []string{"GPU_NODE_AGENT_MEMORY_LIMIT_MIB=10240"},
		},
		"share by MPS": {
			config: func(c *plugin.Config) { shareMemory(c); c.Sharing.Memory.Enforcement = plugin.EnforceMPS },
			claim:  claim("a", result("gpu-0", share("s", 10*gib))),
			env: []string{
				"CUDA_MPS_PIPE_DIRECTORY=/mps/gpu-0/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
				"GPU_NODE_AGENT_MEMORY_LIMIT_MIB=10240",
			}, mounts: 3,
		},
		"MPS": {
			claim: withConfig(claim("a", result("gpu-0")), "FromClass", gpuConfigMPS),
			env:   []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M"}, mounts: 3,
		},
		"MPS, as admin": {claim: withConfig(claim("a", result("gpu-0", asAdmin)), "FromClass", gpuConfigMPS)},
		"MPS of another request": {
			claim: withConfig(claim("a", result("gpu-0"), result("gpu-1", byRequest("b"))), "FromClass", gpuConfigMPS, "b"),
			env:   []string{"CUDA_MPS_PIPE_DIRECTORY=/mps/gpu-1/pipe"}, mounts: 3,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, func(c *plugin.Config) {
				if test.config != nil {
					test.config(c)
				}
			})
			if test.edit != nil {
				test.edit(n)
			}
			names := n.must(test.claim)
			env, mounts := n.edits(slices.Clone(names)...)
			for _, e := range test.env {
				if !slices.Contains(env, e) {
					t.Errorf("%v lacks %s", env, e)
				}
			}
			if len(mounts) != test.mounts || test.env == nil && slices.ContainsFunc(env,
				func(e string) bool { return strings.Contains(e, "MPS") || strings.Contains(e, "MEMORY") }) {
				t.Errorf("got %v and %v", env, mounts)
			}
			if err := n.unprepare(test.claim); err != nil || len(n.prepared())+len(n.specs()) > 0 {
				t.Errorf("%v: left: %v, %v", err, n.prepared(), n.specs())
			}
			n.wantNoMPS()
		})
	}
}

// wantNoMPS waits until no MPS daemon is desired.
func (n *claimNode) wantNoMPS() {
	n.t.Helper()
	limit := time.After(10 * time.Second)
	for {
		desired, changed := n.mps.Watch()
		if desired != nil && len(desired.Daemons) == 0 {
			return
		}
		select {
		case <-changed:
		case <-limit:
			n.t.Fatalf("got %+v", desired)
		}
	}
}

// A device of a claim is refused to others as long as that claim exists and has it, and not longer.
func TestPrepareDeviceOfAnotherClaim(t *testing.T) {
	gone := func(n *claimNode, first *resourceapi.ResourceClaim) { n.remove(first) }
	unprepared := []string{"default/a", "not unprepared yet"}
	tests := map[string]struct {
		config        func(*plugin.Config)
		first, second *resourceapi.ResourceClaim
		before        func(n *claimNode, first *resourceapi.ResourceClaim)
		reason        string // "": given
		both          bool   // the first claim remains prepared
		parts         []string
	}{
		"exists": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), reason: reasonInUse,
			parts: []string{"gpu-0", "default/a", "pod-a"},
		},
		"does not exist": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), before: gone, reason: reasonInUse,
			parts: unprepared,
		},
		"made again": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), reason: reasonInUse, parts: unprepared,
			before: func(n *claimNode, first *resourceapi.ResourceClaim) {
				n.remove(first)
				again := first.DeepCopy()
				again.UID = "other"
				n.create(again)
			},
		},
		"allocated elsewhere": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), reason: reasonInUse, parts: unprepared,
			before: func(n *claimNode, first *resourceapi.ResourceClaim) {
				n.remove(first)
				again := first.DeepCopy()
				again.Status.Allocation.Devices.Results[0].Device = "gpu-1"
				n.create(again)
			},
		},
		"allocated in part elsewhere": {
			first: claim("a", result("gpu-0"), result("gpu-1", byRequest("b"))), second: claim("b", result("gpu-0")), reason: reasonInUse,
			parts: unprepared,
			before: func(n *claimNode, first *resourceapi.ResourceClaim) {
				n.remove(first)
				again := first.DeepCopy()
				again.Status.Allocation.Devices.Results[0].Device = "gpu-2"
				n.create(again)
			},
		},
		"not allocated": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), reason: reasonInUse, parts: unprepared,
			before: func(n *claimNode, first *resourceapi.ResourceClaim) {
				n.remove(first)
				again := first.DeepCopy()
				again.Status.Allocation = nil
				n.create(again)
			},
		},
		"API server away": {
			first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0")), reason: reasonAPIServer,
			before: func(n *claimNode, first *resourceapi.ResourceClaim) {
				n.remove(first)
				n.down = errors.New("connection refused")
			},
		},
		"admin beside it": {first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0", asAdmin)), both: true},
		"beside admin":    {first: claim("a", result("gpu-0", asAdmin)), second: claim("b", result("gpu-0")), both: true},
		"another device":  {first: claim("a", result("gpu-0")), second: claim("b", result("gpu-1")), both: true},
		"two MIG devices": {first: claim("a", result(mig0)), second: claim("b", result("gpu-3-mig-1g10gb-19-1")), both: true},
		"parent of its MIG device": {
			first: claim("a", result(mig0)), second: claim("b", result("gpu-3")), reason: reasonInUse,
			before: func(n *claimNode, _ *resourceapi.ResourceClaim) {
				n.device("GPU-3", func(d *health.DeviceState) { d.Device.MIGMode = false })
			},
		},
		"shares that fit": {
			config: shareMemory, first: claim("a", result("gpu-0", share("s", 40*gib))),
			second: claim("b", result("gpu-0", share("t", 39*gib))), both: true,
		},
		"shares that do not fit": {
			config: shareMemory, first: claim("a", result("gpu-0", share("s", 50*gib))), second: claim("b", result("gpu-0", share("t", 40*gib))),
			reason: reasonMemory, parts: []string{"80896 MiB", "92160 MiB", "default/a", "pod-a"},
		},
		"share that does not fit beside one of no claim": {
			config: shareMemory, first: claim("a", result("gpu-0", share("s", 50*gib))), second: claim("b", result("gpu-0", share("t", 40*gib))),
			before: gone,
			reason: reasonInUse, parts: unprepared,
		},
		"whole beside a share": {
			config: shareMemory, first: claim("a", result("gpu-0", share("s", gib))), second: claim("b", result("gpu-0")),
			reason: reasonInUse,
		},
		"share beside a whole": {
			config: shareMemory, first: claim("a", result("gpu-0")), second: claim("b", result("gpu-0", share("s", gib))),
			reason: reasonInUse,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, func(c *plugin.Config) {
				if test.config != nil {
					test.config(c)
				}
			})
			n.create(test.first, test.second)
			n.must(test.first)
			if test.before != nil {
				test.before(n, test.first)
			}
			want := []types.UID{"uid-a", "uid-b"}
			switch {
			case test.reason != "":
				n.refused(test.second, test.reason, test.parts...)
				want = want[:1]
			default:
				n.must(test.second)
			}
			if got := n.prepared(); !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
			if got := n.specs(); len(got) != len(want) {
				t.Errorf("specs of %v, want %v", got, want)
			}
			if err := n.unprepare(test.first); err != nil { // the kubelet is late
				t.Fatal(err)
			}
			n.down = nil
			n.device("GPU-3", func(d *health.DeviceState) { d.Device.MIGMode = false })
			n.must(test.second)
		})
	}
}

// A claim that was allocated again is prepared for its new device, and only for that.
func TestPrepareAllocatedAgain(t *testing.T) {
	n := newClaimNode(t)
	n.must(claim("a", result("gpu-0")))
	if names := n.must(claim("a", result("gpu-1"))); !slices.Equal(names, []string{"k8s.gpu-node-agent/claim=uid-a-gpu-1"}) {
		t.Errorf("got %v", names)
	}
	n.must(claim("b", result("gpu-0")))
	n.hold(map[health.DeviceID][]podresources.Holder{"GPU-2": {pluginHolder("GPU-2")}})
	n.refused(claim("a", result("gpu-2")), reasonInUse, "ml/train")
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-b"}) {
		t.Errorf("got %v", got)
	}
}

// A full disk refuses claims, and leaves nothing behind; a claim that cannot be removed remains.
func TestPrepareFullDisk(t *testing.T) {
	n := newClaimNode(t)
	a, b := claim("a", result("gpu-0")), claim("b", result("gpu-1"))
	n.must(a)
	n.faults.setFull(true)
	n.refused(b, reasonCheckpoint, "no space left")
	if err := n.unprepare(a); err != nil || len(n.prepared()) > 0 || len(n.specs()) > 0 {
		t.Errorf("%v, %v: a full disk keeps a pod from ending", err, n.prepared())
	}
	n.restart("boot-1") // the file still has the claim, which the API server does not have any more
	n.refused(b, reasonCheckpoint, "no space left")
	n.faults.setFull(false)
	n.must(claim("c", result("gpu-0")))
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-c"}) {
		t.Errorf("got %v", got)
	}
}

// Of the claims that share a device's memory, all that do not exist any more make room, not only the first.
func TestPrepareShareBesideStaleClaim(t *testing.T) {
	n := newClaimNode(t, shareMemory)
	a, b := claim("a", result("gpu-0", share("s1", 30*gib))), claim("b", result("gpu-0", share("s2", 30*gib)))
	n.create(a)
	n.must(a)
	n.must(b)
	if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, string(b.UID)); err != nil { // unprepared when the checkpoint could not be written
		t.Fatal(err)
	}
	c := claim("c", result("gpu-0", share("s3", 40*gib)))
	n.create(c)
	n.must(c)
	n.refused(claim("d", result("gpu-0", share("s4", 79*gib))), reasonMemory, "default/a")
}

// What could not be removed from the checkpoint is removed with its next write, whatever that is for.
func TestCheckpointWrittenLater(t *testing.T) {
	n := newClaimNode(t)
	a := claim("a", result("gpu-0"))
	n.create(a)
	n.must(a)
	n.faults.setFull(true)
	if err := n.unprepare(a); err != nil {
		t.Fatal(err)
	}
	if err := n.prepare.setPublishing(t.Context(), false); err == nil {
		t.Error("released, but a later process would have the claim")
	}
	n.faults.setFull(false)
	if err := n.prepare.setPublishing(t.Context(), false); err != nil {
		t.Error(err)
	}
	n.faults.setFull(true)
	if err := n.prepare.setPublishing(t.Context(), false); err != nil {
		t.Errorf("written without a change: %v", err)
	}
	n.faults.setFull(false)
	n.restart("boot-1")
	if got := n.prepared(); len(got) > 0 {
		t.Errorf("got %v", got)
	}
}

// A claim is prepared before the devices are released, or not at all: release must not miss one whose call began earlier.
func TestPrepareWhileReleasing(t *testing.T) {
	n := newClaimNode(t)
	a, b := claim("a", result("gpu-0")), claim("b", result("gpu-0"))
	n.must(a) // it does not exist on the API server and has no spec, so b gets the device
	if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, string(a.UID)); err != nil {
		t.Fatal(err)
	}
	n.api.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, runtime.Object, error) {
		n.prepare.releasing(true) // while b waits for the API server
		return false, nil, nil
	})
	n.refused(b, reasonReleasing)
	if n.prepare.needed() {
		t.Errorf("got %v", n.prepared())
	}
}

// A claim whose CDI spec cannot be written is not prepared.
func TestPrepareWithoutSpec(t *testing.T) {
	n := newClaimNode(t)
	write := n.prepare.disk.writeSpec
	n.prepare.disk.writeSpec = func(string, string, []cdi.ClaimDevice) error { return syscall.ENOSPC }
	c := claim("a", result("gpu-0"))
	n.refused(c, reasonCDI)
	if got := n.prepared(); len(got) > 0 {
		t.Errorf("got %v", got)
	}
	n.prepare.disk.writeSpec = write
	names := n.must(c)
	if err := os.RemoveAll(n.cfg.CDI.Dir); err != nil {
		t.Fatal(err)
	}
	n.must(c) // written again
	n.edits(slices.Clone(names)...)
}

// A claim whose CDI spec cannot be written leaves nothing behind, also if the kubelet's call has ended meanwhile: nobody would remove it.
func TestPrepareWithoutSpecInEndedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		write := n.prepare.disk.writeFile
		var other sync.WaitGroup
		n.prepare.disk.writeSpec = func(string, string, []cdi.ClaimDevice) error {
			writing := make(chan struct{})
			n.prepare.disk.writeFile = func(path string, text []byte) (durable.Written, error) {
				n.prepare.disk.writeFile = write
				close(writing)
				<-time.After(time.Second) // synctest's time: a slow disk
				return write(path, text)
			}
			other.Go(func() {
				if err := n.prepare.setPublishing(t.Context(), true); err != nil {
					t.Error(err)
				}
			})
			<-writing
			cancel()
			return syscall.ENOSPC
		}
		c := claim("a", result("gpu-0"))
		results, err := n.prepare.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
		if err != nil || results[c.UID].Err == nil {
			t.Errorf("%v, %v", results, err)
		}
		other.Wait()
		if got := n.prepared(); len(got) > 0 {
			t.Errorf("left: %v", got)
		}
	})
}

// A claim whose CDI spec cannot be removed has not ended: a container could still start by it.
func TestUnprepareWithoutRemoval(t *testing.T) {
	n := newClaimNode(t)
	c := claim("a", result("gpu-0"))
	n.must(c)
	remove := n.prepare.disk.removeSpec
	n.prepare.disk.removeSpec = func(string, string) error { return syscall.EROFS }
	if err := n.unprepare(c); err == nil || !strings.Contains(err.Error(), "cannot remove the claim's CDI spec") {
		t.Errorf("%v", err)
	}
	n.refused(claim("a", result("gpu-1")), reasonCDI) // it was allocated again
	if got := n.prepared(); len(got) != 1 {
		t.Errorf("prepared %v", got)
	}
	n.prepare.disk.removeSpec = remove
	if err := n.unprepare(c); err != nil || len(n.prepared()) > 0 {
		t.Errorf("%v, prepared %v", err, n.prepared())
	}
}

// A claim ends with its CDI spec, wherever that was written: plugin.cdi.dir may have changed since.
func TestUnprepareAfterChangeOfDirectory(t *testing.T) {
	n := newClaimNode(t)
	before, other := claim("before", result("gpu-0")), claim("other", result("gpu-1"))
	n.must(before)
	old := n.cfg.CDI.Dir
	n.update(func(*health.Snapshot) { n.cfg.CDI.Dir = filepath.Join(n.dir, "other") })
	n.must(before)
	n.must(other)
	if got := n.specs(); !slices.Equal(got, []string{"uid-other"}) {
		t.Errorf("specs of %v in the new directory", got)
	}
	if err := n.unprepare(before); err != nil {
		t.Fatal(err)
	}
	if left, err := cdi.ClaimSpecs(old); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Another boot has no claims and no specs of them, and keeps the names.
func TestPrepareReboot(t *testing.T) {
	n := newClaimNode(t)
	if err := n.prepare.remember(t.Context(), map[health.DeviceID]string{"GPU-0": "gpu-0"}); err != nil {
		t.Fatal(err)
	}
	if err := n.prepare.setPublishing(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	n.must(claim("a", result("gpu-0")))
	n.restart("boot-2")
	n.must(claim("b", result("gpu-0")))
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-b"}) {
		t.Errorf("got %v", got)
	}
	n.restart("") // unknown
	if claims := n.claims.Load().ByUID; len(claims) != 1 {
		t.Errorf("got %v where the boot is unknown", claims)
	}
	n.must(claim("c", result("gpu-1")))
	n.restart("boot-3") // the checkpoint is of an unknown boot
	if claims := n.claims.Load().ByUID; len(claims) != 2 {
		t.Errorf("got %v of an unknown boot", claims)
	}
	n.restart("boot-3")
	if err := n.unprepare(claim("c")); err != nil {
		t.Fatal(err)
	}
	if names := n.prepare.names(); names["GPU-0"] != "gpu-0" || !n.prepare.publishing() || !n.prepare.needed() {
		t.Errorf("got %v, %t", names, n.prepare.publishing())
	}
	waitFor(t, func() bool { return len(n.specs()) == 1 })
}

// A claim that is prepared is answered before the first poll of a new process: the host engine may hang.
func TestPrepareBeforeFirstPoll(t *testing.T) {
	n := newClaimNode(t)
	a := claim("a", result("gpu-0"))
	want := n.must(a)
	n.update(func(s *health.Snapshot) { s.At = time.Time{} })
	n.restart("boot-1")
	if got := n.must(a); !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	n.refused(claim("b", result("gpu-1")), reasonNotReady)
}

func waitFor(t *testing.T, condition func() bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); !condition(); {
		if time.Now().After(limit) {
			t.Fatal("it does not happen")
		}
		<-time.After(5 * time.Millisecond)
	}
}

// After a checkpoint is lost, devices that pods hold by claims of it are refused, also after a restart, until these pods have ended.
func TestPrepareLostCheckpoint(t *testing.T) {
	lose := map[string]func(t *testing.T, path string){
		"corrupt": func(t *testing.T, path string) {
			if err := os.Truncate(path, 20); err != nil {
				t.Fatal(err)
			}
		},
		"of a later release": func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(`{"version": 99}`), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a fifo": func(t *testing.T, path string) {
			if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
				t.Fatal(err)
			}
		},
		"a directory": func(t *testing.T, path string) {
			if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
				t.Fatal(err)
			}
		},
		"too large": func(t *testing.T, path string) {
			if err := os.Truncate(path, durable.Limit+1); err != nil {
				t.Fatal(err)
			}
		},
		"missing": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	}
	for name, edit := range lose {
		t.Run(name, func(t *testing.T) {
			n := newClaimNode(t)
			a, admin := claim("a", result("gpu-0")), claim("admin", result("gpu-1", asAdmin))
			n.create(a, admin)
			n.must(a)
			n.must(admin)
			path := filepath.Join(n.pluginDir(), checkpointName)
			edit(t, path)
			holder := func(c *resourceapi.ResourceClaim, device string) podresources.Holder {
				return podresources.Holder{
					Namespace: "default", Pod: "pod-" + c.Name, Container: "c", DeviceID: device,
					Claim: podresources.ClaimRef{Name: c.Name, Driver: plugin.DefaultDRADriver, Pool: testNode},
				}
			}
			n.holders.By = nil
			n.restart("boot-1")
			if _, err := os.Stat(path + corruptSuffix); (err == nil) == (name == "missing") {
				t.Errorf("set aside: %v", err)
			}
			var s Status
			if n.prepare.status(&s); s.Warning == "" || !n.prepare.needed() {
				t.Errorf("no warning")
			}
			n.refused(claim("b", result("gpu-2")), reasonNotReady)
			n.mu.Lock()
			n.holders.By = map[health.DeviceID][]podresources.Holder{"GPU-0": {holder(a, "gpu-0")}, "GPU-1": {holder(admin, "gpu-1")}}
			n.mu.Unlock()
			n.refused(claim("b", result("gpu-0")), reasonInUse, "pod-a", "claim a")
			n.must(claim("c", result("gpu-1"))) // an admin takes nothing
			n.restart("boot-1")
			n.refused(claim("b", result("gpu-0")), reasonInUse)
			if len(n.specs()) != 3 {
				t.Errorf("specs of %v: a container that restarts needs its own", n.specs())
			}
			n.must(a) // for another pod
			n.mu.Lock()
			n.holders.By = map[health.DeviceID][]podresources.Holder{}
			n.mu.Unlock()
			if err := n.unprepare(a); err != nil {
				t.Fatal(err)
			}
			n.must(claim("b", result("gpu-0")))
		})
	}
}

// The sweep removes claims that the API server does not have and that cannot have a container.
func TestSweep(t *testing.T) {
	n := newClaimNode(t)
	exists, held, left, other := claim("exists", result("gpu-0")), claim("held", result("gpu-1")), claim("left", result("gpu-2")),
		claim("other", result(mig0))
	n.create(exists, held, left, other)
	runs := claim("runs", result("gpu-0", asAdmin)) // and is of a pod that was deleted by force
	for _, c := range []*resourceapi.ResourceClaim{exists, held, left, other, runs} {
		n.must(c)
	}
	n.remove(held)
	n.remove(left)
	n.remove(other)
	again := other.DeepCopy()
	again.UID = "again"
	n.create(again)
	if err := cdi.WriteClaimSpec(n.cfg.CDI.Dir, "orphan", []cdi.ClaimDevice{{Name: "x", Env: map[string]string{"A": "b"}}}); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(n.cfg.CDI.Dir, "k8s.gpu.nvidia.com-claim_x.json")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	deallocated := claim("deallocated", result("gpu-3-mig-1g10gb-19-1"))
	n.must(deallocated)
	deallocated.Status.Allocation = nil // the kubelet unprepared it, which could not be written before a restart
	n.create(deallocated)
	for _, uid := range []string{"uid-held", "uid-left", "uid-other", "uid-deallocated"} {
		if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, uid); err != nil {
			t.Fatal(err)
		}
	}
	all := n.prepared()
	n.mu.Lock()
	n.holders.By = nil // unknown
	n.mu.Unlock()
	n.prepare.sweep(t.Context())
	if got := n.prepared(); !slices.Equal(got, all) {
		t.Errorf("got %v", got)
	}
	n.mu.Lock()
	n.holders.By = map[health.DeviceID][]podresources.Holder{"GPU-1": {{
		Namespace: "default", Pod: "p",
		Claim: podresources.ClaimRef{Name: "held"},
	}}}
	n.mu.Unlock()
	n.down = errors.New("away")
	n.prepare.sweep(t.Context())
	if got := n.prepared(); !slices.Equal(got, all) {
		t.Errorf("got %v", got)
	}
	n.down = nil
	n.prepare.sweep(t.Context())
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-exists", "uid-held", "uid-runs"}) {
		t.Errorf("got %v", got)
	}
	if got := n.specs(); !slices.Equal(got, []string{"uid-exists", "uid-runs"}) {
		t.Errorf("specs of %v", got)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
}

// A claim that is prepared again while the sweep asks the API server about it stays, although it has no CDI spec yet: its MPS daemon
// starts.
func TestSweepBesidePrepare(t *testing.T) {
	n := newClaimNode(t)
	a := claim("a", result("gpu-0"))
	n.must(a)
	if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, string(a.UID)); err != nil { // unprepared when the checkpoint could not be written
		t.Fatal(err)
	}
	n.stopMPS()
	n.prepare.timing.mps = time.Millisecond
	again := withConfig(claim("a", result("gpu-1")), "FromClass", gpuConfigMPS)
	asked := false
	n.api.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, runtime.Object, error) {
		if !asked { // it is allocated after the answer
			asked = true
			n.refused(again, reasonMPSNotReady)
		}
		return false, nil, nil
	})
	n.prepare.sweep(t.Context())
	if got := n.claims.Load().ByUID[a.UID].Devices; !asked || len(got) != 1 || got[0].Device != "GPU-1" {
		t.Errorf("asked %v, got %+v", asked, got)
	}
}

// Calls for one claim follow each other, and those for several write together. Of two claims for one device, one gets it.
func TestPrepareConcurrently(t *testing.T) {
	n := newClaimNode(t)
	a, b := claim("a", result("gpu-0")), claim("b", result("gpu-0"))
	n.create(a, b)
	for range 20 {
		var calls sync.WaitGroup
		var errs [4]error
		for i, c := range []*resourceapi.ResourceClaim{a, b, a, b} {
			calls.Go(func() { errs[i] = n.call(c).Err })
		}
		calls.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || (errs[0] == nil) != (errs[2] == nil) || (errs[1] == nil) != (errs[3] == nil) {
			t.Fatalf("got %v", errs)
		}
		for _, c := range []*resourceapi.ResourceClaim{a, b} {
			calls.Go(func() {
				if err := n.unprepare(c); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
	}
	if len(n.prepared())+len(n.specs()) > 0 {
		t.Errorf("left: %v, %v", n.prepared(), n.specs())
	}
}

// A process removes what nobody can use any more a minute after its start, and then every 5 to 15 minutes.
func TestRunSweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		leave := func(c *resourceapi.ResourceClaim) { // the claim does not exist, and was unprepared when the checkpoint could not be written
			n.must(c)
			if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, string(c.UID)); err != nil {
				t.Fatal(err)
			}
		}
		wait := func(d time.Duration) int {
			time.Sleep(d) //nolint:forbidigo // synctest's time
			synctest.Wait()
			return len(n.prepared())
		}
		leave(claim("a", result("gpu-0")))
		if wait(59*time.Second) != 1 {
			t.Error("swept within the first minute")
		}
		if wait(time.Second) != 0 {
			t.Error("not swept after a minute")
		}
		for range 15 {
			begin := time.Now()
			leave(claim("b", result("gpu-1")))
			_, swept := n.claims.Watch()
			<-swept
			if took := time.Since(begin); took < 5*time.Minute || took > 15*time.Minute || wait(0) != 0 {
				t.Errorf("swept again after %v", took)
			}
		}
	})
}

// A lost checkpoint counts for a minute at least, and not much longer if no pod holds a claim of it.
func TestRunForgetsLostCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer func() { n.stop() }()
		a := claim("a", result("gpu-0"))
		n.must(a)
		if err := os.Remove(filepath.Join(n.pluginDir(), checkpointName)); err != nil {
			t.Fatal(err)
		}
		n.restart("boot-1")
		n.hold(map[health.DeviceID][]podresources.Holder{"GPU-0": {claimHolder(a, "gpu-0")}})
		lost := func(after time.Duration) bool {
			time.Sleep(after) //nolint:forbidigo // synctest's time
			synctest.Wait()
			return n.prepare.state.Load().Lost
		}
		if !lost(30*time.Minute) || len(n.specs()) != 1 {
			t.Error("forgotten while a pod holds a claim of it")
		}
		n.restart("boot-1")
		other := claimHolder(claim("other"), "gpu-0")
		other.Claim.Driver = "gpu.example.com"
		n.hold(map[health.DeviceID][]podresources.Holder{
			"GPU-0": {other}, "GPU-1": {{Namespace: "default", Pod: "p", Resource: "nvidia.com/gpu", DeviceID: "GPU-1"}},
		})
		if !lost(time.Minute) {
			t.Error("forgotten within a minute")
		}
		if lost(time.Minute) {
			t.Error("not forgotten after two minutes")
		}
		if len(n.specs()) != 0 {
			t.Errorf("specs of %v", n.specs())
		}
	})
}

// A call that ends while the checkpoint is being written for another one prepares nothing.
func TestPrepareEndsBeforeWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		end, write := make(chan struct{}), n.prepare.disk.writeFile
		n.prepare.disk.writeFile = func(path string, text []byte) (durable.Written, error) { <-end; return write(path, text) }
		first, second := claim("first", result("gpu-0")), claim("second", result("gpu-1"))
		var calls sync.WaitGroup
		calls.Go(func() { n.must(first) })
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		results, err := n.prepare.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{second})
		if err != nil || results[second.UID].Err == nil || !strings.Contains(results[second.UID].Err.Error(),
			"the checkpoint is still being written") {
			t.Errorf("%v, %v", results, err)
		}
		again, cancelAgain := context.WithTimeout(t.Context(), time.Second)
		defer cancelAgain()
		results, err = n.prepare.PrepareResourceClaims(again, []*resourceapi.ResourceClaim{first}) // its first call goes on
		if err != nil || results[first.UID].Err == nil || !strings.Contains(results[first.UID].Err.Error(),
			"another call for claim uid-first has not ended") {
			t.Errorf("%v, %v", results, err)
		}
		close(end)
		calls.Wait()
		if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-first"}) {
			t.Errorf("prepared %v", got)
		}
		var s Status
		if n.prepare.status(&s); s.PrepareErrors[reasonCheckpoint] != 1 || s.PrepareErrors[reasonOther] != 1 {
			t.Errorf("counted %v", s.PrepareErrors)
		}
		counts := s.Prepares.Counts // the two others took a second
		if at := slices.Index(DurationBounds(), 1.0); counts[at] != 2 || s.Prepares.Sum < 2 || s.Prepares.Sum > 5 {
			t.Errorf("durations %+v", s.Prepares)
		}
	})
}

// A claim of real devices waits some seconds until it is known that container runtimes can resolve their CDI names.
func TestPrepareAwaitsCheckOfSpec(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		options := n.options
		options.Simulated = func() bool { return false }
		if err := errors.Join(os.MkdirAll(n.cfg.CDI.Dir, 0o700),
			os.WriteFile(filepath.Join(n.cfg.CDI.Dir, "nvidia.json"), []byte(`{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}]}`),
				0o600)); err != nil {
			t.Fatal(err)
		}
		p := newPreparer(&options, &health.Latest[Claims]{})
		if err := p.open(filepath.Join(n.dir, "plugins", "other", n.cfg.DRA.DriverName)); err != nil {
			t.Fatal(err)
		}
		in := n.prepare.input.Load()
		p.update(in.cfg, in.snap, in.pool)
		c := claim("a", result("gpu-0"))
		prepare := func() error {
			results, err := p.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c})
			return errors.Join(err, results[c.UID].Err)
		}
		begin := time.Now()
		if err := prepare(); err == nil || !strings.Contains(err.Error(), "the CDI spec of the devices is not checked yet") ||
			time.Since(begin) != 5*time.Second {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		p.base.Store(&baseSpec{cdi.ErrPending})
		if err := prepare(); err == nil || !strings.Contains(err.Error(), "the CDI spec of the devices is not checked yet") {
			t.Errorf("while it is generated: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		running.Go(func() {
			time.Sleep(time.Second) //nolint:forbidigo // synctest's time
			p.run(ctx)
		})
		begin = time.Now()
		if err := prepare(); err != nil || time.Since(begin) != time.Second {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
	})
}

// Calls that wait for one write of the checkpoint share what becomes of it.
func TestPrepareTogetherOnFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		gone := claim("gone", result(mig0))
		n.must(gone)
		end, write := make(chan struct{}), n.prepare.disk.writeFile
		n.prepare.disk.writeFile = func(path string, text []byte) (durable.Written, error) { <-end; return write(path, text) }
		n.faults.setFull(true)
		claims := []*resourceapi.ResourceClaim{claim("a", result("gpu-0")), claim("b", result("gpu-1")), claim("c", result("gpu-2"))}
		var calls sync.WaitGroup
		for _, c := range claims {
			calls.Go(func() { n.refused(c, reasonCheckpoint, "no space left") })
			synctest.Wait() // the first one writes
		}
		calls.Go(func() {
			if err := n.unprepare(gone); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		close(end)
		calls.Wait()
		if got := n.prepared(); len(got) > 0 {
			t.Errorf("prepared %v", got)
		}
		n.faults.setFull(false)
		for _, c := range claims {
			calls.Go(func() { n.must(c) })
		}
		calls.Wait()
		if got := n.prepared(); len(got) != 3 {
			t.Errorf("prepared %v", got)
		}
	})
}

// Before the checkpoint is read nothing is prepared, and nothing ends.
func TestPrepareBeforeOpen(t *testing.T) {
	n := newClaimNode(t)
	p := newPreparer(&n.options, &health.Latest[Claims]{})
	c := claim("a", result("gpu-0"))
	results, err := p.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil || results[c.UID].Err == nil || !strings.Contains(results[c.UID].Err.Error(), "has not read its checkpoint") {
		t.Errorf("%v, %v", results, err)
	}
	undone, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: c.UID}})
	if err != nil || undone[c.UID] == nil {
		t.Errorf("%v, %v", undone, err)
	}
	if err := p.setPublishing(t.Context(), true); err == nil || p.publishing() || p.needed() || p.names() != nil {
		t.Errorf("%v, publishing %v", err, p.publishing())
	}
}

// A refusal names the pods that have the device: pods that the claim is reserved for, and pods that the kubelet lists.
func TestPrepareNamesUsers(t *testing.T) {
	for name, c := range map[string]struct {
		edit    func(*resourceapi.ResourceClaim)
		holders []podresources.Holder
		want    string
	}{
		"reserved": {nil, nil, "of pod default/pod-a"},
		"held by it": {
			nil,
			[]podresources.Holder{{Namespace: "default", Pod: "pod-a", Claim: podresources.ClaimRef{Name: "a"}}},
			"of pod default/pod-a",
		},
		"held by another": {
			nil,
			[]podresources.Holder{{Namespace: "default", Pod: "job", Claim: podresources.ClaimRef{Name: "a"}}},
			"of pods default/job and default/pod-a",
		},
		"by another claim": {
			nil,
			[]podresources.Holder{{Namespace: "default", Pod: "job", Claim: podresources.ClaimRef{Name: "b"}}},
			"of pod default/pod-a",
		},
		"another namespace": {
			nil,
			[]podresources.Holder{{Namespace: "other", Pod: "job", Claim: podresources.ClaimRef{Name: "a"}}},
			"of pod default/pod-a",
		},
		"nobody": {func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }, nil, "of no pod"},
		"no pod": {func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].Resource = "jobs" }, nil, "of no pod"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newClaimNode(t)
			a := claim("a", result("gpu-0"))
			n.create(a)
			if c.edit != nil {
				n.remove(a)
				c.edit(a)
				n.create(a)
			}
			n.must(a)
			n.hold(map[health.DeviceID][]podresources.Holder{"GPU-2": c.holders}) // it matters for the text only
			if text := n.call(claim("b", result("gpu-0"))).Err.Error(); !strings.HasSuffix(text, c.want) {
				t.Errorf("%q, want %q", text, c.want)
			}
		})
	}
}

// The API server is asked by a client that is opened when it is needed, if none could be opened before.
func TestPrepareConnects(t *testing.T) {
	n := newClaimNode(t)
	a, b := claim("a", result("gpu-0")), claim("b", result("gpu-0"))
	n.create(a)
	n.must(a)
	fail := true
	opened := 0
	n.options.Connect = func() (kubernetes.Interface, error) {
		if fail {
			return nil, errors.New("no such file")
		}
		opened++
		return n.api, nil
	}
	n.refused(b, reasonAPIServer, "cannot be asked", "no such file")
	fail = false
	n.refused(b, reasonInUse, "default/a")
	n.refused(b, reasonInUse, "default/a")
	if opened != 1 {
		t.Errorf("opened %d clients", opened)
	}
}

// A lost checkpoint counts until the kubelet was asked after the devices were found: before, no device of a lost claim resolves.
func TestSweepLost(t *testing.T) {
	n := newClaimNode(t)
	n.must(claim("a", result("gpu-0")))
	if err := os.Remove(filepath.Join(n.pluginDir(), checkpointName)); err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	found := n.snap
	n.snap = health.Snapshot{}
	n.mu.Unlock()
	n.restart("boot-1")
	sweep := func() (lost bool) {
		s := *n.prepare.state.Load()
		s.opened = time.Now().Add(-2 * defaultClaimTiming().lost)
		n.prepare.state.Store(&s)
		n.prepare.sweep(t.Context())
		return n.prepare.state.Load().Lost
	}
	if !sweep() {
		t.Error("the devices are released before one was found")
	}
	n.update(func(s *health.Snapshot) { *s = found })
	n.mu.Lock()
	n.holders.Settling = true
	n.mu.Unlock()
	if !sweep() {
		t.Error("the devices are released before the kubelet has read its pods")
	}
	n.refused(claim("b", result("gpu-1")), reasonNotReady)
	n.mu.Lock()
	n.holders.Settling = false
	n.mu.Unlock()
	if sweep() {
		t.Error("the checkpoint still counts as lost")
	}
}

// The spec of the devices keeps devices of claims that are not published any more: a container that restarts needs them.
func TestBaseSpecOfClaims(t *testing.T) {
	n := newClaimNode(t)
	n.must(claim("a", result("gpu-0")))
	in := *n.prepare.input.Load()
	pool := *in.pool
	pool.ByName = map[string]health.DeviceID{"gpu-1": "GPU-1"}
	in.pool = &pool
	var names []string
	for _, d := range n.prepare.baseInput(&in).Devices {
		names = append(names, d.Name)
	}
	if !slices.Equal(names, []string{"GPU-0", "GPU-1"}) {
		t.Errorf("got %v", names)
	}
}

// Two agents run for a moment: the second waits for the socket of the first, and then has the claims that it prepared meanwhile.
func TestRefresh(t *testing.T) {
	n := newClaimNode(t)
	second := newPreparer(&n.options, &health.Latest[Claims]{})
	if err := second.open(n.pluginDir()); err != nil {
		t.Fatal(err)
	}
	n.must(claim("a", result("gpu-0")))
	n.must(claim("b", result("gpu-1")))
	if err := second.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if claims := second.published.Load().ByUID; len(claims) != 2 || !second.needed() {
		t.Errorf("got %v", claims)
	}
	if err := os.Remove(filepath.Join(n.pluginDir(), checkpointName)); err != nil {
		t.Fatal(err)
	}
	if err := second.refresh(t.Context()); err != nil || !second.needed() {
		t.Errorf("a file that was deleted: %v, needed %t", err, second.needed())
	}
	// The first one was killed before it had prepared a claim, and has given its device to another one since.
	c := checkpoint{BootID: n.boot, Claims: maps.Clone(n.claims.Load().ByUID)}
	killed := c.Claims["uid-a"]
	killed.UID = "uid-killed"
	c.Claims[killed.UID] = killed
	text, err := c.encode()
	if err == nil {
		err = os.WriteFile(filepath.Join(n.pluginDir(), checkpointName), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := second.refresh(t.Context()); err != nil || len(second.published.Load().ByUID) != 2 {
		t.Errorf("%v, %+v", err, second.published.Load())
	}
	if err := os.RemoveAll(n.pluginDir()); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(n.pluginDir(), n.pluginDir()); err != nil { // too many levels of symbolic links
		t.Fatal(err)
	}
	if err := second.refresh(t.Context()); err == nil || !strings.Contains(err.Error(), "cannot read the checkpoint") || !second.needed() {
		t.Errorf("an unreadable file: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	second.writing <- struct{}{}
	if err := second.refresh(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("while another write is in progress: %v", err)
	}
}

// Without a directory of the driver there is no claim, whatever is in its place: the device plugin must not wait for it.
func TestOpenWithoutDirectory(t *testing.T) {
	n := newClaimNode(t)
	file := filepath.Join(t.TempDir(), "plugins")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(file, "gpu.nvidia.com"), file, filepath.Join(t.TempDir(), "plugins", "gpu.nvidia.com")} {
		p := newPreparer(&n.options, &health.Latest[Claims]{})
		if err := p.open(dir); err != nil || p.needed() {
			t.Errorf("%s: %v, needed %t", dir, err, p.needed())
		}
	}
}

// A directory that is open is not read again: its file may still have a claim that was removed while the disk was full. Another directory
// has claims of its own.
func TestOpenAgain(t *testing.T) {
	n := newClaimNode(t)
	a := claim("a", result("gpu-0"))
	n.must(a)
	n.faults.setFull(true)
	if err := n.unprepare(a); err != nil {
		t.Fatal(err)
	}
	if err := n.prepare.open(n.pluginDir()); err != nil || len(n.prepared()) > 0 {
		t.Errorf("%v, prepared %v", err, n.prepared())
	}
	n.faults.setFull(false)
	n.must(claim("b", result("gpu-1")))
	if err := n.prepare.open(filepath.Join(n.dir, "plugins", "other")); err != nil || len(n.claims.Load().ByUID) > 0 {
		t.Errorf("another directory: %v, prepared %v", err, n.claims.Load().ByUID)
	}
}

// The temporary files that an earlier process left beside the CDI specs are removed. The log names one that cannot be.
func TestOpenRemovesTemporaries(t *testing.T) {
	n := newClaimNode(t)
	file, full := filepath.Join(n.cfg.CDI.Dir, ".gpu-node-agent-1.tmp"), filepath.Join(n.cfg.CDI.Dir, ".gpu-node-agent-2.tmp")
	if err := errors.Join(os.MkdirAll(n.cfg.CDI.Dir, 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	open := func() []observer.LoggedEntry {
		core, logs := observer.New(zap.WarnLevel)
		options := n.options
		options.Log = zap.New(core)
		if err := newPreparer(&options, &health.Latest[Claims]{}).open(n.pluginDir()); err != nil {
			t.Fatal(err)
		}
		return logs.All()
	}
	if logs := open(); len(logs) > 0 || exists(file) {
		t.Errorf("the file exists: %t, logged %v", exists(file), logs)
	}
	if err := os.MkdirAll(filepath.Join(full, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if logs := open(); len(logs) != 1 || !strings.Contains(fmt.Sprint(logs[0].ContextMap()["error"]), full) {
		t.Errorf("logged %v, want one error of %s", logs, full)
	}
}
