package mps

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestParsePIDs(t *testing.T) {
	for answer, want := range map[string][]int{
		"": nil, "17\n": {17}, "18\n17\n17": {17, 18}, "0": {-1}, "-3": {-1}, "17 x": {-1}, "+17": {-1}, "Server 17": {-1},
		"99999999999999999999": {-1},
	} {
		got, err := parsePIDs(answer)
		if fails := slices.Equal(want, []int{-1}); fails != errors.Is(err, errRefused) || !fails && !slices.Equal(got, want) {
			t.Errorf("%q: got %v, %v, want %v", answer, got, err, want)
		}
	}
	var list strings.Builder
	for i := range maxPIDs {
		fmt.Fprintln(&list, 1+i)
	}
	if got, err := parsePIDs(list.String() + "1\n"); err != nil || len(got) != maxPIDs {
		t.Errorf("as many as are allowed: %d, %v", len(got), err)
	}
	if _, err := parsePIDs(list.String() + strconv.Itoa(maxPIDs+1)); !errors.Is(err, errRefused) {
		t.Errorf("one more: %v", err)
	}
}

func TestParseServerStatus(t *testing.T) {
	for answer, want := range map[string]string{
		"ACTIVE\n": serverActive, "Server status: FAULT": serverFault, "initializing": serverInitializing, "": "", "INACTIVE": "", "unknown": "",
	} {
		if got := parseServerStatus(answer); got != want {
			t.Errorf("%q: got %q, want %q", answer, got, want)
		}
	}
}

func TestParsePercentage(t *testing.T) {
	for answer, want := range map[string]float64{
		"25.0": 25, "100.0\n": 100, "12.5 %": 12.5, "0": 0, "101": -1, "-1": -1, "NaN": -1, "0x10": -1, "": -1, "a quarter": -1, "1e1": -1,
	} {
		got, ok := parsePercentage(answer)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("%q: got %v, %t, want %v", answer, got, ok, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for answer, want := range map[string]size{
		"3G": {3 << 30, 1 << 30}, "1024M\n": {1 << 30, 1 << 20}, "1.5G": {3 << 29, 1 << 30}, "0=512M": {512 << 20, 1 << 20},
		"The limit of device 0 is 20 GB": {20 << 30, 1 << 30}, "0M": {0, 1 << 20}, "2T": {2 << 40, 1 << 40}, "512 MiB": {512 << 20, 1 << 20},
		"": {}, "1024": {}, "none": {}, "-3G": {}, "NaNG": {}, "999999999T": {}, "G": {},
	} {
		if got, ok := parseSize(answer); ok != (want.unit > 0) || got != want {
			t.Errorf("%q: got %+v, %t, want %+v", answer, got, ok, want)
		}
	}
	s := size{20 << 30, 1 << 30}
	for want, near := range map[uint64]bool{
		20 << 30: true, 20<<30 + 512<<20: true, 20<<30 - 512<<20: true, 21 << 30: false, 19 << 30: false,
		0: false,
	} {
		if s.near(want) != near {
			t.Errorf("20G near %d: %t", want, !near)
		}
	}
}

func FuzzAnswers(f *testing.F) {
	for _, s := range []string{
		"17\n18\n", "ACTIVE", "25.0", "1024M", "0=3G", "Cannot find MPS control daemon process", "Unrecognized command",
		"\xff",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, answer string) {
		checkPIDs(t, answer)
		checkPercentage(t, answer)
		if s := parseServerStatus(answer); s != "" && !strings.Contains(strings.ToUpper(answer), s) {
			t.Errorf("status %q", s)
		}
		if s, ok := parseSize(answer); ok && (s.bytes >= 1<<62 || s.unit < 1<<20 || !s.near(s.bytes)) {
			t.Errorf("%+v", s)
		}
		if q := quote(answer); len(q) > maxQuoted+len("…") || strings.Contains(q, "\n") {
			t.Errorf("%q", q)
		}
		if got, err := controlResult(answer, "", nil, nil); err == nil && got != strings.TrimSpace(answer) || err != nil && got != "" {
			t.Errorf("%q, %v", got, err)
		}
	})
}

func checkPIDs(t *testing.T, answer string) {
	t.Helper()
	pids, err := parsePIDs(answer)
	if !slices.IsSorted(pids) || len(pids) > maxPIDs || len(pids) > 0 && pids[0] < 1 || err != nil && !errors.Is(err, errRefused) {
		t.Errorf("%v, %v", pids, err)
	}
	var text strings.Builder
	for _, pid := range pids {
		fmt.Fprintln(&text, pid)
	}
	if again, err := parsePIDs(text.String()); err != nil || !slices.Equal(again, pids) {
		t.Errorf("%v, %v, want %v", again, err, pids)
	}
}

func checkPercentage(t *testing.T, answer string) {
	t.Helper()
	p, ok := parsePercentage(answer)
	if !ok {
		return
	}
	if p < 0 || p > 100 {
		t.Errorf("%v percent", p)
	}
	if again, ok := parsePercentage(strconv.FormatFloat(p, 'f', 6, 64)); !ok || math.Abs(again-p) > 1e-6 {
		t.Errorf("%v, %t, want %v", again, ok, p)
	}
}

func FuzzFollow(f *testing.F) {
	f.Add(`{"version":1,"control":"c","stopped":true,"daemons":[{"device":"GPU-a","gpu":"GPU-a","index":0,"mig":false,` +
		`"threadPercentage":25,"pinnedMemory":1,"other":true}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"MIG-a","gpu":"GPU-a","index":3,"mig":true,"threadPercentage":25,"pinnedMemory":1}]}`)
	f.Add(`{"version":2}`)
	f.Add(`{"version":1,"daemons":[{"device":"../a","gpu":"GPU-a"}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"..","gpu":"GPU-a"}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"GPU-a","gpu":".."}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parseFollow([]byte(text))
		if err != nil {
			return
		}
		root := Root("/run/mps")
		for _, daemon := range d.Daemons {
			if dir := root.PipeDir(daemon.Device); !strings.HasPrefix(dir, "/run/mps/") || filepath.Dir(filepath.Dir(dir)) != "/run/mps" {
				t.Errorf("%q: %s", daemon.Device, dir)
			}
			if file := root.computeModeFile(daemon.GPU); filepath.Dir(filepath.Dir(file)) != "/run/mps" {
				t.Errorf("%q: %s", daemon.GPU, file)
			}
			if s := newFollowDaemon(daemon.spec()); s != daemon {
				t.Errorf("%+v, want %+v", s, daemon)
			}
		}
	})
}
