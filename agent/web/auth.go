package web

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net/http"
	"sync"
	"time"

	"golang.org/x/crypto/bcrypt"
	"golang.org/x/time/rate"
)

// Realm is the realm of the password prompt. `doctor` also recognizes an agent by it.
const Realm = "gpu-node-agent"

// loginTimeout is how long a request waits while another login is checked.
const loginTimeout = 5 * time.Second

var errTooManyLogins = errors.New("too many concurrent logins; retry later")

// guard applies a web configuration to requests: headers, the rate limit and passwords.
type guard struct {
	*Config
	pages  http.Handler
	probes http.Handler // for probes without a password: the kubelet has none
	limit  *rate.Limiter
	// A slot for one login: each bcrypt comparison takes a processor for about 50 ms, so concurrent logins are limited.
	loginSlot chan struct{}

	mu       sync.Mutex                   // guards verified
	verified map[string][sha256.Size]byte // sums of passwords that were correct, by user: they are not compared again
}

func newGuard(c *Config, pages, probes http.Handler) *guard {
	g := &guard{Config: c, pages: pages, probes: probes, loginSlot: make(chan struct{}, 1), verified: make(map[string][sha256.Size]byte)}
	if l := c.settings.RateLimiterConfig; l.Interval > 0 {
		g.limit = rate.NewLimiter(rate.Every(l.Interval), l.Burst)
	}
	return g
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range g.settings.HTTPConfig.Header {
		w.Header().Set(name, value)
	}
	probe := r.URL.Path == LivezPath || r.URL.Path == ReadyzPath
	_, _, hasLogin := r.BasicAuth()
	switch {
	case probe && !hasLogin && len(g.users) > 0:
		g.probes.ServeHTTP(w, r)
		return
	// A probe with a login counts against the limit, so that passwords cannot be tried there.
	case (!probe || hasLogin) && g.limit != nil && !g.limit.Allow():
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	}
	allowed, err := g.authenticate(r)
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case allowed:
		g.pages.ServeHTTP(w, r)
	default:
		w.Header().Set("WWW-Authenticate", `Basic realm="`+Realm+`", charset="UTF-8"`)
		http.Error(w, "Unauthorized: "+Realm+" requires a user name and a password", http.StatusUnauthorized)
	}
}

// authenticate reports whether the request has a valid login, or needs none. The error says why a login could not be
// checked.
func (g *guard) authenticate(r *http.Request) (bool, error) {
	if len(g.users) == 0 {
		return true, nil
	}
	name, password, ok := r.BasicAuth()
	if !ok {
		return false, nil
	}
	sum := sha256.Sum256([]byte(password))
	g.mu.Lock()
	verified, ok := g.verified[name]
	g.mu.Unlock()
	if ok && subtle.ConstantTimeCompare(verified[:], sum[:]) == 1 {
		return true, nil
	}
	timeout := time.NewTimer(loginTimeout)
	defer timeout.Stop()
	select {
	case g.loginSlot <- struct{}{}:
		defer func() { <-g.loginSlot }()
	case <-timeout.C:
		return false, errTooManyLogins
	case <-r.Context().Done():
		return false, r.Context().Err()
	}
	hash, exists := g.users[name]
	if !exists { // compare with some hash, so that the response time does not reveal which users exist
		for _, hash = range g.users {
			break
		}
	}
	if bcrypt.CompareHashAndPassword(hash, []byte(password)) != nil || !exists {
		return false, nil
	}
	g.mu.Lock()
	g.verified[name] = sum
	g.mu.Unlock()
	return true, nil
}
