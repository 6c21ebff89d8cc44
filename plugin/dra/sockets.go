package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr/funcr"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sockets serves an instance's sockets, by which the kubelet finds and calls it. It notices their loss by polling and opens new ones.
type sockets struct {
	*Driver
	instance
	log    *zap.Logger
	failed chan error // of a server
	// other describes another driver of the same name on the node; empty if there is none. It has no value before the first check.
	other health.Latest[string]

	mu            sync.Mutex // guards the fields below
	err           string     // why they are not served
	accepted      bool       // the kubelet has accepted the registration
	refusal       string     // why the kubelet has not accepted it
	calls         int        // running ones
	lastUnprepare time.Time  // end of the last call that ended claims; zero before
	streams       int        // open health streams
	lastStreamEnd time.Time  // zero if none has ended since the registration
}

func newSockets(d *Driver, i instance, log *zap.Logger) *sockets {
	return &sockets{Driver: d, instance: i, log: log, failed: make(chan error, 1), err: "starting"}
}

var errSocketLost = errors.New("a socket was lost")

// run serves the sockets until ctx ends.
func (s *sockets) run(ctx context.Context) {
	retry := s.timing.pauses()
	for ctx.Err() == nil {
		start := time.Now()
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > s.timing.retryMax || errors.Is(err, fs.ErrNotExist) {
			retry.Reset()
		}
		s.setError(err)
		retry.Wait(ctx)
	}
}

// serve serves the sockets until ctx ends, or one is lost or fails.
func (s *sockets) serve(ctx context.Context) error {
	client, err := s.Connect()
	if err != nil {
		return err
	}
	s.preparer.api.Store(&client) // kubernetes.kubeconfig may have changed
	if err := s.makeDataDir(); err != nil {
		s.setOther("") // no kubelet, so no other driver either
		return err
	}
	if err := s.checkOtherDriver(ctx, ""); err != nil {
		return err
	}
	var open []*unixsock.Socket
	var own string // the registration socket
	listen := func(ctx context.Context, path string) (net.Listener, error) {
		if n := unixsock.PathLen(path) - unixsock.MaxPath; n > 0 {
			return nil, fmt.Errorf("plugin.kubeletDir: the path %s is %d bytes too long for a unix socket; use a shorter directory or "+
				"plugin.dra.driverName", path, n)
		}
		l, err := unixsock.Listen(ctx, path)
		if err != nil {
			return nil, err
		}
		open, own = append(open, l), path
		return l, nil
	}
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, funcr.New(func(_, text string) { s.log.Warn("kubelet helper: " + text) },
		funcr.Options{})))
	defer cancel()
	if len(s.failed) > 0 {
		<-s.failed //nolint:errcheck // of the servers before, which have ended
	}
	helper, err := kubeletplugin.Start(ctx, service{s.preparer, s},
		kubeletplugin.DriverName(s.driver), kubeletplugin.NodeName(s.Node), kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(s.registryDir()), kubeletplugin.PluginDataDirectoryPath(s.dataDir()),
		kubeletplugin.RegistrarListener(listen), kubeletplugin.PluginListener(listen),
		kubeletplugin.Serialize(false), kubeletplugin.GRPCVerbosity(10),
		kubeletplugin.GRPCInterceptor(s.interceptCall), kubeletplugin.GRPCStreamInterceptor(s.interceptStream))
	if err != nil {
		return err
	}
	defer s.forgetRegistration()
	defer helper.Stop()
	s.setError(nil)
	tick := time.NewTicker(s.timing.poll)
	defer tick.Stop()
	var seen time.Time // of the registry directory
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-s.failed:
			return err
		case <-tick.C:
		}
		for _, l := range open {
			if !l.InPlace() {
				return fmt.Errorf("%w: %s", errSocketLost, l.Addr())
			}
		}
		if info, err := os.Stat(s.registryDir()); err == nil && !info.ModTime().Equal(seen) {
			seen = info.ModTime()
			// The claims that are prepared here end here only, so this driver stays.
			s.setError(s.checkOtherDriver(ctx, own))
		}
	}
}

// setError stores why the sockets are not served, or what disturbs that, and logs it when it changes.
func (s *sockets) setError(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if text != s.err && text != "" {
		s.log.Warn("not serving the kubelet", zap.String("reason", text))
	}
	s.err = text
}

// status returns whether the kubelet has accepted the registration, and why the kubelet is not served; empty if it is.
func (s *sockets) status() (registered bool, err string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != "":
		return s.accepted, s.err
	case s.refusal != "":
		return false, "the kubelet refused the registration: " + s.refusal
	case !s.accepted:
		return false, "waiting for the kubelet to register the driver"
	case s.streams == 0 && !s.lastStreamEnd.IsZero() && time.Since(s.lastStreamEnd) > s.timing.streamLost:
		return false, "the kubelet has closed its connection; waiting for the kubelet"
	}
	return true, ""
}

// forgetRegistration resets the registration at the end of the sockets: the kubelet registers the next ones.
func (s *sockets) forgetRegistration() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accepted, s.refusal, s.lastStreamEnd = false, "", time.Time{}
}

// answered reports whether no call runs and the kubelet has the answers to the calls that ended claims. The kubelet would lose an answer
// that is sent while the sockets close, and without the driver it could not ask again: the pod of the claim would not end. Answers to other
// calls do not matter: pods whose claims are refused, and other processes, may call often.
func (s *sockets) answered() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls == 0 && time.Since(s.lastUnprepare) >= s.timing.answer
}

// interceptCall counts the calls, and follows the registration. The helper's RegistrationStatus has no lock.
func (s *sockets) interceptCall(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	s.mu.Lock()
	s.calls++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.calls--
		if strings.HasSuffix(info.FullMethod, "/NodeUnprepareResources") { // of any version
			s.lastUnprepare = time.Now()
		}
	}()
	if r, ok := req.(*registerapi.RegistrationStatus); ok {
		s.mu.Lock()
		was := s.accepted
		s.accepted, s.refusal = r.GetPluginRegistered(), ""
		s.lastStreamEnd = time.Time{}
		if !s.accepted {
			s.refusal = r.GetError()
			if s.refusal == "" {
				s.refusal = "no reason"
			}
		}
		s.mu.Unlock()
		if r.GetPluginRegistered() {
			s.log.Info("registered with the kubelet")
		} else {
			s.log.Warn("the kubelet refused the registration", zap.String("error", r.GetError()), zap.Bool("registeredBefore", was))
		}
	}
	return handler(ctx, req)
}

// interceptStream counts the health streams. The kubelet keeps one open; its end is the first sign of a kubelet that stops.
func (s *sockets) interceptStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	s.mu.Lock()
	s.streams++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.streams--
		s.lastStreamEnd = time.Now()
	}()
	return handler(srv, stream)
}

// checkOtherDriver stores what findOtherDriver returns.
func (s *sockets) checkOtherDriver(ctx context.Context, own string) error {
	err := s.findOtherDriver(ctx, own)
	if err == nil && own == "" {
		err = s.preparer.refresh(ctx)
	}
	if err != nil {
		s.setOther(err.Error())
	} else {
		s.setOther("")
	}
	return err
}

func (s *sockets) setOther(text string) {
	if last := s.other.Load(); last == nil || *last != text {
		s.other.Store(&text)
	}
}

// findOtherDriver returns an error if another process serves a socket of a driver of the same name, except own.
func (s *sockets) findOtherDriver(ctx context.Context, own string) error {
	return s.findDriver(ctx, own, s.timing.call)
}

// FindDriver returns an error if a process serves a driver with the configured name. It may be an agent.
func FindDriver(ctx context.Context, c *plugin.Config) error {
	return configuredInstance(c).findDriver(ctx, "", defaultTiming().call)
}

func (i instance) findDriver(ctx context.Context, own string, timeout time.Duration) error {
	files, err := os.ReadDir(i.registryDir())
	if err != nil {
		return err
	}
	for _, f := range files {
		path := filepath.Join(i.registryDir(), f.Name())
		if f.Type() != fs.ModeSocket || path == own {
			continue
		}
		if info, who := askSocket(ctx, path, timeout); info.GetType() == registerapi.DRAPlugin && info.GetName() == i.driver {
			return fmt.Errorf("another driver of the name %s answers at %s%s; remove it from this node, or set another plugin.dra.driverName",
				i.driver, path, who)
		}
	}
	return nil
}

// askSocket returns what a registration socket answers, nil if nothing does, and the process that serves it as a text.
func askSocket(ctx context.Context, path string, timeout time.Duration) (info *registerapi.PluginInfo, who string) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := podresources.Dial(path)
	if err != nil {
		return nil, ""
	}
	defer func() { _ = conn.Close() }()
	if info, err = registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}); err != nil {
		return nil, ""
	}
	return info, peer(ctx, path)
}

// peer returns the process that serves a socket, " (PID 17)"; empty if it cannot be seen.
func peer(ctx context.Context, path string) string {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close() }()
	pid := unixsock.PeerPID(conn)
	if pid == 0 { // in another PID namespace
		return ""
	}
	return fmt.Sprintf(" (PID %d)", pid)
}
