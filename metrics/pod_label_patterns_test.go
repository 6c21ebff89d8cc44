package metrics

import (
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
)

// pick returns the labels of a pod as "name=value", and the omitted keys.
func pick(c Config, labels map[string]string) (exported, omitted []string) {
	picked, omitted := NewPodPicker(c.SelectedPodLabels()).Of("0f4b", labels)
	for _, l := range picked {
		exported = append(exported, l.Name+"="+l.Value)
	}
	return exported, omitted
}

func TestPodPicker(t *testing.T) {
	pod := map[string]string{
		"app": "train", "team": "vision", "team-lead": "ann", "team_lead": "bob", "app.kubernetes.io/name": "llm",
		"app.kubernetes.io/version": "2",
		"pod-template-hash":         "5f", "empty": "", "3d": "yes", "pod": "x", "hostname": "x", "job": "x", "pod-uid": "x",
		"example.com/gpu": "x",
	}
	for name, c := range map[string]struct {
		entries []string
		want    string
	}{
		"none":                       {nil, ""},
		"keys keep their order":      {[]string{"team", "app", "none", "empty"}, "team=vision app=train"},
		"expression":                 {[]string{"/^app$/"}, "app=train"},
		"expression without anchors": {[]string{"/pp/"}, "app=train app_kubernetes_io_name=llm app_kubernetes_io_version=2"},
		"expression with slashes": {
			[]string{`/^app\.kubernetes\.io\/n/`, "/io/v/"},
			"app_kubernetes_io_name=llm app_kubernetes_io_version=2",
		},
		"alternatives":                   {[]string{"/^(app|team)$/"}, "app=train team=vision"},
		"upper case":                     {[]string{"/^APP$/", "/(?i)^TEAM$/"}, "team=vision"},
		"collision: first key wins":      {[]string{"/^team/"}, "team=vision team_lead=ann"},
		"collision: named label wins":    {[]string{"/^team/", "team_lead"}, "team_lead=bob team=vision"},
		"collision with an absent label": {[]string{"/^team/", "team.lead"}, "team=vision"},
		"names that the agent uses":      {[]string{"/^pod/", "/^host/", "/^jo/", "/uid/", "/^hostname$/"}, "pod_template_hash=5f"},
		"all": {
			[]string{"/.*/"},
			"_3d=yes app=train app_kubernetes_io_name=llm app_kubernetes_io_version=2 example_com_gpu=x pod_template_hash=5f team=vision " +
				"team_lead=ann",
		},
	} {
		t.Run(name, func(t *testing.T) {
			exported, omitted := pick(Config{PodLabels: c.entries}, pod)
			if got := strings.Join(exported, " "); got != c.want || omitted != nil {
				t.Errorf("%q: got\n%s, omitted %q, want\n%s", c.entries, got, omitted, c.want)
			}
		})
	}
}

// Beyond the limit the picker omits the last labels, but none that is named.
func TestPodPickerLimit(t *testing.T) {
	pod := make(map[string]string)
	for i := range 12 {
		pod["x"+string(rune('a'+i))] = "1"
	}
	exported, omitted := pick(Config{PodLabels: []string{"/.*/", "xl", "xk", "none"}, PodUID: true}, pod)
	if want := "xl=1 xk=1 xa=1 xb=1 xc=1 xd=1 xe=1 xf=1 xg=1 xh=1 pod_uid=0f4b"; strings.Join(exported, " ") != want ||
		!slices.Equal(omitted, []string{"xi", "xj"}) {
		t.Errorf("got %q, omitted %q, want %s", exported, omitted, want)
	}
}

func TestPodPickerUID(t *testing.T) {
	on, off := Config{PodUID: true}, Config{}
	if got, _ := pick(on, map[string]string{"a": "b"}); !slices.Equal(got, []string{"pod_uid=0f4b"}) {
		t.Errorf("podUID: true: got %q", got)
	}
	if got, _ := pick(off, map[string]string{"a": "b"}); got != nil {
		t.Errorf("podUID: false: got %q", got)
	}
	if got, _ := NewPodPicker(on.SelectedPodLabels()).Of("", nil); got != nil {
		t.Errorf("a pod without UID: got %q", got)
	}
	if !on.SelectedPodLabels().Any() || off.SelectedPodLabels().Any() {
		t.Error("Any does not follow podUID")
	}
}

// A valid entry exports exactly the labels that it selects, up to the limit, under distinct and valid names that nothing
// else uses; the result is stable.
func FuzzPodLabels(f *testing.F) {
	for _, entry := range []string{
		"team", "app.kubernetes.io/name", "3d", "a__b", "_", "größe", "\xff", "", "*", "/.*/", "a.*", "/^team-/", "/", "//", "///",
		"/[/", "/(a|b)*/", "pod", "pod*", "/pod/",
	} {
		f.Add(entry, "team-a team_a team.a app.kubernetes.io/name pod pod-uid gpu a b c d e f g h i j k l m n o")
	}
	f.Fuzz(func(t *testing.T, entry, keys string) {
		c := Config{PodLabels: []string{entry}}
		if c.validatePodLabels() != nil {
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
		selected := func(key string) bool { return key == entry }
		if expr, ok := strings.CutPrefix(entry, "/"); ok {
			selected = regexp.MustCompile(strings.TrimSuffix(expr, "/")).MatchString
		}
		picker := NewPodPicker(c.SelectedPodLabels())
		exported, omitted := picker.Of("", pod)
		names := make(map[string]bool)
		for _, l := range exported {
			if !model.LegacyValidation.IsValidLabelName(l.Name) || names[l.Name] || reservedBy(l.Name) != "" || !selected(l.Value) ||
				podLabelName(l.Value) != l.Name {
				t.Errorf("%q exports %+v", entry, l)
			}
			names[l.Name] = true
		}
		for key := range pod {
			if name := podLabelName(key); selected(key) && !names[name] && reservedBy(name) == "" &&
				!slices.ContainsFunc(omitted, func(l string) bool { return podLabelName(l) == name }) {
				t.Errorf("%q does not export %s: got %v, omitted %q", entry, key, exported, omitted)
			}
		}
		if len(exported) > maxPodLabels || len(omitted) > 0 && len(exported) < maxPodLabels {
			t.Errorf("%q exports %d labels, omitted %q", entry, len(exported), omitted)
		}
		if again, _ := picker.Of("", maps.Clone(pod)); !reflect.DeepEqual(exported, again) {
			t.Errorf("%q exports %v, then %v", entry, exported, again)
		}
	})
}
