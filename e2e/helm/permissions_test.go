package helm

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// TestPermissions checks the rights of the pod and its service account.
func TestPermissions(t *testing.T) {
	const conditions = "get nodes; patch nodes/status; create,patch events; "
	const slices = "get resourceclaims; list,watch,create,update,delete resourceslices"
	const taint = "config.node.taints[0]."
	const memory = "config.plugin.sharing.memory.resource=nvidia.com/gpu-memory"
	for name, c := range map[string]struct {
		set   []string
		rules string // of the cluster role, and of the role in the namespace; "" for none, and no token
		caps  []corev1.Capability
	}{
		"nothing set":   {},
		"conditions":    {[]string{"config.health.kubernetes.enabled=true"}, conditions + "get pods", nil},
		"pod labels":    {[]string{"config.metrics.podLabels={team}"}, "get,list,watch pods", nil},
		"pod UIDs":      {[]string{"config.metrics.podUID=true"}, "get,list,watch pods", nil},
		"no pod UIDs":   {[]string{"config.metrics.podUID=false", "nodeConfigs.a.metrics.podUID=null"}, "", nil},
		"some pod UIDs": {[]string{"nodeConfigs.a.metrics.podUID=true"}, "get,list,watch pods", nil},
		"both": {
			[]string{"config.health.kubernetes.enabled=true", "config.metrics.podLabels={team}"},
			conditions + "get,list,watch pods", nil,
		},
		"some nodes":     {[]string{"nodeConfigs.a.health.kubernetes.enabled=true"}, conditions + "get pods", nil},
		"DRA":            {[]string{withDRA}, "get nodes; " + slices, nil},
		"DRA, set back":  {[]string{withDRA, "config.plugin.api=devicePlugin"}, "get nodes; " + slices, nil},
		"DRA and labels": {[]string{withDRA, "config.metrics.podLabels={team}"}, "get nodes; get,list,watch pods; " + slices, nil},
		"DRA and all": {
			[]string{withDRA, "config.health.kubernetes.enabled=true", "config.metrics.podUID=true"},
			conditions + "get,list,watch pods; " + slices, nil,
		},
		"DRA and MIG":      {[]string{withDRA, "config.plugin.migStrategy=mixed"}, "get nodes; " + slices, []corev1.Capability{"SYS_ADMIN"}},
		"labels":           {[]string{"config.node.labels.output=api"}, "get,patch nodes", nil},
		"labels to a file": {[]string{"config.node.labels.output=file"}, "", nil},
		"labels to NFD":    {[]string{"config.node.labels.output=nodeFeature"}, "get nodes; local: get,create,update,delete nodefeatures", nil},
		"labels set off":   {[]string{"config.node.labels.output=off"}, "get,patch nodes; local: get,create,update,delete nodefeatures", nil},
		"off of Helm":      {[]string{"config.node.labels.output=false"}, "get,patch nodes; local: get,create,update,delete nodefeatures", nil},
		"labels, null":     {[]string{"config.node.labels.output=null", "config.node.idle.after=0s"}, "", nil},
		"some labels":      {[]string{"nodeConfigs.a.node.labels.output=api"}, "get,patch nodes", nil},
		"taints":           {[]string{taint + "key=a," + taint + "when=cordoned," + taint + "effect=NoExecute"}, "get,patch nodes", nil},
		"taints, null":     {[]string{"config.node.taints=null"}, "", nil},
		"startup taint":    {[]string{"config.node.startupTaint=a:NoExecute"}, "get,patch nodes", nil},
		"no startup taint": {[]string{"config.node.startupTaint="}, "", nil},
		"idle pods":        {[]string{"config.node.idle.after=30m"}, "create,patch events; get pods", nil},
		"idle, conditions": {[]string{"config.node.idle.after=30m", "config.health.kubernetes.enabled=true"}, conditions + "get pods", nil},
		"idle, labels": {
			[]string{"config.node.idle.after=30m", "config.metrics.podUID=true"},
			"create,patch events; get,list,watch pods",
			nil,
		},
		"profiling":         {[]string{"config.metrics.fields={default,profiling}"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"a PROF field":      {[]string{"config.metrics.fields={DCGM_FI_PROF_SM_ACTIVE}"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"MIG":               {[]string{"config.plugin.migStrategy=mixed"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"MIG, other plugin": {[]string{"config.plugin.migStrategy=mixed", "config.plugin.enabled=false"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"CDI, other plugin": {[]string{"config.plugin.cdi.generate=true", "config.plugin.enabled=false"}, "", nil},
		"mounts":            {[]string{"config.plugin.deviceList={volume-mounts}"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"never":             {[]string{"config.plugin.migStrategy=mixed", "sysAdmin=never"}, "", nil},
		"null":              {[]string{"config.plugin.migStrategy=mixed", "sysAdmin=null"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"always":            {[]string{"sysAdmin=always"}, "", []corev1.Capability{"SYS_ADMIN"}},
		"a CSV": {[]string{
			"config.metrics.fieldsFile=/etc/gpu-node-agent/a.csv",
			"files.a\\.csv= DCGM_FI_PROF_SM_ACTIVE\\, gauge\\, x",
		}, "", []corev1.Capability{"SYS_ADMIN"}},
		"a comment": {[]string{
			"config.metrics.fieldsFile=/etc/gpu-node-agent/a.csv",
			"files.a\\.csv=# DCGM_FI_PROF_SM_ACTIVE\\, gauge\\, x",
		}, "", nil},
		"memory limits":     {[]string{memory}, "", []corev1.Capability{"SYS_ADMIN"}},
		"limits of a hook":  {[]string{memory, "config.plugin.deviceList={cdi-cri}"}, "get nodes", nil},
		"CDI alone":         {[]string{"config.plugin.deviceList={cdi-cri,cdi-annotations}"}, "get nodes", nil},
		"some CDI alone":    {[]string{"nodeConfigs.a.plugin.deviceList={cdi-annotations}"}, "get nodes", nil},
		"CDI beside others": {[]string{"config.plugin.deviceList={cdi-cri,envvar}"}, "", nil},
		"CDI alone, off":    {[]string{"config.plugin.deviceList={cdi-cri}", "config.plugin.enabled=false"}, "", nil},
		"CDI and events": {
			[]string{"config.plugin.deviceList={cdi-cri}", "config.health.kubernetes.enabled=true"},
			conditions + "get pods",
			nil,
		},
		"advice on memory": {[]string{memory, "config.plugin.sharing.memory.enforcement=none"}, "", nil},
		"simulated memory": {[]string{memory, "config.source.mode=sim"}, "", nil},
		"simulated MIG":    {[]string{"config.plugin.migStrategy=mixed", "config.source.mode=sim", "sysAdmin=always"}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, settings(c.set)...)
			var rules []string
			add := func(prefix string, of []rbacv1.PolicyRule) {
				for _, r := range of {
					rules = append(rules, prefix+strings.Join(r.Verbs, ",")+" "+strings.Join(r.Resources, ","))
				}
			}
			for _, role := range o.roles {
				add("", role.Rules)
			}
			for _, role := range o.localRoles {
				add("local: ", role.Rules)
			}
			if got := strings.Join(rules, "; "); got != c.rules {
				t.Errorf("the cluster role has %q, want %q", got, c.rules)
			}
			if len(o.bindings) != len(o.roles) || len(o.localBinds) != len(o.localRoles) {
				t.Errorf("%d and %d roles, %d and %d bindings", len(o.roles), len(o.localRoles), len(o.bindings), len(o.localBinds))
			}
			token := false
			for _, ds := range o.daemonSets {
				token = token || *ds.Spec.Template.Spec.AutomountServiceAccountToken
				if ds.Name == "gna-gpu-node-agent" {
					checkConfined(t, ds, c.caps)
				}
			}
			if token != (c.rules != "") {
				t.Errorf("pod has a token: %v, want one only with rules", token)
			}
		})
	}
}

// TestAdmissionPolicy checks when the chart creates the policies for the writes of its account, and that each is in force
// for this account only. e2e/cluster checks what they refuse.
func TestAdmissionPolicy(t *testing.T) {
	const enabled, conditions = "config.health.kubernetes.enabled=true", "nodes/status events"
	for name, c := range map[string]struct {
		args []string
		want string // the resources that the policies cover: what the cluster role lets the account write
	}{
		"nothing set":          {nil, ""},
		"conditions":           {settings([]string{enabled}), conditions},
		"some nodes":           {settings([]string{"nodeConfigs.a.health.kubernetes.enabled=true"}), conditions},
		"pod labels":           {settings([]string{"config.metrics.podLabels={team}"}), ""}, // reads only
		"another account name": {settings([]string{enabled, "serviceAccount.name=a"}), conditions},
		"off":                  {settings([]string{enabled, withDRA, "rbac.admissionPolicy=false"}), ""},
		"null":                 {settings([]string{enabled, "rbac.admissionPolicy=null"}), ""},
		"no rights created":    {settings([]string{enabled, withDRA, "rbac.create=false"}), ""},
		"shared account":       {settings([]string{enabled, withDRA, "serviceAccount.create=false,serviceAccount.name=a"}), ""},
		"before the claim":     {append(settings([]string{enabled}), "--kube-version=1.29.9"), ""},
		"a provider's version": {append(settings([]string{enabled}), "--kube-version=v1.30.0-gke.1"), conditions},
		"DRA":                  {settings([]string{withDRA}), "resourceslices"},
		"DRA, set back":        {settings([]string{withDRA, "config.plugin.api=devicePlugin"}), "resourceslices"},
		"both":                 {settings([]string{withDRA, enabled}), conditions + " resourceslices"},
		"labels":               {settings([]string{"config.node.labels.output=api"}), "nodes"},
		"taints":               {[]string{"--set-json", "config.node.taints=[]"}, "nodes"},
		"startup taint":        {settings([]string{"nodeConfigs.a.node.startupTaint=a:NoExecute"}), "nodes"},
		"labels to NFD":        {settings([]string{"config.node.labels.output=nodeFeature"}), "nodefeatures"},
		"labels set off":       {settings([]string{"config.node.labels.output=off"}), "nodes nodefeatures"},
		"labels to a file":     {settings([]string{"config.node.labels.output=file"}), ""},
		"idle pods":            {settings([]string{"config.node.idle.after=30m"}), "events"},
		"README":               {installCommand(t, filepath.Join("..", "..", "README.md")), conditions + " nodes"},
		"README of the chart":  {installCommand(t, filepath.Join(chart, "README.md")), conditions + " nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, c.args...)
			if len(o.policies) != len(o.policyBinds) {
				t.Fatalf("%d policies and %d bindings", len(o.policies), len(o.policyBinds))
			}
			var resources []string
			for i, p := range o.policies {
				account := "'system:serviceaccount:gpu:" + o.daemonSets[0].Spec.Template.Spec.ServiceAccountName + "'"
				if m := p.Spec.MatchConditions; len(m) != 1 || !strings.HasSuffix(m[0].Expression, " == "+account) {
					t.Errorf("%s applies to %v, want the account %s", p.Name, m, account)
				}
				if *p.Spec.FailurePolicy != admissionv1.Fail {
					t.Errorf("%s has the failure policy %s", p.Name, *p.Spec.FailurePolicy)
				}
				b := o.policyBinds[i].Spec
				if b.PolicyName != p.Name || !slices.Equal(b.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) ||
					b.MatchResources != nil {
					t.Errorf("%s has the binding %v", p.Name, b)
				}
				for _, r := range p.Spec.MatchConstraints.ResourceRules {
					resources = append(resources, r.Resources...)
				}
			}
			if got := strings.Join(resources, " "); got != c.want {
				t.Errorf("the policies cover %q, want %q", got, c.want)
			}
		})
	}
}

// TestKernelLog checks that a container is privileged only if it gets the node's kernel log.
func TestKernelLog(t *testing.T) {
	const enabled = "kernelLog.enabled=true"
	for name, c := range map[string]struct {
		set  []string
		path string // of the kernel log in the container; "" for none
		warn bool   // the notes say that it cannot be read
	}{
		"nothing set":            {},
		"null":                   {[]string{"kernelLog=null"}, "", false},
		"enabled":                {[]string{enabled}, "/dev/kmsg", false},
		"at another path":        {[]string{enabled, "config.source.kernelLogPath=/host/kmsg/"}, "/host/kmsg", false},
		"with SYS_ADMIN":         {[]string{enabled, "sysAdmin=always"}, "/dev/kmsg", false},
		"no capabilities in all": {[]string{enabled, "securityContext.capabilities=null"}, "/dev/kmsg", false},
		"off in the config":      {[]string{enabled, "config.source.kernelLog=false"}, "", false},
		"simulated":              {[]string{enabled, "config.source.mode=sim"}, "", false},
		"in the config only":     {[]string{"config.source.kernelLog=true"}, "", true},
		"in the config, sim":     {[]string{"config.source.kernelLog=true,config.source.mode=sim"}, "", false}, // kernelLog.enabled has no effect
		"from another file": {[]string{
			"config.source.kernelLog=true,config.source.kernelLogPath=/log/kmsg",
			"extraVolumeMounts[0].name=log,extraVolumeMounts[0].mountPath=/log",
		}, "", false},
		"from a file, simulated": {[]string{
			"config.source.mode=sim,config.source.kernelLog=true,config.source.kernelLogPath=/log/kmsg",
			"extraVolumeMounts[0].name=log,extraVolumeMounts[0].mountPath=/log",
		}, "", false},
		"off on some nodes":       {[]string{enabled, "nodeConfigs.a.source.kernelLog=false"}, "/dev/kmsg", false},
		"off on some nodes, null": {[]string{enabled, "nodeConfigs.a.source.kernelLog=null"}, "/dev/kmsg", false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := strings.Contains(notes(t, settings(c.set)...), "kernelLog.enabled"); got != c.warn {
				t.Errorf("the notes name kernelLog.enabled: %v, want %v", got, c.warn)
			}
			for _, ds := range template(t, settings(c.set)...).daemonSets {
				path := c.path
				if ds.Name != "gna-gpu-node-agent" && name == "off on some nodes" {
					path = ""
				}
				if path == "" {
					checkConfined(t, ds, nil)
				}
				checkKernelLog(t, ds, path)
			}
		})
	}
}

// checkKernelLog checks that an agent has the node's kernel log at a path, and what the container needs to read it; "" for neither.
func checkKernelLog(t *testing.T, ds *appsv1.DaemonSet, path string) {
	t.Helper()
	pod := ds.Spec.Template.Spec
	for _, init := range pod.InitContainers {
		if *init.SecurityContext.Privileged {
			t.Errorf("%s: init container is privileged", ds.Name)
		}
	}
	// Kubernetes refuses a privileged container that forbids privilege escalation.
	s := pod.Containers[0].SecurityContext
	if *s.Privileged != (path != "") || *s.AllowPrivilegeEscalation != *s.Privileged {
		t.Errorf("%s: the container has the rights %v, the kernel log is at %q", ds.Name, s, path)
	}
	if path != "" && !slices.Contains(s.Capabilities.Add, "SYSLOG") {
		t.Errorf("%s: the container adds %v, want SYSLOG", ds.Name, s.Capabilities.Add)
	}
	got := kernelLogMounts(pod)
	if strings.Join(got, " ") != path {
		t.Errorf("%s: /dev/kmsg is at %v, want %q", ds.Name, got, path)
	}
}

// kernelLogMounts returns where the container of an agent has the node's kernel log.
func kernelLogMounts(pod corev1.PodSpec) (paths []string) {
	for _, v := range pod.Volumes {
		if h := v.HostPath; h != nil && h.Path == "/dev/kmsg" && *h.Type == corev1.HostPathCharDev {
			for _, m := range pod.Containers[0].VolumeMounts {
				if m.Name == v.Name {
					paths = append(paths, m.MountPath)
				}
			}
		}
	}
	return paths
}

// installCommand returns the flags --set of the first `helm install` of a document.
func installCommand(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, command, found := strings.Cut(string(text), "helm install ")
	command, _, ends := strings.Cut(command, "\n```")
	if !found || !ends {
		t.Fatalf("%s: no helm install", file)
	}
	var args []string
	for _, m := range regexp.MustCompile(`--set (\S+)`).FindAllStringSubmatch(command, -1) {
		args = append(args, "--set", m[1])
	}
	return args
}

// TestKernelLogConfig checks that the value of the chart reaches the agent's configuration.
func TestKernelLogConfig(t *testing.T) {
	for set, want := range map[string]bool{
		"service.port=9400": false, "kernelLog.enabled=true": true, "kernelLog.enabled=true,config.source.kernelLog=false": false,
		"kernelLog.enabled=true,config.source.mode=sim": false,
	} {
		o := template(t, "--set", set)
		if got := strings.Contains(o.configMaps[0].Data["config.yaml"], "kernelLog: true"); got != want {
			t.Errorf("%s: the agent reads the kernel log: %v, want %v", set, got, want)
		}
	}
}

// checkConfined checks that a pod has only the rights of its capabilities.
func checkConfined(t *testing.T, ds *appsv1.DaemonSet, caps []corev1.Capability) {
	t.Helper()
	pod := ds.Spec.Template.Spec
	if pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Error("pod uses the host's namespaces")
	}
	if pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("pod has no seccomp profile")
	}
	s := pod.Containers[0].SecurityContext
	if *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
		!reflect.DeepEqual(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("container has too many rights: %v", s)
	}
	if !slices.Equal(s.Capabilities.Add, caps) {
		t.Errorf("the container has the capabilities %v, want %v", s.Capabilities.Add, caps)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil && (v.HostPath.Path == "/" || v.HostPath.Path == "/var/lib/kubelet") {
			t.Errorf("volume %s shows the container %s", v.Name, v.HostPath.Path)
		}
	}
}

// TestNodeAffinity checks on which nodes the agents run.
func TestNodeAffinity(t *testing.T) {
	const gpus = "feature.node.kubernetes.io/pci-10de.present In [true] | feature.node.kubernetes.io/cpu-model.vendor_id In [NVIDIA] | " +
		"nvidia.com/gpu.present In [true]"
	for name, c := range map[string]struct {
		set  []string
		want map[string]string // by DaemonSet
	}{
		"nothing set": {nil, map[string]string{"gna-gpu-node-agent": gpus}},
		"other affinity": {[]string{
			"affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
			"affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
		}, map[string]string{"gna-gpu-node-agent": gpus}},
		"custom terms": {[]string{
			nodeTerm + "key=a," + nodeTerm + "operator=Exists",
		}, map[string]string{"gna-gpu-node-agent": "a Exists []"}},
		"null":          {[]string{"affinity=null"}, map[string]string{"gna-gpu-node-agent": ""}},
		"an empty text": {[]string{"affinity="}, map[string]string{"gna-gpu-node-agent": ""}},
		"empty parts":   {[]string{"affinity.nodeAffinity=null,affinity.podAntiAffinity=null"}, map[string]string{"gna-gpu-node-agent": gpus}},
		"null by label": {[]string{"affinity=null", "nodeConfigs.a.log.level=debug"}, map[string]string{
			"gna-gpu-node-agent":   "gpu-node-agent/config NotIn [a]",
			"gna-gpu-node-agent-a": "gpu-node-agent/config In [a]",
		}},
		"simulated": {[]string{"config.source.mode=sim"}, map[string]string{"gna-gpu-node-agent": ""}},
		"by label": {[]string{"config.source.mode=sim", "nodeConfigs.a.log.level=debug", "nodeConfigs.b.log.level=debug"}, map[string]string{
			"gna-gpu-node-agent":   "gpu-node-agent/config NotIn [a b]",
			"gna-gpu-node-agent-a": "gpu-node-agent/config In [a]",
			"gna-gpu-node-agent-b": "gpu-node-agent/config In [b]",
		}},
		"GPUs by label": {[]string{"nodeConfigs.a.log.level=debug"}, map[string]string{
			"gna-gpu-node-agent":   strings.ReplaceAll(gpus+" ", "] ", "], gpu-node-agent/config NotIn [a] "),
			"gna-gpu-node-agent-a": strings.ReplaceAll(gpus+" ", "] ", "], gpu-node-agent/config In [a] "),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := make(map[string]string)
			for _, ds := range template(t, settings(c.set)...).daemonSets {
				affinity := ds.Spec.Template.Spec.Affinity
				got[ds.Name] = terms(affinity.NodeAffinity)
				openShiftByKind := affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
				if len(openShiftByKind) != 1 || openShiftByKind[0].TopologyKey != corev1.LabelHostname || openShiftByKind[0].NamespaceSelector == nil {
					t.Errorf("%s: two agents may run on one node: %v", ds.Name, openShiftByKind)
				}
			}
			for name, want := range c.want {
				if got[name] != strings.TrimSpace(want) {
					t.Errorf("%s runs on\n%s, want\n%s", name, got[name], want)
				}
			}
			if len(got) != len(c.want) {
				t.Errorf("DaemonSets %v", got)
			}
		})
	}
}

func terms(a *corev1.NodeAffinity) string {
	if a == nil {
		return ""
	}
	var all []string
	for _, term := range a.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		var one []string
		for _, e := range term.MatchExpressions {
			one = append(one, fmt.Sprintf("%s %s %v", e.Key, e.Operator, e.Values))
		}
		all = append(all, strings.Join(one, ", "))
	}
	return strings.Join(all, " | ")
}

// TestReload checks that a changed configuration leaves the pod unchanged, because a change would restart it.
func TestReload(t *testing.T) {
	before := template(t, "--set", "config.health.temperature=80").daemonSets[0]
	after := template(t, "--set", "config.health.temperature=85", "--set", "config.plugin.exclude={0}").daemonSets[0]
	if !reflect.DeepEqual(before.Spec, after.Spec) {
		t.Error("the pod's template depends on the configuration")
	}
}
