package agent

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

// The probes, which the kubelet asks for without a password: it has none.
const (
	livezPath  = "/livez"
	readyzPath = "/readyz"
)

// realm is what browsers show when they ask for a password, and by which others know us.
const realm = "gpu-node-agent"

// guardPatience is how long a request waits while the passwords of others are checked.
const guardPatience = 5 * time.Second

var errBusy = errors.New("busy with the passwords of others; try again")

// guard stands before the pages, and lets in whom a web configuration lets in.
type guard struct {
	*webConfig
	pages   http.Handler
	outside http.Handler // the probes, for those who are not let in
	limit   *rate.Limiter
	turn    chan struct{} // holds one: to check a password takes a processor for some 50 ms, so there is never more than one

	mu    sync.Mutex                   // guards right
	right map[string][sha256.Size]byte // the passwords that were right, as there is no use in checking them again
}

func newGuard(w *webConfig, pages, outside http.Handler) *guard {
	g := &guard{webConfig: w, pages: pages, outside: outside, turn: make(chan struct{}, 1), right: make(map[string][sha256.Size]byte)}
	if l := w.rest.RateLimiterConfig; l.Interval > 0 {
		g.limit = rate.NewLimiter(rate.Every(l.Interval), l.Burst)
	}
	return g
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range g.rest.HTTPConfig.Header {
		w.Header().Set(name, value)
	}
	probe := r.URL.Path == livezPath || r.URL.Path == readyzPath
	_, _, named := r.BasicAuth()
	switch {
	case probe && !named && len(g.users) > 0:
		g.outside.ServeHTTP(w, r)
		return
	case (!probe || named) && g.limit != nil && !g.limit.Allow():
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	}
	known, err := g.knows(r)
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case known:
		g.pages.ServeHTTP(w, r)
	default:
		w.Header().Set("WWW-Authenticate", `Basic realm="`+realm+`", charset="UTF-8"`)
		http.Error(w, "Unauthorized: "+realm+" wants a name and a password", http.StatusUnauthorized)
	}
}

// knows tells whether whoever asks has a name and its password, or needs none. An error says why that could not
// be found out.
func (g *guard) knows(r *http.Request) (bool, error) {
	if len(g.users) == 0 {
		return true, nil
	}
	name, password, ok := r.BasicAuth()
	if !ok {
		return false, nil
	}
	sum := sha256.Sum256([]byte(password))
	g.mu.Lock()
	was, checked := g.right[name]
	g.mu.Unlock()
	if checked && subtle.ConstantTimeCompare(was[:], sum[:]) == 1 {
		return true, nil
	}
	late := time.NewTimer(guardPatience)
	defer late.Stop()
	select {
	case g.turn <- struct{}{}:
		defer func() { <-g.turn }()
	case <-late.C:
		return false, errBusy
	case <-r.Context().Done():
		return false, r.Context().Err()
	}
	hash, known := g.users[name]
	if !known { // takes as long, so that the time does not tell which names there are
		for _, hash = range g.users {
			break
		}
	}
	if bcrypt.CompareHashAndPassword(hash, []byte(password)) != nil || !known {
		return false, nil
	}
	g.mu.Lock()
	g.right[name] = sum
	g.mu.Unlock()
	return true, nil
}
