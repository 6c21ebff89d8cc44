package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// An empty file is the defaults for an agent that starts. For one that runs it is a file that is being written.
func TestEmptyFileIsNoReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	for _, text := range []string{"", "\n \n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := (Loader{File: file}).Load(); err != nil {
			t.Errorf("%q at the start: %v", text, err)
		}
		if _, err := (Loader{File: file, again: true}).Load(); err == nil || !strings.Contains(err.Error(), file+": is empty") {
			t.Errorf("%q at a reload: %v", text, err)
		}
	}
}

// TestReloadWaitsForTheWriter: what changes from one look to the next is not finished.
func TestReloadWaitsForTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "config.yaml")
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("source: {mode: sim}\nhealth: {temperature: 70}\n")
		a := &Agent{loader: Loader{File: file}, log: zap.NewNop(), level: zap.NewAtomicLevel()}
		c, err := a.loader.Load()
		if err != nil {
			t.Fatal(err)
		}
		a.apply(c)
		start := &metrics.Reload{OK: true, At: time.Now()}
		a.reloaded.Store(start)
		go a.reloadOn(t.Context(), nil)
		synctest.Wait()
		<-time.After(lookEvery / 2) // between two looks
		for _, part := range []string{"", "source: {mode: sim}\n", "source: {mode: sim}\nhealth: {temperature: 80}\n"} {
			if a.reloaded.Load() != start || a.health.Load().Temperature != 70 {
				t.Errorf("it was reloaded before %q was written", part)
			}
			write(part)
			<-time.After(lookEvery)
			synctest.Wait()
		}
		<-time.After(lookEvery)
		synctest.Wait()
		if !a.reloaded.Load().OK || a.health.Load().Temperature != 80 {
			t.Errorf("it was not reloaded when it was finished: %+v", a.reloaded.Load())
		}
		write("")
		<-time.After(3 * lookEvery)
		synctest.Wait()
		if a.reloaded.Load().OK || a.health.Load().Temperature != 80 {
			t.Errorf("a file that is left empty: %+v, %v °C", a.reloaded.Load(), a.health.Load().Temperature)
		}
	})
}
