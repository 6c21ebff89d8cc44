package grouped_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
)

func TestBy(t *testing.T) {
	var by grouped.By[string, int]
	for range by.All() {
		t.Error("the zero value has a key")
	}
	by.Add("b", 1)
	by.Add("a", 2, 3)
	by.Add("c")
	by.Add("b", 4)
	var got []string
	for key, values := range by.All() {
		got = append(got, fmt.Sprint(key, values))
	}
	if want := []string{"b[1 4]", "a[2 3]", "c[]"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for range by.All() { // may be left
		break
	}
}

func TestTexts(t *testing.T) {
	var texts grouped.Texts
	texts.Addf("", "of nothing")
	for i := range 9 {
		texts.Addf(fmt.Sprint("GPU ", i), "more than %d W", 300+i%2)
	}
	want := []string{"of nothing", "more than 300 W: GPU 0, GPU 2, GPU 4, GPU 6, GPU 8", "more than 301 W: GPU 1, GPU 3, GPU 5, GPU 7"}
	if got := texts.Strings(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	texts = grouped.Texts{}
	texts.Addf("GPU 0", "hangs")
	texts.Addf("GPU 1", "hangs")
	texts.Addf("GPU 2", "is lost")
	if got, want := texts.NamesFirst(" "), []string{"GPU 0, GPU 1 hangs", "GPU 2 is lost"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestLists(t *testing.T) {
	for names, want := range map[string][2]string{
		"":                    {"", "pod "},
		"a":                   {"a", "pod a"},
		"a b":                 {"a, b", "pods a and b"},
		"1 2 3 4 5":           {"1, 2, 3, 4, 5", "pods 1, 2, 3, 4 and 5"},
		"1 2 3 4 5 6":         {"1, 2, 3, 4, 5, 6", "pods 1, 2, 3, 4, 5 and 1 more"},
		"1 2 3 4 5 6 7 8":     {"1, 2, 3, 4, 5, 6, 7, 8", "pods 1, 2, 3, 4, 5 and 3 more"},
		"1 2 3 4 5 6 7 8 9":   {"1, 2, 3, 4, 5, 6, 7, 8 and 1 more", "pods 1, 2, 3, 4, 5 and 4 more"},
		"1 2 3 4 5 6 7 8 9 0": {"1, 2, 3, 4, 5, 6, 7, 8 and 2 more", "pods 1, 2, 3, 4, 5 and 5 more"},
	} {
		all := strings.Fields(names)
		if got := [2]string{grouped.Abbreviate(all), grouped.Named("pod", all)}; got != want || names != strings.Join(all, " ") {
			t.Errorf("%s: %q, want %q", names, got, want)
		}
	}
}
