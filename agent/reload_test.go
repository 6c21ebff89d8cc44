package agent

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

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
		a := &Agent{loader: config.Loader{File: file}, log: zap.NewNop(), level: zap.NewAtomicLevel(), reloadEvery: reloadEvery}
		c, err := a.loader.Load()
		if err != nil {
			t.Fatal(err)
		}
		a.apply(c)
		start := &metrics.Reload{OK: true, At: time.Now()}
		a.reloaded.Store(start)
		go a.reloadOn(t.Context(), nil)
		synctest.Wait()
		<-time.After(reloadEvery / 2) // between two looks
		for _, part := range []string{"", "source: {mode: sim}\n", "source: {mode: sim}\nhealth: {temperature: 80}\n"} {
			if a.reloaded.Load() != start || a.health.Load().Temperature != 70 {
				t.Errorf("it was reloaded before %q was written", part)
			}
			write(part)
			<-time.After(reloadEvery)
			synctest.Wait()
		}
		<-time.After(reloadEvery)
		synctest.Wait()
		if !a.reloaded.Load().OK || a.health.Load().Temperature != 80 {
			t.Errorf("it was not reloaded when it was finished: %+v", a.reloaded.Load())
		}
		write("")
		<-time.After(3 * reloadEvery)
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
				a := &Agent{loader: config.Loader{File: filepath.Join(dir, "config.yaml")}, log: zap.NewNop(), level: zap.NewAtomicLevel(), reloadEvery: reloadEvery}
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
				<-time.After(3 * reloadEvery)
				synctest.Wait()
				r := a.reloaded.Load()
				if (r != start) != (name != "nothing") || !r.OK {
					t.Errorf("reloaded: %v, %+v", r != start, r)
				}
				<-time.After(3 * reloadEvery)
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
		a := &Agent{loader: config.Loader{File: file}, log: zap.New(core), level: zap.NewAtomicLevel(), reloadEvery: reloadEvery}
		c, err := a.loader.Load()
		if err != nil {
			t.Fatal(err)
		}
		a.apply(c)
		a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
		hup := make(chan os.Signal)
		go a.reloadOn(t.Context(), hup)
		write("source: {mode: simm}\n")
		<-time.After(5 * reloadEvery)
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
		<-time.After(5 * reloadEvery)
		synctest.Wait()
		if byItself := said.FilterField(zap.String("why", "the file has changed")).All(); len(byItself) != 1 {
			t.Errorf("said without being asked: %v", byItself)
		}
	})
}

// The file, and what it names, may change at any time. What is bad changes nothing.
func TestWebConfigReload(t *testing.T) {
	t.Parallel()
	s := newSite(t, "{}\n")
	before := s.Address()
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	kept := s.Dial(nil)
	served := func(conn net.Conn) error {
		_, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
		if err == nil {
			var res *http.Response
			if res, err = http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
				_, err = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
			}
		}
		return err
	}
	if err := served(kept); err != nil {
		t.Fatal(err)
	}

	s.Write("web.yaml", agenttest.TLSConfig)
	s.Eventually("TLS", func() error { _, _, err := s.Get("/metrics", s.CA.Client(), ""); return err })
	if now := s.Address(); now != before {
		t.Errorf("it moved from %s to %s", before, now)
	}
	s.MustGet(http.StatusBadRequest, "/metrics", nil, "")
	if err := served(kept); err == nil {
		t.Error("a connection of before TLS is served")
	}

	for name, text := range map[string]string{
		"no YAML": "{", "unknown key": "tls: {}", "no such certificate": "tls_server_config: {cert_file: none.crt, key_file: server.key}",
		"no bcrypt": "basic_auth_users: {a: b}", "no key": "tls_server_config: {cert_file: server.crt}",
	} {
		s.reloaded.Store(&metrics.Reload{OK: true})
		s.Write("web.yaml", text)
		s.Eventually("refused: "+name, func() error {
			if s.reloaded.Load().OK {
				return errors.New("no reload yet")
			}
			return nil
		})
		s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "")
	}
	if said := s.Logs.FilterMessage("configuration is bad: the old one stays").All(); !strings.Contains(fmt.Sprint(said[0].ContextMap()["error"]), "metrics.webConfigFile: "+s.File("web.yaml")) {
		t.Errorf("the key is not named: %v", said[0].ContextMap())
	}

	// A new certificate, in two steps as some write it.
	s.Write("web.yaml", agenttest.TLSConfig)
	s.Eventually("the good file is taken", func() error {
		if !s.reloaded.Load().OK {
			return errors.New("not yet")
		}
		return nil
	})
	serial := func() string {
		return s.Dial(s.CA.Client()).(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	was := serial()
	s.CA.Issue(t, "next", "localhost")
	s.rename("next.crt", "server.crt")
	s.Eventually("half a certificate is refused", func() error {
		if s.reloaded.Load().OK {
			return errors.New("no reload yet")
		}
		return nil
	})
	if now := serial(); now != was {
		t.Errorf("certificate %s, want still %s", now, was)
	}
	s.rename("next.key", "server.key")
	s.Eventually("the new certificate", func() error {
		if now := serial(); now == was {
			return errors.New("still " + was)
		}
		return nil
	})

	s.Write("web.yaml", agenttest.TLSConfig+"basic_auth_users: {ada: "+agenttest.PasswordHash(t, "1815")+"}\n")
	s.Eventually("passwords", func() error {
		if code, _, err := s.Get("/metrics", s.CA.Client(), ""); code != http.StatusUnauthorized {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
	s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "ada:1815")
	s.Write("config.yaml", "metrics: {listen: 127.0.0.1:0}\n")
	s.Eventually("plain again", func() error {
		code, _, err := s.Get("/metrics", nil, "")
		if code != http.StatusOK {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
}
