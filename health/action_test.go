package health

import (
	"regexp"
	"testing"
)

func TestActionAdvice(t *testing.T) {
	code := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)
	unique := make(map[string]Action)
	for _, a := range Actions() {
		if !code.MatchString(string(a)) || !a.Valid() {
			t.Errorf("%q: expected a lower-case code with advice, got %q", a, a.Advice())
		}
		if other := unique[a.Advice()]; other != "" {
			t.Errorf("%q and %q have the same advice", a, other)
		}
		unique[a.Advice()] = a
	}
	if Action("dance").Valid() || Action("").Valid() {
		t.Error("an unknown action is valid")
	}
}
