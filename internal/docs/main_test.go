package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

const root = "../.."

// blob begins the addresses of files in the repository, for texts that are read outside of it.
const blob = "https://github.com/gpu-node-agent/gpu-node-agent/blob/main/"

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// eachDocument calls check with every document of the repository.
func eachDocument(t *testing.T, check func(t *testing.T, file, text string)) {
	t.Helper()
	for _, file := range documents(root) {
		t.Run(strings.TrimPrefix(file, root+"/"), func(t *testing.T) { check(t, file, read(t, file)) })
	}
}

func TestGeneratedPartsAreCurrent(t *testing.T) {
	eachDocument(t, func(t *testing.T, _, text string) {
		if want, err := generate(root, text); err != nil || want != text {
			t.Errorf("generated parts are out of date (%v); run make docs", err)
		}
	})
}

func TestLinksResolve(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	path := regexp.MustCompile("`((?:agent|charts|docs|e2e|health|internal|metrics|plugin)/[\\w./-]*)`")
	eachDocument(t, func(t *testing.T, file, text string) {
		for _, match := range link.FindAllStringSubmatch(prose(text), -1) {
			target, inRepository := strings.CutPrefix(match[1], blob)
			switch {
			case inRepository:
				target = filepath.Join(root, target)
			case strings.Contains(target, "://"):
				continue
			case strings.HasPrefix(target, "#"):
				target = file + target
			default:
				target = filepath.Join(filepath.Dir(file), target)
			}
			if err := resolve(target); err != nil {
				t.Error(err)
			}
		}
		for _, match := range path.FindAllStringSubmatch(text, -1) {
			if err := resolve(filepath.Join(root, match[1])); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestRunbookURLsResolve(t *testing.T) {
	rules, err := alertRules(root)
	if err != nil || len(rules) == 0 {
		t.Fatalf("%d alerts: %v", len(rules), err)
	}
	for _, r := range rules {
		target, ok := strings.CutPrefix(r.Annotations["runbook_url"], blob)
		if !ok || !strings.HasSuffix(target, "#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s: runbook_url %q, want a heading of its own below %s", r.Alert, r.Annotations["runbook_url"], blob)
		} else if err := resolve(filepath.Join(root, target)); err != nil {
			t.Errorf("%s: %v", r.Alert, err)
		}
	}
}

// resolve reports a file that does not exist, or one without the anchor behind "#".
func resolve(target string) error {
	file, anchor, _ := strings.Cut(target, "#")
	if _, err := os.Stat(file); err != nil || anchor == "" {
		return err
	}
	text, err := os.ReadFile(file)
	if err == nil && !anchors(string(text))[anchor] {
		err = fmt.Errorf("%s has no anchor #%s", file, anchor)
	}
	return err
}

// prose returns a document without its code blocks.
func prose(text string) string {
	return regexp.MustCompile("(?ms)^```.*?^```$").ReplaceAllString(text, "")
}

// anchors returns the anchors of a document: GitHub's for its headings, and the ones that it sets itself.
func anchors(text string) map[string]bool {
	found := make(map[string]bool)
	for _, match := range regexp.MustCompile(`<a id="([^"]+)">`).FindAllStringSubmatch(text, -1) {
		found[match[1]] = true
	}
	punctuation := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, match := range regexp.MustCompile(`(?m)^#+ +(.+)$`).FindAllStringSubmatch(prose(text), -1) {
		slug := strings.ReplaceAll(punctuation.ReplaceAllString(strings.ToLower(match[1]), ""), " ", "-")
		for n, base := 1, slug; found[slug]; n++ {
			slug = fmt.Sprintf("%s-%d", base, n)
		}
		found[slug] = true
	}
	return found
}

// TestRunnableBlocks executes the shell blocks marked "sh runnable", each in an empty directory with the agent on PATH.
func TestRunnableBlocks(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	bin := t.TempDir()
	agent := bin + "/gpu-node-agent"
	if built := os.Getenv("AGENT_BIN"); built != "" {
		if err := os.Symlink(built, agent); err != nil {
			t.Fatal(err)
		}
	} else if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", agent, root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	block := regexp.MustCompile("(?ms)^```sh runnable$\n(.*?)^```$")
	blocks := 0
	eachDocument(t, func(t *testing.T, _, text string) {
		for _, match := range block.FindAllStringSubmatch(text, -1) {
			blocks++
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", match[1])
			shell.Dir = t.TempDir()
			shell.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
			shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that what it leaves behind ends with it
			shell.Cancel = func() error { return syscall.Kill(-shell.Process.Pid, syscall.SIGKILL) }
			shell.WaitDelay = 5 * time.Second
			out, err := shell.CombinedOutput()
			_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL)
			if err != nil && !errors.Is(err, exec.ErrWaitDelay) { // an agent that takes longer to stop keeps the pipe open
				t.Errorf("%v:\n%s%s", err, match[1], out)
			}
		}
	})
	if blocks == 0 {
		t.Error("no document has a runnable block")
	}
}
