package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// running is a Source whose Run has been started.
type running struct {
	*Source
	stop func() error
}

// run starts a source with a control socket and waits until it listens. The test's cleanup, or stop, ends it.
func run(t *testing.T) *running {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Control = filepath.Join(t.TempDir(), "run", "control.sock")
	r := &running{Source: newSource(t, cfg)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = r.stop() })
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if conn, err := net.Dial("unix", cfg.Control); err == nil {
			_ = conn.Close()
			return r
		}
		<-tick.C
	}
}

func TestSend(t *testing.T) {
	r := run(t)
	ses := open(t, r.Source)
	before := time.Now()
	if err := Send(t.Context(), r.cfg.Control, event(t, 0, `{gpu: 3, xid: 79, lost: true}`)); err != nil {
		t.Error(err)
	}
	<-ses.Wake()
	s := gpuSample(t, poll(t, ses), 3)
	if s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 79 {
		t.Errorf("GPU 3 is %v with XIDs %v; want lost with XID 79", s.Presence, s.XIDs)
	} else if at := s.XIDs[0].At; at.Before(before) || at.After(time.Now()) {
		t.Errorf("the XID's time is %v; want now", at)
	}

	e := event(t, 0, `{gpu: 9, xid: 79}`)
	want := r.inject(e)
	if err := Send(t.Context(), r.cfg.Control, e); err == nil || err.Error() != want.Error() {
		t.Errorf("Send returned %v; want %v", err, want)
	}
}

func TestSendFails(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	if err := Send(t.Context(), missing, event(t, 0, `{gpu: 3, xid: 79}`)); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "source.sim.control") {
		t.Errorf("without an agent: %v", err)
	}
	if err := Send(t.Context(), missing, event(t, time.Second, `{gpu: 3, xid: 79}`)); !errors.Is(err, errAt) {
		t.Errorf("with a time: %v", err)
	}
	if err := Send(t.Context(), missing, Event{XID: new(79)}); !slices.Equal(errorKeys(err), []string{"gpu"}) {
		t.Errorf("without a GPU: %v", err)
	}
}

// TestControlSocket sends events as people write them with curl.
func TestControlSocket(t *testing.T) {
	r := run(t)
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", r.cfg.Control)
		},
	}}
	for text, want := range map[string]string{
		`{"gpu":3,"xid":79}`:         "",
		"{gpu: 3, lost: true}":       "",
		"gpu: 3\ntemperature: 97\n":  "",
		"{gpu: 3, xdi: 79}":          `"xdi": is not known`,
		"{gpu: 8, xid: 79}":          "gpu: 8 is not a GPU",
		"{at: 5s, gpu: 3, xid: 79}":  "at: ",
		"{gpu: 3, xid: -1, mig: no}": "; mig: ", // both errors in a line
		"hello":                      "is not an event",
		"":                           "missing event",
		"{source: down}":             "",
	} {
		resp, err := client.Post("http://localhost/events", "", strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		code, lines := http.StatusNoContent, 0
		if want != "" {
			code, lines = http.StatusBadRequest, 1
		}
		if err != nil || resp.StatusCode != code || !strings.Contains(string(body), want) || strings.Count(string(body), "\n") != lines {
			t.Errorf("%s: %s %q, %v; want %d %q", text, resp.Status, body, err, code, want)
		}
	}
	expectOpenFails(t, r.Source, errDown)
	if err := r.stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := os.Lstat(r.cfg.Control); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestControlSocketConcurrentEvents(t *testing.T) {
	r := run(t)
	var wg sync.WaitGroup
	for i := range 8 { // fewer than unixsock.MaxConnections
		wg.Go(func() {
			for n := range 20 {
				if err := Send(t.Context(), r.cfg.Control, event(t, 0, fmt.Sprintf(`{gpu: %d, xid: %d}`, i, n+1))); err != nil {
					t.Errorf("GPU %d, XID %d: %v", i, n+1, err)
				}
			}
		})
	}
	wg.Wait()
	reading := poll(t, open(t, r.Source))
	for i := range 8 {
		s := gpuSample(t, reading, i)
		if len(s.XIDs) != 20 {
			t.Errorf("GPU %d has %d XIDs; want 20", i, len(s.XIDs))
		}
		for n, x := range s.XIDs {
			if x.Code != n+1 {
				t.Errorf("GPU %d: XID %d is %d; want the order of sending", i, n, x.Code)
			}
		}
	}
}

func TestRunWithoutControlSocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		if err := src.Run(ctx); err != nil || time.Since(start) != time.Hour {
			t.Errorf("Run returned %v after %v; want nil after an hour", err, time.Since(start))
		}
	})
}
