package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// phase is the progress of a registration.
type phase uint8

const (
	unregistered phase = iota
	accepted           // by the kubelet, which has not opened ListAndWatch yet
	registered
)

// registrar keeps one resource registered with the kubelet. It detects every disturbance, from a kubelet restart to a wiped
// directory, by polling, and treats all alike: wait for the settle time without another disturbance, then register. The gRPC
// server and its streams live as long as the registrar.
//
// Each registration has a socket of its own, at a path that is never used twice: a kubelet since 1.37 refuses a path that it still has
// connected, and then never notices that the path's stream ends.
type registrar struct {
	timing
	srv         *server
	pods        *podresources.Client
	cfg         Config
	kubeletPath string // of kubelet.sock
	log         *zap.Logger
	grpc        *grpc.Server
	serving     sync.WaitGroup // the grpc.Serve of each listener

	// The fields up to mu belong to the goroutine of run.
	socket        *unixsock.Socket // of the newest registration; nil before the first
	served        chan struct{}    // closed when grpc.Serve of socket has returned
	kubeletSocket fs.FileInfo      // the last one that existed, nil if none did
	kubeletErr    error            // why kubelet.sock cannot be found; nil if it exists
	kubeletNew    bool             // no registration was attempted since kubeletSocket changed
	kubeletNewAt  time.Time
	followable    int // registrations with which the kubelet may have a stream, since none was open
	phase         phase
	phaseSince    time.Time
	settledAt     time.Time // earliest next registration, as is nextAttempt
	nextAttempt   time.Time
	retry         backoff.Backoff
	logged        logonce.State // the error
	streamEnd     string        // how the last registration ended, until it is logged or superseded
	audit         audit

	mu            sync.Mutex // guards the fields below
	accepted      bool       // the kubelet accepted the newest registration, and nothing disturbed it since
	err           string     // why the resource is not registered
	registrations uint64
	mismatches    uint64
	auditedAt     time.Time // of the answer in which the kubelet last had the list of the newest registration; zero if there is none
}

func newRegistrar(srv *server, cfg Config, t timing, pods *podresources.Client, log *zap.Logger) *registrar {
	return &registrar{
		timing: t, srv: srv, pods: pods, log: log.With(zap.String("resource", srv.name)),
		cfg: cfg, kubeletPath: filepath.Join(cfg.socketDir(), "kubelet.sock"),
		grpc:  grpc.NewServer(serverOptions(t.handshake)...),
		retry: backoff.Backoff{Min: t.retryMin, Max: t.retryMax},
		audit: audit{retry: backoff.Backoff{Min: t.auditRetryMin, Max: t.auditRetryMax}},
	}
}

// run serves until ctx ends. Call stop afterwards.
func (r *registrar) run(ctx context.Context) {
	pluginapi.RegisterDevicePluginServer(r.grpc, r.srv)
	tick := time.NewTicker(r.poll)
	defer tick.Stop()
	for {
		r.step(ctx)
		r.srv.refusals.flush(false)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.srv.streams.changed:
		}
	}
}

// stop ends the server. It removes the socket before the streams end, so that no client connects any more. With withdraw it
// sends the kubelet an empty list and gives it withdrawTimeout to receive the list.
func (r *registrar) stop(withdraw bool) {
	if count := r.srv.streams.counts(); !withdraw && count.open > 1 {
		// A kubelet before 1.37 marks the devices unhealthy at the first end of a stream. A list that it reads from another
		// stream after that would make them healthy again.
		<-time.After(time.Until(count.lastSent.Add(r.settle)))
	}
	if r.socket != nil {
		if err := r.socket.Remove(); err != nil {
			r.log.Warn("cannot remove the plugin's socket", zap.Error(err))
		}
	}
	r.srv.stop(withdraw)
	if withdraw {
		// GracefulStop closes a connection only when all messages are sent. The timer ends it if the kubelet does not read.
		timeout := time.AfterFunc(r.withdrawTimeout, r.grpc.Stop)
		r.grpc.GracefulStop()
		timeout.Stop()
	}
	r.grpc.Stop()
	r.serving.Wait()
	r.srv.refusals.flush(true)
}

// step checks everything once and does what is due.
func (r *registrar) step(ctx context.Context) {
	r.checkSocket()
	r.checkKubelet()
	r.followStreams()
	r.auditDevices()
	if r.phase != unregistered {
		return
	}
	if r.kubeletErr != nil {
		r.reportError(r.kubeletErr.Error())
		return
	}
	// The end of a stream, for whatever reason, is a disturbance as well.
	now, count := time.Now(), r.srv.streams.counts()
	if count.open == 0 && r.earlierPluginCounted(now) || now.Before(r.settledAt) || now.Before(r.nextAttempt) ||
		now.Before(count.lastEnd.Add(r.settle)) {
		return
	}
	if r.followable > maxStreamsKept {
		r.endStreams()
		return
	}
	r.register(ctx)
}

// maxStreamsKept limits the streams of earlier registrations that stay open beside the newest one. There may be one more after
// each loss of the socket, and after each registration of which the kubelet's answer or stream came too late.
const maxStreamsKept = 8

// endStreams ends all streams.
func (r *registrar) endStreams() {
	r.srv.streams.drop()
	r.followable = 0
}

// earlierPluginCounted reports whether the kubelet still counts devices of the resource before the first registration, or
// has not answered yet: it has not processed the end of the earlier agent. The registrar waits for that for endTimeout at most,
// because it may also be another plugin that serves the resource.
func (r *registrar) earlierPluginCounted(now time.Time) bool {
	if !r.kubeletNew || now.After(r.kubeletNewAt.Add(r.settle+r.endTimeout)) {
		return false
	}
	answer := r.pods.Allocatable.Load()
	if answer == nil || answer.At.Before(r.kubeletNewAt) {
		return true
	}
	if answer.Err != "" || len(answer.IDs[r.srv.name]) == 0 {
		return false
	}
	r.setError("the kubelet still counts the devices of an earlier plugin; about to register")
	r.pods.QueryWithin(r.poll)
	return true
}

// checkSocket detects that the socket of the newest registration is lost. The kubelet's stream stays open.
func (r *registrar) checkSocket() {
	if r.phase == unregistered {
		return // the next registration has another socket
	}
	if listens := !wait.Closed(r.served); listens && r.socket.InPlace() {
		return
	}
	r.log.Warn("socket lost, registering another one", zap.String("socket", r.socket.Path()))
	r.scheduleRegistration("the plugin's socket was lost")
}

// listen replaces the socket by one at a new path. The connections that the one before accepted, and with them the kubelet's stream, stay
// open.
func (r *registrar) listen(ctx context.Context) error {
	socket, err := unixsock.Listen(ctx, r.cfg.socketPath(r.srv.name, rand.Uint32()))
	if err != nil {
		return fmt.Errorf("plugin.kubeletDir: no socket for the plugin: %w", err)
	}
	if r.socket != nil {
		if err := r.socket.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			r.log.Debug("closing a socket", zap.Error(err))
		}
	}
	served := make(chan struct{})
	r.socket, r.served = socket, served
	r.serving.Go(func() {
		defer close(served)
		_ = r.grpc.Serve(socket) // checkSocket notices its end
	})
	return nil
}

// checkKubelet detects a new kubelet by its new socket.
func (r *registrar) checkKubelet() {
	info, err := os.Lstat(r.kubeletPath)
	r.kubeletErr = nil
	if err != nil {
		r.kubeletErr = fmt.Errorf("%w; waiting for the kubelet", err)
		if _, err := os.Stat(filepath.Dir(r.kubeletPath)); err != nil {
			r.kubeletErr = fmt.Errorf("plugin.kubeletDir: %w; set it to the kubelet's directory and mount that", err)
		}
		return
	}
	if unixsock.SameSocket(r.kubeletSocket, info) {
		return
	}
	r.kubeletSocket, r.kubeletNew, r.kubeletNewAt = info, true, time.Now()
	r.pods.QueryWithin(0)
	r.scheduleRegistration("the kubelet has started")
}

// scheduleRegistration requests a registration after the settle time and resets the retries.
func (r *registrar) scheduleRegistration(reason string) {
	r.unregister(reason + "; about to register")
	r.streamEnd = ""
	r.nextAttempt = time.Time{}
	r.retry.Reset()
	r.settledAt = time.Now().Add(r.settle)
}

func (r *registrar) unregister(reason string) {
	r.phase = unregistered
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted, r.err, r.auditedAt = false, reason, time.Time{}
}

// followStreams updates the phase after the kubelet opened or closed streams.
func (r *registrar) followStreams() {
	count, now := r.srv.streams.counts(), time.Now()
	switch {
	case r.phase == accepted && count.openCurrent > 0:
		r.phase, r.phaseSince = registered, now
		r.logged.Clear()
		r.pods.QueryWithin(r.settle + r.timing.pods.QuickRefresh)
		r.setError("")
		r.log.Info(msgRegistered, zap.Int("devices", r.srv.resource().units()))
	case r.phase == accepted && !count.openedCurrent:
		if now.Sub(r.phaseSince) > r.streamTimeout {
			r.fail(fmt.Sprintf("the kubelet accepted %s but did not open ListAndWatch within %s; registering again", r.srv.name, r.streamTimeout))
		}
	case r.phase != unregistered && count.openCurrent == 0:
		// The kubelet stopped or dropped the plugin. Retries slow down if it drops the plugin repeatedly.
		lasted := r.phase == registered && now.Sub(r.phaseSince) > r.streamTimeout
		// A kubelet that stops closes its streams first. The next step detects that it stopped, which explains more.
		r.streamEnd = "the kubelet closed ListAndWatch; registering again"
		r.retryLater(r.streamEnd)
		if lasted {
			r.nextAttempt = time.Time{}
			r.retry.Reset()
		}
	}
}

// fail reports an error and schedules another attempt.
func (r *registrar) fail(reason string) {
	r.retryLater(reason)
	r.reportError(reason)
}

// retryLater schedules another attempt after a pause.
func (r *registrar) retryLater(reason string) {
	now := time.Now()
	r.unregister(reason)
	r.settledAt = now.Add(r.settle)
	r.nextAttempt = now.Add(r.retry.Next())
}

// register registers once, with a new socket. It blocks until the kubelet answers, for at most registerTimeout.
func (r *registrar) register(ctx context.Context) {
	r.kubeletNew = false
	if r.srv.streams.counts().open == 0 {
		r.followable = 0
	}
	err := r.listen(ctx)
	if err == nil {
		err = r.call(ctx)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		r.fail(err.Error())
		return
	}
	r.phase, r.phaseSince = accepted, time.Now()
	if r.streamEnd != "" { // the kubelet closed the stream and still runs
		r.log.Warn(msgUnregistered, zap.String("reason", r.streamEnd))
		r.streamEnd = ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted, r.err = true, "the kubelet accepted the registration; waiting for it to open ListAndWatch"
	r.registrations++
}

// call makes the Register call for the newest socket.
func (r *registrar) call(ctx context.Context) error {
	r.srv.streams.beginRegistration()
	ctx, cancel := context.WithTimeout(ctx, r.registerTimeout)
	defer cancel()
	err := register(ctx, r.kubeletPath, r.srv.name, filepath.Base(r.socket.Path()))
	answer := status.Convert(err)
	if c := answer.Code(); c == codes.OK || c == codes.DeadlineExceeded || c == codes.Canceled { // else it was refused
		r.followable++
	}
	if err != nil {
		return fmt.Errorf("the kubelet at %s did not register %s: %s", r.kubeletPath, r.srv.name, answer.Message())
	}
	return nil
}

// register makes one Register call over a connection of its own.
func register(ctx context.Context, kubelet, resource, endpoint string) (err error) {
	conn, err := podresources.Dial(kubelet)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: endpoint, ResourceName: resource, Options: options(),
	})
	return err
}

// reportError stores why the resource is not registered, and logs it when it changes.
func (r *registrar) reportError(reason string) {
	r.setError(reason)
	r.streamEnd = ""
	if r.logged.Changed(reason) {
		r.log.Warn(msgUnregistered, zap.String("reason", reason))
	}
}

func (r *registrar) setError(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = reason
}

// status may be called from any goroutine.
func (r *registrar) status() ResourceStatus {
	resource, count := r.srv.resource(), r.srv.streams.counts()
	s := ResourceStatus{
		Name: r.srv.name, Streams: count.open, Devices: resource.units(), Healthy: resource.healthy(),
		Unschedulable: resource.Unschedulable,
	}
	s.Allocations, s.AllocationErrors = r.srv.counts.read()
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Registrations, s.AuditMismatches = r.registrations, r.mismatches
	s.Registered = r.accepted && count.openCurrent > 0
	s.Audited = s.Registered && r.auditedAt.After(count.lastSent)
	if !s.Registered {
		s.Err = r.err
		if s.Err == "" {
			s.Err = "the kubelet has just closed ListAndWatch"
		}
	}
	return s
}

// timing holds the intervals and timeouts; tests shorten them.
type timing struct {
	poll            time.Duration // between checks of the sockets: two lstat calls
	settle          time.Duration // without a disturbance before a registration
	registerTimeout time.Duration // of the Register call, during which the kubelet dials the plugin
	streamTimeout   time.Duration // from the registration to ListAndWatch
	endTimeout      time.Duration // for the kubelet to process the end of an earlier agent, besides settle
	retryMin        time.Duration // the bounds of the pause between two attempts; see backoff.Backoff
	retryMax        time.Duration
	withdrawTimeout time.Duration // for the kubelet to receive the last list
	handshake       time.Duration // for a new connection to speak HTTP/2

	pods          podresources.Timing
	auditRetryMin time.Duration // the bounds of the pause between the second registration after audit mismatches and the next ones
	auditRetryMax time.Duration
}

// defaultTiming settles for a second: when a stream ends, the kubelet cleans up by resource name, and removes a newer
// registration of the same name (kubernetes#127803). No registration was lost in tests after a tenth of that.
func defaultTiming() timing {
	return timing{
		poll: 250 * time.Millisecond, settle: time.Second, registerTimeout: 15 * time.Second, streamTimeout: 5 * time.Second,
		endTimeout: 2 * time.Second,
		retryMin:   time.Second, retryMax: 30 * time.Second, withdrawTimeout: time.Second, handshake: 5 * time.Second,
		pods: podresources.Timing{
			Poll: 250 * time.Millisecond, Refresh: 2 * time.Second, QuickRefresh: time.Second, Settle: 5 * time.Second,
			Call: 5 * time.Second, MaxAge: 5 * time.Minute, LogAfter: 3 * time.Second,
		},
		auditRetryMin: 10 * time.Second, auditRetryMax: 10 * time.Minute,
	}
}
