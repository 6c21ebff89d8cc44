package apiserver

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// condition returns the condition GPUHealthy. It fails if the condition does not have this status and reason, or if
// another condition changed.
func (n machine) condition(status v1.ConditionStatus, reason string) (v1.NodeCondition, error) {
	object, err := theCluster.client.CoreV1().Nodes().Get(n.T.Context(), n.name, metav1.GetOptions{})
	if err != nil {
		return v1.NodeCondition{}, err
	}
	var found v1.NodeCondition
	for _, c := range object.Status.Conditions {
		switch {
		case c.Type == "GPUHealthy":
			found = c
		case c.Type == v1.NodeReady && c.Status == v1.ConditionTrue && c.Reason == "KubeletReady":
		default:
			return found, fmt.Errorf("another condition changed: %+v", c)
		}
	}
	if len(object.Status.Conditions) != 2 || found.Status != status || found.Reason != reason {
		return found, fmt.Errorf("conditions %+v, want GPUHealthy %s %s", object.Status.Conditions, status, reason)
	}
	return found, nil
}

// awaitCondition waits for a condition and returns it.
func (n machine) awaitCondition(status v1.ConditionStatus, reason string) v1.NodeCondition {
	n.T.Helper()
	var c v1.NodeCondition
	n.Eventually(fmt.Sprintf("GPUHealthy is %s, %s", status, reason), func() (err error) {
		c, err = n.condition(status, reason)
		return err
	})
	return c
}

// checkEvents checks that an object has exactly one event per reason.
func (n machine) checkEvents(kind, namespace, name string, uid types.UID, reasons ...string) error {
	list, err := theCluster.client.CoreV1().Events(namespace).List(n.T.Context(), metav1.ListOptions{
		FieldSelector: fmt.Sprintf("involvedObject.kind=%s,involvedObject.name=%s,involvedObject.uid=%s", kind, name, uid),
	})
	if err != nil {
		return err
	}
	var have []string
	for _, e := range list.Items {
		have = append(have, e.Reason)
		if warn := e.Reason != "GPURecovered"; warn != (e.Type == v1.EventTypeWarning) || e.Source.Component != "gpu-node-agent" ||
			e.Message == "" {
			return fmt.Errorf("event %+v", e)
		}
	}
	slices.Sort(have)
	slices.Sort(reasons)
	if !slices.Equal(have, reasons) {
		return fmt.Errorf("%s %s has events %v, want %v", kind, name, have, reasons)
	}
	return nil
}

// awaitWrites waits until the audit log has want writes of the node's status. The API server logs a write after it responds.
func (n machine) awaitWrites(user string, want int) {
	n.T.Helper()
	n.Eventually(fmt.Sprintf("%d writes", want), func() error {
		all, err := theCluster.requests(user)
		count := 0
		for _, r := range all {
			if r == "patch nodes/status "+n.name+" 200" {
				count++
			}
		}
		if count > want {
			n.T.Fatalf("%d writes, want %d", count, want)
		}
		if err == nil && count < want {
			err = fmt.Errorf("%d writes", count)
		}
		return err
	})
}
