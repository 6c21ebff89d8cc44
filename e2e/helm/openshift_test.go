package helm

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// TestOpenShift checks the rights and SELinux types that agents need on OpenShift, and that they have none elsewhere.
func TestOpenShift(t *testing.T) {
	const openShift, openShiftByKind = "--api-versions=security.openshift.io/v1",
		"--api-versions=security.openshift.io/v1/SecurityContextConstraints"
	for name, c := range map[string]struct {
		args    []string
		account string // that may use the constraint; "" for none
		selinux string // type of all containers
	}{
		"elsewhere":               {nil, "", ""},
		"there":                   {[]string{openShift}, "gna-gpu-node-agent", "spc_t"},
		"there, detected by kind": {[]string{openShiftByKind}, "gna-gpu-node-agent", "spc_t"},
		"custom account":          {[]string{openShift, "--set", "serviceAccount.create=false,serviceAccount.name=a"}, "a", "spc_t"},
		"no rights":               {[]string{openShift, "--set", "rbac.create=false"}, "", "spc_t"},
		"custom type":             {[]string{openShift, "--set", "securityContext.seLinuxOptions.type=t"}, "gna-gpu-node-agent", "t"},
		"custom level of pods":    {[]string{openShift, "--set", "podSecurityContext.seLinuxOptions.level=s0"}, "gna-gpu-node-agent", "spc_t"},
		"custom type of pods":     {[]string{openShift, "--set", "podSecurityContext.seLinuxOptions.type=t"}, "gna-gpu-node-agent", ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := template(t, append(c.args, "--set", "gpuOperator.enabled=true")...)
			if len(o.roles) != 0 {
				t.Errorf("unexpected cluster roles %v", o.roles)
			}
			want := 0
			if c.account != "" {
				want = 1
			}
			if len(o.localRoles) != want || len(o.localBinds) != want {
				t.Fatalf("%d roles and %d bindings, want %d", len(o.localRoles), len(o.localBinds), want)
			}
			checkConstraintUse(t, o, c.account)
			pod := o.daemonSets[0].Spec.Template.Spec
			if c.account != "" && pod.ServiceAccountName != c.account {
				t.Errorf("pod has account %s, want %s", pod.ServiceAccountName, c.account)
			}
			checkConfined(t, o.daemonSets[0], nil)
			checkSELinuxType(t, pod, c.selinux)
		})
	}
	if _, err := helm(t, "template", "gna", chart, openShift, "--set", "serviceAccount.create=false"); err == nil ||
		!strings.Contains(err.Error(), "serviceAccount.name") {
		t.Errorf("error without an account: %v", err)
	}
}

// checkSELinuxType checks the SELinux type of all containers of a pod.
func checkSELinuxType(t *testing.T, pod corev1.PodSpec, want string) {
	t.Helper()
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		got := ""
		if s := container.SecurityContext.SELinuxOptions; s != nil {
			got = s.Type
		}
		if got != want {
			t.Errorf("%s has the SELinux type %q, want %q", container.Name, got, want)
		}
	}
}

// checkConstraintUse checks that each role lets the account use the constraint privileged, and nothing else.
func checkConstraintUse(t *testing.T, o objects, account string) {
	t.Helper()
	for i, role := range o.localRoles {
		rules := []rbacv1.PolicyRule{{
			APIGroups: []string{"security.openshift.io"}, Resources: []string{"securitycontextconstraints"},
			ResourceNames: []string{"privileged"}, Verbs: []string{"use"},
		}}
		if !reflect.DeepEqual(role.Rules, rules) {
			t.Errorf("the role has %v, want %v", role.Rules, rules)
		}
		bound := o.localBinds[i]
		if (bound.RoleRef != rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name}) {
			t.Errorf("binding has role %v", bound.RoleRef)
		}
		if !reflect.DeepEqual(bound.Subjects, []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: "gpu"}}) {
			t.Errorf("binding has subjects %v, want the account %s", bound.Subjects, account)
		}
	}
}
