package apiserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// grantDocumentedRole grants a user the cluster role in docs/operations.md.
func (c *cluster) grantDocumentedRole(t *testing.T, user string) {
	t.Helper()
	c.grantRules(t, user, "gpu-node-agent-"+user, documentedRole(t).Rules...)
}

// grantRules gives a user rights through a cluster role and a binding named as. Both may exist.
func (c *cluster) grantRules(t *testing.T, user, as string, rules ...rbac.PolicyRule) {
	t.Helper()
	name := metav1.ObjectMeta{Name: as}
	role := &rbac.ClusterRole{ObjectMeta: name, Rules: rules}
	binding := &rbac.ClusterRoleBinding{
		ObjectMeta: name, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: name.Name},
		Subjects: []rbac.Subject{{APIGroup: rbac.GroupName, Kind: rbac.UserKind, Name: user}},
	}
	_, err := c.client.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
	_, err2 := c.client.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{})
	for _, err := range []error{err, err2} {
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
}

func documentedRole(t *testing.T) *rbac.ClusterRole {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```yaml\nrules:\n")
	rules, _, ends := strings.Cut(rest, "```")
	role := new(rbac.ClusterRole)
	if err := yaml.UnmarshalStrict([]byte("rules:\n"+rules), role); err != nil || !found || !ends || len(role.Rules) == 0 {
		t.Fatalf("docs/operations.md has no cluster role: %v", err)
	}
	return role
}
