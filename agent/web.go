package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// Limits of the web server: a scrape is small and quick, so nothing needs more.
const (
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	listenBackoff  = 2 * time.Second
)

// handler serves the metrics, the probes and the status.
func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics.Handler(metrics.Sources{
		Config:    &a.metrics,
		Snapshots: &a.snapshots,
		Totals:    a.totals,
		Plugin:    a.devices.Status,
		Holders:   a.devices.Holders,
		Reload:    func() metrics.Reload { return *a.reloaded.Load() },
		Now:       time.Now,
		Hostname:  nodeName(),
		Version:   a.build.Version,
		Revision:  a.build.Revision,
		PodLabels: a.labels.Labels,
		PodLabelsUp: func() (up, on bool) {
			s := a.labels.Status()
			return s.Up, s.Enabled
		},
		Jobs: a.jobs.Of,
		Kubernetes: func() (metrics.Kubernetes, bool) {
			s := a.reporter.Status()
			return metrics.Kubernetes{Writes: s.Writes, Events: s.Events, Dropped: s.Dropped, Errors: s.Errors}, s.Enabled
		},
		StateFileUp: func() (up, on bool) {
			s := a.keeper.Status()
			return s.Err == "", s.Path != ""
		},
		LogDropped: a.logDropped,
	}, zap.NewStdLog(a.log.Named("metrics"))))
	// Only memory is looked at: a process that holds a sick GPU must not be killed for it.
	mux.HandleFunc("GET "+livezPath, livez)
	mux.HandleFunc("GET "+readyzPath, a.readyz)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "OK") }) // as dcgm-exporter
	status := newStatusPages(a.status, a.log.Named("web"))
	mux.HandleFunc("GET /{$}", status.serveHTML)
	mux.HandleFunc("GET "+snapshotPath, status.serveJSON)
	return mux
}

func livez(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }

// nodeName is the Kubernetes node's name if the pod was told it, else the host's.
func nodeName() string {
	if n := os.Getenv("NODE_NAME"); n != "" {
		return n
	}
	n, err := os.Hostname()
	if err != nil {
		return ""
	}
	return n
}

// readyz says 200, or 503 and each thing that is not as it should be.
func (a *Agent) readyz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if why := a.unready(); len(why) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, strings.Join(why, "\n"))
		return
	}
	fmt.Fprintln(w, "ok")
}

// unready returns every reason why the agent cannot do its whole job now.
func (a *Agent) unready() []string {
	var why []string
	s := a.snapshots.Load()
	if s == nil || s.Source.Status != health.SourceUp {
		reason := "starting"
		if s != nil {
			reason = s.Source.Status.String()
			if s.Source.Err != "" {
				reason += ": " + s.Source.Err
			}
		}
		why = append(why, "source "+reason)
	} else if age := time.Since(s.At); age > a.maxAge() { // by the monotonic clock
		why = append(why, fmt.Sprintf("GPUs were last measured %v ago, though the source is up", age.Round(time.Second)))
	}
	st := a.devices.Status()
	if st.Err != "" {
		why = append(why, "plugin: "+st.Err)
	}
	for _, r := range st.Resources {
		if !r.Registered {
			why = append(why, "plugin "+r.Name+": "+r.Err)
		}
	}
	return why
}

// maxAge is how old the snapshot of a source that is up may be. A poll takes up to stallAfter before the source is shown as
// stalled; an older snapshot means that the monitor itself is stuck.
func (a *Agent) maxAge() time.Duration {
	return 3*a.health.Load().Interval + a.source.Load().StallAfter
}

// probes are /livez and /readyz for those who have no password: whether, but not why.
func (a *Agent) probes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+livezPath, livez)
	mux.HandleFunc("GET "+readyzPath, func(w http.ResponseWriter, _ *http.Request) {
		if len(a.unready()) > 0 {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// runWeb serves on the configured address, and moves when that changes. An address that cannot be had is
// tried again: the device plugin goes on without.
func (a *Agent) runWeb(ctx context.Context) error {
	h := a.handler()
	said := ""
	for ctx.Err() == nil {
		listen, same, cancel := health.While(ctx, &a.metrics, func(c *metrics.Config) string { return c.Listen })
		err := a.listen(same, h, listen)
		switch {
		case err == nil:
			said = ""
		case err.Error() != said:
			said = err.Error()
			a.log.Error("web server cannot listen; trying again", zap.Error(err), zap.String("key", "metrics.listen"),
				zap.Duration("every", listenBackoff))
		}
		if err != nil {
			select {
			case <-same.Done():
			case <-time.After(listenBackoff):
			}
		}
		cancel()
	}
	return nil
}

// listen serves at an address until ctx ends, which is no error, each web configuration with a server of its
// own: connections that were made under another one do not outlive it.
func (a *Agent) listen(ctx context.Context, h http.Handler, address string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	for ctx.Err() == nil {
		w, same, cancel := health.While(ctx, &a.web, func(w *webConfig) *webConfig { return w })
		if w != nil {
			a.log.Info("web server listens", zap.Stringer("address", l.Addr()), zap.Bool("tls", w.tls != nil), zap.Int("users", len(w.users)))
			err = a.serve(same, newGuard(w, h, a.probes()), keptListener{l.(*net.TCPListener)}, w)
		}
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// keptListener is a listener that outlives its servers: to close it only ends Accept, and who connects meanwhile waits
// for the next server.
type keptListener struct{ *net.TCPListener }

func (l keptListener) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// serve serves until ctx ends, which is no error.
func (a *Agent) serve(ctx context.Context, h http.Handler, l keptListener, w *webConfig) error {
	if err := l.SetDeadline(time.Time{}); err != nil {
		return err
	}
	log := a.log.Named("web")
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: stdlog.New(complaints{log}, "", 0),
		TLSConfig: w.tls.Clone(), Protocols: new(http.Protocols),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetHTTP2(w.http2)
	failed := make(chan error, 1)
	go func() {
		if w.tls != nil {
			failed <- srv.ServeTLS(l, "", "")
		} else {
			failed <- srv.Serve(l)
		}
	}()
	select {
	case <-ctx.Done():
	case err := <-failed:
		return err
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin/2)
	defer cancel()
	if err := srv.Shutdown(end); err != nil {
		_ = srv.Close() // a slow client is cut off
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// complaints are what net/http has to say. That a connection ended before it was one is next to nothing: a
// probe that only looks whether the port is open makes one every few seconds.
type complaints struct{ log *zap.Logger }

func (c complaints) Write(text []byte) (int, error) {
	level := zapcore.WarnLevel
	switch {
	case bytes.Contains(text, []byte("TLS handshake error")):
		level = zapcore.DebugLevel
	case bytes.Contains(text, []byte("panic")):
		level = zapcore.ErrorLevel
	}
	c.log.Log(level, strings.TrimSpace(string(text)))
	return len(text), nil
}
