package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

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

// Between the start's reading and the first look a program may write: that is a change as any other.
func TestReloadOfWhatChangedSinceTheStart(t *testing.T) {
	for name, write := range map[string]func(dir string) error{
		"the file": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("health: {temperature: 80}\n"), 0o600)
		},
		"a file that it names": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "fields.csv"), []byte("DCGM_FI_DEV_POWER_USAGE, gauge, power\n"), 0o600)
		},
		"nothing": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{
				"config.yaml": fmt.Sprintf("source: {mode: sim}\nplugin: {nvidiaConfig: %[1]s/nvidia.yaml}\n"+
					"metrics: {fieldsFile: %[1]s/fields.csv, webConfigFile: %[1]s/web.yaml}\n", dir),
				"fields.csv":  "DCGM_FI_DEV_GPU_TEMP, gauge, temperature\n",
				"nvidia.yaml": "version: v1\n",
				"web.yaml":    "http_server_config: {http2: true}\n",
			} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Test(t, func(t *testing.T) {
				a := &Agent{loader: Loader{File: filepath.Join(dir, "config.yaml")}, log: zap.NewNop(), level: zap.NewAtomicLevel()}
				c, err := a.loader.Load()
				if err != nil {
					t.Fatal(err)
				}
				if err := write(dir); err != nil {
					t.Fatal(err)
				}
				a.apply(c)
				start := &metrics.Reload{OK: true, At: time.Now()}
				a.reloaded.Store(start)
				go a.reloadOn(t.Context(), nil)
				<-time.After(3 * lookEvery)
				synctest.Wait()
				r := a.reloaded.Load()
				if (r != start) != (name != "nothing") || !r.OK {
					t.Errorf("reloaded: %v, %+v", r != start, r)
				}
				<-time.After(3 * lookEvery)
				synctest.Wait()
				if a.reloaded.Load() != r {
					t.Error("reloaded again, though nothing has changed since")
				}
			})
		})
	}
}

// Who asks for a reload gets an answer each time; that a file is bad is said once.
func TestSIGHUPIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "config.yaml")
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("source: {mode: sim}\n")
		core, said := observer.New(zap.InfoLevel)
		a := &Agent{loader: Loader{File: file}, log: zap.New(core), level: zap.NewAtomicLevel()}
		c, err := a.loader.Load()
		if err != nil {
			t.Fatal(err)
		}
		a.apply(c)
		a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
		hup := make(chan os.Signal)
		go a.reloadOn(t.Context(), hup)
		write("source: {mode: simm}\n")
		<-time.After(5 * lookEvery)
		synctest.Wait()
		for _, c := range []struct{ text, says string }{
			{"", "configuration is bad: the old one stays"},
			{"", "configuration is bad: the old one stays"},
			{"source: {mode: sim}\n", "configuration reloaded"},
			{"", "configuration reloaded"},
		} {
			if c.text != "" {
				write(c.text)
			}
			before := said.FilterField(zap.String("why", "SIGHUP")).Len()
			hup <- syscall.SIGHUP
			synctest.Wait()
			if all := said.FilterField(zap.String("why", "SIGHUP")).All(); len(all) != before+1 || all[before].Message != c.says {
				t.Errorf("%q is answered by %v, want %s", c.text, all, c.says)
			}
		}
		<-time.After(5 * lookEvery)
		synctest.Wait()
		if byItself := said.FilterField(zap.String("why", "the file has changed")).All(); len(byItself) != 1 {
			t.Errorf("said without being asked: %v", byItself)
		}
	})
}
