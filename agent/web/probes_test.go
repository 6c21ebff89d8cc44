package web_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// A warning is in the response and does not make the agent unready; a note is not.
func TestReadyz(t *testing.T) {
	unready, warning := view.Problem{
		Part:  "source",
		Level: view.Unready,
		Text:  "down",
	}, view.Problem{
		Part:  "dra",
		Level: view.Warning,
		Text:  "a",
	}
	note := view.Problem{Part: "config", Level: view.Note, Text: "b"}
	for name, c := range map[string]struct {
		problems view.Problems
		code     int
		text     string
	}{
		"ready":                  {nil, http.StatusOK, "ok\n"},
		"ready with a warning":   {view.Problems{warning, note}, http.StatusOK, "ok\ndra: a\n"},
		"unready":                {view.Problems{unready}, http.StatusServiceUnavailable, "source: down\n"},
		"unready with a warning": {view.Problems{unready, warning}, http.StatusServiceUnavailable, "source: down\ndra: a\n"},
	} {
		mux := http.NewServeMux()
		web.HandleProbes(mux, func() view.Problems { return c.problems })
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, web.ReadyzPath, nil))
		if w.Code != c.code || w.Body.String() != c.text {
			t.Errorf("%s: %d %q", name, w.Code, w.Body)
		}
	}
}
