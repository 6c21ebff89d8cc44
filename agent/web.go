package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"

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
	}, zap.NewStdLog(a.log.Named("metrics"))))
	// Only memory is looked at: a process that holds a sick GPU must not be killed for it.
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.readyz)
	status := newStatusPages(a.status, a.log.Named("web"))
	mux.HandleFunc("GET /{$}", status.serveHTML)
	mux.HandleFunc("GET "+snapshotPath, status.serveJSON)
	return mux
}

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
	if s := a.snapshots.Load(); s == nil || s.Source.Status != health.SourceUp {
		reason := "starting"
		if s != nil {
			reason = s.Source.Status.String()
			if s.Source.Err != "" {
				reason += ": " + s.Source.Err
			}
		}
		why = append(why, "source "+reason)
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

// runWeb serves on the configured address, and moves when that changes. An address that cannot be had is
// tried again: the device plugin goes on without.
func (a *Agent) runWeb(ctx context.Context) error {
	h := a.handler()
	said := ""
	for ctx.Err() == nil {
		listen, same, cancel := health.While(ctx, &a.metrics, func(c *metrics.Config) string { return c.Listen })
		err := a.serve(ctx, h, listen, same.Done())
		switch {
		case err == nil:
			said = ""
		case err.Error() != said:
			said = err.Error()
			a.log.Error("web server", zap.Error(err), zap.String("key", "metrics.listen"))
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

// serve serves until ctx ends or the configuration has changed, which both are no error.
func (a *Agent) serve(ctx context.Context, h http.Handler, address string, changed <-chan struct{}) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	a.log.Info("web server listens", zap.Stringer("address", l.Addr()))
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: zap.NewStdLog(a.log.Named("web")),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case <-ctx.Done():
	case <-changed:
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
