package helm

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestNoTaints checks that an empty list keeps the rights and the tolerations with which an agent removes its taints.
func TestNoTaints(t *testing.T) {
	o := template(t, "--set-json", "config.node.taints=[]")
	if len(o.roles) != 1 || !slices.Contains(o.roles[0].Rules[0].Verbs, "patch") {
		t.Errorf("cluster roles %v, want one that may patch nodes", o.roles)
	}
	tolerated(t, o.daemonSets[0].Spec.Template.Spec.Tolerations, "gpu-node-agent/unhealthy", "gpu-node-agent/cordoned")
}

// TestTolerations checks that all pods on the nodes tolerate the taints of every agent, whatever the values' own tolerations are.
func TestTolerations(t *testing.T) {
	const taint, mps = "nodeConfigs.a.node.taints[0].", "config.plugin.sharing.mps.resources[0]."
	o := template(t, settings([]string{
		"tolerations=null", "config.node.startupTaint=a/b=c:NoSchedule", taint + "key=7000000", taint + "when=cordoned",
		taint + "effect=NoExecute",
		"mps.enabled=true", mps + "name=nvidia.com/gpu", mps + "replicas=4",
	})...)
	if len(o.agents()) != 2 || len(o.mps()) != 2 {
		t.Fatalf("%d and %d DaemonSets, want 2 of each", len(o.agents()), len(o.mps()))
	}
	for _, ds := range o.daemonSets {
		tolerated(t, ds.Spec.Template.Spec.Tolerations, "a/b", "7000000", "gpu-node-agent/unhealthy", "gpu-node-agent/cordoned")
	}
	got := template(t, "--set", "tolerations=null").daemonSets[0].Spec.Template.Spec.Tolerations // what an upgrade without config.node renders
	if tolerated(t, got, "gpu-node-agent/unhealthy", "gpu-node-agent/cordoned"); len(got) != 2 {
		t.Errorf("without taints: tolerations %v, want two", got)
	}
}

// TestLabelsFile checks that the directory of Node Feature Discovery is mounted for the agents that write or remove a file in it.
func TestLabelsFile(t *testing.T) {
	const dir = "/etc/kubernetes/node-feature-discovery/features.d"
	for name, c := range map[string]struct {
		set  []string
		want map[string]string // by DaemonSet; "" for none
	}{
		"nothing set": {nil, map[string]string{"gna-gpu-node-agent": ""}},
		"a file":      {[]string{"config.node.labels.output=file"}, map[string]string{"gna-gpu-node-agent": dir}},
		"off":         {[]string{"config.node.labels.output=off"}, map[string]string{"gna-gpu-node-agent": dir}},
		"another file": {
			[]string{"config.node.labels.output=file", "config.node.labels.file=/nfd//features.d/x"},
			map[string]string{"gna-gpu-node-agent": "/nfd/features.d"},
		},
		"the API": {[]string{"config.node.labels.output=api", "config.node.labels.file=/etc/x"}, map[string]string{"gna-gpu-node-agent": ""}},
		"some nodes": {
			[]string{"nodeConfigs.a.node.labels.output=file"},
			map[string]string{"gna-gpu-node-agent": "", "gna-gpu-node-agent-a": dir},
		},
		"a user's mount": {
			[]string{
				"config.node.labels.output=file",
				"extraVolumes[0].name=x,extraVolumes[0].emptyDir.medium=,extraVolumeMounts[0].name=x,extraVolumeMounts[0].mountPath=" + dir + "/",
			},
			map[string]string{"gna-gpu-node-agent": ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, ds := range template(t, settings(c.set)...).daemonSets {
				pod, got := ds.Spec.Template.Spec, ""
				for _, v := range pod.Volumes {
					if v.Name == "nfd-features" {
						got = v.HostPath.Path
					}
				}
				mounted := slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
					return reflect.DeepEqual(m, corev1.VolumeMount{Name: "nfd-features", MountPath: got})
				})
				if got != c.want[ds.Name] || mounted != (got != "") {
					t.Errorf("%s: %q is mounted: %v, want %q", ds.Name, got, mounted, c.want[ds.Name])
				}
			}
		})
	}
}

// tolerated checks that every effect of the keys is tolerated.
func tolerated(t *testing.T, tolerations []corev1.Toleration, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if want := (corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}); !slices.Contains(tolerations, want) {
			t.Errorf("tolerations %v lack %s", tolerations, key)
		}
	}
}

// TestAdmittedLabels checks that the policy for nodes admits every label in the golden files of agent/node.
func TestAdmittedLabels(t *testing.T) {
	o := template(t, "--set", "config.node.labels.output=api")
	var pattern *regexp.Regexp
	for _, v := range o.policies[0].Spec.Validations {
		if found := regexp.MustCompile(`k\.matches\('([^']*)'\)`).FindStringSubmatch(v.Expression); found != nil {
			pattern = regexp.MustCompile(found[1])
		}
	}
	files, err := filepath.Glob(filepath.Join("..", "..", "agent", "node", "testdata", "*"))
	if err != nil || pattern == nil {
		t.Fatalf("the policy has the pattern %v: %v", pattern, err)
	}
	labels := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // a directory
		}
		for _, label := range regexp.MustCompile(`(nvidia\.com|gpu-node-agent)/[-A-Za-z0-9_.]+`).FindAllString(string(text), -1) {
			if labels++; !pattern.MatchString(label) {
				t.Errorf("%s: the policy refuses the label %s", file, label)
			}
		}
	}
	if labels < 50 {
		t.Errorf("%d labels in %d files", labels, len(files))
	}
}
