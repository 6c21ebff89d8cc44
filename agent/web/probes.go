package web

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The paths of the probes. The kubelet requests them without a password.
const (
	LivezPath  = "/livez"
	ReadyzPath = "/readyz"
)

// NotReady returns every reason why the agent cannot do its whole job now, none if it is ready. A snapshot of a source
// that is up may be maxAge old.
func NotReady(s *health.Snapshot, p plugin.Status, maxAge time.Duration) (reasons []string) {
	if s == nil || s.Source.Status != health.SourceUp {
		reason := "starting"
		if s != nil {
			reason = s.Source.Status.String()
			if s.Source.Err != "" {
				reason += ": " + s.Source.Err
			}
		}
		reasons = append(reasons, "source "+reason)
	} else if age := time.Since(s.At); age > maxAge { // by the monotonic clock
		reasons = append(reasons, fmt.Sprintf("GPUs were last measured %v ago, though the source is up", age.Round(time.Second)))
	}
	if p.Err != "" {
		reasons = append(reasons, "plugin: "+p.Err)
	}
	for _, r := range p.Resources {
		if !r.Registered {
			reasons = append(reasons, "plugin "+r.Name+": "+r.Err)
		}
	}
	return reasons
}

// HandleProbes adds the probes to mux. /readyz responds with 200, or with 503 and the reasons.
func HandleProbes(mux *http.ServeMux, notReady func() []string) {
	// Liveness checks nothing: the kubelet must not kill the agent because of a faulty GPU.
	mux.HandleFunc("GET "+LivezPath, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET "+ReadyzPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if reasons := notReady(); len(reasons) > 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, strings.Join(reasons, "\n"))
			return
		}
		fmt.Fprintln(w, "ok")
	})
}

// anonymousProbes returns the probes for clients without a password. They do not disclose the reasons.
func anonymousProbes(notReady func() []string) http.Handler {
	mux := http.NewServeMux()
	HandleProbes(mux, func() []string {
		if len(notReady()) > 0 {
			return []string{"not ready"}
		}
		return nil
	})
	return mux
}
