package metrics

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestPodLabelName(t *testing.T) {
	for key, want := range map[string]string{
		"team": "team", "app.kubernetes.io/name": "app_kubernetes_io_name", "job-name": "job_name", "3d": "_3d", "A.b_c-D": "A_b_c_D",
	} {
		if got := podLabelName(key); got != want {
			t.Errorf("podLabelName(%q) = %q, want %q", key, got, want)
		}
	}
}

func TestValidatePodLabels(t *testing.T) {
	long := strings.Repeat("x", 64)
	var many []string
	for i := range maxPodLabels + 1 {
		many = append(many, fmt.Sprint("label", i))
	}
	for _, c := range []struct {
		want    error // nil: valid
		entries []string
	}{
		{nil, nil},
		{nil, []string{"team", "app.kubernetes.io/name", "3d", "a"}},
		{nil, many[1:]},
		{nil, []string{long[:63]}},
		{nil, []string{"/^team-/", "/.*/", `/^app\.kubernetes\.io//`, "/name$/", "team-a"}},
		{nil, []string{"/^app$/", `/^app\.kubernetes\.io\/.*/`, "/^(tier|environment)$/", "/a/b/", "/.*/", "///", "/^a{2,3}$/"}},
		{errTooManyPodLabels, many},
		{errTooManyPodLabels, append([]string{"/.*/"}, many[1:]...)},
		{errDuplicateEntry, []string{"a", "a"}},
		{errDuplicateEntry, []string{"/.*/", "/.*/"}},
		{errLabelCollision, []string{"a.b", "a-b"}},
		{errInvalidLabelKey, []string{""}},
		{errInvalidLabelKey, []string{"-a"}},
		{errInvalidLabelKey, []string{"a/b/c"}},
		{errInvalidLabelKey, []string{"UPPER.io/a"}},
		{errInvalidLabelKey, []string{"größe"}},
		{errInvalidLabelKey, []string{long}},
		{errInvalidLabelKey, []string{strings.Repeat("x", 254) + "/a"}},
		{errLabelInUse, []string{"pod"}},
		{errLabelInUse, []string{"gpu"}},
		{errLabelInUse, []string{"Hostname"}},
		{errLabelInUse, []string{"DCGM_FI_DRIVER_VERSION"}},
		{errLabelInUse, []string{"job"}},
		{errLabelInUse, []string{"instance"}},
		{errLabelInUse, []string{"cluster"}},
		{errLabelInUse, []string{"service"}},
		{errLabelInUse, []string{"endpoint"}},
		{errInvalidPattern, []string{"/"}},
		{errInvalidPattern, []string{"/a"}},
		{errInvalidPattern, []string{"//"}},
		{errInvalidPattern, []string{"/[/"}},
		{errInvalidPattern, []string{"/a(?!b)/"}},
		{errInvalidPattern, []string{"^app$"}},
		{errInvalidPattern, []string{"(tier|environment)"}},
		{errInvalidPattern, []string{"^app/.*"}},
		{errInvalidPattern, []string{"team-?"}},
		{errInvalidPattern, []string{"app.*"}},
		{errInvalidPattern, []string{"größe*"}},
		{errInvalidPattern, []string{"team *"}},
		{errInvalidPattern, []string{"*"}},
	} {
		cfg, err := DefaultConfig().Resolve(os.ReadFile)
		if err != nil {
			t.Fatal(err)
		}
		cfg.PodLabels = c.entries
		err = cfg.Validate()
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%q: got %v, want %v", c.entries, err, c.want)
		}
		if c.want == nil || errors.Is(c.want, errTooManyPodLabels) {
			continue
		}
		if text := err.Error(); !strings.HasPrefix(text, "podLabels: ") || !strings.Contains(text, fmt.Sprintf("%q", c.entries[0])) ||
			strings.Contains(text, "\n") {
			t.Errorf("%q: the error does not name key and entry: %v", c.entries, err)
		}
	}
}

// An entry that is no key names the regular expression with the meaning that it has as a pattern or in dcgm-exporter's list.
func TestPodLabelsNameTheExpression(t *testing.T) {
	for entry, want := range map[string]string{
		"*": "/^.*$/", "app.kubernetes.io/*": `/^app\.kubernetes\.io/.*$/`, "*/name": "/^.*/name$/", "^team-": "/^team-/", "team.*": "/team.*/",
		"//": "/.*/",
	} {
		err := Config{PodLabels: []string{entry}}.validatePodLabels()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", entry, err, want)
		}
		if err := (Config{PodLabels: []string{want}}).validatePodLabels(); err != nil {
			t.Errorf("%s: %v", want, err)
		}
	}
}
