//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// setPodSecurity sets the namespace's Pod Security level by a label KEY=VALUE.
func setPodSecurity(t *testing.T, label string) {
	t.Helper()
	key, value, _ := strings.Cut(label, "=")
	patch := fmt.Appendf(nil, `{"metadata": {"labels": {%q: %q}}}`, key, value)
	if _, err := theCluster.client.CoreV1().Namespaces().Patch(t.Context(), namespace, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// TestPodSecurity installs the chart in a namespace whose Pod Security level refuses the pods. Helm succeeds; the notes
// name the event that shows the cause, and the cure.
func TestPodSecurity(t *testing.T) {
	makeNamespace(t)
	setPodSecurity(t, "pod-security.kubernetes.io/enforce=restricted")
	notes := helm(t, upgradeArgs(oldTag, withdrawOnStop)...)
	step(t, "the DaemonSet has the event that the notes name, and no pods", func(t *testing.T) {
		const refused = "violates PodSecurity"
		if !strings.Contains(notes, refused) {
			t.Errorf("%q is not in:\n%s", refused, notes)
		}
		eventually(t, "event", func(ctx context.Context) error {
			events, err := theCluster.client.CoreV1().Events(namespace).List(ctx,
				metav1.ListOptions{FieldSelector: "involvedObject.name=" + account})
			if err != nil {
				return err
			}
			for _, e := range events.Items {
				if strings.Contains(e.Message, refused) {
					return nil
				}
			}
			return fmt.Errorf("events: %v", events.Items)
		})
		if pods, err := agentPods(t.Context()); err != nil || len(pods) != 0 {
			t.Errorf("%d pods, %v", len(pods), err)
		}
	})
	step(t, "the command in the notes lets them start", func(t *testing.T) {
		command := regexp.MustCompile(`kubectl label --overwrite namespace ` + namespace + ` \\\n *(\S+=\S+)\n`).FindStringSubmatch(notes)
		if command == nil {
			t.Fatalf("no command in:\n%s", notes)
		}
		setPodSecurity(t, command[1])
		awaitAmounts(t, gpu, "8/8")
	})
	step(t, "helm uninstall", uninstall)
}
