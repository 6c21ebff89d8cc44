package metrics

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
)

// Handler serves the page.
//
// Who takes Prometheus's text gets that, as from dcgm-exporter, whatever it would like better. In OpenMetrics
// the name of a counter must end in _total, which dcgm-exporter's do not: there they keep their names and are
// of unknown type, which some readers take for gauges. Prometheus itself asks for OpenMetrics first, has no
// use for what it adds here, and takes text. Only who takes nothing else gets OpenMetrics.
func Handler(src Sources, log promhttp.Logger) http.Handler {
	gatherer := NewGatherer(src)
	// What cannot be shown is no reason to lose the rest.
	opts := promhttp.HandlerOpts{ErrorLog: log, ErrorHandling: promhttp.ContinueOnError, DisableCompression: true}
	other := promhttp.HandlerForTransactional(gatherer, opts)
	opts.EnableOpenMetrics = true
	open := promhttp.HandlerForTransactional(gatherer, opts)
	press := newPress()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultAcceptedFormats()...)
		fill := func(w http.ResponseWriter) { other.ServeHTTP(w, r) }
		switch {
		case onlyOpenMetrics(r.Header.Values("Accept")):
			fill = func(w http.ResponseWriter) { open.ServeHTTP(w, r) }
		case format.FormatType() == expfmt.TypeTextPlain && !r.URL.Query().Has(onlyNames):
			fill = func(w http.ResponseWriter) { gatherer.serveText(w, format, log) }
		}
		press.serve(r.Context(), w, takesGzip(r.Header.Values("Accept-Encoding")), fill)
	})
}

// onlyNames is promhttp's word for the names of the families that are wanted.
const onlyNames = "name[]"

// serveText answers with all that there is as text.
func (g *Gatherer) serveText(w http.ResponseWriter, format expfmt.Format, log promhttp.Logger) {
	p := g.page()
	defer g.done(p)
	for _, f := range p.out {
		if err := p.text.add(f); err != nil {
			log.Println("a metric that cannot be shown:", err) // which is no reason to lose the rest
		}
	}
	w.Header().Add("Vary", "Accept")
	w.Header().Set("Content-Type", string(format))
	_, _ = w.Write(p.text.buf)
}

// listed calls see for each entry of a header that is a list of things with parameters, such as q.
func listed(header []string, see func(name string, q float64)) {
	for part := range strings.SplitSeq(strings.Join(header, ","), ",") {
		name, params, _ := strings.Cut(part, ";")
		q := 1.0
		for param := range strings.SplitSeq(params, ";") {
			if k, v, _ := strings.Cut(param, "="); strings.EqualFold(strings.TrimSpace(k), "q") {
				if n, err := strconv.ParseFloat(strings.TrimSpace(v), 64); err == nil {
					q = n
				}
			}
		}
		see(strings.ToLower(strings.TrimSpace(name)), q)
	}
}

// onlyOpenMetrics tells whether a client names OpenMetrics and does not name the text format.
func onlyOpenMetrics(accept []string) bool {
	open, text := false, false
	listed(accept, func(kind string, q float64) {
		text = text || q > 0 && (kind == "text/plain" || kind == "text/*")
		open = open || q > 0 && kind == "application/openmetrics-text"
	})
	return open && !text
}

// takesGzip tells whether a client names gzip and does not like the plain page better.
func takesGzip(accept []string) bool {
	zip, plain := 0.0, 0.0
	listed(accept, func(coding string, q float64) {
		switch coding {
		case "gzip":
			zip = q
		case "identity":
			plain = q
		}
	})
	return zip > 0 && zip >= plain
}
