package agent

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// An agent answers who may ask, and says to others what they need.
func TestAskStatusWithAccess(t *testing.T) {
	s := newSite(t, `tls_server_config:
  {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: VerifyClientCertIfGiven}
basic_auth_users: {ada: `+hashed(t, "1815")+"}\n")
	local, ip, plain := "https://localhost"+portOf(s), "https://127.0.0.1"+portOf(s), s.address()
	strangers := t.TempDir()
	newAuthority(t, strangers)
	ca, other, client, key := s.file("ca.crt"), filepath.Join(strangers, "ca.crt"), s.file("client.crt"), s.file("client.key")
	named := Access{CAFile: ca, User: "ada", Password: "1815"}
	with := func(f func(*Access)) Access { a := named; f(&a); return a }
	for _, c := range []struct {
		address string
		access  Access
		want    string // in the error, "" for none
	}{
		{local, named, ""},
		{ip, named, ""},
		{local, with(func(a *Access) { a.CertFile, a.KeyFile = client, key }), ""},
		{local, with(func(a *Access) { a.CAFile, a.Insecure = "", true }), ""},
		{local, with(func(a *Access) { a.CAFile = other }), "use --ca-file"},
		{local, with(func(a *Access) { a.CAFile = "" }), "use --ca-file, or --insecure"},
		{strings.Replace(ip, "127.0.0.1", "127.0.0.2", 1), with(func(a *Access) { a.CAFile = ca }), "127.0.0.2"},
		{plain, named, "use --address https://HOST:PORT"},
		{local, with(func(a *Access) { a.Password = "1816" }), "does not take this name and password"},
		{local, with(func(a *Access) { a.User = "eve" }), "does not take this name and password"},
		{local, with(func(a *Access) { a.User = "" }), "wants a name and a password; use --user NAME, with the password in $GPU_NODE_AGENT_PASSWORD"},
		{local, with(func(a *Access) { a.Password = "" }), "--user: put its password into $GPU_NODE_AGENT_PASSWORD"},
		{local, with(func(a *Access) { a.CAFile = key }), "--ca-file: "},
		{local, with(func(a *Access) { a.CAFile = ca + ".none" }), "--ca-file: "},
		{local, with(func(a *Access) { a.CertFile = client }), "use both"},
		{local, with(func(a *Access) { a.CertFile, a.KeyFile = client, client }), "--cert-file, --key-file: "},
	} {
		status, _, err := AskStatus(t.Context(), c.address, c.access)
		switch {
		case c.want == "" && (err != nil || len(status.GPUs) == 0):
			t.Errorf("%s %+v: %d GPUs, %v", c.address, c.access, len(status.GPUs), err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s %+v: %v, want %q", c.address, c.access, err, c.want)
		}
	}
	s.write("web.yaml", "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}")
	s.eventually("a certificate is asked for", func() error {
		if _, _, err := AskStatus(t.Context(), local, named); err == nil || !strings.Contains(err.Error(), "use --cert-file and --key-file") {
			return err
		}
		return nil
	})
}

func portOf(s *site) string { return s.address()[strings.LastIndex(s.address(), ":"):] }

// The agent of this node is known by its certificate, whoever signed it.
func TestAskStatusHere(t *testing.T) {
	s := newSite(t, tlsText)
	c, err := Loader{File: s.file("config.yaml")}.Load()
	if err != nil {
		t.Fatal(err)
	}
	c.Metrics.Listen = portOf(s)
	var access Access
	address := access.Here(c)
	if want := "https://localhost" + portOf(s); address != want {
		t.Errorf("it is at %s, want %s", address, want)
	}
	if _, _, err := AskStatus(t.Context(), address, access); err != nil {
		t.Error(err)
	}
	s.ca.issue(t, "another", "localhost") // as good, but not that of the file
	if access.own = c.web.tls.Certificates[0].Leaf; access.own == nil {
		t.Fatal("no certificate")
	}
	cert, err := tls.LoadX509KeyPair(s.file("another.crt"), s.file("another.key"))
	if err != nil {
		t.Fatal(err)
	}
	access.own = cert.Leaf
	if _, _, err := AskStatus(t.Context(), address, access); err == nil || !strings.Contains(err.Error(), "is not that of metrics.webConfigFile") {
		t.Errorf("another certificate: %v", err)
	}
	if address := new(Access).Here(DefaultConfig()); address != ":9400" {
		t.Errorf("without TLS it is at %s", address)
	}
}

// doctor knows an agent with TLS and passwords for one.
func TestDoctorFindsAnAgentWithTLS(t *testing.T) {
	s := newSite(t, tlsText+"basic_auth_users: {ada: "+hashed(t, "1815")+"}\n")
	c, err := Loader{File: s.file("config.yaml")}.Load()
	if err != nil {
		t.Fatal(err)
	}
	c.Metrics.Listen, c.Plugin.KubeletDir = s.address(), tempDir(t)
	expect(t, checkPort(t.Context(), c), wanted{CheckOK, "the agent that runs here", ""})
	expect(t, checkRunning(t.Context(), c), wanted{CheckWarn, "runs, but is not ready", "log"})
}

func TestDoctorWebConfig(t *testing.T) {
	dir := t.TempDir()
	ca := newAuthority(t, dir)
	ca.issue(t, "server", "localhost")
	check := func(text string, now time.Time, want ...wanted) {
		t.Helper()
		file := filepath.Join(dir, "web.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := load(t, "metrics: {webConfigFile: "+file+"}")
		if err != nil {
			t.Fatal(err)
		}
		expect(t, checkWebConfig(c, now), want...)
	}
	now := time.Now()
	users := "basic_auth_users: {ada: " + hashed(t, "1815") + "}\n"
	check(tlsText, now.Add(-30*24*time.Hour), wanted{CheckOK, "TLS with a certificate until", ""})
	check(tlsText+users, now, wanted{CheckOK, "1 user with a password", ""}, wanted{CheckWarn, "ends in 1h", "renew"})
	check(tlsText, now.Add(2*time.Hour), wanted{CheckOK, "TLS", ""}, wanted{CheckWarn, "has ended", "renew"})
	check(users, now, wanted{CheckOK, "1 user", ""}, wanted{CheckWarn, "for everybody to read", "tls_server_config"})
	check("{}", now, wanted{CheckOK, "plain HTTP for everybody", ""})
	check(`tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}`,
		now.Add(-30*24*time.Hour), wanted{CheckOK, "clients show a certificate", ""})
	if checks := checkWebConfig(DefaultConfig(), now); checks != nil {
		t.Errorf("without one: %v", checks)
	}
}
