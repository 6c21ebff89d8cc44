package mps

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
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
		if s := parseServerStatus(answer); s != "" && !strings.Contains(strings.ToUpper(answer), s) {
			t.Errorf("status %q", s)
		}
		if p, ok := parsePercentage(answer); ok {
			if p < 0 || p > 100 {
				t.Errorf("%v percent", p)
			}
			if again, ok := parsePercentage(strconv.FormatFloat(p, 'f', 6, 64)); !ok || math.Abs(again-p) > 1e-6 {
				t.Errorf("%v, %t, want %v", again, ok, p)
			}
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

func logLine(text string) string {
	return "[2026-11-22 07:30:26.216 Control     6] " + text + "\n"
}

func TestControlLog(t *testing.T) {
	const (
		pending = "NEW CLIENT 0 from user 1001: Server is not ready, push client to pending list"
		serves  = "Starting new server 17 for user 1000"
		later   = "Starting new server 18 for user 1001"
		exists  = "NEW CLIENT 0 from user 1001: Server already exists"
	)
	now := time.Now()
	for name, test := range map[string]struct {
		lines   []string
		servers []int
		want    []int
	}{
		"waits":                  {[]string{serves, pending}, []int{17}, []int{1001}},
		"served later":           {[]string{serves, pending, later}, []int{18}, nil},
		"was served":             {[]string{serves, pending, later}, []int{17}, nil},
		"accepted":               {[]string{serves, pending, exists}, []int{17}, nil},
		"no server":              {[]string{serves, pending}, nil, nil},
		"user of server unknown": {[]string{pending}, []int{17}, nil},
		"its own server starts":  {[]string{pending, later}, []int{18}, nil},
		"root waits":             {[]string{serves, strings.ReplaceAll(pending, "1001", "0")}, []int{17}, []int{0}},
		"root serves":            {[]string{strings.ReplaceAll(serves, "1000", "0"), pending}, []int{17}, []int{1001}},
		"several":                {[]string{serves, pending, strings.ReplaceAll(pending, "1001", "7")}, []int{17}, []int{7, 1001}},
		"something else":         {[]string{serves, "NEW CLIENT 0 from user x: pending", "Accepting connection...", "\x00\xff"}, []int{17}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := newControlLog(t.TempDir())
			for _, line := range test.lines {
				l.apply([]byte(logLine(line)), now)
			}
			if got := l.waiting(test.servers, now.Add(pendingLimit-time.Second)); got != nil {
				t.Errorf("at once: %v", got)
			}
			if got := l.waiting(test.servers, now.Add(pendingLimit)); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// Each line counts once, also if the log is written in parts, truncated, replaced, or larger than one read.
func TestControlLogFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, controlLogName)
	l, now := newControlLog(dir), time.Now()
	read := func(want map[int]int) {
		t.Helper()
		l.read(now)
		if !reflect.DeepEqual(l.servers, want) {
			t.Errorf("got %v, want %v", l.servers, want)
		}
		clear(l.servers)
	}
	write := func(flags int, text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|flags, 0o600)
		if err == nil {
			_, err = f.WriteString(text)
		}
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	read(map[int]int{})
	line := func(pid int) string { return logLine(fmt.Sprintf("Starting new server %d for user 7", pid)) }
	write(os.O_APPEND, line(1)+line(2)[:60])
	read(map[int]int{1: 7})
	write(os.O_APPEND, line(2)[60:])
	read(map[int]int{2: 7})
	read(map[int]int{})
	write(os.O_APPEND, strings.Repeat(logLine("Accepting connection..."), 3000)+line(3))
	read(map[int]int{3: 7})
	write(os.O_TRUNC, line(4))
	read(map[int]int{4: 7})
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write(0, line(5)+line(6)+line(7))
	read(map[int]int{5: 7, 6: 7, 7: 7})
	write(os.O_APPEND, strings.Repeat("x", 3*maxLogRead))
	read(map[int]int{})
	write(os.O_APPEND, "\n"+line(8))
	read(map[int]int{8: 7})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	read(map[int]int{})
}

// A log of any content has bounded effects.
func FuzzControlLog(f *testing.F) {
	f.Add(logLine("Starting new server 17 for user 0") + logLine("NEW CLIENT 0 from user 1: Server is not ready, push client to pending list"))
	f.Fuzz(func(t *testing.T, text string) {
		l, now := newControlLog(""), time.Now()
		for line := range strings.Lines(text) {
			l.apply([]byte(line), now)
		}
		if len(l.servers) > maxLogUsers || len(l.pending) > maxLogUsers {
			t.Errorf("%d servers, %d users", len(l.servers), len(l.pending))
		}
		for pid, uid := range l.servers {
			if pid < 1 || uid < 0 || !strings.Contains(text, strconv.Itoa(uid)) {
				t.Errorf("server %d of user %d", pid, uid)
			}
		}
		for _, uid := range l.waiting([]int{1}, now.Add(time.Hour)) {
			if !strings.Contains(text, "user") || uid < 0 {
				t.Errorf("user %d", uid)
			}
		}
	})
}

func FuzzDesiredFile(f *testing.F) {
	f.Add(`{"version":1,"control":"c","stopped":true,"daemons":[{"device":"GPU-a","gpu":"GPU-a","index":0,"mig":false,"threadPercentage":25,"pinnedMemory":1,"leaving":true}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"MIG-a","gpu":"GPU-a","index":3,"mig":true,"threadPercentage":25,"pinnedMemory":1}]}`)
	f.Add(`{"version":2}`)
	f.Add(`{"version":1,"daemons":[{"device":"../a","gpu":"GPU-a"}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"..","gpu":"GPU-a"}]}`)
	f.Add(`{"version":1,"daemons":[{"device":"GPU-a","gpu":".."}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parseDesired([]byte(text))
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
			if s := newDesiredDaemon(daemon.spec(), daemon.Leaving); s != daemon {
				t.Errorf("%+v, want %+v", s, daemon)
			}
		}
	})
}
