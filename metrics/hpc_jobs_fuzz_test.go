package metrics

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

func isIndex(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 0 && strconv.Itoa(n) == s && n < 10000
}

func checkJobIDs(t *testing.T, ids []string) {
	t.Helper()
	if len(ids) > maxJobs || len(slices.Compact(slices.Sorted(slices.Values(ids)))) != len(ids) {
		t.Errorf("%d job IDs, or duplicates: %q", len(ids), ids)
	}
	for _, id := range ids {
		if id == "" || len(id) > maxJobID || !utf8.ValidString(id) || strings.ContainsAny(id, "\n") || strings.TrimSpace(id) != id {
			t.Errorf("invalid job ID %q", id)
		}
	}
}

// FuzzHPCJobs reads a file with any name and content. Only a file named after a GPU is read. Its job IDs are distinct,
// valid as labels, and within the limits; parsing them again yields the same IDs. An error names the file.
func FuzzHPCJobs(f *testing.F) {
	for _, name := range []string{"0", "7", "2.7", "0.0", "00", "-1", "1.", ".1", "1.2.3", "9999", "10000", "0\n", "GPU-0", "0~", "٣"} {
		f.Add(name, []byte("4711\n"))
	}
	for _, text := range []string{
		"", "\n\n", "1\n1\n2", "a b\r\n c \r\n", "\x00\n\xff\xfe\n", "\xef\xbb\xbf4711", "{job=\"x\"}\n\"\\\n", "no newline",
		strings.Repeat("x", maxJobID) + "\n" + strings.Repeat("y", maxJobID+1),
		strings.Repeat("\xff", maxJobID), strings.Repeat("1\n", maxJobBytes), strings.Repeat("z", maxJobBytes+1), "a\u2028b\u0085c",
	} {
		f.Add("0", []byte(text))
	}
	var many strings.Builder
	for i := range maxJobs + 1 {
		many.WriteString(strconv.Itoa(i) + "\n")
	}
	f.Add("0", []byte(many.String()))
	f.Fuzz(func(t *testing.T, name string, text []byte) {
		if strings.ContainsAny(name, "/\x00") || name == "" || name == "." || name == ".." || len(name) > 200 {
			return // not a file name
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		read, err := readJobs(dir)
		if err != nil && !strings.Contains(err.Error(), filepath.Join(dir, name)) {
			t.Errorf("the error does not name the file: %v", err)
		}
		gpu, gi, instance := strings.Cut(name, ".")
		if !isIndex(gpu) || instance && !isIndex(gi) {
			if len(read) > 0 || err != nil {
				t.Errorf("%q names no GPU but has %v, %v", name, read, err)
			}
			return
		}
		ids := read[name]
		checkJobIDs(t, ids)
		if again, err := parseJobs([]byte(strings.Join(ids, "\n"))); err != nil || !slices.Equal(again, ids) {
			t.Errorf("%q parsed again yields %q, %v", ids, again, err)
		}
		j := NewJobs(nil, nil)
		j.byFile.Store(&read)
		n, _ := strconv.Atoi(gpu)
		if got := j.Of(n, gi); !slices.Equal(got, ids) {
			t.Errorf("GPU %d instance %q has %q, want %q", n, gi, got, ids)
		}
	})
}
