package doctor

import (
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// renewBefore is how long before its expiry a certificate should have been renewed. Common tools renew when a third of the
// lifetime is left: 30 of 90 days.
const renewBefore = 7 * 24 * time.Hour

// checkWebConfig checks a valid web configuration for certificates that expire and passwords without TLS.
func checkWebConfig(c config.Config, now time.Time) []Check {
	w := c.Web
	if c.Metrics.WebConfigFile == "" || w == nil {
		return nil
	}
	var found []string
	var checks []Check
	if leaf := w.Certificate(); leaf != nil {
		found = append(found, "TLS, certificate valid until "+leaf.NotAfter.UTC().Format(time.RFC3339))
		const fix = "renew cert_file and key_file; the agent reloads them"
		switch left := leaf.NotAfter.Sub(now); {
		case left <= 0:
			checks = append(checks, warn("the certificate has expired", fix)...)
		case left < renewBefore:
			checks = append(checks, warn("the certificate expires in "+duration.HumanDuration(left), fix)...)
		}
		if w.RequiresClientCertificate() {
			found = append(found, "client certificates required, which the kubelet's HTTP probes do not have")
		}
	}
	if n := w.Users(); n > 0 {
		found = append(found, status.Plural(n, "user")+" with a password")
		if w.Certificate() == nil {
			checks = append(checks, warn("passwords are sent without TLS", "add a tls_server_config")...)
		}
	}
	if len(found) == 0 {
		found = []string{"plain HTTP without passwords"}
	}
	return append(pass(strings.Join(found, "; ")), checks...)
}
