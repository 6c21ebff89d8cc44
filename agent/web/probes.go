package web

import (
	"fmt"
	"net/http"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
)

// The paths of the probes. The kubelet requests them without a password.
const (
	LivezPath  = "/livez"
	ReadyzPath = "/readyz"
)

// HandleProbes adds the probes to mux. /readyz responds with 200, or with 503 and why the agent is not ready. Both also have the warnings,
// which do not make the agent unready.
func HandleProbes(mux *http.ServeMux, problems func() view.Problems) {
	// Liveness checks nothing: the kubelet must not kill the agent because of a faulty GPU.
	mux.HandleFunc("GET "+LivezPath, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET "+ReadyzPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		all := problems()
		if all.Ready() {
			fmt.Fprintln(w, "ok")
		} else {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		for _, p := range all {
			if p.Level != view.Note {
				fmt.Fprintln(w, p)
			}
		}
	})
}

// anonymousProbes returns the probes for clients without a password. They do not disclose the problems, and cost little: their number is
// not limited.
func anonymousProbes(ready func() bool) http.Handler {
	mux := http.NewServeMux()
	HandleProbes(mux, func() view.Problems {
		if ready() {
			return nil
		}
		return view.Problems{{Level: view.Unready, Text: "not ready"}}
	})
	return mux
}
