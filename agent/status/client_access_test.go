package status

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
)

func TestAskWithAccess(t *testing.T) {
	s := serve(t, `tls_server_config:
  {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: VerifyClientCertIfGiven}
`+agenttest.Users)
	local, ip, plain := "https://localhost"+portOf(s), "https://127.0.0.1"+portOf(s), s.Address()
	otherDir := t.TempDir()
	agenttest.NewAuthority(t, otherDir)
	ca, other, client, key := s.File("ca.crt"), filepath.Join(otherDir, "ca.crt"), s.File("client.crt"), s.File("client.key")
	login := Access{CAFile: ca, User: "ada", Password: "1815"}
	with := func(f func(*Access)) Access { a := login; f(&a); return a }
	for _, c := range []struct {
		address string
		access  Access
		want    string // in the error, "" for none
	}{
		{local, login, ""},
		{ip, login, ""},
		{local, with(func(a *Access) { a.CertFile, a.KeyFile = client, key }), ""},
		{local, with(func(a *Access) { a.CAFile, a.Insecure = "", true }), ""},
		{local, with(func(a *Access) { a.CAFile = other }), "--ca-file"},
		{local, with(func(a *Access) { a.CAFile = "" }), "--insecure"},
		{strings.Replace(ip, "127.0.0.1", "127.0.0.2", 1), with(func(a *Access) { a.CAFile = ca }), "127.0.0.2"},
		{plain, login, "use https://"},
		{ip, with(func(a *Access) { a.ServerName = "localhost" }), ""},
		{local, with(func(a *Access) { a.ServerName = "other.example" }), "--server-name"},
		{local, with(func(a *Access) { a.Password = "1816" }), "$GPU_NODE_AGENT_PASSWORD"},
		{local, with(func(a *Access) { a.User = "eve" }), "$GPU_NODE_AGENT_PASSWORD"},
		{local, with(func(a *Access) { a.User = "" }), "--user NAME"},
		{local, with(func(a *Access) { a.Password = "" }), "--user: "},
		{local, with(func(a *Access) { a.CAFile = key }), "--ca-file: "},
		{local, with(func(a *Access) { a.CAFile = ca + ".none" }), "--ca-file: "},
		{local, with(func(a *Access) { a.CertFile = client }), "--cert-file and --key-file"},
		{local, with(func(a *Access) { a.CertFile, a.KeyFile = client, client }), "--cert-file, --key-file: "},
	} {
		status, _, err := Ask(t.Context(), c.address, c.access)
		switch {
		case c.want == "" && (err != nil || len(status.GPUs) == 0):
			t.Errorf("%s %+v: %d GPUs, %v", c.address, c.access, len(status.GPUs), err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s %+v: %v, want %q", c.address, c.access, err, c.want)
		}
	}
	s.Configure("tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: " +
		"RequireAndVerifyClientCert}")
	s.Eventually("a client certificate is required", func() error {
		if _, _, err := Ask(t.Context(), local, login); err == nil || !strings.Contains(err.Error(), "--cert-file") {
			return fmt.Errorf("not yet: %w", err)
		}
		return nil
	})
}

// serve serves the status of a node with a web configuration.
func serve(t *testing.T, config string) *agenttest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+SnapshotPath, NewPages(func() Node { return newNode(testInputs()) }, &History{}, zap.NewNop()).ServeJSON)
	return agenttest.Serve(t, config, mux, func() bool { return true })
}

func portOf(s *agenttest.Server) string { return s.Address()[strings.LastIndex(s.Address(), ":"):] }

// The local agent is verified by its certificate, without a trusted authority.
func TestAskLocalAgent(t *testing.T) {
	s := serve(t, agenttest.TLSConfig)
	var access Access
	address := access.Local(portOf(s), s.Config.Load().Certificate())
	if want := "https://localhost" + portOf(s); address != want {
		t.Errorf("address %s, want %s", address, want)
	}
	if _, _, err := Ask(t.Context(), address, access); err != nil {
		t.Error(err)
	}
	s.CA.Issue(t, "another", "localhost") // valid, but not the server's
	cert, err := tls.LoadX509KeyPair(s.File("another.crt"), s.File("another.key"))
	if err != nil {
		t.Fatal(err)
	}
	access.pinned = cert.Leaf
	if _, _, err := Ask(t.Context(), address, access); err == nil || !strings.Contains(err.Error(), "metrics.webConfigFile") {
		t.Errorf("another certificate: %v", err)
	}
	if address := new(Access).Local(":9400", nil); address != ":9400" {
		t.Errorf("without TLS: %s", address)
	}
}
