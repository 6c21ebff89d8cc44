package agent

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/crypto/bcrypt"
)

const tlsText = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"

// site is an agent's web server with its configuration in files, as a node has it.
type site struct {
	*Agent
	t    *testing.T
	dir  string
	ca   *authority
	said *observer.ObservedLogs
}

// newSite serves, with a web configuration if that is not "". Certificates of an authority are beside it:
// server.crt and server.key, and those of a client.
func newSite(t *testing.T, text string) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	s.ca = newAuthority(t, s.dir)
	s.ca.issue(t, "server", "localhost")
	s.ca.issue(t, "client", "prometheus")
	node := aNode().snapshot
	node.At = time.Now().Add(time.Hour) // nobody measures again here, and /readyz wants new measurements
	s.Agent = knowing(node)
	core, said := observer.New(zap.DebugLevel)
	s.log, s.said = zap.New(core), said
	s.loader = Loader{File: s.file("config.yaml")} // the reload's own from then on
	s.write("config.yaml", "metrics: {listen: 127.0.0.1:0}\n")
	if text != "" {
		s.write("web.yaml", text)
		s.write("config.yaml", "metrics: {listen: 127.0.0.1:0, webConfigFile: "+s.file("web.yaml")+"}\n")
	}
	c, err := s.loader.Load()
	if err != nil {
		t.Fatal(err)
	}
	s.apply(c)
	t.Cleanup(func() {
		if t.Failed() {
			for _, e := range said.All() {
				t.Log(e.Message, e.ContextMap())
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- s.runWeb(ctx) }()
	go func() { s.reloadOn(ctx, nil); ended <- nil }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

func (s *site) file(name string) string { return filepath.Join(s.dir, name) }

func (s *site) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(s.file(name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// address waits until the server listens, and returns where.
func (s *site) address() string {
	s.t.Helper()
	address := ""
	s.eventually("it listens", func() error {
		for _, e := range s.said.FilterMessage("web server listens").All() {
			address = fmt.Sprint(e.ContextMap()["address"])
		}
		if address == "" {
			return errors.New("not yet")
		}
		return nil
	})
	return address
}

func (s *site) eventually(what string, check func() error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			s.t.Fatalf("waited in vain for: %s: %v", what, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ask asks for a page on a connection of its own, over TLS if the client has a configuration for it.
func (s *site) ask(path string, client *tls.Config, user string) (int, string, error) {
	scheme := "http"
	if client != nil {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, scheme+"://"+s.address()+path, nil)
	if err != nil {
		return 0, "", err
	}
	if name, password, ok := strings.Cut(user, ":"); ok {
		req.SetBasicAuth(name, password)
	}
	c := http.Client{
		Timeout:   20 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: client, ForceAttemptHTTP2: true},
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, string(text), err
}

// must asks, and fails unless the answer has a status.
func (s *site) must(want int, path string, client *tls.Config, user string) string {
	s.t.Helper()
	code, text, err := s.ask(path, client, user)
	if err != nil || code != want {
		s.t.Fatalf("%s as %q: %d %v, want %d\n%s", path, user, code, err, want, text)
	}
	return text
}

func hashed(t *testing.T, password string) string {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return string(hash)
}

func (s *site) move(from, to string) {
	s.t.Helper()
	if err := os.Rename(s.file(from), s.file(to)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) dial(client *tls.Config) net.Conn {
	s.t.Helper()
	var conn net.Conn
	var err error
	if client != nil {
		conn, err = tls.Dial("tcp", s.address(), client)
	} else {
		conn, err = net.Dial("tcp", s.address())
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		s.t.Fatal(err)
	}
	return conn
}

// answer is what came back.
type answer struct {
	code   int
	header http.Header
	body   string
}

// raw sends a text and returns the answer.
func (s *site) raw(text string) answer {
	s.t.Helper()
	conn := s.dial(nil)
	if _, err := io.WriteString(conn, text); err != nil {
		s.t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		s.t.Fatalf("%.60q: %v", text, err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Errorf("%.60q: %v", text, err)
	}
	return answer{res.StatusCode, res.Header, string(body)}
}
