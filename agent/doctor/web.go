package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
)

// renewBefore is how long before its end a certificate should have been renewed: who renews them does so when a
// third of their life is left, which is 30 days of those of 90.
const renewBefore = 7 * 24 * time.Hour

// checkWebConfig looks at what a web configuration that is not wrong still may be: of no use.
func checkWebConfig(c config.Config, now time.Time) []Check {
	w := c.Web
	if c.Metrics.WebConfigFile == "" || w == nil {
		return nil
	}
	var has []string
	var checks []Check
	if leaf := w.Certificate(); leaf != nil {
		has = append(has, "TLS with a certificate until "+leaf.NotAfter.UTC().Format(time.RFC3339))
		const fix = "renew cert_file and key_file; the agent takes the new ones by itself"
		switch left := leaf.NotAfter.Sub(now); {
		case left <= 0:
			checks = append(checks, Check{Status: CheckWarn, Found: "its certificate has ended: Prometheus does not take it", Fix: fix})
		case left < renewBefore:
			checks = append(checks, Check{Status: CheckWarn, Found: fmt.Sprintf("its certificate ends in %v", left.Round(time.Hour)), Fix: fix})
		}
		if w.RequiresClientCertificate() {
			has = append(has, "clients show a certificate, which the kubelet's HTTP probes do not")
		}
	}
	if n := w.Users(); n > 0 {
		has = append(has, plural(n, "user")+" with a password")
		if w.Certificate() == nil {
			checks = append(checks, Check{Status: CheckWarn, Found: "passwords go over the network for everybody to read", Fix: "add a tls_server_config"})
		}
	}
	if len(has) == 0 {
		has = []string{"plain HTTP for everybody"}
	}
	return append([]Check{{Status: CheckOK, Found: strings.Join(has, "; ")}}, checks...)
}
