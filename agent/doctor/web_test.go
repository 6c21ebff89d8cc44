package doctor

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// TestDoctorFindsAnAgentWithTLS: an agent with TLS and passwords is recognized.
func TestDoctorFindsAnAgentWithTLS(t *testing.T) {
	notReady := func() []string { return []string{"starting"} }
	s := agenttest.Serve(t, agenttest.TLSConfig+"basic_auth_users: {ada: "+agenttest.PasswordHash(t, "1815")+"}\n", http.NotFoundHandler(), notReady)
	c := config.DefaultConfig()
	c.Metrics.Listen, c.Plugin.KubeletDir, c.Web = s.Address(), agenttest.SocketDir(t), s.Config.Load()
	expect(t, checkPort(t.Context(), c), wanted{CheckOK, "the agent that runs here", ""})
	expect(t, checkRunning(t.Context(), c), wanted{CheckWarn, "runs, but is not ready", "log"})
}

func TestDoctorWebConfig(t *testing.T) {
	dir := t.TempDir()
	ca := agenttest.NewAuthority(t, dir)
	ca.Issue(t, "server", "localhost")
	check := func(text string, now time.Time, want ...wanted) {
		t.Helper()
		file := filepath.Join(dir, "web.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		w, err := web.LoadConfig(file)
		if err != nil {
			t.Fatal(err)
		}
		c := config.DefaultConfig()
		c.Metrics.WebConfigFile, c.Web = file, w
		expect(t, checkWebConfig(c, now), want...)
	}
	now := time.Now()
	users := "basic_auth_users: {ada: " + agenttest.PasswordHash(t, "1815") + "}\n"
	check(agenttest.TLSConfig, now.Add(-30*24*time.Hour), wanted{CheckOK, "TLS with a certificate until", ""})
	check(agenttest.TLSConfig+users, now, wanted{CheckOK, "1 user with a password", ""}, wanted{CheckWarn, "ends in 1h", "renew"})
	check(agenttest.TLSConfig, now.Add(2*time.Hour), wanted{CheckOK, "TLS", ""}, wanted{CheckWarn, "has ended", "renew"})
	check(users, now, wanted{CheckOK, "1 user", ""}, wanted{CheckWarn, "for everybody to read", "tls_server_config"})
	check("{}", now, wanted{CheckOK, "plain HTTP for everybody", ""})
	check(`tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}`,
		now.Add(-30*24*time.Hour), wanted{CheckOK, "clients show a certificate", ""})
	if checks := checkWebConfig(config.DefaultConfig(), now); checks != nil {
		t.Errorf("without one: %v", checks)
	}
}
