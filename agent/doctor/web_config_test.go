package doctor

import (
	"net/http"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// An agent with TLS and passwords is recognized.
func TestCheckAgentWithTLS(t *testing.T) {
	s := agenttest.Serve(t, agenttest.TLSConfig+agenttest.Users, http.NotFoundHandler(), func() bool { return false })
	c := config.DefaultConfig()
	c.Metrics.Listen, c.Plugin.KubeletDir, c.Web = s.Address(), agenttest.SocketDir(t), s.Config.Load()
	expect(t, checkPort(t.Context(), c), want{CheckOK, s.Address(), ""})
	expect(t, checkAgent(t.Context(), c, survey{}), want{CheckWarn, "", "log"})
}

func TestCheckWebConfig(t *testing.T) {
	dir := t.TempDir()
	ca := agenttest.NewAuthority(t, dir)
	ca.Issue(t, "server", "localhost")
	check := func(text string, now time.Time, wants ...want) {
		t.Helper()
		file := agenttest.WriteFile(t, dir, "web.yaml", text)
		w, err := web.LoadConfig(file)
		if err != nil {
			t.Fatal(err)
		}
		c := config.DefaultConfig()
		c.Metrics.WebConfigFile, c.Web = file, w
		expect(t, checkWebConfig(c, now), wants...)
	}
	now := time.Now()
	check(agenttest.TLSConfig, now.Add(-30*24*time.Hour), want{CheckOK, "TLS", ""})
	check(agenttest.TLSConfig+agenttest.Users, now.Add(-50*time.Hour), want{CheckOK, "2 users", ""}, want{CheckWarn, " in 2d2h", "renew"})
	check(agenttest.TLSConfig, now.Add(2*time.Hour), want{CheckOK, "TLS", ""}, want{CheckWarn, "", "renew"})
	check(agenttest.Users, now, want{CheckOK, "2 users", ""}, want{CheckWarn, "", "tls_server_config"})
	check("{}", now, want{CheckOK, "plain HTTP", ""})
	check(`tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt,
  client_auth_type: RequireAndVerifyClientCert}`,
		now.Add(-30*24*time.Hour), want{CheckOK, "client certificates", ""})
	if checks := checkWebConfig(config.DefaultConfig(), now); checks != nil {
		t.Errorf("without one: %v", checks)
	}
}
