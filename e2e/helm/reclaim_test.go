package helm

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

const withReclaim = "reclaim.enabled=true,reclaim.policy.idle.after=2h,reclaim.policy.namespaces={a,b}"

// TestReclaimRights checks that reclaim has rights in the namespaces of its policy only, to read unless dryRun is false, and that a policy
// limits what it writes.
func TestReclaimRights(t *testing.T) {
	const read, write = "get namespaces; list pods; list deployments,replicasets,statefulsets; list jobs,cronjobs",
		"get namespaces; list,patch pods; get,list,patch deployments,replicasets,statefulsets; list,patch jobs; list cronjobs; " +
			"patch deployments/scale,replicasets/scale,statefulsets/scale; create pods/eviction; create events"
	for name, c := range map[string]struct {
		args    []string
		rules   string // in each namespace of the policy; "" for none
		account string
		policy  bool
	}{
		"nothing set":   {nil, "", "", false},
		"only a policy": {[]string{"reclaim.policy.namespaces={a}"}, "", "", false},
		"dry run":       {[]string{withReclaim}, read, "gna-gpu-node-agent-reclaim", false},
		"dry run, null": {[]string{withReclaim, "reclaim.dryRun=null"}, read, "gna-gpu-node-agent-reclaim", false},
		"changes":       {[]string{withReclaim, "reclaim.dryRun=false"}, write, "gna-gpu-node-agent-reclaim", true},
		"suspended":     {[]string{withReclaim, "reclaim.dryRun=false,reclaim.suspend=true"}, write, "gna-gpu-node-agent-reclaim", true},
		"no admission policy": {
			[]string{withReclaim, "reclaim.dryRun=false,rbac.admissionPolicy=false"},
			write, "gna-gpu-node-agent-reclaim",
			false,
		},
		"another account name": {[]string{withReclaim, "reclaim.dryRun=false,reclaim.serviceAccount.name=x"}, write, "x", true},
		"a shared account": {
			[]string{withReclaim, "reclaim.dryRun=false,reclaim.serviceAccount.name=x,reclaim.serviceAccount.create=false"},
			write, "x", false,
		},
		"agents' own account": {
			[]string{withReclaim, "reclaim.dryRun=false,serviceAccount.create=false,serviceAccount.name=x"},
			write,
			"gna-gpu-node-agent-reclaim", true,
		},
		"no rights created": {[]string{withReclaim, "reclaim.dryRun=false,rbac.create=false,reclaim.serviceAccount.name=x"}, "", "x", false},
		"a twice":           {[]string{withReclaim + ",reclaim.policy.namespaces={a,b,a}"}, read, "gna-gpu-node-agent-reclaim", false},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, settings(c.args)...)
			if len(o.roles) != 0 || len(o.bindings) != 0 {
				t.Errorf("cluster roles %v and bindings %v", o.roles, o.bindings)
			}
			want := map[string]string{}
			if c.rules != "" {
				want = map[string]string{"a": c.rules, "b": c.rules, "gpu": "list pods"}
			}
			if len(o.localRoles) != len(want) || len(o.localBinds) != len(want) {
				t.Fatalf("%d roles and %d bindings, want %d", len(o.localRoles), len(o.localBinds), len(want))
			}
			checkReclaimRoles(t, o, want, c.account)
			if got := len(o.cronJobs) == 1; got != (c.account != "") {
				t.Fatalf("%d CronJobs", len(o.cronJobs))
			}
			for _, j := range o.cronJobs {
				checkReclaim(t, j, c.account, strings.Contains(strings.Join(c.args, ","), "reclaim.dryRun=false"))
			}
			if got := len(o.policies) == 1; got != c.policy {
				t.Fatalf("%d policies", len(o.policies))
			}
			for _, p := range o.policies {
				if m := p.Spec.MatchConditions; len(m) != 1 || !strings.HasSuffix(m[0].Expression, " == 'system:serviceaccount:gpu:"+c.account+"'") {
					t.Errorf("the policy applies to %v, want the account %s", m, c.account)
				}
			}
		})
	}
}

// checkReclaimRoles checks the rules of the roles by namespace, and that only the account has them.
func checkReclaimRoles(t *testing.T, o objects, want map[string]string, account string) {
	t.Helper()
	for i, role := range o.localRoles {
		var rules []string
		for _, r := range role.Rules {
			rules = append(rules, strings.Join(r.Verbs, ",")+" "+strings.Join(r.Resources, ","))
			if r.Resources[0] == "namespaces" && !slices.Equal(r.ResourceNames, []string{role.Namespace}) {
				t.Errorf("%s: the account can get the namespaces %v", role.Namespace, r.ResourceNames)
			}
		}
		if got := strings.Join(rules, "; "); got != want[role.Namespace] {
			t.Errorf("%s: the role has %q, want %q", role.Namespace, got, want[role.Namespace])
		}
		b := o.localBinds[i]
		if b.Namespace != role.Namespace || b.RoleRef.Name != role.Name || len(b.Subjects) != 1 ||
			b.Subjects[0] != (rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: "gpu"}) {
			t.Errorf("%s: the role %s has the binding %v, want the account %s", role.Namespace, role.Name, b, account)
		}
	}
}

// checkReclaim checks that the pods of reclaim have no privileges, and that they make changes only if that is wanted.
func checkReclaim(t *testing.T, j *batchv1.CronJob, account string, apply bool) {
	t.Helper()
	job := j.Spec.JobTemplate.Spec
	if j.Spec.ConcurrencyPolicy != batchv1.ForbidConcurrent || *job.BackoffLimit != 0 || job.TTLSecondsAfterFinished == nil ||
		job.ActiveDeadlineSeconds == nil {
		t.Errorf("CronJob %+v", j.Spec)
	}
	pod := job.Template.Spec
	if pod.ServiceAccountName != account || !*pod.AutomountServiceAccountToken || pod.RestartPolicy != corev1.RestartPolicyNever ||
		*pod.TerminationGracePeriodSeconds < 30 {
		t.Errorf("pod %+v", pod)
	}
	if pod.HostNetwork || pod.HostPID || pod.HostIPC || !*pod.SecurityContext.RunAsNonRoot ||
		pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("the pod has privileges: %+v", pod)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("volume %s is a directory of the node", v.Name)
		}
	}
	c := pod.Containers[0]
	if s := c.SecurityContext; s.Privileged != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.Capabilities.Add != nil {
		t.Errorf("the container has privileges: %v", s)
	}
	if c.Args[0] != "reclaim" || slices.Contains(c.Args, "--apply") != apply {
		t.Errorf("arguments %q, want changes: %v", c.Args, apply)
	}
	if !slices.Contains(c.Env, corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", Value: "void"}) {
		t.Errorf("the image's variable requests all GPUs: %v", c.Env)
	}
}

// TestReclaimFindsAgents checks that the labels by which reclaim finds agents select the agents' pods, and no other pods, and
// that the network policy admits it.
func TestReclaimFindsAgents(t *testing.T) {
	const mps = "config.plugin.sharing.mps.resources[0]."
	o := template(t, settings([]string{
		withReclaim, "nameOverride=x", "nodeConfigs.a.log.level=debug", "mps.enabled=true", mps + "name=nvidia.com/gpu", mps + "replicas=4",
		"networkPolicy.enabled=true", "networkPolicy.from[0].namespaceSelector.matchLabels.a=b",
	})...)
	var selector map[string]string
	own := o.cronJobs[0].Spec.JobTemplate.Spec.Template
	for _, arg := range own.Spec.Containers[0].Args {
		if text, ok := strings.CutPrefix(arg, "--agent-selector="); ok {
			selector = make(map[string]string)
			for label := range strings.SplitSeq(text, ",") {
				key, value, _ := strings.Cut(label, "=")
				selector[key] = value
			}
		}
	}
	matches := func(selector, labels map[string]string) bool {
		for key, value := range selector {
			if labels[key] != value {
				return false
			}
		}
		return len(selector) > 0
	}
	for _, ds := range o.daemonSets {
		if got, want := matches(selector, ds.Spec.Template.Labels), !isMPS(ds); got != want {
			t.Errorf("%s is an agent by the labels %v: %v", ds.Name, selector, got)
		}
	}
	if matches(selector, own.Labels) || matches(o.services[0].Spec.Selector, own.Labels) {
		t.Errorf("the pods of reclaim have the labels of agents: %v", own.Labels)
	}
	admitted := false
	for _, from := range o.networkPolicies[0].Spec.Ingress[0].From {
		admitted = admitted || from.NamespaceSelector == nil && from.PodSelector != nil && matches(from.PodSelector.MatchLabels, own.Labels)
	}
	if !admitted {
		t.Errorf("the network policy admits %v, want the pods with the labels %v", o.networkPolicies[0].Spec.Ingress, own.Labels)
	}
}

// TestReclaimWeb checks how reclaim reaches agents with TLS and passwords.
func TestReclaimWeb(t *testing.T) {
	for name, c := range map[string]struct {
		set      []string
		want     string // the arguments about the connection
		password bool
		files    bool
	}{
		"nothing set":    {nil, "", false, false},
		"TLS":            {[]string{"web.secretName=w"}, "--agent-scheme=https", false, false},
		"passwords only": {[]string{"web.secretName=w,web.probes=HTTP", "reclaim.web.secretName=s,reclaim.web.user=u"}, "--user=u", true, false},
		"an authority": {
			[]string{"web.secretName=w", "reclaim.web.secretName=s,reclaim.web.caFile=ca.crt,reclaim.web.serverName=x"},
			"--agent-scheme=https --ca-file=/etc/gpu-node-agent-web/ca.crt --server-name=x", false, true,
		},
		"any certificate": {[]string{"web.secretName=w", "reclaim.web.insecure=true"}, "--agent-scheme=https --insecure", false, false},
		"a certificate": {
			[]string{"web.secretName=w", "reclaim.web.secretName=s,reclaim.web.certFile=a,reclaim.web.keyFile=b"},
			"--agent-scheme=https --cert-file=/etc/gpu-node-agent-web/a --key-file=/etc/gpu-node-agent-web/b", false, true,
		},
		"null": {[]string{"reclaim.web=null"}, "", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			pod := template(t, settings(append(c.set, withReclaim))...).cronJobs[0].Spec.JobTemplate.Spec.Template.Spec
			container := pod.Containers[0]
			args := slices.DeleteFunc(slices.Clone(container.Args[1:]), func(arg string) bool {
				return strings.HasPrefix(arg, "--policy=") || strings.HasPrefix(arg, "--agent-namespace=") ||
					strings.HasPrefix(arg, "--agent-selector=")
			})
			if got := strings.Join(args, " "); got != c.want {
				t.Errorf("arguments %q, want %q", got, c.want)
			}
			password := slices.ContainsFunc(container.Env, func(e corev1.EnvVar) bool {
				return e.Name == "GPU_NODE_AGENT_PASSWORD" && e.ValueFrom.SecretKeyRef.Name == "s" && e.ValueFrom.SecretKeyRef.Key == "password"
			})
			files := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Secret != nil && v.Secret.SecretName == "s" }) &&
				slices.ContainsFunc(container.VolumeMounts,
					func(m corev1.VolumeMount) bool { return m.MountPath == "/etc/gpu-node-agent-web" && m.ReadOnly })
			if password != c.password || files != c.files {
				t.Errorf("password %v, files %v, want %v, %v", password, files, c.password, c.files)
			}
		})
	}
}

// TestReclaimPolicies compares the schema of reclaim.policy with the command: both must accept a policy, or both must refuse it.
func TestReclaimPolicies(t *testing.T) {
	schema, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	const required = "namespaces: [research], idle: {after: 2h}"
	of := func(text string) string { return "{" + required + ", " + text + "}" }
	accepted := []string{
		"{" + required + "}", "{namespaces: [research, a-b, a1], idle: {after: 1h30m, evidence: noWork}}",
		of("minimumAge: 0s, notice: 1.5h, leaveFor: 168h, maxPerRun: 1"),
		of("optOutAnnotation: example.com/keep"),
		of("podSelector: {matchLabels: {a: b}, matchExpressions: [{key: tier, operator: In, values: [x]}, {key: a/b, operator: Exists}]}"),
	}
	refused := []string{
		of("x: y"), of("namespace: a"), "{namespaces: [A], idle: {after: 2h}}", "{namespaces: [team-*], idle: {after: 2h}}",
		"{namespaces: research, idle: {after: 2h}}",
		"{namespaces: [a], idle: {after: 2}}", "{namespaces: [a], idle: {after: 2d}}", "{namespaces: [a], idle: {after: -2h}}",
		"{namespaces: [a], idle: {after: 2h, evidence: idle}}", "{namespaces: [a], idle: 2h}",
		of("minimumAge: 1"), of("minimumAge: -1h"), of("notice: soon"), of("leaveFor: 7d"), of("maxPerRun: 0"), of("maxPerRun: 1.5"),
		of("maxPerRun: all"),
		of(`hours: {from: "22:00", to: "06:00"}`), of("optOutAnnotation: a b"), of("podSelector: {matchLabel: {a: b}}"),
		of("podSelector: {matchExpressions: [{key: a, operator: Has}]}"), of("podSelector: tier=x"),
	}
	for i, text := range slices.Concat(accepted, refused) {
		var policy map[string]any
		if err := yaml.Unmarshal([]byte(text), &policy); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		file := filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(file, []byte(asYAML(t, policy)), 0o600); err != nil {
			t.Fatal(err)
		}
		fromHelm := util.ValidateAgainstSingleSchema(common.Values{"reclaim": map[string]any{"policy": policy}}, schema)
		// The command has accepted the policy if it fails for want of an API server.
		out, err := exec.CommandContext(t.Context(), agentBinary, "reclaim", "--policy", file, "--kubeconfig", "/none").CombinedOutput()
		fromCommand := bytes.Contains(out, []byte("--kubeconfig: "))
		if want := i < len(accepted); want != (fromHelm == nil) || want != fromCommand || want == bytes.Contains(out, []byte(file+": ")) {
			t.Errorf("%s: accepted must be %v; Helm: %v; the command: %v %s", text, want, fromHelm, err, out)
		}
	}
}
