package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"
)

// minLimit is the least time limit of a test run: a fast package on a busy machine is no slower mutant.
const minLimit = 10 * time.Second

// Trial runs the tests of a package with and without mutants.
type trial struct {
	source *source
	tmp    string
	limit  time.Duration
}

// newTrial measures the normal time of the tests: the longest of three runs, which must pass.
func newTrial(ctx context.Context, s *source, tmp string) (*trial, error) {
	t := &trial{source: s, tmp: tmp, limit: 10 * time.Minute}
	if out, err := t.compile(ctx, nil); err != nil {
		return nil, fmt.Errorf("%s: the tests do not compile: %w\n%s", s.path, err, out)
	}
	var normal time.Duration
	for range 3 {
		started := time.Now()
		if test, err := t.run(ctx); err != nil {
			return nil, fmt.Errorf("%s: the tests fail without a mutant: %s: %w", s.path, test, err)
		}
		normal = max(normal, time.Since(started))
	}
	t.limit = max(5*normal, minLimit)
	fmt.Fprintf(os.Stderr, "%s: three runs without a mutant pass, the longest takes %v\n", s.path, normal.Round(time.Millisecond))
	return t, nil
}

// compile builds the tests, with the mutant unless it is nil.
func (t *trial) compile(ctx context.Context, m *mutant) ([]byte, error) {
	replace := map[string]string{}
	if m != nil {
		file := filepath.Join(t.source.dir, m.file)
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		text = bytes.Join([][]byte{text[:m.start], []byte(m.new), text[m.end:]}, nil)
		replace[file] = filepath.Join(t.tmp, "mutant.go")
		if err := os.WriteFile(replace[file], text, 0o600); err != nil {
			return nil, err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(t.tmp, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay", file, "-o", t.binary(), "./"+t.source.path).CombinedOutput()
}

func (t *trial) binary() string { return filepath.Join(t.tmp, "tests") }

var failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// errLimit is the result of tests that did not end in time.
var errLimit = errors.New("time limit")

// run runs the compiled tests in namespaces of their own, because a mutant can send signals to anything. It returns the
// first test that failed, as far as it is known.
func (t *trial) run(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.limit, errLimit)
	defer cancel()
	args := []string{"--mount-proc", "--pid", "--fork", "--kill-child"}
	if os.Getuid() != 0 {
		args = append(args, "--user", "--map-root-user")
	}
	// The first process of a namespace ignores signals that it does not handle, so the tests are not the first.
	args = append(args, "sh", "-c", `"$@"; exit $?`, "sh", t.binary(), "-test.failfast", "-test.timeout=0")
	cmd := exec.CommandContext(ctx, "unshare", args...)
	cmd.Dir = t.source.dir
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if cause := context.Cause(ctx); cause != nil {
		return "", cause
	}
	if err == nil {
		return "", nil
	}
	if found := failedTest.FindSubmatch(out); found != nil {
		return string(found[1]), err
	}
	return oneLine(string(out)), err
}
