package metrics

import (
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// of returns what a pod is shown with, as "name=value", and what is left out.
func of(c Config, labels map[string]string) (shown, left []string) {
	picked, left := NewPodPicker(c.ShownPodLabels()).Of("0f4b", labels)
	for _, l := range picked {
		shown = append(shown, l.Name+"="+l.Value)
	}
	return shown, left
}

func TestPodPicker(t *testing.T) {
	pod := map[string]string{
		"app": "train", "team": "vision", "team-lead": "ann", "team_lead": "bob", "app.kubernetes.io/name": "llm", "app.kubernetes.io/version": "2",
		"pod-template-hash": "5f", "empty": "", "3d": "yes", "pod": "x", "hostname": "x", "job": "x", "pod-uid": "x", "example.com/gpu": "x",
	}
	for name, c := range map[string]struct {
		entries []string
		want    string
	}{
		"none":              {nil, ""},
		"by name, in order": {[]string{"team", "app", "none", "empty"}, "team=vision app=train"},
		"a prefix":          {[]string{"app.kubernetes.io/*"}, "app_kubernetes_io_name=llm app_kubernetes_io_version=2"},
		"a suffix":          {[]string{"*/name"}, "app_kubernetes_io_name=llm"},
		"a middle":          {[]string{"a*n*e"}, "app_kubernetes_io_name=llm"},
		"the whole key":     {[]string{"eam*"}, ""},
		"a dot is a dot":    {[]string{"app.k*", "t.am*"}, "app_kubernetes_io_name=llm app_kubernetes_io_version=2"},
		"an expression":     {[]string{"/^app$/"}, "app=train"},
		"not anchored":      {[]string{"/pp/"}, "app=train app_kubernetes_io_name=llm app_kubernetes_io_version=2"},
		"with slashes":      {[]string{`/^app\.kubernetes\.io\/n/`, "/io/v/"}, "app_kubernetes_io_name=llm app_kubernetes_io_version=2"},
		"alternatives":      {[]string{"/^(app|team)$/"}, "app=train team=vision"},
		"capitals":          {[]string{"/^APP$/", "/(?i)^TEAM$/"}, "team=vision"},
		"one name, by key":  {[]string{"team*"}, "team=vision team_lead=ann"},
		"the named comes first, and has its name": {[]string{"team*", "team_lead"}, "team_lead=bob team=vision"},
		"a name stays its own":                    {[]string{"team*", "team.lead"}, "team=vision"},
		"ours stay ours":                          {[]string{"pod*", "host*", "jo*", "/uid/", "/^hostname$/"}, "pod_template_hash=5f"},
		"all":                                     {[]string{"*"}, "_3d=yes app=train app_kubernetes_io_name=llm app_kubernetes_io_version=2 example_com_gpu=x pod_template_hash=5f team=vision team_lead=ann"},
	} {
		t.Run(name, func(t *testing.T) {
			shown, left := of(Config{PodLabels: c.entries}, pod)
			if got := strings.Join(shown, " "); got != c.want || left != nil {
				t.Errorf("%q shows\n%s, without %q, want\n%s", c.entries, got, left, c.want)
			}
		})
	}
}

// What is too much is left out from the end, and never what is named.
func TestPodPickerHasALimit(t *testing.T) {
	pod := make(map[string]string)
	for i := range 12 {
		pod["x"+string(rune('a'+i))] = "1"
	}
	shown, left := of(Config{PodLabels: []string{"*", "xl", "xk", "none"}, PodUID: true}, pod)
	if want := "xl=1 xk=1 xa=1 xb=1 xc=1 xd=1 xe=1 xf=1 xg=1 xh=1 pod_uid=0f4b"; strings.Join(shown, " ") != want || !slices.Equal(left, []string{"xi", "xj"}) {
		t.Errorf("shown %q, without %q, want %s", shown, left, want)
	}
}

func TestPodUIDIsPicked(t *testing.T) {
	on, off := Config{PodUID: true}, Config{}
	if got, _ := of(on, map[string]string{"a": "b"}); !slices.Equal(got, []string{"pod_uid=0f4b"}) {
		t.Errorf("%q", got)
	}
	if got, _ := of(off, map[string]string{"a": "b"}); got != nil {
		t.Errorf("it is off: %q", got)
	}
	if got, _ := NewPodPicker(on.ShownPodLabels()).Of("", nil); got != nil {
		t.Errorf("a pod without a UID: %q", got)
	}
	if !on.ShownPodLabels().Any() || off.ShownPodLabels().Any() {
		t.Error("what is on is off")
	}
}

// like tells the same as a pattern with stars, in another way.
func like(pattern, key string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == key
	}
	after, ok := strings.CutPrefix(key, first)
	for i := range len(after) + 1 {
		if ok && like(rest, after[i:]) {
			return true
		}
	}
	return false
}

// Whatever is taken as an entry, it shows only what it asks for, under names that Prometheus takes and that are
// nothing else, each once; the same each time, and not too many.
func FuzzPodLabels(f *testing.F) {
	for _, entry := range []string{
		"team", "app.kubernetes.io/name", "3d", "a__b", "_", "größe", "\xff", "", "*", "team-*", "*/name", "a.*", "/^team-/", "/", "//", "///", "/[/", "/(a|b)*/", "pod", "pod*", "/pod/",
	} {
		f.Add(entry, "team-a team_a team.a app.kubernetes.io/name pod pod-uid gpu a b c d e f g h i j k l m n o")
	}
	f.Fuzz(func(t *testing.T, entry, keys string) {
		c := Config{PodLabels: []string{entry}}
		if c.validatePodLabels() != nil || strings.Count(entry, "*") > 4 { // like would take its time
			return
		}
		pod := make(map[string]string)
		for key := range strings.FieldsSeq(keys) {
			if labelKey.MatchString(key) {
				pod[key] = key
			}
		}
		if labelKey.MatchString(entry) {
			pod[entry] = entry
		}
		asked := func(key string) bool { return key == entry || strings.Contains(entry, "*") && like(entry, key) }
		if expr, ok := strings.CutPrefix(entry, "/"); ok {
			asked = regexp.MustCompile(strings.TrimSuffix(expr, "/")).MatchString
		}
		picker := NewPodPicker(c.ShownPodLabels())
		shown, left := picker.Of("", pod)
		names := make(map[string]bool)
		for _, l := range shown {
			if !isLabelName(l.Name) || names[l.Name] || ownLabel(l.Name) != "" || !asked(l.Value) || podLabelName(l.Value) != l.Name {
				t.Errorf("%q shows %+v", entry, l)
			}
			names[l.Name] = true
		}
		for key := range pod {
			if name := podLabelName(key); asked(key) && !names[name] && ownLabel(name) == "" && !slices.ContainsFunc(left, func(l string) bool { return podLabelName(l) == name }) {
				t.Errorf("%q does not show %s: %v, without %q", entry, key, shown, left)
			}
		}
		if len(shown) > maxPodLabels || len(left) > 0 && len(shown) < maxPodLabels {
			t.Errorf("%q shows %d labels, without %q", entry, len(shown), left)
		}
		if again, _ := picker.Of("", maps.Clone(pod)); !reflect.DeepEqual(shown, again) {
			t.Errorf("%q shows %v, and then %v", entry, shown, again)
		}
	})
}
