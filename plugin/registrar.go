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
	"strings"
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
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// phase is the progress of a registration.
type phase uint8

const (
	unregistered phase = iota
	accepted           // by the kubelet, which has not opened ListAndWatch yet
	registered
)

// registrar keeps the socket of one resource served and registered with the kubelet. It detects every disturbance, from
// a kubelet restart to a wiped directory, by polling, and treats all alike: wait for the settle time without another
// disturbance, then register. The gRPC server and its streams live as long as the registrar; a lost socket is only
// replaced by a new listener.
//
// A kubelet since 1.37 refuses a registration at a path that it still has connected, and then never notices that the
// path's stream ends. So the registrar registers its fixed path only while the kubelet cannot hold it, and otherwise
// another path, at which it listens as well, and which it never uses twice. It always listens at the fixed path, by which
// another agent detects it.
type registrar struct {
	timing
	srv         *server
	pods        *podresources.Client
	cfg         Config
	socketPath  string // the fixed path
	kubeletPath string // of kubelet.sock
	log         *zap.Logger
	grpc        *grpc.Server
	serving     sync.WaitGroup // the grpc.Serve of each listener

	// The fields up to mu belong to the goroutine of run.
	socket        *unixsock.Socket
	alternate     *unixsock.Socket // at another path if that was registered, otherwise nil
	served        chan struct{}    // closed when grpc.Serve of socket has returned
	listenErr     error
	nextListen    time.Time   // earliest next attempt after listenErr
	kubeletSocket fs.FileInfo // the last one that existed, nil if none did
	kubeletLost   bool        // kubelet.sock does not exist
	kubeletNew    bool        // nothing was registered with it since kubeletSocket changed
	kubeletNewAt  time.Time
	fixedSent     bool // the newest registration is at the fixed path, and may have reached the kubelet
	fixedHeld     bool // the kubelet may hold the fixed path until it restarts
	followable    int  // registrations with which the kubelet may have a stream, since none was open
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
	socketLost    bool       // the socket cannot be served at its path
	err           string     // why the resource is not registered
	warning       string     // ResourceStatus.Warning
	registrations uint64
	mismatches    uint64
	auditedAt     time.Time // of the answer in which the kubelet last had the list of the newest registration; zero if there is none
}

func newRegistrar(srv *server, cfg Config, t timing, pods *podresources.Client, log *zap.Logger) *registrar {
	return &registrar{
		timing: t, srv: srv, pods: pods, log: log.With(zap.String("resource", srv.name)),
		cfg: cfg, socketPath: cfg.socketPath(srv.name),
		kubeletPath: filepath.Join(cfg.socketDir(), "kubelet.sock"),
		grpc:        grpc.NewServer(serverOptions(t.handshake)...),
		retry:       backoff.Backoff{Min: t.retryMin, Max: t.retryMax},
		audit:       audit{retry: backoff.Backoff{Min: t.auditRetryMin, Max: t.auditRetryMax}},
	}
}

// kubeletView is what a registrar has found about a kubelet. The next registrar of the resource, after a change of the
// configuration, must not register a path whose end the kubelet processes late.
type kubeletView struct {
	socket    fs.FileInfo
	fixedHeld bool
	warning   string
}

func (r *registrar) view() kubeletView {
	if r.kubeletNew { // the rest is about the kubelet before
		return kubeletView{}
	}
	return kubeletView{r.kubeletSocket, r.fixedHeld || r.fixedSent, r.warning}
}

// resume continues with the view of an ended registrar. It applies as long as the kubelet is the same.
func (r *registrar) resume(v kubeletView) {
	r.kubeletSocket, r.fixedHeld, r.warning = v.socket, v.fixedHeld, v.warning
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
	for _, s := range []*unixsock.Socket{r.socket, r.alternate} {
		if s == nil {
			continue
		}
		if err := s.Remove(); err != nil {
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
	if err := r.listen(ctx); err != nil {
		r.reportError(err.Error(), true)
		return
	}
	r.checkKubelet()
	r.followStreams()
	r.auditDevices()
	if r.phase != unregistered {
		return
	}
	if r.kubeletLost {
		r.reportError(r.kubeletPath+" does not exist; waiting for the kubelet", false)
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

// maxStreamsKept limits the streams of earlier registrations that stay open beside the newest one. There is one more after
// each loss of the socket, and after each lost answer of the kubelet.
const maxStreamsKept = 8

// endStreams ends all streams. The next registration has another path, because the kubelet may process the ends late.
func (r *registrar) endStreams() {
	r.srv.streams.drop()
	r.followable, r.fixedHeld = 0, r.fixedHeld || r.fixedSent
}

// earlierPluginCounted reports whether the kubelet still counts devices of the resource before the first registration, or
// has not answered yet: it has not processed the end of the earlier agent, and must not get another registration of the
// same path. A kubelet for which that takes longer than endTimeout keeps a dead endpoint, or another plugin serves the
// resource.
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
	r.setError("the kubelet still counts the devices of an earlier plugin; about to register", false)
	r.pods.QueryWithin(r.poll)
	return true
}

// listen ensures that the socket exists at its path and is served.
func (r *registrar) listen(ctx context.Context) error {
	if r.socket != nil && r.socket.InPlace() {
		select {
		case <-r.served: // the listener failed
		default:
			if r.alternate != nil && !r.alternate.InPlace() {
				r.closeAlternate()
				r.log.Warn("socket lost, registering another path", zap.String("socket", r.socketPath))
				r.scheduleRegistration(socketLostReason)
			}
			return nil
		}
	}
	if time.Now().Before(r.nextListen) {
		return r.listenErr
	}
	socket, err := openSocket(ctx, r.socketPath)
	if err != nil {
		r.listenErr, r.nextListen = err, time.Now().Add(r.retryMin)
		return err
	}
	reason := "the plugin's socket is new"
	if r.socket != nil {
		reason = socketLostReason
		// The connections that it accepted, and with them the kubelet's stream, stay open.
		r.closeAlternate()
		if err := r.socket.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			r.log.Debug("closing the lost socket", zap.Error(err))
		}
		r.log.Warn("socket lost, listening again", zap.String("socket", r.socketPath))
	} else {
		r.log.Info("listening", zap.String("socket", r.socketPath))
	}
	r.socket, r.served = socket, r.serve(socket)
	r.scheduleRegistration(reason)
	return nil
}

const socketLostReason = "the plugin's socket was lost"

// serve serves a socket until it is closed or fails. The result is closed then.
func (r *registrar) serve(socket *unixsock.Socket) (served chan struct{}) {
	served = make(chan struct{})
	r.serving.Go(func() {
		defer close(served)
		_ = r.grpc.Serve(socket) // after an error the next step listens again
	})
	return served
}

// closeAlternate closes the socket at another path. The connections that it accepted stay open.
func (r *registrar) closeAlternate() {
	if r.alternate == nil {
		return
	}
	if err := r.alternate.Close(); err != nil {
		r.log.Debug("closing the socket at another path", zap.Error(err))
	}
	r.alternate = nil
}

// openSocket listens at path, below plugin.kubeletDir.
func openSocket(ctx context.Context, path string) (*unixsock.Socket, error) {
	if n := unixsock.PathLen(path); n > unixsock.MaxPath {
		return nil, fmt.Errorf("plugin.kubeletDir: the path %s is %d bytes too long for a unix socket; use a shorter directory",
			path, n-unixsock.MaxPath)
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("plugin.kubeletDir: %w; set it to the kubelet's directory and mount that", err)
	}
	return unixsock.Listen(ctx, path)
}

// checkKubelet detects a new kubelet by its new socket.
func (r *registrar) checkKubelet() {
	info, err := os.Lstat(r.kubeletPath)
	r.kubeletLost = err != nil // absent or inaccessible
	if r.kubeletLost || unixsock.SameSocket(r.kubeletSocket, info) {
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
	r.accepted, r.err, r.socketLost, r.auditedAt = false, reason, false, time.Time{}
}

// followStreams updates the phase after the kubelet opened or closed streams.
func (r *registrar) followStreams() {
	count, now := r.srv.streams.counts(), time.Now()
	switch {
	case r.phase == accepted && count.openCurrent > 0:
		r.phase, r.phaseSince = registered, now
		r.logged.Clear()
		r.pods.QueryWithin(r.settle + r.timing.pods.QuickRefresh)
		r.setError("", false)
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
	r.reportError(reason, false)
}

// retryLater schedules another attempt after a pause.
func (r *registrar) retryLater(reason string) {
	now := time.Now()
	r.unregister(reason)
	r.settledAt = now.Add(r.settle)
	r.nextAttempt = now.Add(r.retry.Next())
}

// register registers once. It blocks until the kubelet answers, for at most registerTimeout.
func (r *registrar) register(ctx context.Context) {
	r.checkHeld()
	connected, err := r.registerNextPath(ctx)
	if connected && !r.fixedHeld {
		r.reportDeadEndpoint()
		_, err = r.registerNextPath(ctx)
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

// checkHeld updates whether the kubelet may hold the fixed path, before a registration. The kubelet holds it from the Register
// call, whatever its answer, until it closes the stream of that registration or restarts. An open stream contradicts a restart:
// then something only touched kubelet.sock.
func (r *registrar) checkHeld() {
	count := r.srv.streams.counts()
	if count.open == 0 {
		r.followable = 0
		if r.kubeletNew {
			r.fixedSent, r.fixedHeld = false, false
			r.setWarning("")
		}
	}
	r.kubeletNew = false
	if r.fixedSent && (!count.openedCurrent || count.openCurrent > 0) {
		r.fixedHeld = true
	}
}

// registerNextPath registers the fixed path, or another one if the kubelet may hold the fixed path. It reports whether the
// kubelet refused the path because it has it connected already.
func (r *registrar) registerNextPath(ctx context.Context) (connected bool, err error) {
	r.closeAlternate()
	path := r.socketPath
	if r.fixedHeld {
		path = r.cfg.alternateSocketPath(r.srv.name, rand.Uint32())
		if r.alternate, err = openSocket(ctx, path); err != nil {
			return false, fmt.Errorf("no other socket for the plugin: %w", err)
		}
		r.serve(r.alternate)
	}
	r.srv.streams.beginRegistration()
	call, cancel := context.WithTimeout(ctx, r.registerTimeout)
	defer cancel()
	err = register(call, r.kubeletPath, r.srv.name, filepath.Base(path))
	answer := status.Convert(err)
	refused := err != nil && answer.Code() != codes.DeadlineExceeded && answer.Code() != codes.Canceled
	// A kubelet's own refusal, whatever its text, may mean that it holds the path.
	r.fixedSent = !r.fixedHeld && (!refused || answer.Code() == codes.Unknown)
	if !refused {
		r.followable++
	}
	if err == nil {
		return false, nil
	}
	return isConnected(answer), fmt.Errorf("the kubelet at %s did not register %s: %s", r.kubeletPath, r.srv.name, answer.Message())
}

// isConnected reports whether the kubelet refused a registration because it has the path connected already.
func isConnected(answer *status.Status) bool {
	return answer.Code() == codes.Unknown && strings.Contains(answer.Message(), "device plugin already connected")
}

// reportDeadEndpoint reports that the kubelet keeps an endpoint at the fixed path. Even if the endpoint's stream was about
// to end, the refusal made the kubelet forget whom to disconnect then.
func (r *registrar) reportDeadEndpoint() {
	r.fixedHeld = true
	r.setWarning(fmt.Sprintf("the kubelet keeps a dead endpoint of %s at %s, so the devices stay allocatable when the agent ends; restart "+
		"the kubelet",
		r.srv.name, r.socketPath))
	r.log.Warn(msgDeadEndpoint, zap.String("socket", r.socketPath))
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
func (r *registrar) reportError(reason string, socketLost bool) {
	r.setError(reason, socketLost)
	r.streamEnd = ""
	if r.logged.Changed(reason) {
		r.log.Warn(msgUnregistered, zap.String("reason", reason))
	}
}

func (r *registrar) setError(reason string, socketLost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err, r.socketLost = reason, socketLost
}

func (r *registrar) setWarning(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.warning = text
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
	s.Registrations, s.AuditMismatches, s.Warning = r.registrations, r.mismatches, r.warning
	s.Registered = r.accepted && count.openCurrent > 0 && !r.socketLost
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
