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
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"k8s.io/client-go/kubernetes"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registration answers as a driver's registration socket.
type registration struct {
	registerapi.UnimplementedRegistrationServer
	kind, name string
}

func (r registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: r.kind, Name: r.name}, nil
}

// serveRegistration serves a registration socket until stop or the end of the test.
func serveRegistration(t *testing.T, path string, r registration) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv, done := grpc.NewServer(), make(chan struct{})
	registerapi.RegisterRegistrationServer(srv, r)
	go func() { defer close(done); _ = srv.Serve(l) }()
	stop = func() { srv.Stop(); <-done }
	t.Cleanup(stop)
	return stop
}

// Another driver of the same name is found at any socket, with its process. Sockets of others, dead ones and our own are no matter.
func TestFindOtherDriver(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	timing := defaultTiming()
	timing.call = time.Minute // a driver that answers late counts as none
	s := newSockets(&Driver{timing: timing}, instance{"gpu.nvidia.com", dir}, zap.NewNop())
	if err := s.findOtherDriver(t.Context(), ""); err == nil {
		t.Error("no error without the directory")
	}
	if err := os.Mkdir(s.registryDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(s.registryDir(), "dead.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	own := filepath.Join(s.registryDir(), "gpu.nvidia.com-reg.sock")
	serveRegistration(t, own, registration{kind: registerapi.DRAPlugin, name: "gpu.nvidia.com"})
	serveRegistration(t, filepath.Join(s.registryDir(), "nic.sock"), registration{kind: registerapi.DRAPlugin, name: "nic.example.com"})
	serveRegistration(t, filepath.Join(s.registryDir(), "csi.sock"), registration{kind: registerapi.CSIPlugin, name: "gpu.nvidia.com"})
	if err := s.findOtherDriver(t.Context(), own); err != nil {
		t.Error(err)
	}
	other := filepath.Join(s.registryDir(), "gpu.nvidia.com-uid-reg.sock")
	serveRegistration(t, other, registration{kind: registerapi.DRAPlugin, name: "gpu.nvidia.com"})
	err = s.findOtherDriver(t.Context(), own)
	if err == nil || !strings.Contains(err.Error(), other) || !strings.Contains(err.Error(), fmt.Sprintf(" (PID %d);", os.Getpid())) {
		t.Errorf("%v, want an error with %s and its process", err, other)
	}
	if err := s.findOtherDriver(t.Context(), ""); err == nil {
		t.Error("a live process at our own path must be found before the start")
	}
}

// An attempt is repeated soon after one that has lasted, or that found no kubelet; others less and less often.
func TestSocketsRetry(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		lasts time.Duration
		soon  bool
	}{
		"fails":               {errors.New("no kubeconfig"), 0, false},
		"fails after a while": {errors.New("no kubeconfig"), 20 * time.Second, false},
		"fails after long":    {errors.New("no kubeconfig"), time.Minute, true},
		"without a kubelet":   {fs.ErrNotExist, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ended []time.Time
				var pause time.Duration // the last one
				d := &Driver{timing: defaultTiming(), Options: Options{Connect: func() (kubernetes.Interface, error) {
					if n := len(ended); n > 0 {
						pause = time.Since(ended[n-1])
					}
					<-time.After(c.lasts)
					ended = append(ended, time.Now())
					return nil, c.err
				}}}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				newSockets(d, instance{}, zap.NewNop()).run(ctx)
				if least, most := d.timing.retryMax/2, d.timing.retryMin; pause > most && c.soon || pause < least && !c.soon {
					t.Errorf("the last of %d pauses is %v", len(ended)-1, pause)
				}
			})
		})
	}
}

func TestSocketsStatus(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change     func(*sockets)
		registered bool
		healthy    bool
	}{
		"registered":                       {func(*sockets) {}, true, true},
		"starting":                         {func(s *sockets) { s.err = "starting"; s.accepted = false }, false, false},
		"not registered yet":               {func(s *sockets) { s.accepted = false }, false, false},
		"refused":                          {func(s *sockets) { s.accepted, s.refusal = false, "no" }, false, false},
		"disturbed by another driver":      {func(s *sockets) { s.err = "another driver" }, true, false},
		"the health stream ended now":      {func(s *sockets) { s.streams, s.lastStreamEnd = 0, time.Now() }, true, true},
		"the health stream ended long ago": {func(s *sockets) { s.streams, s.lastStreamEnd = 0, time.Now().Add(-time.Minute) }, false, false},
		"no kubelet with health streams":   {func(s *sockets) { s.streams = 0 }, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSockets(&Driver{timing: defaultTiming()}, instance{}, zap.NewNop())
			s.err, s.accepted, s.streams = "", true, 1
			c.change(s)
			if registered, err := s.status(); registered != c.registered || (err == "") != c.healthy {
				t.Errorf("%v, %q", registered, err)
			}
		})
	}
}
