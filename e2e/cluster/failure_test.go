//go:build cluster

package cluster

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// explain logs what may have made a step fail: the warnings of all pods, and the ends of the logs of the kubelet and of the agent. The files
// in bin/e2e-cluster/logs have more, but often only the output of a failed run is left.
func explain(t *testing.T) {
	t.Helper()
	const lines = 30
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	list, err := theCluster.client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "type=" + v1.EventTypeWarning})
	if err != nil {
		t.Logf("no events: %v", err)
	} else {
		at := func(e *v1.Event) time.Time {
			return slices.MaxFunc([]time.Time{e.LastTimestamp.Time, e.EventTime.Time}, time.Time.Compare)
		}
		slices.SortFunc(list.Items, func(a, b v1.Event) int { return at(&a).Compare(at(&b)) })
		for _, e := range list.Items[max(0, len(list.Items)-lines):] {
			t.Logf("event %s %s/%s: %s x%d: %s", at(&e).Format(time.TimeOnly), e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, max(e.Count, 1), e.Message)
		}
	}
	pods, err := agentPods(ctx)
	if err != nil {
		t.Logf("no pods of the agent: %v", err)
	}
	for _, pod := range pods {
		log, err := theCluster.client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &v1.PodLogOptions{TailLines: ptr.To[int64](lines)}).DoRaw(ctx)
		if err != nil {
			t.Logf("no log of pod %s: %v", pod.Name, err)
		}
		t.Logf("the log of pod %s ends:\n%s", pod.Name, log)
	}
	text, err := os.ReadFile(theCluster.file("logs", kubeletRole+".log"))
	if err != nil {
		t.Logf("no log of the kubelet: %v", err)
	}
	var problems []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "E") || strings.HasPrefix(line, "W") {
			problems = append(problems, line)
		}
	}
	t.Logf("the kubelet's log has %d errors and warnings, the last are:\n%s", len(problems), strings.Join(problems[max(0, len(problems)-lines):], ""))
}
