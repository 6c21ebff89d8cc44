package web

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"maps"
	"net"
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
	limit  *rateLimit   // nil for none
	// A slot for one login: each bcrypt comparison takes a processor for about 50 ms, so concurrent logins are limited.
	loginSlot chan struct{}

	mu       sync.Mutex                   // guards verified
	verified map[string][sha256.Size]byte // sums of passwords that were correct, by user: they are not compared again
}

func newGuard(c *Config, pages, probes http.Handler) *guard {
	g := &guard{Config: c, pages: pages, probes: probes, loginSlot: make(chan struct{}, 1), verified: make(map[string][sha256.Size]byte)}
	if l := c.settings.RateLimiterConfig; l.Interval > 0 {
		g.limit = &rateLimit{every: rate.Every(l.Interval), burst: l.Burst, clients: make(map[string]*rate.Limiter)}
	}
	return g
}

// maxClients limits the clients without a verified login that have a rate limit of their own.
const maxClients = 256

// rateLimit limits the requests of each client, so that one does not use up the limit of the others.
type rateLimit struct {
	every rate.Limit
	burst int

	mu      sync.Mutex // guards clients
	clients map[string]*rate.Limiter
}

// allow reports whether a client may make a request now. Those above maxClients share one limit, except those with a verified login, which
// the configuration limits.
func (l *rateLimit) allow(client string, verified bool) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !verified && l.clients[client] == nil && len(l.clients) >= maxClients-1 {
		maps.DeleteFunc(l.clients, func(_ string, c *rate.Limiter) bool { return c.Tokens() >= float64(l.burst) }) // as a new one
		if len(l.clients) >= maxClients-1 {
			client = ""
		}
	}
	if l.clients[client] == nil {
		l.clients[client] = rate.NewLimiter(l.every, l.burst)
	}
	return l.clients[client].Allow()
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range g.settings.HTTPConfig.Header {
		w.Header().Set(name, value)
	}
	probe := r.URL.Path == LivezPath || r.URL.Path == ReadyzPath
	name, _, hasLogin := r.BasicAuth()
	verified := g.isVerified(r)
	client := "user " + name
	if !verified {
		client, _, _ = net.SplitHostPort(r.RemoteAddr)
	}
	switch {
	case probe && !hasLogin && len(g.users) > 0:
		g.probes.ServeHTTP(w, r)
		return
	// A probe with a login counts against the limit, so that passwords cannot be tried there.
	case (!probe || hasLogin) && !g.limit.allow(client, verified):
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	case verified:
		g.pages.ServeHTTP(w, r)
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

// isVerified reports whether the request has a login that was valid before.
func (g *guard) isVerified(r *http.Request) bool {
	name, password, ok := r.BasicAuth()
	if !ok {
		return false
	}
	sum := sha256.Sum256([]byte(password))
	g.mu.Lock()
	verified, ok := g.verified[name]
	g.mu.Unlock()
	return ok && subtle.ConstantTimeCompare(verified[:], sum[:]) == 1
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
	g.verified[name] = sha256.Sum256([]byte(password))
	g.mu.Unlock()
	return true, nil
}
