package cdi

import (
	"strings"
	"testing"
)

func TestJudge(t *testing.T) {
	for version, want := range map[string]Support{
		"containerd://1.6.36":                   SupportIgnored,
		"containerd://1.6.20~ds1":               SupportIgnored,
		"containerd://1.6.12-0ubuntu1~22.04.3":  SupportIgnored,
		"containerd://1.6.36+bottlerocket":      SupportIgnored,
		"containerd://v1.6.28-k3s1":             SupportIgnored,
		"containerd://1.6.4.1":                  SupportIgnored,
		"containerd://1.6":                      SupportIgnored,
		"containerd://1.4.13":                   SupportIgnored,
		"containerd://0.9.0":                    SupportIgnored,
		"containerd://1.7.0-beta.4":             SupportDepends,
		"containerd://1.7.0":                    SupportDepends,
		"containerd://1.7.27":                   SupportDepends,
		"containerd://v1.7.11-k3s2":             SupportDepends,
		"containerd://1.10.0":                   SupportDepends,
		"containerd://2.0.0-beta.0":             SupportDepends,
		"containerd://2.0.0~beta.1":             SupportDepends,
		"containerd://2.0.0-rc.1":               Supported,
		"containerd://2.0.0":                    Supported,
		"containerd://2.1.0-beta.0":             Supported,
		"containerd://2.4.2":                    Supported,
		"containerd://10.0.0":                   Supported,
		"containerd://1":                        SupportUnknown,
		"containerd://1.x":                      SupportUnknown,
		"containerd://1.6x":                     SupportUnknown,
		"containerd://99999.1.1":                SupportUnknown,
		"containerd://Unknown":                  SupportUnknown,
		"containerd://":                         SupportUnknown,
		"containerd 1.6.36":                     SupportUnknown,
		"containerd://1.6.36\ncontainerd://2.0": SupportUnknown,
		"cri-o://1.31.0":                        SupportUnknown,
		"docker://24.0.7":                       SupportUnknown,
		"1.6.36":                                SupportUnknown,
		"":                                      SupportUnknown,
	} {
		for _, annotated := range []bool{false, true} {
			want := want
			if annotated && want == SupportIgnored { // NVIDIA's runtime may read the annotation
				want = SupportDepends
			}
			v := Config{Runtime: RuntimeAuto}.Judge(Runtime{Version: version}, annotated)
			if v.Support != want || v.Found == "" || (v.Fix != "") != (want == SupportIgnored || want == SupportDepends) ||
				!strings.Contains(v.String(), version) {
				t.Errorf("%q, annotated %v: got %s (%s), want %s", version, annotated, v.Support, v, want)
			}
			if want == SupportDepends {
				want = Supported
			}
			if v := (Config{Runtime: RuntimeSupported}).Judge(Runtime{Version: version}, annotated); v.Support != want {
				t.Errorf("%q, annotated %v, said to be supported: got %s, want %s", version, annotated, v.Support, want)
			}
		}
	}
	if v := (Config{}).Judge(Runtime{Err: "forbidden"}, false); v.Support != SupportUnknown || !strings.Contains(v.String(), "forbidden") {
		t.Errorf("a Node that cannot be read: %s (%s)", v.Support, v)
	}
}

func TestKubeletAnnotates(t *testing.T) {
	for version, want := range map[string]bool{
		"v1.31.4": true, "v1.32.0": false, "v1.34.1-gke.100": false, "v1.100.0": false, "v1.9.0": true, "": true, "v2.0.0": true, "1.34.0": true,
	} {
		if got := (Runtime{Kubelet: version}).KubeletAnnotates(); got != want {
			t.Errorf("%q: %v", version, got)
		}
	}
}

// Only releases of containerd before 1.7 are refused, whatever a runtime calls itself, and none that a user has looked at may come out
// worse.
func FuzzJudge(f *testing.F) {
	for _, s := range []string{
		"containerd://1.6.36", "containerd://1.7.27-0ubuntu1", "containerd://2.0.0-beta.0", "cri-o://1.31.0",
		"docker://", "containerd://1.06.1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, version string) {
		r := Runtime{Version: version}
		auto, looked := Config{Runtime: RuntimeAuto}.Judge(r, false), Config{Runtime: RuntimeSupported}.Judge(r, false)
		refused := auto.Support == SupportIgnored
		if rest, ok := strings.CutPrefix(strings.Replace(version, "://v", "://", 1), "containerd://"); refused &&
			(!ok || strings.TrimLeft(rest, "0") == "" || rest[0] > '1') {
			t.Errorf("%q is refused", version)
		}
		if refused != (looked.Support == SupportIgnored) || looked.Support == SupportDepends {
			t.Errorf("%q: %s, and %s when looked at", version, auto.Support, looked.Support)
		}
		if annotated := (Config{Runtime: RuntimeAuto}).Judge(r, true); annotated.Support == SupportIgnored {
			t.Errorf("%q is refused with annotations", version)
		}
		if auto.Found == "" || (auto.Fix == "") == (refused || auto.Support == SupportDepends) {
			t.Errorf("%q: %q, fix %q", version, auto.Found, auto.Fix)
		}
	})
}
