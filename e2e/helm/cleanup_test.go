package helm

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestCleanupHook checks when the chart has the hook, that Helm deletes each of its objects, and that its account has only the rights
// of its roles.
func TestCleanupHook(t *testing.T) {
	for name, c := range map[string]struct {
		set        []string
		configMaps string // that the account may read; "" for no hook
	}{
		"nothing set":       {nil, "gna-gpu-node-agent"},
		"more agents":       {[]string{"nodeConfigs.a.node.labels.output=api"}, "gna-gpu-node-agent gna-gpu-node-agent-a"},
		"agents' account":   {[]string{"serviceAccount.create=false"}, "gna-gpu-node-agent"},
		"off":               {[]string{"rbac.cleanupHook=false"}, ""},
		"null":              {[]string{"rbac.cleanupHook=null"}, ""},
		"no rights created": {[]string{"rbac.create=false"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := hooks(t, settings(c.set)...)
			want := map[string]int{"ServiceAccount": 1, "ClusterRole": 1, "ClusterRoleBinding": 1, "Role": 1, "RoleBinding": 1, "Job": 1}
			if c.configMaps == "" {
				want = map[string]int{}
			}
			if !maps.Equal(o.kinds, want) {
				t.Fatalf("hooks %v, want %v", o.kinds, want)
			}
			if c.configMaps == "" {
				return
			}
			job, account := o.jobs[0], o.accounts[0]
			checkHookAnnotations(t, o)
			checkHookRights(t, o, c.configMaps)
			pod := job.Spec.Template.Spec
			if pod.ServiceAccountName != account.Name || !*pod.AutomountServiceAccountToken || *account.AutomountServiceAccountToken {
				t.Errorf("the pod has the account %s, want %s", pod.ServiceAccountName, account.Name)
			}
			for _, ds := range template(t, settings(c.set)...).daemonSets {
				if ds.Spec.Template.Spec.ServiceAccountName == account.Name ||
					*ds.Spec.Template.Spec.AutomountServiceAccountToken != (name == "more agents" && ds.Name == "gna-gpu-node-agent-a") {
					t.Errorf("%s has the account or a token of the hook", ds.Name)
				}
			}
		})
	}
}

// checkHookRights checks the rights of the hook's account, which may read the ConfigMaps.
func checkHookRights(t *testing.T, o objects, configMaps string) {
	t.Helper()
	var rules []string
	for _, r := range slices.Concat(o.roles[0].Rules, o.localRoles[0].Rules) {
		rules = append(rules, strings.Join(r.Verbs, ",")+" "+strings.Join(r.Resources, ",")+
			strings.Join(append([]string{""}, r.ResourceNames...), " "))
	}
	if got := strings.Join(rules, "; "); got != "get,list,patch nodes; patch nodes/status; list pods; list daemonsets,controllerrevisions; "+
		"get jobs "+o.jobs[0].Name+"; get configmaps "+configMaps+"; patch pods/status; list,delete nodefeatures" {
		t.Errorf("the account has the rights %q", got)
	}
	subject := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: o.accounts[0].Name, Namespace: "gpu"}
	if o.bindings[0].RoleRef.Name != o.roles[0].Name || !slices.Equal(o.bindings[0].Subjects, []rbacv1.Subject{subject}) ||
		o.localBinds[0].RoleRef.Name != o.localRoles[0].Name || !slices.Equal(o.localBinds[0].Subjects, []rbacv1.Subject{subject}) ||
		o.localRoles[0].Namespace != "gpu" {
		t.Errorf("bindings %v and %v, want both to %v", o.bindings[0], o.localBinds[0], subject)
	}
}

// checkHookAnnotations checks that Helm runs the hook's Job last, and deletes each of its objects.
func checkHookAnnotations(t *testing.T, o objects) {
	t.Helper()
	job := o.jobs[0]
	for _, m := range []metav1.ObjectMeta{
		o.accounts[0].ObjectMeta, o.roles[0].ObjectMeta, o.bindings[0].ObjectMeta, o.localRoles[0].ObjectMeta,
		o.localBinds[0].ObjectMeta, job.ObjectMeta,
	} {
		if m.Annotations["helm.sh/hook"] != "post-upgrade,post-rollback,post-delete" ||
			m.Annotations["helm.sh/hook-delete-policy"] != "before-hook-creation,hook-succeeded,hook-failed" {
			t.Errorf("%s has the annotations %v", m.Name, m.Annotations)
		}
		if weight := m.Annotations["helm.sh/hook-weight"]; (weight == "-10") != (m.Name != job.Name ||
			m.Annotations["helm.sh/hook-output-log-policy"] == "") {
			t.Errorf("%s has the weight %q; the Job must be last", m.Name, weight)
		}
	}
}

// TestCleanupPod checks that the hook's pod runs on each node, with the agent's image and without its privileges, and ends in time.
func TestCleanupPod(t *testing.T) {
	o := hooks(t, settings([]string{
		"image.repository=r.test/a", "image.tag=v1-sim", "config.source.mode=sim", "imagePullSecrets[0].name=s", "podLabels.team=x",
		"podAnnotations.a=b",
		"tolerations=null",
	})...)
	job, pod := o.jobs[0], o.jobs[0].Spec.Template.Spec
	container, selector := pod.Containers[0], template(t).daemonSets[0].Spec.Selector.MatchLabels
	if container.Image != "r.test/a:v1-sim" || pod.ImagePullSecrets[0].Name != "s" || pod.PriorityClassName != "system-node-critical" {
		t.Errorf("image %s, secrets %v, class %s", container.Image, pod.ImagePullSecrets, pod.PriorityClassName)
	}
	if !slices.Contains(pod.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists}) {
		t.Errorf("tolerations %v, want all", pod.Tolerations)
	}
	if labels := job.Spec.Template.Labels; labels["app.kubernetes.io/name"] == selector["app.kubernetes.io/name"] ||
		labels["gpu-node-agent/serves"] != "" || labels["team"] != "x" {
		t.Errorf("the pod has the labels %v, which select agents", labels)
	}
	// 4 minutes in all, of which the command waits for 3, and ends half a minute later: see agent/cleanup.
	if args := strings.Join(container.Args, " "); args != "cleanup --apply --hook="+job.Name+" --wait=3m --namespace=gpu" ||
		*job.Spec.ActiveDeadlineSeconds != 240 || *job.Spec.BackoffLimit < 1 {
		t.Errorf("%s, with %d s and %d retries", args, *job.Spec.ActiveDeadlineSeconds, *job.Spec.BackoffLimit)
	}
	if len(pod.Volumes) > 0 || pod.HostNetwork || pod.HostPID {
		t.Errorf("the pod sees its node: %v", pod)
	}
	s := container.SecurityContext
	if !*pod.SecurityContext.RunAsNonRoot || *pod.SecurityContext.RunAsUser == 0 || *s.AllowPrivilegeEscalation ||
		!*s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("the pod has the rights %v and %v", pod.SecurityContext, s)
	}
	if container.Resources.Requests.Cpu().IsZero() || container.Resources.Limits.Memory().IsZero() {
		t.Errorf("resources %v", container.Resources)
	}
	onOpenShift := hooks(t, "--api-versions=security.openshift.io/v1").jobs[0].Spec.Template.Spec.SecurityContext
	if onOpenShift.RunAsUser != nil || !*onOpenShift.RunAsNonRoot { // restricted-v2 chooses the user
		t.Errorf("on OpenShift: %v", onOpenShift)
	}
}

// TestReplacedWithoutParts checks that pods are new ones when something is dropped that agents write to the API server, also if other
// features keep the token, and not when its values change.
func TestReplacedWithoutParts(t *testing.T) {
	const token = "config.metrics.podUID=true"
	const taint = token + ",config.node.taints[0].when=cordoned,config.node.taints[0].effect=NoSchedule," +
		"config.node.taints[0].key=gpu-node-agent/"
	writes := func(set string) string {
		return template(t, "--set", set).daemonSets[0].Spec.Template.Annotations["gpu-node-agent/writes"]
	}
	for set, want := range map[string]string{
		token: "", taint + "cordoned": "taints", "config.node.labels.output=api": "labels",
		"config.node.labels.output=nodeFeature":                               "nodefeature",
		"config.health.kubernetes.enabled=true":                               "condition",
		"config.node.labels.output=off,config.health.kubernetes.enabled=true": "condition,labels,nodefeature",
		"config.node.startupTaint=a:NoExecute":                                "", "nodeConfigs.a.node.labels.output=api": "",
	} {
		if got := writes(set); got != want {
			t.Errorf("%s: the pods write %q, want %q", set, got, want)
		}
	}
	a, b := template(t, "--set", taint+"cordoned").daemonSets[0], template(t, "--set", taint+"unhealthy").daemonSets[0]
	if !reflect.DeepEqual(a.Spec, b.Spec) {
		t.Error("another taint replaces the pods")
	}
}
