package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// A claim's spec can be resolved by the CDI library, and only files of claims are found and removed.
func TestClaimSpecs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	if uids, err := ClaimSpecs(dir); err != nil || uids != nil {
		t.Fatalf("got %v, %v", uids, err)
	}
	devices := []ClaimDevice{
		{
			Name: "u-1-gpu-0", Env: map[string]string{"B": "2", "A": "1"},
			Mounts: []ClaimMount{{HostPath: "/run/x", ContainerPath: "/x"}, {HostPath: "/run/y", ContainerPath: "/y", ReadOnly: true}},
		},
		{Name: "u-1-gpu-1-share", Env: map[string]string{"C": "3"}},
	}
	if err := WriteClaimSpec(dir, "u-1", devices); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	first, second := cache.GetDevice(ClaimDeviceName("u-1-gpu-0")), cache.GetDevice(ClaimDeviceName("u-1-gpu-1-share"))
	if first == nil || second == nil {
		t.Fatalf("not found: %v", cache.GetErrors())
	}
	edits := first.ContainerEdits
	if !slices.Equal(edits.Env, []string{"A=1", "B=2"}) || len(edits.Mounts) != 2 || !slices.Contains(edits.Mounts[0].Options, "rw") ||
		!slices.Contains(edits.Mounts[1].Options, "ro") {
		t.Errorf("got %+v", edits)
	}
	for _, foreign := range []string{
		"nvidia.json", "k8s.gpu.nvidia.com-claim_u.yaml", "k8s.gpu-node-agent-claim_.json",
		"k8s.gpu-node-agent-claim_a.b.json",
	} {
		if err := os.WriteFile(filepath.Join(dir, foreign), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if uids, err := ClaimSpecs(dir); err != nil || !slices.Equal(uids, []string{"u-1"}) {
		t.Errorf("got %v, %v", uids, err)
	}
	for range 2 {
		if err := RemoveClaimSpec(dir, "u-1"); err != nil {
			t.Error(err)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 4 {
		t.Errorf("got %v", entries)
	}
}

// No UID leads out of the directory, and an invalid spec leaves nothing.
func TestWriteClaimSpecRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, uid := range []string{"", "../x", "a/b", "a.b"} {
		if err := WriteClaimSpec(dir, uid, []ClaimDevice{{Name: "x", Env: map[string]string{"A": "1"}}}); err == nil {
			t.Errorf("%q accepted", uid)
		}
		if err := RemoveClaimSpec(dir, uid); err != nil {
			t.Errorf("%q: %v", uid, err)
		}
	}
	if err := WriteClaimSpec(dir, "u", []ClaimDevice{{Name: "x y", Env: map[string]string{"A": "1"}}}); err == nil {
		t.Error("invalid name accepted")
	}
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("left: %v", entries)
	}
}
