package helm

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/chart/common"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	kubefake "helm.sh/helm/v4/pkg/kube/fake"
	release "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
	"sigs.k8s.io/yaml"
)

// TestNull sets each value to null, in the defaults and in values that enable everything. Such a release must be valid
// or be refused by an error about the value. helm upgrade --reuse-values, which stores and restores the nulls, must not
// change it.
func TestNull(t *testing.T) {
	t.Parallel()
	everything := read(t, filepath.Join(chart, "ci", "full-values.yaml"))
	for name, c := range map[string]struct {
		values  map[string]any
		refused map[string]string // by path; key in the error
	}{
		"defaults": {map[string]any{}, map[string]string{
			"image":            "image.repository: ",
			"image.repository": "image.repository: ",
			"kubeletDir":       "kubeletDir: ",
		}},
		"everything enabled": {everything, map[string]string{
			"reclaim.policy.podSelector.matchLabels":      "reclaim.policy.podSelector: ",
			"reclaim.policy.podSelector.matchLabels.tier": "reclaim.policy.podSelector: ",

			"image":                          "image.repository: ",
			"image.repository":               "image.repository: ",
			"kubeletDir":                     "kubeletDir: ",
			"gpuOperator.validationsDir":     "gpuOperator.validationsDir: ",
			"service":                        "serviceMonitor.enabled",
			"service.enabled":                "serviceMonitor.enabled",
			"serviceAccount":                 "serviceAccount.name: ",
			"serviceAccount.create":          "serviceAccount.name: ",
			"rbac":                           "reclaim.serviceAccount.name: ",
			"rbac.create":                    "reclaim.serviceAccount.name: ",
			"reclaim.serviceAccount":         "reclaim.serviceAccount.name: ",
			"reclaim.serviceAccount.create":  "reclaim.serviceAccount.name: ",
			"reclaim.schedule":               "reclaim.schedule: ",
			"reclaim.policy":                 "reclaim.policy.namespaces: ",
			"reclaim.policy.namespaces":      "reclaim.policy.namespaces: ",
			"reclaim.policy.idle":            "reclaim.policy.idle.after: ",
			"reclaim.policy.idle.after":      "reclaim.policy.idle.after: ",
			"reclaim.web.secretName":         "reclaim.web.secretName: ",
			"reclaim.web.certFile":           "reclaim.web: ",
			"reclaim.web.keyFile":            "reclaim.web: ",
			"mps":                            "nodeConfigs.mps.plugin.sharing.mps.resources: ",
			"mps.enabled":                    "nodeConfigs.mps.plugin.sharing.mps.resources: ",
			"nodeConfigs":                    "mps.enabled: ",
			"nodeConfigs.mps":                "mps.enabled: ",
			"nodeConfigs.mps.plugin":         "mps.enabled: ",
			"nodeConfigs.mps.plugin.sharing": "mps.enabled: ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := paths(read(t, filepath.Join(chart, "values.yaml")))
			all = append(all, paths(map[string]any{"config": read(t, filepath.Join("..", "..", "config.yaml"))})...)
			all = append(all, paths(c.values)...)
			slices.SortFunc(all, slices.Compare)
			all = slices.CompactFunc(all, slices.Equal)
			for key := range c.refused {
				if !slices.ContainsFunc(all, func(path []string) bool { return strings.Join(path, ".") == key }) {
					t.Errorf("%s is not a value of the chart", key)
				}
			}
			for _, path := range all {
				values := deepCopy(t, c.values)
				setNull(values, path)
				installed, upgraded, err := releases(t, values)
				key := strings.Join(path, ".")
				want, refused := c.refused[key]
				switch {
				case refused && (err == nil || !strings.Contains(err.Error(), want)):
					t.Errorf("%s: error %v, want one about %q", key, err, want)
				case refused:
				case err != nil:
					t.Errorf("%s: %v", key, err)
				case installed != upgraded:
					t.Errorf("%s: the upgrade changed\n%s\nto\n%s", key, installed, upgraded)
				case len(parse(t, installed).daemonSets) == 0:
					t.Errorf("%s: no DaemonSet", key)
				}
			}
		})
	}
}

// TestTag checks that a numeric tag, such as a build number, stays unchanged.
func TestTag(t *testing.T) {
	installed, upgraded, err := releases(t, map[string]any{"image": map[string]any{"tag": int64(20260101)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{installed, upgraded} {
		if got := parse(t, text).daemonSets[0].Spec.Template.Spec.Containers[0].Image; !strings.HasSuffix(got, ":20260101") {
			t.Errorf("the image is %s", got)
		}
	}
}

// TestNullInNodeConfigs checks that null in nodeConfigs removes the value in config for these nodes.
func TestNullInNodeConfigs(t *testing.T) {
	mig := func(strategy any) map[string]any {
		return map[string]any{"plugin": map[string]any{"migStrategy": strategy, "exclude": []any{"7"}}}
	}
	installed, upgraded, err := releases(t, map[string]any{"config": mig("mixed"), "nodeConfigs": map[string]any{"a": mig(nil), "b": nil}})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{installed, upgraded} {
		o := parse(t, text)
		got := make(map[string]string)
		for _, c := range o.configMaps {
			got[c.Name] = c.Data["config.yaml"]
		}
		const rest = "plugin:\n  exclude:\n  - \"7\"\n"
		want := map[string]string{"gna-gpu-node-agent": rest + "  migStrategy: mixed\n", "gna-gpu-node-agent-a": rest}
		if !maps.Equal(got, want) {
			t.Errorf("configurations %q, want %q", got, want)
		}
		for _, ds := range o.daemonSets {
			if ds.Name == "gna-gpu-node-agent-a" {
				checkConfined(t, ds, nil)
			}
		}
	}
}

// releases installs the chart and upgrades it with the release's values. The cluster consists of Helm's storage in
// memory.
func releases(t *testing.T, values map[string]any) (installed, upgraded string, err error) {
	t.Helper()
	c := action.NewConfiguration()
	c.Releases = storage.Init(driver.NewMemory())
	c.KubeClient = &kubefake.PrintingKubeClient{Out: io.Discard, LogOutput: io.Discard}
	c.Capabilities = common.DefaultCapabilities.Copy()
	c.Capabilities.KubeVersion = common.KubeVersion{Version: "v1.36.0", Major: "1", Minor: "36"}
	install := action.NewInstall(c)
	install.ReleaseName, install.Namespace = "gna", "gpu"
	first, err := install.Run(load(t), values)
	if err != nil {
		return "", "", err
	}
	stored, ok := first.(*release.Release)
	if !ok {
		t.Fatalf("the release is a %T", first)
	}
	stored.Config = deepCopy(t, stored.Config) // through JSON, as in a cluster
	upgrade := action.NewUpgrade(c)
	upgrade.Namespace, upgrade.ReuseValues = "gpu", true
	second, err := upgrade.Run("gna", load(t), map[string]any{})
	if err != nil {
		return "", "", err
	}
	again, ok := second.(*release.Release)
	if !ok {
		t.Fatalf("the release is a %T", second)
	}
	return stored.Manifest, again.Manifest, nil
}

// load reads the chart without its dashboards and rules, which no value affects.
func load(t *testing.T) *chartv2.Chart {
	t.Helper()
	c, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	c.Files = nil
	return c
}

// paths returns the paths of all keys in nested maps, including keys of maps.
func paths(values map[string]any) [][]string {
	var all [][]string
	for key, value := range values {
		all = append(all, []string{key})
		below, _ := value.(map[string]any)
		for _, path := range paths(below) {
			all = append(all, append([]string{key}, path...))
		}
	}
	return all
}

// setNull sets one key to null.
func setNull(values map[string]any, path []string) {
	for ; len(path) > 1; path = path[1:] {
		below, ok := values[path[0]].(map[string]any)
		if !ok {
			below = make(map[string]any)
			values[path[0]] = below
		}
		values = below
	}
	values[path[0]] = nil
}

func read(t *testing.T, file string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// deepCopy returns a deep copy.
func deepCopy(t *testing.T, values map[string]any) map[string]any {
	t.Helper()
	text, err := json.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	into := make(map[string]any)
	if err := json.Unmarshal(text, &into); err != nil {
		t.Fatal(err)
	}
	return into
}
