package metrics

import (
	"fmt"
	"strings"
	"testing"
)

func TestPodLabelNames(t *testing.T) {
	for key, want := range map[string]string{
		"team": "team", "app.kubernetes.io/name": "app_kubernetes_io_name", "job-name": "job_name", "3d": "_3d", "A.b_c-D": "A_b_c_D",
	} {
		if got := podLabelName(key); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
}

func TestPodLabelsAreChecked(t *testing.T) {
	long := strings.Repeat("x", 64)
	var many []string
	for i := range maxPodLabels + 1 {
		many = append(many, fmt.Sprint("label", i))
	}
	for _, c := range []struct {
		keys []string
		want string // "" if there is nothing wrong
	}{
		{nil, ""},
		{[]string{"team", "app.kubernetes.io/name", "3d", "a"}, ""},
		{many[1:], ""},
		{many, "podLabels: 11 labels are too many"},
		{[]string{""}, `podLabels: "" is no key`},
		{[]string{"-a"}, "is no key"},
		{[]string{"a/b/c"}, "is no key"},
		{[]string{"UPPER.io/a"}, "is no key"},
		{[]string{"größe"}, "is no key"},
		{[]string{long}, "is no key"},
		{[]string{long[:63]}, ""},
		{[]string{strings.Repeat("x", 254) + "/a"}, "is no key"},
		{[]string{"pod"}, `podLabels: "pod" would be the label pod, which is a label of ours; leave it out`},
		{[]string{"gpu"}, "a label of ours"},
		{[]string{"Hostname"}, "a label of ours"},
		{[]string{"DCGM_FI_DRIVER_VERSION"}, "a label of ours"},
		{[]string{"job"}, "would be the label job, which is Prometheus's"},
		{[]string{"instance"}, "Prometheus's"},
		{[]string{"a.b", "a-b"}, `podLabels: "a.b" and "a-b" would both be the label a_b; leave one out`},
		{[]string{"a", "a"}, `podLabels: "a" is there twice`},
		{[]string{"team-*", "*", "app.kubernetes.io/*", "*/name", "team-a"}, ""},
		{[]string{"/^app$/", `/^app\.kubernetes\.io\/.*/`, "/^(tier|environment)$/", "/a/b/", "/.*/", "///", "/^a{2,3}$/"}, ""},
		{append([]string{"*"}, many[1:]...), "podLabels: 11 labels are too many"},
		{[]string{"*", "*"}, `podLabels: "*" is there twice`},
		{[]string{"/"}, `podLabels: "/" begins with a slash and does not end with one; a regular expression is between two: /^team-/`},
		{[]string{"/a"}, `"/a" begins with a slash`},
		{[]string{"//"}, `"//" is an empty regular expression; write "*" for all labels`},
		{[]string{"/[/"}, "podLabels: \"/[/\" is no regular expression: missing closing ]: `[`; use one such as /^team-/"},
		{[]string{"/a(?!b)/"}, `is no regular expression: invalid or unsupported Perl syntax`},
		{[]string{"^app$"}, `podLabels: "^app$" is no key of a Kubernetes label; if it is a regular expression, write /^app$/`},
		{[]string{"(tier|environment)"}, "write /(tier|environment)/"},
		{[]string{"^app/.*"}, "write /^app/.*/"},
		{[]string{"team-?"}, "write /team-?/"},
		{[]string{"app.*"}, `podLabels: "app.*" may be a regular expression or not; write /app.*/ if it is, and else app*,`},
		{[]string{"größe*"}, `podLabels: "größe*" is like no key`},
		{[]string{"team *"}, "is like no key"},
	} {
		cfg, err := DefaultConfig().Resolve()
		if err != nil {
			t.Fatal(err)
		}
		cfg.PodLabels = c.keys
		switch err := cfg.Validate(); {
		case c.want == "" && err != nil:
			t.Errorf("%q: %v", c.keys, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%q: %v, want %q", c.keys, err, c.want)
		}
	}
}

func TestPathsAreChecked(t *testing.T) {
	c := DefaultConfig()
	c.HPCJobDir, c.WebConfigFile = "jobs", "web.yaml"
	err := c.Validate()
	for _, want := range []string{`hpcJobDir: "jobs" is not an absolute path`, `webConfigFile: "web.yaml" is not an absolute path`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
