package helm

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

const withDRA = "dra.enabled=true"

// TestDRANodes checks which agents use DRA, and that every agent of a release with dra.enabled has what it needs to release claims.
func TestDRANodes(t *testing.T) {
	const entry = defaultAgent + "-a"
	for name, c := range map[string]struct {
		set  []string
		apis map[string]string // plugin.api by agent; "" if it is not set
		have bool              // the mounts and the token
	}{
		"nothing set": {nil, map[string]string{defaultAgent: ""}, false},
		"null":        {[]string{"dra=null"}, map[string]string{defaultAgent: ""}, false},
		"off":         {[]string{"dra.enabled=null"}, map[string]string{defaultAgent: ""}, false},
		"everywhere":  {[]string{withDRA}, map[string]string{defaultAgent: "dra"}, true},
		"set back":    {[]string{withDRA, "config.plugin.api=devicePlugin"}, map[string]string{defaultAgent: "devicePlugin"}, true},
		"some nodes": {
			[]string{withDRA, "config.plugin.api=devicePlugin", "nodeConfigs.a.plugin.api=dra"},
			map[string]string{defaultAgent: "devicePlugin", entry: "dra"},
			true,
		},
		"but not some": {
			[]string{withDRA, "nodeConfigs.a.plugin.api=devicePlugin"},
			map[string]string{defaultAgent: "dra", entry: "devicePlugin"},
			true,
		},
		"an entry, null": {
			[]string{withDRA, "config.plugin.api=devicePlugin", "nodeConfigs.a.plugin.api=null"},
			map[string]string{defaultAgent: "devicePlugin", entry: "dra"},
			true,
		},
		"no plugin": {[]string{withDRA, "config.plugin.enabled=false"}, map[string]string{defaultAgent: "dra"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, settings(c.set)...)
			got := make(map[string]string)
			for _, m := range o.configMaps {
				got[m.Name] = pluginAPI(t, m.Data["config.yaml"])
				if found := faults(t, m.Data["config.yaml"]); len(found) > 0 {
					t.Errorf("%s: the agent reports %v", m.Name, found)
				}
			}
			if !maps.Equal(got, c.apis) {
				t.Errorf("agents with %v, want %v", got, c.apis)
			}
			for _, ds := range o.agents() {
				checkDRAMounts(t, ds, c.have)
				if got := *ds.Spec.Template.Spec.AutomountServiceAccountToken; got != c.have {
					t.Errorf("%s has a token: %v", ds.Name, got)
				}
				checkConfined(t, ds, nil)
			}
		})
	}
}

// checkDRAMounts checks that an agent has all directories for DRA, or none.
func checkDRAMounts(t *testing.T, ds *appsv1.DaemonSet, have bool) {
	t.Helper()
	all := mounts(ds)
	for dir, want := range map[string]mount{
		"/var/lib/kubelet/plugins/gpu.nvidia.com": {path: "/var/lib/kubelet/plugins/gpu.nvidia.com"},
		"/var/lib/kubelet/plugins_registry":       {path: "/var/lib/kubelet/plugins_registry"},
		"/var/run/cdi":                            {path: "/var/run/cdi"},
		"/etc/cdi":                                {path: "/etc/cdi", readOnly: true},
	} {
		if m, mounted := all[dir]; mounted != have || mounted && m != want {
			t.Errorf("%s has %v at %s: %v", ds.Name, m, dir, mounted)
		}
	}
}

// pluginAPI returns plugin.api of an agent's configuration.
func pluginAPI(t *testing.T, text string) string {
	t.Helper()
	var config struct {
		Plugin struct {
			API string `json:"api"`
		} `json:"plugin"`
	}
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		t.Fatal(err)
	}
	return config.Plugin.API
}

// TestDRAPaths checks that the pod has the kubelet's directories at their paths on the node, because the agent names its socket to the
// kubelet, and that only the kubelet's own directories must exist.
func TestDRAPaths(t *testing.T) {
	o := template(t, settings([]string{withDRA, "kubeletDir=/k/let/,config.plugin.dra.driverName=gpu.example.com"})...)
	if got := o.configMaps[0].Data["config.yaml"]; !strings.Contains(got, "kubeletDir: /k/let\n") {
		t.Errorf("the agent does not find the kubelet:\n%s", got)
	}
	types := map[string]corev1.HostPathType{
		"/k/let/device-plugins": corev1.HostPathDirectory, "/k/let/pod-resources": corev1.HostPathDirectory,
		"/k/let/plugins_registry": corev1.HostPathDirectory, "/k/let/plugins/gpu.example.com": corev1.HostPathDirectoryOrCreate,
	}
	for dir, m := range mounts(o.agents()[0]) {
		if strings.Contains(m.path, "/k/") != strings.HasPrefix(dir, "/k/") ||
			strings.HasPrefix(dir, "/k/") && (dir != m.path || types[dir] == "") {
			t.Errorf("%s is %s on the node", dir, m.path)
		}
	}
	for _, v := range o.agents()[0].Spec.Template.Spec.Volumes {
		if h := v.HostPath; h != nil && types[h.Path] != "" {
			if *h.Type != types[h.Path] {
				t.Errorf("%s has the type %s", h.Path, *h.Type)
			}
			delete(types, h.Path)
		}
	}
	if len(types) > 0 {
		t.Errorf("not mounted: %v", types)
	}
}

// TestDeviceClasses checks the names of classes and which extended resources they serve. e2e/apiserver checks what they select.
func TestDeviceClasses(t *testing.T) {
	for name, c := range map[string]struct {
		set  []string
		want map[string]string // the extended resource by name; "" for none
	}{
		"no DRA":      {nil, nil},
		"defaults":    {[]string{withDRA}, map[string]string{"gpu.nvidia.com": "nvidia.com/gpu", "mig.nvidia.com": ""}},
		"null":        {[]string{withDRA, "dra.deviceClasses=null"}, map[string]string{"gpu.nvidia.com": "nvidia.com/gpu", "mig.nvidia.com": ""}},
		"not created": {[]string{withDRA, "dra.deviceClasses.create=false"}, nil},
		"renamed": {
			[]string{
				withDRA,
				"config.plugin.resource=example.com/gpu,config.plugin.dra.driverName=gpu.example.com,dra.deviceClasses.mig={1c.3g.40gb+me.all}",
			},
			map[string]string{
				"gpu.example.com": "example.com/gpu", "mig.example.com": "", "mig-1c.3g.40gb.me.all.example.com": "example.com/mig-1c.3g.40gb.me.all",
			},
		},
		"another driver": {[]string{withDRA, "config.plugin.dra.driverName=a.b"}, map[string]string{"a.b": "nvidia.com/gpu", "mig.a.b": ""}},
		"more": {[]string{
			withDRA, "dra.deviceClasses.extra[0].name=x",
			"dra.deviceClasses.extra[1].name=y.z,dra.deviceClasses.extra[1].extendedResourceName=a.b/c",
		}, map[string]string{
			"gpu.nvidia.com": "nvidia.com/gpu", "mig.nvidia.com": "", "x": "", "y.z": "a.b/c",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := make(map[string]string)
			for _, class := range template(t, settings(c.set)...).deviceClasses {
				got[class.Name] = ""
				if r := class.Spec.ExtendedResourceName; r != nil {
					got[class.Name] = *r
				}
				if !strings.HasPrefix(class.Spec.Selectors[0].CEL.Expression, "device.driver == ") {
					t.Errorf("%s selects devices of every driver: %v", class.Name, class.Spec.Selectors)
				}
			}
			if len(got)+len(c.want) > 0 && !maps.Equal(got, c.want) {
				t.Errorf("classes %v, want %v", got, c.want)
			}
		})
	}
	classes := template(t, "-f", filepath.Join(chart, "ci", "dra-values.yaml")).deviceClasses
	if i := slices.IndexFunc(classes, func(c *resourcev1.DeviceClass) bool { return c.Name == "shared.nvidia.com" }); i < 0 ||
		len(classes[i].Spec.Config) != 1 {
		t.Error("the configuration of a class is lost")
	}
}

// TestDRAVersion checks which versions of Kubernetes the chart refuses, and which features the notes name.
func TestDRAVersion(t *testing.T) {
	for version, want := range map[string]string{
		"1.33.9": "", "v1.33.4-gke.100": "", "1.34.0": "no device taints", "v1.34.1-eks-1": "no device taints", "1.35.2": "no device taints",
		"1.36.0": "no DeviceTaintRules", "v1.37.0-gke.1": "- DeviceTaintRules", "1.40.1": "- DeviceTaintRules",
	} {
		text, err := notesAt(t, version, "--set", withDRA)
		if want == "" {
			if err == nil || !strings.Contains(err.Error(), "dra.enabled: expected Kubernetes 1.34") || !strings.Contains(err.Error(), version) {
				t.Errorf("%s: error %v", version, err)
			}
			continue
		}
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: error %v, no %q in the notes:\n%s", version, err, want, text)
		}
		for line := range strings.Lines(text) {
			if len(strings.TrimSuffix(line, "\n")) > 80 {
				t.Errorf("%s: line is longer than 80 columns: %s", version, line)
			}
		}
	}
	if _, err := helm(t, "template", "gna", chart, "--kube-version=1.30.0"); err != nil {
		t.Errorf("without DRA: %v", err)
	}
}

// notesAt returns the notes for a version of Kubernetes. Helm renders notes only for its own version.
func notesAt(t *testing.T, version string, args ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(chart)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "templates", "NOTES.txt"))
	if err != nil {
		t.Fatal(err)
	}
	object := `apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data: {notes: {{ include "notes" . | toJson }}}
{{- define "notes" }}` + string(text) + "{{ end }}\n"
	if err := os.WriteFile(filepath.Join(dir, "templates", "notes.yaml"), []byte(object), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := helm(t, append([]string{
		"template", "gna", dir, "-n", "gpu-node-agent", "--kube-version", version, "-s",
		"templates/notes.yaml",
	}, args...)...)
	if err != nil {
		return "", err
	}
	return parse(t, out).configMaps[0].Data["notes"], nil
}

// TestDRASharing checks what agents and MPS daemons have with DRA.
func TestDRASharing(t *testing.T) {
	o := template(t, settings([]string{withDRA, "mps.enabled=true", "nodeConfigs.a.plugin.api=devicePlugin"})...)
	if len(o.mps()) != 1 || o.mps()[0].Name != defaultAgent+"-mps-daemon" {
		t.Errorf("%d DaemonSets of MPS daemons, want the one of the nodes whose claims may ask for MPS", len(o.mps()))
	}
	// A hook in the CDI specs limits memory, whatever the list of the device plugin is.
	const memory = "config.plugin.sharing.memory.resource=a.b/c"
	for _, lists := range []string{"envvar", "volume-mounts"} {
		checkConfined(t, template(t, settings([]string{withDRA, memory, "config.plugin.deviceList={" + lists + "}"})...).agents()[0], nil)
	}
	checkConfined(t, template(t, settings([]string{withDRA, memory, "config.plugin.api=devicePlugin"})...).agents()[0],
		[]corev1.Capability{"SYS_ADMIN"})
}

// TestDRADocument checks the configurations in docs/dra.md with the chart and the agent. e2e/apiserver checks the manifests.
func TestDRADocument(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "dra.md"))
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, block := range regexp.MustCompile("(?ms)^ *```yaml\n(.*?)^ *```$").FindAllStringSubmatch(string(text), -1) {
		lines := strings.Split(block[1], "\n")
		indent := lines[0][:len(lines[0])-len(strings.TrimLeft(lines[0], " "))]
		for i := range lines {
			lines[i] = strings.TrimPrefix(lines[i], indent)
		}
		values := strings.Join(lines, "\n")
		if strings.HasPrefix(values, "apiVersion:") {
			continue
		}
		if strings.HasPrefix(values, "plugin:") {
			values = "dra: {enabled: true}\nconfig:\n  " + strings.ReplaceAll(values, "\n", "\n  ")
		}
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, m := range template(t, "-f", file).configMaps {
			if found := faults(t, m.Data["config.yaml"]); len(found) > 0 {
				t.Errorf("the agent reports %v about\n%s", found, values)
			}
		}
		checked++
	}
	if checked < 3 {
		t.Errorf("%d configurations", checked)
	}
}
