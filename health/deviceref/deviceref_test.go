package deviceref

import "testing"

func TestMatch(t *testing.T) {
	gpu := &Names{UUID: "GPU-a", Index: 3, MIG: -1, PCI: "00000000:1B:00.0"}
	mig := &Names{UUID: "MIG-b", Parent: "GPU-a", Index: 3, MIG: 1, PCI: "00000000:1B:00.0"}
	unknown := &Names{UUID: "GPU-c", MIG: -1}
	for _, tt := range []struct {
		ref               string
		gpu, mig, unknown bool
		valid             bool
	}{
		{"GPU-a", true, true, false, true},
		{"gpu-A", true, true, false, true},
		{"MIG-b", false, true, false, true},
		{"mig-b", false, false, false, false},
		{"3", true, true, false, true},
		{"0", false, false, true, true},
		{"3:1", false, true, false, true},
		{"3:0", false, false, false, true},
		{"0000:1b:00.0", true, true, false, true},
		{"00000000:1B:00.0", true, true, false, true},
		{"1b:00.0", true, true, false, true},
		{"0001:1b:00.0", false, false, false, true},
		{"*H100*", false, false, false, false},
		{"-1", false, false, false, false},
		{"1b:00", false, false, false, false},
		{"", false, false, false, false},
	} {
		g, valid := gpu.Match(tt.ref)
		m, _ := mig.Match(tt.ref)
		u, _ := unknown.Match(tt.ref)
		if g != tt.gpu || m != tt.mig || u != tt.unknown || valid != tt.valid || Valid(tt.ref) != tt.valid {
			t.Errorf("%q matches GPU %v, MIG device %v, other %v, valid %v and %v; want %+v", tt.ref, g, m, u, valid, Valid(tt.ref), tt)
		}
	}
	if Valid("GPU-") || Valid("gpu-") || Valid("MIG-") {
		t.Error("a prefix without a UUID is valid")
	}
}

func FuzzMatch(f *testing.F) {
	for _, s := range []string{"GPU-a", "0:1", "1b:00.0", "*a?", "::", ":.", "-", "MIG-"} {
		f.Add(s, "00000000:1B:00.0")
	}
	f.Fuzz(func(t *testing.T, ref, pci string) {
		n := &Names{UUID: "GPU-0", MIG: -1, PCI: pci}
		if match, valid := n.Match(ref); match && !valid {
			t.Errorf("%q matches but is not valid", ref)
		}
		a, ok := ParsePCI(pci)
		if !ok {
			return
		}
		if again, ok := ParsePCI(a.String()); !ok || again != a {
			t.Errorf("%q parses as %v, which parses as %v", pci, a, again)
		}
		if match, _ := n.Match(a.String()); !match {
			t.Errorf("%v does not match the device at %q", a, pci)
		}
	})
}
