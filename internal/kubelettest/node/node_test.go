package node

import (
	"os"
	"reflect"
	"testing"
	"time"
)

func TestParsePage(t *testing.T) {
	page, err := ParsePage([]byte("# HELP a b\n# TYPE a gauge\na 1\nb{x=\"1\",y=\"a \\\"b\\\\} c\"} 2.5e+06\nb{x=\"2\",} +Inf\n\nc{} -3\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Series{"b", map[string]string{"x": "1", "y": `a "b\} c`}, 2.5e6}
	if len(page) != 4 || !reflect.DeepEqual(page[1], want) {
		t.Errorf("got %+v, want %+v as the second series", page, want)
	}
	if v, ok := page.Value("b", "x", "2"); !ok || v < 1e300 {
		t.Errorf("b{x=2} is %v, %v", v, ok)
	}
	if _, ok := page.Value("b", "x", "3"); ok {
		t.Error("b{x=3} exists")
	}
	for _, bad := range []string{"a", "a{x 1", `a{x="1} 2`, "a b", `a{x="1"}`} {
		if _, err := ParsePage([]byte(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

// Nodes whose agents do not listen at the moment have different addresses.
func TestFreeAddressIsNotRepeated(t *testing.T) {
	seen := make(map[string]bool)
	for range 2000 {
		address, err := freeAddress(t.Context())
		if err != nil || seen[address] {
			t.Fatalf("%q after %d others: repeated %t, %v", address, len(seen), seen[address], err)
		}
		seen[address] = true
	}
}

func TestUsageOf(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var u Usage
	for start := time.Now(); err == nil && u.CPU == 0 && time.Since(start) < time.Minute; { // reading /proc uses CPU time
		u, err = UsageOf(os.Getpid())
	}
	if err != nil || u.CPU == 0 || u.RSS < 1<<20 || u.Anon < 1<<20 || u.Anon >= u.RSS || u.Threads < 2 || u.Files < 4 {
		t.Errorf("UsageOf = %+v, %v", u, err)
	}
	if _, err := UsageOf(1 << 30); err == nil {
		t.Error("no error for a process that does not exist")
	}
}
