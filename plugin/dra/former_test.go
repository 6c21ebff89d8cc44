package dra

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// Claims that the configured driver cannot end keep its configuration from being used.
func TestCheckFormer(t *testing.T) {
	t.Parallel()
	const boot = "boot"
	prepared := checkpoint{BootID: boot, Publishing: true, Claims: map[types.UID]Claim{"uid": {UID: "uid", Name: "a"}}}
	text := func(c checkpoint) string {
		text, err := c.encode()
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	with := func(change func(*checkpoint)) string {
		c := prepared
		change(&c)
		return text(c)
	}
	const name, dir = "plugin.dra.driverName: expected gpu.former, got gpu.nvidia.com: ", "plugin.kubeletDir: expected FORMER, got KUBELET: "
	type edits []func(c, former *plugin.Config)
	usesPlugin := func(c, _ *plugin.Config) { c.API = plugin.APIDevicePlugin }
	off := func(c, _ *plugin.Config) { c.Enabled = false }
	renamed := func(_, former *plugin.Config) { former.DRA.DriverName = "gpu.former" }
	moved := func(_, former *plugin.Config) { former.KubeletDir = "FORMER" }
	lost := with(func(c *checkpoint) { c.Claims, c.Lost = nil, true })
	const inFormer, inOwn, elsewhere = "KUBELET/plugins/gpu.former", "KUBELET/plugins/gpu.nvidia.com", "FORMER/plugins/gpu.nvidia.com"
	for what, c := range map[string]struct {
		files   map[string]string // checkpoints by directory
		specs   []string          // UIDs of claims
		edits   edits
		unknown bool   // what the process before had
		want    string // the start of the error; empty for none
		part    string
	}{
		"first start":           {unknown: true},
		"own claims":            {files: map[string]string{inOwn: text(prepared)}, specs: []string{"uid"}},
		"another name":          {files: map[string]string{inFormer: text(prepared)}, unknown: true, want: name, part: "1 claim is prepared"},
		"for the device plugin": {files: map[string]string{inFormer: text(prepared)}, edits: edits{usesPlugin}, want: name},
		"off now":               {files: map[string]string{inFormer: text(prepared)}, edits: edits{off}, want: name},
		"of another agent":      {files: map[string]string{inFormer: text(prepared)}, edits: edits{off}, unknown: true},
		"corrupt": {
			files: map[string]string{inFormer: "{"}, edits: edits{renamed}, want: name,
			part: "may be prepared (FORMERFILE: ",
		},
		"corrupt, unknown":         {files: map[string]string{inFormer: "{"}, unknown: true, want: name, part: "may be prepared"},
		"corrupt, of weeks ago":    {files: map[string]string{inFormer: "{"}},
		"lost":                     {files: map[string]string{inFormer: lost}, want: name, part: "lost"},
		"no claims":                {files: map[string]string{inFormer: with(func(c *checkpoint) { c.Claims = nil })}},
		"of another boot":          {files: map[string]string{inFormer: with(func(c *checkpoint) { c.BootID = "before" })}},
		"of an unknown boot":       {files: map[string]string{inFormer: with(func(c *checkpoint) { c.BootID = "" })}, want: name},
		"not mounted":              {specs: []string{"uid", "other"}, edits: edits{renamed}, want: name, part: "2 claims are prepared"},
		"not mounted, no claims":   {edits: edits{renamed}},
		"not mounted, own claims":  {files: map[string]string{inOwn: text(prepared)}, specs: []string{"uid"}, edits: edits{renamed}},
		"not mounted, own corrupt": {files: map[string]string{inOwn: "{"}, specs: []string{"uid"}, edits: edits{renamed}},
		"not mounted, rolled back to a release without DRA": {
			specs: []string{"uid"}, edits: edits{renamed, usesPlugin},
		},
		"another directory":              {files: map[string]string{elsewhere: text(prepared)}, edits: edits{moved}, want: dir, part: "there"},
		"another directory, no claims":   {edits: edits{moved}},
		"another directory, rolled back": {files: map[string]string{elsewhere: text(prepared)}, edits: edits{moved, usesPlugin}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			paths := strings.NewReplacer("KUBELET", filepath.Join(root, "kubelet"), "FORMERFILE",
				filepath.Join(root, "kubelet/plugins/gpu.former", checkpointName), "FORMER", filepath.Join(root, "former"))
			cfg := plugin.DefaultConfig()
			cfg.API, cfg.KubeletDir, cfg.CDI.Dir = plugin.APIDRA, "KUBELET", filepath.Join(root, "cdi")
			former := cfg
			for _, edit := range c.edits {
				edit(&cfg, &former)
			}
			cfg.KubeletDir, former.KubeletDir = paths.Replace(cfg.KubeletDir), paths.Replace(former.KubeletDir)
			for dir, text := range c.files {
				writeText(t, filepath.Join(paths.Replace(dir), checkpointName), text)
			}
			for _, uid := range c.specs {
				if err := cdi.WriteClaimSpec(cfg.CDI.Dir, uid, []cdi.ClaimDevice{{Name: "gpu-0", Env: map[string]string{"A": "b"}}}); err != nil {
					t.Fatal(err)
				}
			}
			before := &former
			if c.unknown {
				before = nil
			}
			err := CheckFormer(&cfg, before, boot)
			switch {
			case c.want == "" && err == nil:
			case err == nil || c.want == "" || !strings.HasPrefix(err.Error(), paths.Replace(c.want)) ||
				!strings.Contains(err.Error(), paths.Replace(c.part)):
				t.Errorf("got %v, want %q with %q", err, c.want, c.part)
			}
		})
	}
}

// writeText writes a file in a directory that it makes.
func writeText(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}
