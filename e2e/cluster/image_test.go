//go:build cluster

package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
)

// writeImage writes an image of one layer in the format of docker save. files maps paths in the image to paths on this
// machine.
func writeImage(to, name, entrypoint string, files map[string]string) error {
	layer, err := tarOf(func(w *tar.Writer) error {
		created := make(map[string]bool)
		for _, dir := range []string{"/etc", "/tmp", "/dev", "/proc", "/sys", "/run", "/var/run"} {
			if err := addDir(w, created, dir); err != nil {
				return err
			}
		}
		for _, in := range slices.Sorted(maps.Keys(files)) {
			if err := addDir(w, created, path.Dir(in)); err != nil {
				return err
			}
			text, err := os.ReadFile(files[in])
			if err != nil {
				return err
			}
			if err := addFile(w, in[1:], text); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	diff := fmt.Sprintf("sha256:%x", sha256.Sum256(layer))
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{
			"Entrypoint": []string{entrypoint}, "WorkingDir": "/",
			"Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{diff}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	image, err := tarOf(func(w *tar.Writer) error {
		for _, part := range []struct {
			name string
			text []byte
		}{{"layer.tar", layer}, {"config.json", config}, {"manifest.json", manifest}} {
			if err := addFile(w, part.name, part.text); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return os.WriteFile(to, image, 0o600)
}

func tarOf(fill func(*tar.Writer) error) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := fill(w); err != nil {
		return nil, err
	}
	err := w.Close()
	return out.Bytes(), err
}

// addDir adds a directory and its parents, each once.
func addDir(w *tar.Writer, created map[string]bool, dir string) error {
	if dir == "/" || created[dir] {
		return nil
	}
	if err := addDir(w, created, path.Dir(dir)); err != nil {
		return err
	}
	created[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: int64(fs.ModePerm)})
}

func addFile(w *tar.Writer, name string, text []byte) error {
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
		return err
	}
	_, err := w.Write(text)
	return err
}
