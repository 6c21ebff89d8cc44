package dra

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
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
		"a": {UID: "a", Namespace: "n", Name: "c", CDIDir: "/var/run/cdi", Devices: []ClaimDevice{{Request: "r", Pool: "p", Name: "gpu-0", Device: "GPU-0", Memory: 1 << 30}}},
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

// The names of removed devices do not grow without bound; those of published devices and of claims stay.
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
	delete(names, "MIG-0")
	if got := c.remember(names, nil).Names; len(got) != maxNames {
		t.Errorf("got %d names", len(got))
	}
}
