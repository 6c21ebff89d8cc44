//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// setPodSecurity sets the namespace's Pod Security level.
func setPodSecurity(t *testing.T, level string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata": {"labels": {"pod-security.kubernetes.io/enforce": %q}}}`, level)
	if _, err := theCluster.client.CoreV1().Namespaces().Patch(t.Context(), namespace, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// TestPodSecurity installs the chart in a namespace whose Pod Security level refuses the pods. Helm succeeds; the notes
// name the cause and the cure.
func TestPodSecurity(t *testing.T) {
	const warning = "WARNING: namespace " + namespace + " enforces the Pod Security level restricted"
	makeNamespace(t)
	step(t, "the notes warn of the level that refuses the pods", func(t *testing.T) {
		setPodSecurity(t, "restricted")
		if out := helm(t, upgradeArgs(oldTag, withdrawOnStop)...); !strings.Contains(out, warning) {
			t.Errorf("no warning in:\n%s", out)
		}
		eventually(t, "the DaemonSet has the event that the notes name", func(ctx context.Context) error {
			events, err := theCluster.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + account})
			if err != nil {
				return err
			}
			for _, e := range events.Items {
				if strings.Contains(e.Message, "violates PodSecurity") {
					return nil
				}
			}
			return fmt.Errorf("events: %v", events.Items)
		})
		if pods, err := agentPods(t.Context()); err != nil || len(pods) != 0 {
			t.Errorf("%d pods, %v", len(pods), err)
		}
	})
	step(t, "the level privileged admits them", func(t *testing.T) {
		setPodSecurity(t, "privileged")
		awaitAmounts(t, gpu, "8/8")
		if out := helm(t, upgradeArgs(oldTag, withdrawOnStop)...); strings.Contains(out, warning) {
			t.Errorf("unexpected warning in:\n%s", out)
		}
	})
	step(t, "helm uninstall", uninstall)
}
