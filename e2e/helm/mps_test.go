package helm

import (
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

const (
	withMPS = "mps.enabled=true,config.plugin.sharing.mps.resources[0].name=nvidia.com/gpu,config.plugin.sharing.mps.resources[0].replicas=4"

	someNodes = "mps.enabled=true,nodeConfigs.a.plugin.sharing.mps.resources[0].name=nvidia.com/gpu," +
		"nodeConfigs.a.plugin.sharing.mps.resources[0].replicas=4"
	memoryByMPS  = "mps.enabled=true,config.plugin.sharing.memory.resource=a.b/c,config.plugin.sharing.memory.enforcement=mps"
	defaultAgent = "gna-gpu-node-agent"

	nodeTerm = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]."
)

// TestMPSNodes checks for which configurations there are MPS control daemons.
func TestMPSNodes(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want map[string]string // node selection by agent
	}{
		"nothing set":   {nil, nil},
		"everywhere":    {settings([]string{withMPS}), map[string]string{defaultAgent: ""}},
		"memory by MPS": {settings([]string{memoryByMPS}), map[string]string{defaultAgent: ""}},
		"some nodes":    {settings([]string{someNodes}), map[string]string{defaultAgent + "-a": "gpu-node-agent/config In [a]"}},
		"but not some": {settings([]string{withMPS, "nodeConfigs.a.plugin.sharing.mps=null"}), map[string]string{
			defaultAgent: "gpu-node-agent/config NotIn [a]",
		}},
		"no more, off": {[]string{"--set-json", "config.plugin.sharing.mps.resources=[]"}, nil},
		"no more, with clients": {
			[]string{"--set", "mps.enabled=true", "--set-json", "config.plugin.sharing.mps.resources=[]"}, map[string]string{defaultAgent: ""},
		},
		"NVIDIA's file": {
			settings([]string{
				"mps.enabled=true,config.plugin.nvidiaConfig=/etc/gpu-node-agent/n",
				`files.n=sharing: {mps: {resources: [{name: nvidia.com/gpu\, replicas: 2}]}}`,
			}),
			map[string]string{defaultAgent: ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, append(c.args, "--set", "affinity=null")...)
			got := make(map[string]string)
			for _, ds := range o.mps() {
				agent := strings.TrimSuffix(ds.Name, "-mps-daemon")
				got[agent] = ""
				if a := ds.Spec.Template.Spec.Affinity; a != nil {
					got[agent] = terms(a.NodeAffinity)
				}
			}
			if len(got)+len(c.want) > 0 && !maps.Equal(got, c.want) {
				t.Errorf("daemons on %v, want %v", got, c.want)
			}
			for _, ds := range o.agents() {
				_, want := c.want[ds.Name]
				if _, mounted := mounts(ds)["/run/nvidia/mps"]; mounted != want {
					t.Errorf("%s has the directory of MPS: %v, want %v", ds.Name, mounted, want)
				}
				checkConfined(t, ds, nil)
			}
		})
	}
	// Where a node has an agent it has the daemons, whatever selects the agents.
	values := []string{
		someNodes, "nodeSelector.pool=gpu,tolerations[0].operator=Exists,gpuOperator.enabled=true,runtimeClassName=nvidia",
		nodeTerm + "key=k," + nodeTerm + "operator=Exists",
	}
	o := template(t, settings(values)...)
	agent, mps := o.agents()[1].Spec.Template.Spec, o.mps()[0].Spec.Template.Spec
	if terms(agent.Affinity.NodeAffinity) != terms(mps.Affinity.NodeAffinity) || mps.Affinity.PodAntiAffinity != nil ||
		!maps.Equal(agent.NodeSelector, mps.NodeSelector) || len(mps.NodeSelector) != 2 || !slices.Equal(agent.Tolerations, mps.Tolerations) ||
		mps.Tolerations[0].Operator != corev1.TolerationOpExists ||
		*mps.RuntimeClassName != "nvidia" || mps.PriorityClassName != agent.PriorityClassName || len(mps.InitContainers) != 1 {
		t.Errorf("daemons run on\n%v, agents on\n%v", mps, agent)
	}
}

// TestMPSPod checks what the pods of MPS control daemons may do, and that the chart ends none of them.
func TestMPSPod(t *testing.T) {
	for name, c := range map[string]struct {
		set        []string
		privileged bool
		args       string
		env        string
	}{
		"GPUs": {nil, true, "--mount-shm", "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"},
		"MIG": {
			[]string{"config.plugin.migStrategy=mixed"},
			true, "--mount-shm",
			"NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_MIG_MONITOR_DEVICES=all",
		},
		"logs": {
			[]string{"config.log.level=debug,config.log.format=console,goMemLimit=null"},
			true,
			"--log.format=console --log.level=debug --mount-shm", "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
		},
		"simulated GPUs": {
			[]string{"config.source.mode=sim"},
			false, "--source.mode=sim",
			"NVIDIA_VISIBLE_DEVICES=void NVIDIA_DRIVER_CAPABILITIES=compute,utility",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, settings(append(c.set, withMPS, "config.plugin.sharing.mps.root=/run/x/",
				"config.plugin.sharing.mps.control=/x/control", "config.health.kubernetes.enabled=true"))...)
			ds, agent := o.mps()[0], o.agents()[0]
			checkMPSRights(t, ds, c.privileged)
			container := ds.Spec.Template.Spec.Containers[0]
			if got, want := strings.Join(container.Args, " "),
				"mps-daemon --plugin.sharing.mps.root=/run/x --plugin.sharing.mps.control=/x/control "+c.args; got != want {
				t.Errorf("arguments %s, want %s", got, want)
			}
			var env []string
			for _, v := range container.Env {
				if v.Name != "GOMEMLIMIT" {
					env = append(env, v.Name+"="+v.Value)
				}
			}
			if got := strings.Join(env, " "); got != c.env {
				t.Errorf("environment %s, want %s", got, c.env)
			}
			checkMPSMounts(t, ds, agent, c.privileged)
			if a := agent.Spec.Template.Spec; a.HostPID || *a.Containers[0].SecurityContext.Privileged {
				t.Error("agent is privileged")
			}
		})
	}
	imported := template(t, settings([]string{
		withMPS,
		"config.plugin.nvidiaConfig=/etc/gpu-node-agent/n,files.n=flags: {mpsRoot: /run/y}",
	})...).mps()[0]
	if args := imported.Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--plugin.sharing.mps.root=/run/y") {
		t.Errorf("arguments %v with the root of NVIDIA's file", args)
	}
	got := template(t, settings([]string{withMPS, "mps.updateStrategy=null"})...).mps()[0].Spec.UpdateStrategy.Type
	if got != appsv1.OnDeleteDaemonSetStrategyType {
		t.Errorf("update strategy %q without a value", got)
	}
}

// checkMPSRights checks what MPS control daemons may do, and that neither the kubelet nor an update ends them.
func checkMPSRights(t *testing.T, ds *appsv1.DaemonSet, privileged bool) {
	t.Helper()
	pod := ds.Spec.Template.Spec
	if *pod.AutomountServiceAccountToken || pod.HostNetwork || pod.HostIPC || pod.HostPID != privileged {
		t.Errorf("pod has too many or too few rights: %v", pod)
	}
	if got := ds.Spec.UpdateStrategy.Type; got != appsv1.OnDeleteDaemonSetStrategyType {
		t.Errorf("update strategy %s: it would end CUDA processes", got)
	}
	container := pod.Containers[0]
	if container.LivenessProbe != nil || container.StartupProbe != nil {
		t.Error("the kubelet may end CUDA processes")
	}
	if container.Resources.Limits != nil {
		t.Errorf("limits %v", container.Resources.Limits)
	}
	if *container.SecurityContext.Privileged != privileged || !*container.SecurityContext.ReadOnlyRootFilesystem {
		t.Errorf("the container has the rights %v", container.SecurityContext)
	}
}

// checkMPSMounts checks the directories that MPS control daemons share with the agent.
func checkMPSMounts(t *testing.T, ds, agent *appsv1.DaemonSet, privileged bool) {
	t.Helper()
	propagation := corev1.MountPropagationBidirectional
	if !privileged { // which Kubernetes refuses then
		propagation = ""
	}
	if got := mounts(ds)["/run/x"]; got != (mount{path: "/run/x", propagation: propagation}) {
		t.Errorf("daemons have %v", got)
	}
	if got := mounts(agent)["/run/x"]; got != (mount{path: "/run/x", propagation: corev1.MountPropagationHostToContainer}) {
		t.Errorf("agent has %v", got)
	}
	shm := mount{}
	if privileged {
		shm = mount{path: "/run/x/shm", propagation: corev1.MountPropagationHostToContainer}
	}
	if got := mounts(agent)["/dev/shm"]; got != shm {
		t.Errorf("agent has %v at /dev/shm, want %v", got, shm)
	}
}

// TestMPSSelection checks that nothing that selects agents selects MPS control daemons.
func TestMPSSelection(t *testing.T) {
	o := template(t, settings([]string{withMPS, someNodes, "networkPolicy.enabled=true,serviceMonitor.enabled=true,podLabels.x=y"})...)
	podMonitor := template(t, settings([]string{withMPS, "podMonitor.enabled=true"})...).unstructured["PodMonitor"]
	var monitor struct {
		Spec struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal([]byte(podMonitor), &monitor); err != nil {
		t.Fatal(err)
	}
	selectors := []map[string]string{monitor.Spec.Selector.MatchLabels}
	for _, s := range o.services {
		selectors = append(selectors, s.Spec.Selector)
	}
	for _, p := range o.networkPolicies {
		selectors = append(selectors, p.Spec.PodSelector.MatchLabels)
	}
	if len(selectors) != 3 || len(o.daemonSets) != 4 {
		t.Fatalf("%d selectors, %d DaemonSets", len(selectors), len(o.daemonSets))
	}
	for _, ds := range o.daemonSets {
		pod := labels.Set(ds.Spec.Template.Labels)
		for _, s := range selectors {
			if got := labels.SelectorFromSet(s).Matches(pod); got == isMPS(ds) || len(s) == 0 {
				t.Errorf("%v selects %s with %v: %v", s, ds.Name, pod, got)
			}
		}
		for _, other := range o.daemonSets {
			if got := labels.SelectorFromSet(other.Spec.Selector.MatchLabels).Matches(pod); got != (ds == other) {
				t.Errorf("%s selects pods of %s: %v", other.Name, ds.Name, got)
			}
		}
	}
}

// TestMemoryLimits checks what an agent needs to limit the memory of containers.
func TestMemoryLimits(t *testing.T) {
	const memory = "config.plugin.sharing.memory.resource=a.b/c"
	for name, c := range map[string]struct {
		set  string
		want bool
	}{
		"off":        {"", false},
		"auto":       {memory, true},
		"driver":     {memory + ",config.plugin.sharing.memory.enforcement=driver", true},
		"MPS":        {memoryByMPS, false},
		"none":       {memory + ",config.plugin.sharing.memory.enforcement=none", false},
		"no plugin":  {memory + ",config.plugin.enabled=false", false},
		"simulation": {memory + ",config.source.mode=sim", false},
	} {
		t.Run(name, func(t *testing.T) {
			all := mounts(template(t, settings([]string{c.set})...).agents()[0])
			var got []string
			for _, dir := range []string{"/sys/fs/cgroup", "/var/log/containers", "/var/log/pods"} {
				if m, mounted := all[dir]; mounted {
					if got = append(got, dir); !m.readOnly || m.path != dir {
						t.Errorf("%s is %v", dir, m)
					}
				}
			}
			if c.want != (len(got) == 3) || !c.want && len(got) > 0 {
				t.Errorf("agent has %v", got)
			}
		})
	}
}

type mount struct {
	path        string // on the node
	readOnly    bool
	propagation corev1.MountPropagationMode
}

// mounts returns the directories of the node in a DaemonSet's container, by path.
func mounts(ds *appsv1.DaemonSet) map[string]mount {
	pod := ds.Spec.Template.Spec
	all := make(map[string]mount)
	for _, m := range pod.Containers[0].VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if host := pod.Volumes[i].HostPath; host != nil {
			propagation := corev1.MountPropagationMode("")
			if m.MountPropagation != nil {
				propagation = *m.MountPropagation
			}
			all[m.MountPath] = mount{path: host.Path, readOnly: m.ReadOnly, propagation: propagation}
		}
	}
	return all
}
