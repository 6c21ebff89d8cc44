package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestParseCheckpointRefuses(t *testing.T) {
	tests := map[string]string{
		"empty":               ``,
		"no version":          `{}`,
		"a later version":     `{"version": 2}`,
		"one name twice":      `{"version": 1, "names": {"GPU-0": "gpu-0", "GPU-1": "gpu-0"}}`,
		"no name":             `{"version": 1, "names": {"GPU-0": ""}}`,
		"a path as UID":       `{"version": 1, "claims": {"../x": {"uid": "../x"}}}`,
		"another UID":         `{"version": 1, "claims": {"a": {"uid": "b"}}}`,
		"device without UUID": `{"version": 1, "claims": {"a": {"uid": "a", "devices": [{"name": "gpu-0"}]}}}`,
	}
	for name, text := range tests {
		t.Run(name, func(t *testing.T) {
			if c, err := parseCheckpoint([]byte(text)); err == nil {
				t.Errorf("got %+v", c)
			}
		})
	}
}

// FuzzCheckpoint checks that what is read can be written, read again equally, and names no other file.
func FuzzCheckpoint(f *testing.F) {
	c := checkpoint{BootID: "b", Publishing: true, Names: map[health.DeviceID]string{"GPU-0": "gpu-0"}, Claims: map[types.UID]Claim{
		"a": {
			UID: "a", Namespace: "n", Name: "c", CDIDir: "/var/run/cdi",
			Devices: []ClaimDevice{{Request: "r", Pool: "p", Name: "gpu-0", Device: "GPU-0", Memory: 1 << 30}},
		},
	}}
	text, err := c.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"version": 1}`))
	f.Add([]byte(`{"version": 1, "lost": true, "claims": {"a": {"uid": "a"}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseCheckpoint(text)
		if err != nil {
			return
		}
		for uid := range c.Claims {
			if _, ok := cdi.ClaimSpecPath("/x", string(uid)); !ok {
				t.Fatalf("accepted the UID %q", uid)
			}
		}
		written, err := c.encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseCheckpoint(written)
		if err != nil {
			t.Fatalf("%s: %v", written, err)
		}
		rewritten, err := again.encode()
		if err != nil || !reflect.DeepEqual(json.RawMessage(written), json.RawMessage(rewritten)) {
			t.Fatalf("%s became %s, %v", written, rewritten, err)
		}
	})
}

// The names of removed devices do not grow without bound. The names of published devices and of claims stay.
func TestRememberIsBounded(t *testing.T) {
	c := checkpoint{Claims: map[types.UID]Claim{"a": {UID: "a", Devices: []ClaimDevice{{Device: "MIG-7", Name: "x"}}}}}
	names := make(map[health.DeviceID]string)
	for i := range maxNames + 1 {
		names[health.DeviceID(fmt.Sprintf("MIG-%d", i))] = fmt.Sprintf("gpu-0-mig-%d", i)
	}
	got := c.remember(names, map[string]health.DeviceID{"gpu-0-mig-3": "MIG-3"}).Names
	if want := map[health.DeviceID]string{"MIG-3": "gpu-0-mig-3", "MIG-7": "gpu-0-mig-7"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %d names", len(got))
	}
	n := newClaimNode(t)
	names["GPU-1"] = "gpu-1"
	if err := n.prepare.remember(t.Context(), names); err != nil ||
		!reflect.DeepEqual(n.prepare.names(), map[health.DeviceID]string{"GPU-1": "gpu-1", "MIG-0": "gpu-0-mig-0", "MIG-1": "gpu-0-mig-1"}) {
		t.Errorf("%v: %d names, want the names of the node", err, len(n.prepare.names()))
	}
	delete(names, "GPU-1")
	delete(names, "MIG-0")
	if got := c.remember(names, nil).Names; len(got) != maxNames {
		t.Errorf("got %d names", len(got))
	}
}

// A full disk refuses no claim: 50 changes are in the checkpoint of the next process, each.
func TestCheckpointOnFullDisk(t *testing.T) {
	n := newClaimNode(t)
	n.must(claim("first", result("gpu-1"))) // reserves the space
	text, err := os.ReadFile(filepath.Join(n.pluginDir(), checkpointName))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("checkpoint", n.pluginDir(), "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("needs the permission to mount: %v; health/durable and e2e/agent/chaos/holders play the same in a namespace", err)
	}
	defer func() { _ = syscall.Unmount(n.pluginDir(), syscall.MNT_DETACH) }()
	if err := os.WriteFile(filepath.Join(n.pluginDir(), checkpointName), text, 0o600); err != nil {
		t.Fatal(err)
	}
	n.restart("boot-1")
	n.must(claim("second", result("gpu-2")))
	filler, err := os.Create(filepath.Join(n.pluginDir(), "filler"))
	for size := 64 << 10; err == nil; {
		if _, err = filler.Write(make([]byte, size)); err != nil && size > 1 {
			size, err = size/2, nil
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	c := claim("c", result("gpu-0"))
	for i := range 50 {
		if i%2 == 0 {
			n.must(c)
		} else if err := n.unprepare(c); err != nil {
			t.Fatal(err)
		}
		n.restart("boot-1")
		if got := len(n.prepared()); got != 3-i%2 {
			t.Fatalf("after change %d: %d claims", i, got)
		}
	}
	var s Status
	if n.prepare.status(&s); s.Checkpoint.Err != "" || s.Unreserved != "" {
		t.Errorf("%+v", s)
	}
}

// The status names the checkpoint that cannot be written, and since when. When the disk works again, the checkpoint is written although the
// claim that it was for has gone.
func TestCheckpointFailureStatus(t *testing.T) {
	n := newClaimNode(t)
	n.must(claim("a", result("gpu-0")))
	path := filepath.Join(n.pluginDir(), checkpointName)
	n.faults.setFull(true)
	before := time.Now()
	n.refused(claim("b", result("gpu-1")), reasonCheckpoint, "no space left")
	status := func() (s Status) { n.prepare.status(&s); return s }
	n.prepare.retryWrite(t.Context())
	if f := status().Checkpoint; f.Path != path || !strings.Contains(f.Err, "no space left") || f.Since.Before(before) ||
		f.Since.After(time.Now()) {
		t.Errorf("%+v", f)
	}
	n.faults.setFull(false)
	n.prepare.retryWrite(t.Context())
	if f := status().Checkpoint; f.Err != "" {
		t.Errorf("%+v", f)
	}
	n.restart("boot-1")
	if got := n.prepared(); !slices.Equal(got, []types.UID{"uid-a"}) {
		t.Errorf("got %v", got)
	}
}

// A process tries to write the checkpoint again within seconds, although nothing changes.
func TestRunRetriesCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		n.must(claim("a", result("gpu-0")))
		n.faults.setFull(true)
		n.refused(claim("b", result("gpu-1")), reasonCheckpoint)
		n.faults.setFull(false)
		failing := func(after time.Duration) bool {
			time.Sleep(after) //nolint:forbidigo // synctest's time
			synctest.Wait()
			var s Status
			n.prepare.status(&s)
			return s.Checkpoint.Err != ""
		}
		if !failing(time.Second) {
			t.Error("no failure")
		}
		if failing(10 * time.Second) {
			t.Error("not written again")
		}
	})
}

// A checkpoint that could not be written is no fault any more when the node serves no claims: nothing is refused, and nothing tries again.
func TestCheckpointFailureEndsWithDRA(t *testing.T) {
	d := New(Options{
		Config: new(health.Latest[plugin.Config]), PluginReleased: new(health.Latest[plugin.Handover]),
		Snapshots: new(health.Latest[health.Snapshot]), Holders: new(health.Latest[podresources.Holders]), Log: zap.NewNop(),
	})
	d.preparer.writes.Report("/checkpoint", syscall.ENOSPC)
	d.preparer.writes.SetUnreserved(syscall.ENOSPC)
	for _, enabled := range []bool{true, false} {
		d.setWaiting(enabled, "", false)
		if s := d.Status(); (s.Checkpoint.Err != "") != enabled || (s.Unreserved != "") != enabled {
			t.Errorf("enabled %t: %+v", enabled, s)
		}
	}
}
