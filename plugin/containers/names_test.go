package containers

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeFiles writes files with their directories.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadNames(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("n", 253-len(id))
	writeFiles(t, dir, map[string]string{
		"pods/team_train-0_" + podUID + "/main/0.log": "", "pods/kube-system_etcd_" + staticID + "/etcd/0.log": "",
		"pods/lost+found/x": "", "pods/a_b/x": "", "pods/_b_c/x": "", "pods/a_b_c_d/x": "",
		"containers/train-0_team_main-" + id + ".log": "", "containers/train-0_team_side-car-" + otherID + ".log": "",
		"containers/README": "", "containers/train-0_team_x-" + id[1:] + ".log": "",
		("containers/" + long + "_team_x-" + id)[:len("containers/")+251] + ".log": "",
	})
	got, err := readNames(filepath.Join(dir, "pods") + "/")
	if err != nil {
		t.Fatal(err)
	}
	if want := map[string]Pod{podUID: {"team", "train-0"}, staticID: {"kube-system", "etcd"}}; !maps.Equal(got.Pods, want) {
		t.Errorf("pods %v, want %v", got.Pods, want)
	}
	if want := map[string]Container{id: {"team", "train-0", "main"}, otherID: {"team", "train-0", "side-car"}}; !maps.Equal(got.Containers,
		want) {
		t.Errorf("containers %v, want %v", got.Containers, want)
	}
}

func TestReadNamesOfMissingDirectories(t *testing.T) {
	if n, err := readNames(""); err != nil || n.Pods != nil {
		t.Errorf("without a directory: %v, %v", n, err)
	}
	if _, err := readNames(filepath.Join(t.TempDir(), "pods")); err == nil {
		t.Error("no error for a directory that does not exist")
	}
	dir := t.TempDir()
	if n, err := readNames(dir); err != nil || len(n.Pods) > 0 {
		t.Errorf("empty directory: %v, %v", n, err)
	}
	writeFiles(t, dir, map[string]string{"a_b_" + podUID: ""})
	if n, err := readNames(dir); err != nil || len(n.Pods) != 1 {
		t.Errorf("without links: %v, %v", n, err)
	}
}
