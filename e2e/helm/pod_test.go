package helm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNull says that a map of which all lines are comments, which is null in YAML, is no error.
func TestNull(t *testing.T) {
	for _, key := range []string{"config", "nodeSelector", "affinity", "securityContext", "nodeConfigs", "files", "resources", "podSecurityContext"} {
		t.Run(key, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "values.yaml")
			if err := os.WriteFile(file, []byte(key+":\n  # nothing\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if o := template(t, "-f", file, "--set", "sysAdmin=always,gpuOperator.enabled=true"); len(o.daemonSets) != 1 {
				t.Errorf("there are %d DaemonSets", len(o.daemonSets))
			}
		})
	}
}

// TestMountedOnce says that no two volumes are at one path, which the API server refuses.
func TestMountedOnce(t *testing.T) {
	for _, dir := range []string{"/var/run/cdi", "/etc/cdi", "/etc/cdi/"} {
		seen := make(map[string]bool)
		for _, m := range template(t, "--set", "config.plugin.cdi.generate=true,config.plugin.cdi.dir="+dir).daemonSets[0].Spec.Template.Spec.Containers[0].VolumeMounts {
			if seen[m.MountPath] {
				t.Errorf("dir %s: %s is mounted twice", dir, m.MountPath)
			}
			seen[m.MountPath] = true
		}
		if !seen["/etc/cdi"] {
			t.Errorf("dir %s: /etc/cdi is not mounted", dir)
		}
	}
}

// TestToolkit says that what waits for NVIDIA's toolkit does not ask it for GPUs.
func TestToolkit(t *testing.T) {
	init := template(t, "--set", "gpuOperator.enabled=true").daemonSets[0].Spec.Template.Spec.InitContainers
	if len(init) != 1 || len(init[0].Env) != 1 || init[0].Env[0].Name != "NVIDIA_VISIBLE_DEVICES" || init[0].Env[0].Value != "void" {
		t.Errorf("the init containers are %v", init)
	}
}

// TestScheme says how Prometheus asks.
func TestScheme(t *testing.T) {
	for set, want := range map[string]bool{
		"web.secretName=":                                      false,
		"web.secretName=w":                                     true,
		"web.secretName=w,web.probes=TCP":                      true,
		"web.secretName=w,web.probes=HTTP":                     false,
		"web.secretName=w,serviceMonitor.endpoint.scheme=http": false,
	} {
		o := template(t, "--set", "serviceMonitor.enabled=true", "--set", set)
		if got := strings.Contains(o.unstructured["ServiceMonitor"], "scheme: https"); got != want {
			t.Errorf("%s: https is %v, want %v", set, got, want)
		}
	}
}

// TestClusterNames says that two releases have no cluster role in common.
func TestClusterNames(t *testing.T) {
	names := make(map[string]bool)
	for _, r := range [][2]string{{"a", "b-c"}, {"a-b", "c"}} {
		names[template(t, "-n", r[0], "--set", "fullnameOverride="+r[1], "--set", "config.health.kubernetes.enabled=true").roles[0].Name] = true
	}
	if len(names) != 2 {
		t.Errorf("two releases have the cluster role %v", names)
	}
}
