package metrics

import (
	"mime"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler serves the page.
//
// Who takes Prometheus's text gets that, as from dcgm-exporter, whatever it would like better. In OpenMetrics
// the name of a counter must end in _total, which dcgm-exporter's do not: there they keep their names and are
// of unknown type, which some readers take for gauges. Prometheus itself asks for OpenMetrics first, has no
// use for what it adds here, and takes text. Only who takes nothing else gets OpenMetrics.
func Handler(src Sources, log promhttp.Logger) http.Handler {
	registry := NewRegistry(src)
	// One series that cannot be shown is no reason to lose the others.
	opts := promhttp.HandlerOpts{ErrorLog: log, ErrorHandling: promhttp.ContinueOnError, Registry: registry}
	text := promhttp.HandlerFor(registry, opts)
	opts.EnableOpenMetrics = true
	open := promhttp.HandlerFor(registry, opts)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if onlyOpenMetrics(r.Header.Values("Accept")) {
			open.ServeHTTP(w, r)
			return
		}
		text.ServeHTTP(w, r)
	})
}

// onlyOpenMetrics tells whether a client names OpenMetrics and does not name the text format.
func onlyOpenMetrics(accept []string) bool {
	open := false
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		kind, params, err := mime.ParseMediaType(strings.TrimSpace(part))
		if err != nil || params["q"] == "0" {
			continue
		}
		switch kind {
		case "text/plain", "text/*":
			return false
		case "application/openmetrics-text":
			open = true
		}
	}
	return open
}
