package judge

import (
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestConditionCausesUnique(t *testing.T) {
	found := make(map[string]bool)
	for _, c := range conditions {
		if found[c.cause] {
			t.Errorf("two conditions have the cause %s", c.cause)
		}
		found[c.cause] = true
	}
	if fields := JudgedFields(); slices.Contains(fields, health.FieldXID) || len(fields) < 8 {
		t.Errorf("judged fields %v", fields)
	}
}

// Measured values show exactly the causes of that family, and only the end of such a condition proves a reset.
func TestCausesOfConditions(t *testing.T) {
	for _, cause := range health.Causes() {
		family := health.Finding{Cause: cause}.Family()
		if (conditionOf(cause) != nil) != (family == health.FamilyCondition) {
			t.Errorf("%s is of the family %d, its condition is %v", cause, family, conditionOf(cause))
		}
		if health.EndProvesReset(cause) && family != health.FamilyCondition {
			t.Errorf("%s has no condition that a reset ends", cause)
		}
	}
}
