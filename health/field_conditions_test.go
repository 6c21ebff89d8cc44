package health

import (
	"slices"
	"testing"
)

func TestConditionCausesUnique(t *testing.T) {
	found := make(map[string]bool)
	for _, c := range conditions {
		if found[c.cause] {
			t.Errorf("two conditions have the cause %s", c.cause)
		}
		found[c.cause] = true
	}
	if fields := JudgedFields(); slices.Contains(fields, FieldXID) || len(fields) < 8 {
		t.Errorf("judged fields %v", fields)
	}
}
