//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// explain logs what may have made a step fail: the warnings of all pods, and the ends of the logs of the agent and of the kubelet. The
// files in bin/e2e-cluster/logs have more, but often only the output of a failed run is left.
func explain(t *testing.T) {
	t.Helper()
	const lines, width = 12, 300
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	show := func(what string, all []string) {
		var text strings.Builder
		for _, line := range all[max(0, len(all)-lines):] {
			text.WriteString("\n" + line[:min(len(line), width)])
		}
		t.Logf("%s, the last of %d:%s", what, len(all), text.String())
	}
	events, err := theCluster.client.CoreV1().Events(metav1.NamespaceAll).List(ctx,
		metav1.ListOptions{FieldSelector: "type=" + v1.EventTypeWarning + ",reason!=MissingClusterDNS"})
	if err != nil {
		t.Log(err)
	} else {
		at := func(e v1.Event) time.Time {
			return slices.MaxFunc([]time.Time{e.LastTimestamp.Time, e.EventTime.Time}, time.Time.Compare)
		}
		slices.SortStableFunc(events.Items, func(a, b v1.Event) int { return at(a).Compare(at(b)) })
		var all []string
		for _, e := range events.Items {
			all = append(all, fmt.Sprintf("%s %s/%s %s: %s", at(e).Format(time.TimeOnly), e.InvolvedObject.Namespace, e.InvolvedObject.Name,
				e.Reason, e.Message))
		}
		show("warnings", all)
	}
	pods, err := agentPods(ctx)
	if err != nil {
		t.Log(err)
	}
	for _, pod := range pods {
		log, err := theCluster.client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &v1.PodLogOptions{}).DoRaw(ctx)
		if err != nil {
			t.Log(err)
		}
		show("log of pod "+pod.Name, strings.Split(string(log), "\n"))
	}
	text, err := os.ReadFile(theCluster.file("logs", kubeletRole+".log"))
	if err != nil {
		t.Log(err)
	}
	show("errors in the kubelet's log", slices.DeleteFunc(strings.Split(string(text), "\n"),
		func(line string) bool { return !strings.HasPrefix(line, "E") }))
}
