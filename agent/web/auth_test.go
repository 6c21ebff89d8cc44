package web

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"
)

// Logins wait for each other; verified logins and probes do not wait.
func TestGuardLimitsConcurrentLogins(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	pages := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	g := newGuard(&Config{users: map[string][]byte{"prometheus": hash}}, pages, anonymousProbes(func() []string { return nil }))
	serve := func(ctx context.Context, path, user string) int {
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
		if name, password, ok := strings.Cut(user, ":"); ok {
			r.SetBasicAuth(name, password)
		}
		w := httptest.NewRecorder()
		g.ServeHTTP(w, r)
		return w.Code
	}
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
