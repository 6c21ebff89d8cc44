package web

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

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
		reasons = append(reasons, "GPUs were last measured "+duration.HumanDuration(age)+" ago, though the source is up")
	}
	if p.Err != "" && !p.WaitsForPods {
		reasons = append(reasons, "plugin: "+p.Err)
	}
	for _, r := range p.Resources {
		if !r.Registered {
			reasons = append(reasons, "plugin "+r.Name+": "+r.Err)
		}
	}
	return reasons
}

// HandleProbes adds the probes to mux. /readyz responds with 200, or with 503 and the reasons. Both also have the warnings,
// which do not make the agent unready.
func HandleProbes(mux *http.ServeMux, notReady, warnings func() []string) {
	// Liveness checks nothing: the kubelet must not kill the agent because of a faulty GPU.
	mux.HandleFunc("GET "+LivezPath, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET "+ReadyzPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		lines := notReady()
		if len(lines) > 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
		} else {
			lines = []string{"ok"}
		}
		fmt.Fprintln(w, strings.Join(slices.Concat(lines, warnings()), "\n"))
	})
}

// anonymousProbes returns the probes for clients without a password. They do not disclose the reasons and warnings.
func anonymousProbes(notReady func() []string) http.Handler {
	mux := http.NewServeMux()
	HandleProbes(mux, func() []string {
		if len(notReady()) > 0 {
			return []string{"not ready"}
		}
		return nil
	}, func() []string { return nil })
	return mux
}
