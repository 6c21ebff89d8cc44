package helm

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// TestMountedOnce checks that no path has two volumes, which the API server refuses.
func TestMountedOnce(t *testing.T) {
	for _, dir := range []string{"/var/run/cdi", "/etc/cdi", "/etc/cdi/"} {
		seen := make(map[string]bool)
		for _, m := range template(t, "--set", "config.plugin.cdi.generate=true,config.plugin.cdi.dir="+
			dir).daemonSets[0].Spec.Template.Spec.Containers[0].VolumeMounts {
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

// TestJobs checks that a volume can replace the node's directory of jobs.
func TestJobs(t *testing.T) {
	const dir = "config.metrics.hpcJobDir=/run/jobs"
	for name, c := range map[string]struct {
		set  []string
		want string // the volume at /run/jobs
	}{
		"node's directory": {[]string{dir}, "hpc-jobs"},
		"another": {
			[]string{
				dir,
				"extraVolumes[0].name=j,extraVolumes[0].configMap.name=jobs,extraVolumeMounts[0].name=j,extraVolumeMounts[0].mountPath=/run/jobs/",
			},
			"j",
		},
		"another volume elsewhere": {
			[]string{
				dir,
				"extraVolumes[0].name=j,extraVolumes[0].configMap.name=jobs,extraVolumeMounts[0].name=j,extraVolumeMounts[0].mountPath=/run/other",
			},
			"hpc-jobs",
		},
		"key not set": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			pod := template(t, settings(c.set)...).daemonSets[0].Spec.Template.Spec
			var got []string
			for _, m := range pod.Containers[0].VolumeMounts {
				if filepath.Clean(m.MountPath) == "/run/jobs" {
					got = append(got, m.Name)
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("/run/jobs is %v, want %s", got, c.want)
			}
			for _, v := range pod.Volumes {
				if v.Name == "hpc-jobs" && c.want != v.Name {
					t.Error("volume of the node's directory is not mounted")
				}
			}
		})
	}
}

// TestProcesses checks the directories of the node by which the agent finds the pods of processes.
func TestProcesses(t *testing.T) {
	const on = "config.metrics.processes.enabled=true"
	proc, logs, links := "/host/proc=/proc", "/var/log/pods=/var/log/pods", "/var/log/containers=/var/log/containers"
	for name, c := range map[string]struct {
		set     []string
		want    []string // the path in the container, and the node's
		proc    string   // metrics.processes.proc
		hostPID bool
	}{
		"off":           {nil, nil, "", false},
		"on":            {[]string{on}, []string{proc, logs, links}, "/host/proc", false},
		"PID namespace": {[]string{on, "hostPID=true"}, []string{logs, links}, "", true},
		"both": {
			[]string{on, "hostPID=true,config.metrics.processes.proc=/host/proc"},
			[]string{proc, logs, links},
			"/host/proc",
			true,
		},
		"PID namespace, proc": {[]string{on, "hostPID=true,config.metrics.processes.proc=/proc/"}, []string{logs, links}, "/proc/", true},
		"no names":            {[]string{on, "config.metrics.processes.podLogs="}, []string{proc}, "/host/proc", false},
		"other directories": {
			[]string{on, "config.metrics.processes.proc=/p,config.metrics.processes.podLogs=/data/pods/"},
			[]string{"/p=/proc", "/data/pods=/data/pods", "/data/containers=/var/log/containers"},
			"/p", false,
		},
		"simulation": {[]string{on, "config.source.mode=sim"}, []string{proc, logs, links}, "/host/proc", false},
		"a volume of its own": {
			[]string{
				on,
				"extraVolumes[0].name=p,extraVolumes[0].emptyDir.medium=,extraVolumeMounts[0].name=p,extraVolumeMounts[0].mountPath=/host/proc",
			},
			[]string{logs, links},
			"/host/proc", false,
		},
		"nodeConfigs only": {[]string{"nodeConfigs.a.metrics.processes.enabled=true"}, nil, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, settings(c.set)...)
			pod := o.daemonSets[0].Spec.Template.Spec
			got := processMounts(t, pod)
			if !slices.Equal(got, c.want) || pod.HostPID != c.hostPID {
				t.Errorf("mounts %v, hostPID %v, want %v, %v", got, pod.HostPID, c.want, c.hostPID)
			}
			var config struct {
				Metrics struct {
					Processes struct {
						Proc string `json:"proc"`
					} `json:"processes"`
				} `json:"metrics"`
			}
			if err := yaml.Unmarshal([]byte(o.configMaps[0].Data["config.yaml"]), &config); err != nil {
				t.Fatal(err)
			}
			if got := config.Metrics.Processes.Proc; got != c.proc {
				t.Errorf("proc %q, want %q", got, c.proc)
			}
		})
	}
}

// processMounts returns where the container of an agent has the directories by which it finds the pods of processes.
func processMounts(t *testing.T, pod corev1.PodSpec) (mounts []string) {
	t.Helper()
	paths := make(map[string]string)
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			paths[v.Name] = v.HostPath.Path
		}
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		if path := paths[m.Name]; path == "/proc" || strings.Contains(path, "/pods") || strings.Contains(path, "/containers") {
			if mounts = append(mounts, m.MountPath+"="+path); !m.ReadOnly {
				t.Errorf("%s is writable", m.MountPath)
			}
		}
	}
	return mounts
}

// TestToolkit checks that the container that waits for NVIDIA's toolkit requests no GPUs.
func TestToolkit(t *testing.T) {
	init := template(t, "--set", "gpuOperator.enabled=true").daemonSets[0].Spec.Template.Spec.InitContainers
	if len(init) != 1 || len(init[0].Env) != 1 || init[0].Env[0].Name != "NVIDIA_VISIBLE_DEVICES" || init[0].Env[0].Value != "void" {
		t.Errorf("init containers %v", init)
	}
}

// TestScheme checks the schemes of Prometheus and the probes.
func TestScheme(t *testing.T) {
	for set, want := range map[string]struct {
		prometheus bool // uses HTTPS
		kubelet    corev1.URIScheme
	}{
		"web.secretName=":                                      {false, corev1.URISchemeHTTP},
		"web.secretName=null":                                  {false, corev1.URISchemeHTTP},
		"web=null":                                             {false, corev1.URISchemeHTTP},
		"web.secretName=w":                                     {true, corev1.URISchemeHTTPS},
		"web.secretName=w,web.probes=null":                     {true, corev1.URISchemeHTTPS},
		"web.secretName=w,web.probes=TCP":                      {true, ""},
		"web.secretName=w,web.probes=HTTP":                     {false, corev1.URISchemeHTTP},
		"web.secretName=w,serviceMonitor.endpoint.scheme=http": {false, corev1.URISchemeHTTPS},
	} {
		o := template(t, "--set", "serviceMonitor.enabled=true", "--set", set)
		if got := strings.Contains(o.unstructured["ServiceMonitor"], "scheme: https"); got != want.prometheus {
			t.Errorf("%s: Prometheus uses HTTPS: %v, want %v", set, got, want.prometheus)
		}
		container := o.daemonSets[0].Spec.Template.Spec.Containers[0]
		for _, probe := range []*corev1.Probe{container.StartupProbe, container.LivenessProbe, container.ReadinessProbe} {
			var got corev1.URIScheme
			if probe.HTTPGet != nil {
				got = probe.HTTPGet.Scheme
			}
			if got != want.kubelet {
				t.Errorf("%s: the probes use %q, want %q", set, got, want.kubelet)
			}
		}
	}
}

// TestClusterNames checks that two releases have different cluster roles and admission policies.
func TestClusterNames(t *testing.T) {
	names := make(map[string]bool)
	for _, r := range [][2]string{{"a", "b-c"}, {"a-b", "c"}} {
		o := template(t, "-n", r[0], "--set", "fullnameOverride="+r[1], "--set", "config.health.kubernetes.enabled=true")
		names["role "+o.roles[0].Name], names["policy "+o.policies[0].Name] = true, true
	}
	if len(names) != 4 {
		t.Errorf("two releases share names: %v", names)
	}
}

// TestEndpoint checks that a user's endpoint settings take precedence.
func TestEndpoint(t *testing.T) {
	for name, c := range map[string]struct {
		set  string
		want map[string]string // keys of the endpoint; "" if absent
	}{
		"nothing set": {"", map[string]string{"honorLabels": "true", "interval": `"15s"`, "port": `"metrics"`, "scheme": ""}},
		"false":       {"endpoint.honorLabels=false", map[string]string{"honorLabels": "false"}},
		"null":        {"endpoint.honorLabels=null,MONITOR.interval=null", map[string]string{"honorLabels": "true", "interval": ""}},
		"another": {
			"interval=15s,MONITOR.endpoint.interval=1m,MONITOR.endpoint.path=/m",
			map[string]string{"interval": `"1m"`, "path": `"/m"`},
		},
		"one added": {
			"relabelings[0].action=keep",
			map[string]string{"relabelings": `[{"sourceLabels":["__meta_kubernetes_pod_node_name"],"targetLabel":"instance"},` +
				`{"action":"labeldrop","regex":"namespace|pod|container"},{"action":"keep"}]`},
		},
		"replaced": {"endpoint.relabelings[0].action=keep", map[string]string{"relabelings": `[{"action":"keep"}]`}},
	} {
		for kind, key := range map[string]string{"ServiceMonitor": "serviceMonitor", "PodMonitor": "podMonitor"} {
			set := key + ".enabled=true"
			if c.set != "" {
				set += "," + key + "." + strings.ReplaceAll(c.set, "MONITOR", key)
			}
			text := template(t, "--set", set).unstructured[kind]
			var monitor struct {
				Spec struct {
					Endpoints           []map[string]json.RawMessage `json:"endpoints"`
					PodMetricsEndpoints []map[string]json.RawMessage `json:"podMetricsEndpoints"`
				} `json:"spec"`
			}
			if err := yaml.Unmarshal([]byte(text), &monitor); err != nil {
				t.Fatal(err)
			}
			endpoints := append(monitor.Spec.Endpoints, monitor.Spec.PodMetricsEndpoints...)
			if len(endpoints) != 1 {
				t.Fatalf("%s of %s: there are %d endpoints\n%s", kind, name, len(endpoints), text)
			}
			for key, want := range c.want {
				if got := string(endpoints[0][key]); got != want {
					t.Errorf("%s of %s: %s is %s, want %s", kind, name, key, got, want)
				}
			}
		}
	}
}
