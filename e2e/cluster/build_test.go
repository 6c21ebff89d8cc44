//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Images. Nothing is pulled: no registry is reachable.
const (
	pauseImage    = "registry.k8s.io/pause:3.10"
	workloadImage = "example.test/workload:v1"
	agentImage    = "example.test/gpu-node-agent"
	oldTag        = "v1"     // as the Dockerfile's last stage: linked with glibc, with a shell
	newTag        = "v2-sim" // as the Dockerfile's stage sim: static, nothing else
)

// customResourceModules are the modules with definitions of custom resources, by directory in bin/e2e-cluster. The
// definitions in documentedCRDs are only to check documents.
func customResourceModules() []customResourceModule {
	return []customResourceModule{
		{
			operatorCRDs, "github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_",
			[]string{"servicemonitors", "podmonitors", "prometheusrules"},
		},
		{documentedCRDs, "sigs.k8s.io/karpenter@v1.8.0", "pkg/apis/crds/karpenter.sh_", []string{"nodepools"}},
		{
			documentedCRDs, "sigs.k8s.io/kueue@v0.15.0", "config/components/crd/bases/kueue.x-k8s.io_",
			[]string{"resourceflavors", "clusterqueues", "localqueues"},
		},
	}
}

const operatorCRDs, documentedCRDs = "crds", "documented-crds"

type customResourceModule struct {
	to, module, prefix string
	kinds              []string
}

// requirements returns an error for everything that this machine lacks.
func requirements() error {
	var errs []error
	if os.Getuid() != 0 {
		errs = append(errs, errors.New("only root can make namespaces, cgroups and containers"))
	}
	for command, from := range map[string]string{
		"runc": "runc", "prometheus": "prometheus", "ip": "iproute2", "cc": "gcc",
		"/usr/lib/cni/bridge": "containernetworking-plugins", "/usr/lib/cni/host-local": "containernetworking-plugins",
		"/usr/lib/cni/loopback": "containernetworking-plugins",
	} {
		if _, err := exec.LookPath(command); err != nil {
			errs = append(errs, fmt.Errorf("%s is missing: install Debian's package %s", command, from))
		}
	}
	return errors.Join(errs...)
}

// build builds two versions of the agent, helm, containerd and the images, and fetches the custom resources.
func build(ctx context.Context, dir string) error {
	bin := func(name string) string { return filepath.Join(dir, name) }
	agent := func(version string) []string {
		return []string{"build", "-ldflags", "-s -w -X main.version=" + version, "-o", bin("gpu-node-agent-" + version), "."}
	}
	root := filepath.Join("..", "..")
	for _, step := range []struct {
		dir, cgo string
		args     []string
	}{
		{root, "1", agent(oldTag)},
		{root, "0", agent(newTag)},
		{".", "0", []string{"build", "-ldflags", "-s -w", "-o", bin("workload"), "./workload"}},
		{root, "0", []string{"build", "-ldflags", "-s -w", "-o", bin(mpsControl), "./internal/mpstest/" + mpsControl}},
		{filepath.Join("..", "helm"), "1", []string{"build", "-o", bin("helm"), "helm.sh/helm/v4/cmd/helm"}},
		// Debian 12 has release 1.6, which ignores the CDI devices of a claim.
		{filepath.Join("..", "containerd"), "0", []string{
			"build", "-tags", "no_btrfs no_devmapper no_zfs no_tracing", "-ldflags",
			"-s -w", "-o", bin("containerd") + "/", "tool",
		}},
	} {
		begin := time.Now()
		cmd := exec.CommandContext(ctx, "go", step.args...)
		cmd.Dir, cmd.Env = step.dir, append(os.Environ(), "CGO_ENABLED="+step.cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", cmd, err, out)
		}
		fmt.Printf("built %s in %.0fs\n", filepath.Base(step.args[len(step.args)-2]), time.Since(begin).Seconds())
	}
	glibc, err := sharedLibraries(ctx, bin("gpu-node-agent-"+oldTag), "/bin/sh")
	if err != nil {
		return err
	}
	glibc["/bin/sh"] = "/bin/sh"
	glibc["/usr/local/bin/gpu-node-agent"] = bin("gpu-node-agent-" + oldTag)
	var errs []error
	for _, m := range customResourceModules() {
		errs = append(errs, m.copyTo(ctx, bin(m.to)))
	}
	return errors.Join(append(errs,
		writeImage(bin("pause.tar"), pauseImage, "/workload", map[string]string{"/workload": bin("workload")}),
		writeImage(bin("workload.tar"), workloadImage, "/workload", map[string]string{"/workload": bin("workload")}),
		writeImage(bin("agent-old.tar"), agentImage+":"+oldTag, "/usr/local/bin/gpu-node-agent", glibc),
		writeImage(bin("agent-new.tar"), agentImage+":"+newTag, "/usr/local/bin/gpu-node-agent",
			map[string]string{"/usr/local/bin/gpu-node-agent": bin("gpu-node-agent-" + newTag)}),
	)...)
}

// sharedLibraries returns the libraries of programs, including the loader, at the paths where the loader searches.
func sharedLibraries(ctx context.Context, programs ...string) (map[string]string, error) {
	files := make(map[string]string)
	for _, program := range programs {
		out, err := exec.CommandContext(ctx, "ldd", program).Output()
		if err != nil {
			return nil, fmt.Errorf("ldd %s: %w", program, err)
		}
		for word := range strings.FieldsSeq(string(out)) {
			if filepath.IsAbs(word) {
				files[word] = word
			}
		}
	}
	return files, nil
}

// copyTo copies the definitions from the module.
func (m customResourceModule) copyTo(ctx context.Context, dir string) error {
	out, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", m.module).Output()
	if err != nil {
		return fmt.Errorf("go mod download %s: %w\n%s", m.module, err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, kind := range m.kinds {
		file := filepath.Join(module.Dir, filepath.FromSlash(m.prefix)+kind+".yaml")
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(file)), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
