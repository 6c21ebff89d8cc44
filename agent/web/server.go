// Package web serves the agent's pages: the listener and its connections, probes, TLS and passwords.
package web

import (
	"bytes"
	"context"
	"errors"
	stdlog "log"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// Limits of the web server. Scrapes are small and quick.
const (
	headerTimeout   = 5 * time.Second
	requestTimeout  = 10 * time.Second
	idleTimeout     = 2 * time.Minute
	shutdownTimeout = 2 * time.Second
	maxHeaderBytes  = 16 << 10
	listenBackoff   = 2 * time.Second
)

// Server serves pages at metrics.listen with a web configuration. It follows changes of both.
type Server struct {
	Metrics *health.Latest[metrics.Config] // for the address
	Config  *health.Latest[Config]
	Pages   http.Handler
	Ready   func() bool    // whether the agent is ready, for clients without a password
	Dropped *atomic.Uint64 // counts connections that were closed to make room for others
	Log     *zap.Logger
}

// Run serves until ctx ends, and moves when metrics.listen changes. If the address is not available, Run logs it once,
// keeps retrying, and starts serving when the address is free: the device plugin works without.
func (s *Server) Run(ctx context.Context) error {
	var logged logonce.State
	for ctx.Err() == nil {
		address, same, cancel := health.WatchPart(ctx, s.Metrics, func(c *metrics.Config) string { return c.Listen })
		err := s.listen(same, address)
		if logged.ErrorChanged(err) && err != nil {
			s.Log.Error("web server cannot listen; retrying", zap.Error(err), zap.String("key", "metrics.listen"),
				zap.Duration("every", listenBackoff))
		}
		if err != nil {
			wait.Sleep(same, listenBackoff)
		}
		cancel()
	}
	return nil
}

// listen serves at an address until ctx ends, which is not an error. Each web configuration gets a server of its own,
// so that no connection outlives the configuration that it was accepted with.
func (s *Server) listen(ctx context.Context, address string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	bounded := boundedListener{reusableListener{l.(*net.TCPListener)}, newConnections(connectionLimit(), s.Dropped, s.Log)}
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, s.Config, func(c *Config) *Config { return c })
		if c != nil {
			s.Log.Info("web server listens", zap.Stringer("address", l.Addr()), zap.Bool("tls", c.tls != nil), zap.Int("users", len(c.users)))
			err = s.serve(same, bounded, c)
		}
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// reusableListener is a listener that outlives its servers: Close only ends Accept, and clients that connect meanwhile
// wait for the next server.
type reusableListener struct{ *net.TCPListener }

func (l reusableListener) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// serve serves until ctx ends, which is not an error.
func (s *Server) serve(ctx context.Context, l boundedListener, c *Config) error {
	if err := l.SetDeadline(time.Time{}); err != nil {
		return err
	}
	srv := &http.Server{
		Handler: newGuard(c, s.Pages, anonymousProbes(s.Ready)), ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout,
		WriteTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: stdlog.New(errorLog{s.Log}, "", 0),
		TLSConfig: c.tls.Clone(), Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ConnState: l.conns.follow,
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetHTTP2(c.settings.HTTPConfig.HTTP2)
	failed := make(chan error, 1)
	go func() {
		if c.tls != nil {
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
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := srv.Shutdown(end); err != nil {
		_ = srv.Close() // the requests that have not ended
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// errorLog receives net/http's messages. A connection that ends before its TLS handshake is logged at debug level:
// a probe that only checks whether the port is open causes one every few seconds.
type errorLog struct{ log *zap.Logger }

func (l errorLog) Write(text []byte) (int, error) {
	level := zapcore.WarnLevel
	switch {
	case bytes.Contains(text, []byte("TLS handshake error")):
		level = zapcore.DebugLevel
	case bytes.Contains(text, []byte("panic")):
		level = zapcore.ErrorLevel
	}
	l.log.Log(level, strings.TrimSpace(string(text)))
	return len(text), nil
}
