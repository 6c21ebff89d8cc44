package deviceref

import "testing"

func TestIs(t *testing.T) {
	gpu := &Names{UUID: "GPU-a", Index: 3, MIG: -1, PCI: "00000000:1B:00.0"}
	mig := &Names{UUID: "MIG-b", Parent: "GPU-a", Index: 3, MIG: 1, PCI: "00000000:1B:00.0"}
	none := &Names{UUID: "GPU-c", MIG: -1}
	for _, c := range []struct {
		word           string
		gpu, mig, none bool
		named          bool
	}{
		{"GPU-a", true, true, false, true},
		{"MIG-b", false, true, false, true},
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
		g, named := gpu.Match(c.word)
		m, _ := mig.Match(c.word)
		n, _ := none.Match(c.word)
		if g != c.gpu || m != c.mig || n != c.none || named != c.named || Valid(c.word) != c.named {
			t.Errorf("%q: GPU %v, MIG device %v, other %v, named %v, valid %v; want %+v", c.word, g, m, n, named, Valid(c.word), c)
		}
	}
	if Valid("GPU-") || Valid("MIG-") {
		t.Error("a UUID without anything in it is taken for one")
	}
}

func FuzzIs(f *testing.F) {
	for _, s := range []string{"GPU-a", "0:1", "1b:00.0", "*a?", "::", ":.", "-", "MIG-"} {
		f.Add(s, "00000000:1B:00.0")
	}
	f.Fuzz(func(t *testing.T, word, pci string) {
		d := &Names{UUID: "GPU-0", MIG: -1, PCI: pci}
		if is, named := d.Match(word); is && !named {
			t.Errorf("%q means a device and is no name", word)
		}
		a, ok := ParsePCI(pci)
		if !ok {
			return
		}
		if again, ok := ParsePCI(a.String()); !ok || again != a {
			t.Errorf("%q is %v, and that %v", pci, a, again)
		}
		if is, _ := d.Match(a.String()); !is {
			t.Errorf("%v does not mean the device at %q", a, pci)
		}
	})
}
