package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// phase is how far a registration has come.
type phase uint8

const (
	unregistered phase = iota
	accepted           // the kubelet has accepted it, but has not opened ListAndWatch
	registered
)

// link keeps one resource listening and known to the kubelet. Whatever goes wrong, from a restart of the
// kubelet to a wiped directory, is seen by polling and ends in one place: wait until it is quiet for the
// settle time, then register. The gRPC server lives as long as the link, and with it every stream: a
// lost socket only means another listener.
type link struct {
	timing
	srv        *server
	pods       *podResources
	socketPath string
	kubelet    string // the path of kubelet.sock
	log        *zap.Logger
	grpc       *grpc.Server
	serving    sync.WaitGroup // the grpc.Serve of each listener

	// Everything from here to mu belongs to the goroutine of run.
	own       *unixsock.Socket
	served    chan struct{} // closed when own is no longer served
	listenErr error         // why we do not listen
	listenAt  time.Time     // no attempt to do so before
	seen      fs.FileInfo   // kubelet.sock as it was seen last, nil if it was not there
	phase     phase
	settledAt time.Time // no registration before
	retryAt   time.Time // nor before this
	retry     time.Duration
	since     time.Time // when the phase was reached
	blamed    string    // what was logged last, empty once registered
	ended     string    // how the last registration ended, until it is logged or better explained
	audit     audit

	mu            sync.Mutex // guards what status reads
	ok            bool       // the kubelet has accepted the newest registration
	conflict      bool       // our socket cannot be where it should
	err           string     // why we are not registered, in words
	registrations uint64     // that the kubelet has accepted
	mismatches    uint64     // that the audit has found
}

func newLink(srv *server, dir Config, t timing, pods *podResources, log *zap.Logger) *link {
	return &link{
		timing: t, srv: srv, pods: pods, log: log.With(zap.String("resource", srv.name)),
		socketPath: dir.socketPath(srv.name),
		kubelet:    filepath.Join(dir.socketDir(), "kubelet.sock"),
		grpc:       grpc.NewServer(serverOptions()...),
		retry:      t.retryMin,
	}
}

// run serves until ctx ends. What stops then is stop's to say.
func (l *link) run(ctx context.Context) {
	pluginapi.RegisterDevicePluginServer(l.grpc, l.srv)
	tick := time.NewTicker(l.poll)
	defer tick.Stop()
	for {
		l.step(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.srv.streams.changed:
		}
	}
}

// stop ends the server, after run. The socket goes first, so that nobody new comes. With withdraw the
// kubelet is sent an empty list and has a moment to receive it.
func (l *link) stop(withdraw bool) {
	if l.own != nil {
		if err := l.own.Remove(); err != nil {
			l.log.Warn("could not remove our socket", zap.Error(err))
		}
	}
	l.srv.stop(withdraw)
	if withdraw {
		// It closes a connection only when all that was sent on it has gone out. A kubelet that does not
		// read is not waited for.
		hurry := time.AfterFunc(l.goodbye, l.grpc.Stop)
		l.grpc.GracefulStop()
		hurry.Stop()
	}
	l.grpc.Stop()
	l.serving.Wait()
}

// step looks at everything once and does what is due.
func (l *link) step(ctx context.Context) {
	if err := l.listen(ctx); err != nil {
		l.blame(err.Error(), true)
		return
	}
	l.look()
	l.follow()
	l.check()
	if l.phase != unregistered {
		return
	}
	if l.seen == nil {
		l.blame(l.kubelet+" is not there; waiting for the kubelet", false)
		return
	}
	// A stream that ends on its own unsettles the kubelet as well.
	now := time.Now()
	if now.Before(l.settledAt) || now.Before(l.retryAt) || now.Before(l.srv.streams.count().lastEnd.Add(l.settle)) {
		return
	}
	l.register(ctx)
}

// listen makes sure that our socket is in its place and served.
func (l *link) listen(ctx context.Context) error {
	if l.own != nil && l.own.InPlace() {
		select {
		case <-l.served: // cannot be accepted from any more
		default:
			return nil
		}
	}
	if time.Now().Before(l.listenAt) {
		return l.listenErr
	}
	own, err := openSocket(ctx, l.socketPath)
	if err != nil {
		l.listenErr, l.listenAt = err, time.Now().Add(l.retryMin)
		return err
	}
	if l.own != nil {
		// Connections that it has accepted live on, and with them the kubelet's stream.
		if err := l.own.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			l.log.Debug("closing the lost socket", zap.Error(err))
		}
		l.log.Warn("our socket was gone, listening again", zap.String("socket", l.socketPath))
	} else {
		l.log.Info("listening", zap.String("socket", l.socketPath))
	}
	served := make(chan struct{})
	l.own, l.served = own, served
	l.serving.Go(func() {
		defer close(served)
		// An error is the end of this listener, and the next step opens another.
		_ = l.grpc.Serve(own)
	})
	l.disturbed("our socket is new")
	return nil
}

// look notices a new kubelet.
func (l *link) look() {
	info, err := os.Lstat(l.kubelet)
	if err != nil {
		info = nil // gone or hidden: either way there is no one to register with
	}
	if unixsock.SameSocket(l.seen, info) {
		return
	}
	l.seen = info
	if info != nil {
		l.disturbed("the kubelet has started")
	}
}

// disturbed asks for a registration after the settle time, whatever was tried before.
func (l *link) disturbed(what string) {
	l.explain(what+"; about to register", false)
	l.ended = ""
	l.phase, l.retry, l.retryAt = unregistered, l.retryMin, time.Time{}
	l.settledAt = time.Now().Add(l.settle)
}

// follow moves on from what the kubelet did with its streams.
func (l *link) follow() {
	count, now := l.srv.streams.count(), time.Now()
	switch {
	case l.phase == accepted && count.openNow > 0:
		l.phase, l.since, l.blamed = registered, now, ""
		l.pods.ask(l.settle + l.hurry)
		l.explain("", false)
		l.log.Info("registered with the kubelet", zap.Int("devices", len(l.srv.resource().Devices)))
	case l.phase == accepted && !count.everNow:
		if now.Sub(l.since) > l.stream {
			l.failed(fmt.Sprintf("the kubelet accepted %s but did not open ListAndWatch within %s; registering again", l.srv.name, l.stream))
		}
	case l.phase != unregistered && count.openNow == 0:
		// Either the kubelet is gone, or it has lost us. One that does so again and again is not helped
		// by hurry.
		if l.phase == registered && now.Sub(l.since) > l.stream {
			l.retry = 0
		}
		// A kubelet that ends closes its streams first. That it is gone, or new, is seen next and says more.
		l.ended = "the kubelet has closed ListAndWatch; registering again"
		l.again(l.ended)
	}
}

// failed asks for another attempt, and says why.
func (l *link) failed(why string) {
	l.again(why)
	l.blame(why, false)
}

// again asks for another attempt after a pause that doubles each time.
func (l *link) again(why string) {
	now := time.Now()
	l.phase = unregistered
	l.settledAt = now.Add(l.settle)
	l.retryAt = now.Add(l.retry)
	l.retry = min(max(2*l.retry, l.retryMin), l.retryMax)
	l.explain(why, false)
}

// register registers once. It blocks for as long as the kubelet takes, at most l.answer.
func (l *link) register(ctx context.Context) {
	l.mu.Lock()
	l.ok = false
	l.mu.Unlock()
	l.srv.streams.next()
	call, cancel := context.WithTimeout(ctx, l.answer)
	defer cancel()
	err := register(call, l.kubelet, l.srv.name, filepath.Base(l.socketPath))
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		l.failed(fmt.Sprintf("the kubelet at %s did not register %s: %s", l.kubelet, l.srv.name, status.Convert(err).Message()))
		return
	}
	l.phase, l.since = accepted, time.Now()
	if l.ended != "" { // by a kubelet that lives
		l.log.Warn("not registered with the kubelet", zap.String("why", l.ended))
		l.ended = ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ok, l.err = true, "the kubelet has accepted the registration; waiting for it to open ListAndWatch"
	l.registrations++
}

// blame says what keeps us from being registered, and logs it if that is news.
func (l *link) blame(why string, conflict bool) {
	l.explain(why, conflict)
	l.ended = ""
	if why != l.blamed {
		l.blamed = why
		l.log.Warn("not registered with the kubelet", zap.String("why", why))
	}
}

// explain says for status why we are not registered.
func (l *link) explain(why string, conflict bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.conflict = why, conflict
}

// status may be called from any goroutine.
func (l *link) status() ResourceStatus {
	r, count := l.srv.resource(), l.srv.streams.count()
	s := ResourceStatus{Name: l.srv.name, Streams: count.open, Devices: len(r.Devices), Healthy: r.healthy()}
	s.Allocations, s.AllocationErrors = l.srv.counts.read()
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Registrations, s.AuditMismatches = l.registrations, l.mismatches
	s.Registered = l.ok && count.openNow > 0 && !l.conflict
	if !s.Registered {
		s.Err = l.err
		if s.Err == "" {
			s.Err = "the kubelet has just closed ListAndWatch"
		}
	}
	return s
}
