package dra

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// hold sets which containers hold devices; nil: unknown.
func (n *claimNode) hold(by map[health.DeviceID][]podresources.Holder) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holders = podresources.Holders{By: by}
}

func pluginHolder(id string) podresources.Holder {
	return podresources.Holder{Namespace: "ml", Pod: "train", Container: "main", Resource: "nvidia.com/gpu", DeviceID: id}
}

func claimHolder(c *resourceapi.ResourceClaim, device string) podresources.Holder {
	return podresources.Holder{
		Namespace: c.Namespace, Pod: "pod-" + c.Name, Container: "c", DeviceID: device,
		Claim: podresources.ClaimRef{Name: c.Name, Driver: plugin.DefaultDRADriver, Pool: testNode},
	}
}

// A container that holds a device by a device plugin keeps it, its GPU and its parts from claims, except from claims with adminAccess and
// claims that were prepared before.
func TestPrepareDeviceOfPlugin(t *testing.T) {
	n := newClaimNode(t)
	before := claim("before", result("gpu-0"))
	n.must(before)
	n.hold(map[health.DeviceID][]podresources.Holder{
		"GPU-0": {pluginHolder("GPU-0")}, "GPU-1": {pluginHolder("GPU-1::1")}, "MIG-0": {pluginHolder("MIG-0")},
	})
	n.must(before)
	n.refused(claim("a", result("gpu-1")), reasonInUse, "ml/train", "GPU-1::1 of nvidia.com/gpu")
	n.refused(claim("b", result("gpu-2"), result("gpu-1")), reasonInUse, "gpu-1", "ml/train")
	n.refused(claim("c", result(mig0)), reasonInUse, "ml/train")
	n.must(claim("d", result("gpu-1", asAdmin)))
	n.must(claim("e", result("gpu-2")))
	n.must(claim("f", result("gpu-3-mig-1g10gb-19-1")))
	n.hold(map[health.DeviceID][]podresources.Holder{})
	n.must(claim("a", result("gpu-1")))
}

// While it is unknown which containers hold devices, no new claim is prepared, unless no device plugin has served since the boot.
func TestPrepareUnknownHolders(t *testing.T) {
	n := newClaimNode(t)
	before := claim("before", result("gpu-0"))
	n.must(before)
	n.hold(nil)
	n.must(before)
	n.refused(claim("a", result("gpu-1")), reasonNotReady, "unknown which pods", "tries again")
	n.must(claim("admin", result("gpu-1", asAdmin)))
	n.mu.Lock()
	n.holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}, Settling: true}
	n.mu.Unlock()
	n.refused(claim("a", result("gpu-1")), reasonNotReady, "may not have read all its pods")
	n.noPlugin = true
	n.refused(claim("a", result("gpu-1")), reasonNotReady, "may not have read all its pods")
	n.mu.Lock()
	n.holders = podresources.Holders{Err: "denied", Silent: true}
	n.mu.Unlock()
	a := claim("a", result("gpu-1"))
	n.create(a)
	n.must(a)
	n.refused(claim("b", result("gpu-1")), reasonInUse)
}

// An answer to a question from before the driver had its devices does not tell which claims hold them.
func TestPrepareOldAnswer(t *testing.T) {
	n := newClaimNode(t)
	n.options.Ask = func(context.Context, time.Duration) podresources.Holders {
		return podresources.Holders{At: n.prepare.pooled.Add(-time.Second), By: map[health.DeviceID][]podresources.Holder{}}
	}
	n.refused(claim("a", result("gpu-1")), reasonNotReady)
}

// A claim that is refused is not kept, also if the checkpoint is written for another reason: here to remove a claim that a full disk kept.
func TestPrepareRefusedAfterFullDisk(t *testing.T) {
	n := newClaimNode(t)
	owner, gone := claim("owner", result("gpu-0")), claim("gone", result("gpu-1"))
	n.create(owner)
	n.must(owner)
	n.must(gone)
	n.faults.setFull(true)
	if err := n.unprepare(gone); err != nil {
		t.Fatal(err)
	}
	n.faults.setFull(false)
	n.refused(withConfig(claim("other", result("gpu-0")), "FromClaim", gpuConfigMPS), reasonInUse, "default/owner")
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-owner"}) {
		t.Errorf("prepared: %v", got)
	}
	n.restart("boot-1")
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-owner"}) {
		t.Errorf("after a restart: %v", got)
	}
	n.wantNoMPS()
}

// giveDevicesOf changes the checkpoint: claim to has the devices of claim from.
func (n *claimNode) giveDevicesOf(from, to types.UID) {
	n.t.Helper()
	file, err := readCheckpoint(n.pluginDir())
	if err != nil {
		n.t.Fatal(err)
	}
	c := file.Claims[to]
	c.Devices = file.Claims[from].Devices
	file.Claims[to] = c
	text, err := json.Marshal(file)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.pluginDir(), checkpointName), text, 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n *claimNode) warning() string {
	var s Status
	n.prepare.status(&s)
	return s.Warning
}

// Two claims of a checkpoint that exclude each other: one without a CDI spec was never prepared and goes. If both are prepared, both stay.
func TestHealCheckpoint(t *testing.T) {
	for name, c := range map[string]struct {
		noSpec  []string
		want    []types.UID
		warning bool
	}{
		"both prepared": {nil, []types.UID{"uid-a", "uid-b", "uid-c"}, true},
		"one prepared":  {[]string{"b", "c"}, []types.UID{"uid-a", "uid-c"}, false},
		"none prepared": {[]string{"a", "b"}, []types.UID{"uid-c"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newClaimNode(t)
			a, b, other := claim("a", result("gpu-0")), claim("b", result("gpu-1")), claim("c", result("gpu-2"))
			for _, c := range []*resourceapi.ResourceClaim{a, b, other} {
				n.create(c)
				n.must(c)
			}
			n.giveDevicesOf("uid-a", "uid-b")
			for _, name := range c.noSpec {
				if err := n.prepare.disk.removeSpec(n.cfg.CDI.Dir, "uid-"+name); err != nil {
					t.Fatal(err)
				}
			}
			n.restart("boot-1")
			if got := slices.Sorted(maps.Keys(n.prepare.state.Load().Claims)); !slices.Equal(got, c.want) {
				t.Errorf("claims %v, want %v", got, c.want)
			}
			if text := n.warning(); strings.Contains(text, "default/a") != c.warning {
				t.Errorf("warning %q", text)
			}
			n.refused(claim("new", result("gpu-2")), reasonInUse)
			if err := errors.Join(n.unprepare(other), n.unprepare(b)); err != nil { // each is a write
				t.Fatal(err)
			}
			if text := n.warning(); strings.Contains(text, "default/a") {
				t.Errorf("warning %q of a claim that has its device alone", text)
			}
			want := slices.DeleteFunc(c.want, func(uid types.UID) bool { return uid == "uid-c" || uid == "uid-b" })
			if got := n.prepared(); !slices.Equal(got, want) {
				t.Errorf("file has %v, want %v", got, want)
			}
		})
	}
}

// The container of a claim that was deleted by force may still run, until the kubelet unprepares the claim.
func TestPrepareAwaitsUnprepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		n.prepare.timing.unprepare = defaultClaimTiming().unprepare
		old, next := claim("old", result("gpu-0")), claim("next", result("gpu-0"))
		n.must(old)
		n.refused(next, reasonInUse, "default/old", "not unprepared yet")
		var wait sync.WaitGroup
		wait.Go(func() {
			time.Sleep(3 * time.Second) //nolint:forbidigo // synctest's time
			if err := n.unprepare(old); err != nil {
				t.Error(err)
			}
		})
		begin := time.Now()
		n.must(next)
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("took %v", took)
		}
		wait.Wait()
	})
}

// A claim that does not exist any more is removed without the kubelet only if it cannot have a container. The kubelet does not list the
// containers of a pod that was deleted by force, and they may end after minutes.
func TestPrepareAfterStaleClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		old, next := claim("old", result("gpu-0")), claim("next", result("gpu-0"))
		n.must(old)
		time.Sleep(time.Hour) //nolint:forbidigo // synctest's time
		n.refused(next, reasonInUse, "default/old")
		n.prepare.sweep(t.Context())
		n.refused(next, reasonInUse, "default/old")
		if err := cdi.RemoveClaimSpec(n.cfg.CDI.Dir, string(old.UID)); err != nil { // unprepared when the checkpoint could not be written
			t.Fatal(err)
		}
		n.hold(map[health.DeviceID][]podresources.Holder{"GPU-0": {claimHolder(old, "gpu-0")}})
		n.refused(next, reasonInUse, "default/old")
		n.hold(map[health.DeviceID][]podresources.Holder{})
		n.must(next)
	})
}
