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
		{[]string{"team*"}, `podLabels: "team*" is a pattern; name each key`},
		{[]string{""}, `podLabels: "" is no key`},
		{[]string{"-a"}, "is no key"},
		{[]string{"a/b/c"}, "is no key"},
		{[]string{"/a"}, "is no key"},
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

// Whatever a label of a pod is called, it is no name that Prometheus would refuse.
func FuzzPodLabelName(f *testing.F) {
	for _, key := range []string{"team", "app.kubernetes.io/name", "3d", "a__b", "_", "größe", "\xff", ""} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		c := DefaultConfig()
		c.PodLabels = []string{key}
		if c.Validate() == nil && !isLabelName(podLabelName(key)) {
			t.Errorf("%q becomes %q", key, podLabelName(key))
		}
	})
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
