package web

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"
)

type testGuard struct{ *guard }

// newTestGuard returns a guard for a user prometheus with the password secret.
func newTestGuard(t *testing.T, c *Config) testGuard {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	c.users = map[string][]byte{"prometheus": hash}
	pages := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	return testGuard{newGuard(c, pages, anonymousProbes(func() bool { return true }))}
}

// serve returns the status code of a request with "user:password" from an address.
func (g testGuard) serve(ctx context.Context, path, user, address string) int {
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
	r.RemoteAddr = net.JoinHostPort(address, "40000")
	if name, password, ok := strings.Cut(user, ":"); ok {
		r.SetBasicAuth(name, password)
	}
	w := httptest.NewRecorder()
	g.ServeHTTP(w, r)
	return w.Code
}

// Logins wait for each other; verified logins and probes do not wait.
func TestGuardLimitsConcurrentLogins(t *testing.T) {
	g := newTestGuard(t, new(Config))
	serve := func(ctx context.Context, path, user string) int { return g.serve(ctx, path, user, "192.0.2.1") }
	if code := serve(t.Context(), "/metrics", "prometheus:secret"); code != http.StatusOK {
		t.Errorf("a first login: %d", code)
	}
	g.loginSlot <- struct{}{} // another login is being checked
	if code := serve(t.Context(), "/metrics", "prometheus:secret"); code != http.StatusOK {
		t.Errorf("a verified login: %d", code)
	}
	if code := serve(t.Context(), LivezPath, ""); code != http.StatusOK {
		t.Errorf("a probe: %d", code)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if code := serve(gone, "/metrics", "prometheus:wrong"); code != http.StatusServiceUnavailable {
		t.Errorf("a client that disconnects while it waits: %d", code)
	}
	<-g.loginSlot
	if code := serve(t.Context(), "/metrics", "prometheus:wrong"); code != http.StatusUnauthorized {
		t.Errorf("a wrong password: %d", code)
	}
}

// Requests of others do not use up the limit of a login, be it the first one or verified. Guesses stay limited.
func TestGuardLimitsClientsApart(t *testing.T) {
	limited := func() testGuard {
		c := new(Config)
		c.settings.RateLimiterConfig.Interval, c.settings.RateLimiterConfig.Burst = time.Hour, 3
		return newTestGuard(t, c)
	}
	const prometheus, stranger = "192.0.2.1", "192.0.2.2"
	flood := func(g testGuard, path, user, address string, accepted int) {
		t.Helper()
		for i := range 5 {
			want := http.StatusTooManyRequests
			if i < 3 {
				want = accepted
			}
			if code := g.serve(t.Context(), path, user, address); code != want {
				t.Errorf("request %d of %q to %s: %d, want %d", i, user, path, code, want)
			}
		}
	}
	login := func(g testGuard, address string) {
		t.Helper()
		if code := g.serve(t.Context(), "/metrics", "prometheus:secret", address); code != http.StatusOK {
			t.Errorf("first login: %d", code)
		}
	}
	for _, user := range []string{"", "prometheus:guess", "nobody:guess"} {
		g := limited()
		flood(g, "/metrics", user, stranger, http.StatusUnauthorized)
		login(g, prometheus)
		flood(g, "/metrics", "prometheus:secret", prometheus, http.StatusOK)
		g = limited()
		login(g, stranger) // both behind one proxy
		for range 5 {
			g.serve(t.Context(), "/metrics", user, stranger)
		}
		flood(g, "/metrics", "prometheus:secret", stranger, http.StatusOK)
	}
	g := limited()
	login(g, prometheus)
	flood(g, LivezPath, "prometheus:guess", stranger, http.StatusUnauthorized)
	for i := range 2 * maxClients { // a client of many addresses
		g.serve(t.Context(), "/metrics", "", netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String())
	}
	if n := len(g.limit.clients); n > maxClients {
		t.Errorf("%d clients are remembered", n)
	}
	flood(g, "/metrics", "prometheus:secret", prometheus, http.StatusOK)
}
