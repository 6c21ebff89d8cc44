package exposition

import (
	"net/http"
	"net/url"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
)

// CollectFunc returns a page with the current series. The page belongs to the caller until it calls done.
type CollectFunc func() (p *Page, done func())

// Gather implements prometheus.TransactionalGatherer.
func (c CollectFunc) Gather() (families []*dto.MetricFamily, done func(), err error) {
	p, done := c()
	return p.Families(), done, nil
}

// Handler serves the page of a scrape. It logs a family that cannot be encoded and serves the others.
//
// A client that accepts Prometheus' text format gets it, whatever else it prefers, as from dcgm-exporter. OpenMetrics
// requires counter names to end in _total; dcgm-exporter's do not, so in OpenMetrics they have the type unknown, which
// some readers treat as gauges. Prometheus asks for OpenMetrics first, but gains nothing from it here. Only clients
// that accept OpenMetrics and not the text format get it.
func Handler(collect CollectFunc, renderer *response.Renderer, log promhttp.Logger) http.Handler {
	opts := promhttp.HandlerOpts{ErrorLog: log, ErrorHandling: promhttp.ContinueOnError, DisableCompression: true}
	standard := promhttp.HandlerForTransactional(collect, opts)
	opts.EnableOpenMetrics = true
	openMetrics := promhttp.HandlerForTransactional(collect, opts)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, formats := standard, expfmt.DefaultAcceptedFormats()
		if requiresOpenMetrics(r.Header.Values("Accept")) {
			handler, formats = openMetrics, expfmt.DefaultOpenMetricsAcceptedFormats()
		}
		format := expfmt.NegotiateAccept(r.Header, formats...)
		names := r.URL.Query()[nameParameter]
		write := func(w http.ResponseWriter) { handler.ServeHTTP(w, r) }
		if format.FormatType() == expfmt.TypeTextPlain && len(names) == 0 {
			write = func(w http.ResponseWriter) { collect.writeText(w, format, log) }
		}
		// The page depends on nothing else. The format is one of a few, whatever the client accepts.
		page := "metrics " + string(format) + "?" + url.Values{nameParameter: names}.Encode()
		renderer.Serve(w, r, page, write)
	})
}

// nameParameter is promhttp's query parameter that selects families by name.
const nameParameter = "name[]"

// requiresOpenMetrics reports whether a client names OpenMetrics but not the text format.
func requiresOpenMetrics(accept []string) bool {
	openMetrics, text := false, false
	response.ForEachAccepted(accept, func(mediaType string, q float64) {
		text = text || q > 0 && (mediaType == "text/plain" || mediaType == "text/*")
		openMetrics = openMetrics || q > 0 && mediaType == "application/openmetrics-text"
	})
	return openMetrics && !text
}

// writeText responds with all families in the text format.
func (c CollectFunc) writeText(w http.ResponseWriter, format expfmt.Format, log promhttp.Logger) {
	p, done := c()
	defer done()
	text, err := p.Text()
	if err != nil {
		log.Println("cannot encode all metrics:", err)
	}
	w.Header().Add("Vary", "Accept")
	w.Header().Set("Content-Type", string(format))
	_, _ = w.Write(text) // to memory
}
