// Package podresources polls the kubelet's pod-resources API: the holders of each device, and the IDs that the kubelet
// may allocate.
package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Settings can change while a Client runs.
type Settings struct {
	KubeletDir  string // pod-resources/kubelet.sock is below it
	Allocatable bool   // also query the allocatable IDs
}

// Timing holds the intervals and timeouts of a Client.
type Timing struct {
	Poll         time.Duration // between checks of the socket
	Refresh      time.Duration // between queries
	QuickRefresh time.Duration // between queries after an allocation or a kubelet start
	Settle       time.Duration // how long a new kubelet may be reading its pods
	Call         time.Duration // timeout of a query
	MaxAge       time.Duration // of an answer that is kept while queries fail
	LogAfter     time.Duration // how long an error lasts until it is logged: longer than a kubelet restart
}

// settle returns how long the kubelet behind a socket may still be reading its pods. The time of the socket tells how old the kubelet is. A
// wall clock that was set back since makes it look new.
func (t Timing) settle(socket fs.FileInfo) time.Duration {
	if age := time.Since(socket.ModTime()); age >= 0 {
		return max(0, t.Settle-age)
	}
	return t.Settle
}

// Client queries the kubelet over one connection and publishes the answers. No caller waits for the kubelet.
type Client struct {
	Holders     health.Latest[Holders] // never empty
	Allocatable health.Latest[Allocatable]
	KubeletLost func() bool // reports whether the loss of the kubelet is logged elsewhere

	wake     chan struct{} // of capacity 1: a query is due now
	timing   Timing
	settings func() *Settings // nil before there is a configuration
	resolver func() Resolvers // for the newest snapshot
	log      *zap.Logger

	// The fields up to mu belong to the goroutine of Run.
	path         string      // of the socket
	socket       fs.FileInfo // nil if it does not exist
	settledAt    time.Time   // until then a new kubelet may not have read all pods
	conn         *grpc.ClientConn
	refusesSince time.Time     // since when this kubelet does not answer; zero if it does
	failingSince time.Time     // zero if the last queries succeeded
	logged       logonce.State // the error

	mu             sync.Mutex // guards the fields below
	nextQuery      time.Time
	quickUntil     time.Time // until then queries are QuickRefresh apart
	allocatableErr string
}

// New returns a Client that follows the settings.
func New(settings func() *Settings, resolver func() Resolvers, t Timing, log *zap.Logger) *Client {
	c := &Client{
		wake: make(chan struct{}, 1), timing: t, settings: settings, resolver: resolver, log: log,
		KubeletLost: func() bool { return false },
	}
	c.Holders.Store(&Holders{Err: "the kubelet has not been asked yet", Pending: true})
	return c
}

// QueryWithin schedules the next query no later than d from now. Any goroutine may call it.
func (c *Client) QueryWithin(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := time.Now().Add(d); at.Before(c.nextQuery) {
		c.nextQuery = at
	}
	if d <= 0 {
		wait.Signal(c.wake)
	}
}

// Ask asks the kubelet now and returns its answer. It returns the last answer after timeout, or if the kubelet cannot be asked. Callers
// that wait together share an answer. An answer of a query that began before the call does not count.
func (c *Client) Ask(ctx context.Context, timeout time.Duration) Holders {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c.QueryWithin(0)
	for {
		h, changed := c.Holders.Watch()
		if h.Asked.After(began) {
			return *h
		}
		if !wait.For(ctx, changed) {
			return *c.Holders.Load()
		}
	}
}

// FollowAllocation schedules several queries: the kubelet records an allocation only after the plugin's answer.
func (c *Client) FollowAllocation() {
	c.mu.Lock()
	c.quickUntil = time.Now().Add(3 * c.timing.QuickRefresh)
	c.mu.Unlock()
	c.QueryWithin(c.timing.QuickRefresh / 10)
}

// AllocatableError returns why the allocatable IDs are unknown. It is empty if they are known or not queried.
func (c *Client) AllocatableError() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.allocatableErr
}

// Run queries the kubelet until ctx ends.
func (c *Client) Run(ctx context.Context) {
	tick := time.NewTicker(c.timing.Poll)
	defer tick.Stop()
	defer c.disconnect()
	for {
		if s := c.settings(); s != nil {
			c.poll(ctx, *s)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-c.wake:
		}
	}
}

// poll checks the socket, and queries the kubelet if a query is due.
func (c *Client) poll(ctx context.Context, s Settings) {
	c.checkSocket(filepath.Join(s.KubeletDir, "pod-resources", "kubelet.sock"))
	now, due := c.queryDue()
	if !due {
		return
	}
	pods, devices, podsErr, devicesErr := c.query(ctx, s.Allocatable)
	if ctx.Err() != nil {
		return
	}
	c.storeHolders(now, pods, podsErr)
	a := &Allocatable{At: now, IDs: allocatableIDs(devices)}
	switch {
	case !s.Allocatable:
		a.Err, devicesErr = "not queried", nil
	case devicesErr != nil:
		a.Err = devicesErr.Error()
	}
	c.Allocatable.Store(a)
	c.logChange(podsErr, devicesErr)
}

// queryDue reports whether it is time for a query, and schedules the next one if so.
func (c *Client) queryDue() (now time.Time, due bool) {
	c.mu.Lock() // before now: Ask waits for a query that began later
	defer c.mu.Unlock()
	if now = time.Now(); now.Before(c.nextQuery) {
		return now, false
	}
	c.nextQuery = now.Add(c.timing.Refresh)
	if now.Before(c.quickUntil) {
		c.nextQuery = now.Add(c.timing.QuickRefresh)
	}
	return now, true
}

// checkSocket detects a new kubelet by its new socket, and reconnects.
func (c *Client) checkSocket(path string) {
	info, err := os.Lstat(path)
	if err != nil {
		info = nil // absent or inaccessible
	}
	if path == c.path && unixsock.SameSocket(c.socket, info) {
		return
	}
	c.disconnect()
	c.path, c.socket = path, info
	if info == nil {
		return
	}
	c.settledAt = time.Now().Add(c.timing.settle(info))
	c.refusesSince = time.Time{}
	if next := *c.Holders.Load(); next.Silent {
		next.Silent = false
		c.Holders.Store(&next)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextQuery, c.quickUntil = time.Time{}, c.settledAt.Add(c.timing.QuickRefresh)
}

func (c *Client) disconnect() {
	if c.conn != nil {
		_ = c.conn.Close() // fails only if it is closed already
		c.conn = nil
	}
}

// query asks for the pods and, with allocatable, for the allocatable devices.
func (c *Client) query(ctx context.Context, allocatable bool) (
	pods *podsapi.ListPodResourcesResponse, devices *podsapi.AllocatableResourcesResponse, podsErr, devicesErr error,
) {
	if c.socket == nil {
		err := fmt.Errorf("%s does not exist", c.path)
		if _, statErr := os.Stat(filepath.Dir(c.path)); errors.Is(statErr, fs.ErrNotExist) {
			err = &absentError{err}
		}
		return nil, nil, err, err
	}
	if c.conn == nil {
		conn, err := Dial(c.path)
		if err != nil {
			return nil, nil, err, err
		}
		c.conn = conn
	}
	api := podsapi.NewPodResourcesListerClient(c.conn)
	ctx, cancel := context.WithTimeout(ctx, c.timing.Call)
	defer cancel()
	pods, err := api.List(ctx, &podsapi.ListPodResourcesRequest{})
	podsErr = c.callError("List", err)
	if allocatable {
		devices, err = api.GetAllocatableResources(ctx, &podsapi.AllocatableResourcesRequest{})
		devicesErr = c.callError("GetAllocatableResources", err)
	}
	return pods, devices, podsErr, devicesErr
}

// absentError is the error while the directory of the socket is missing. Every kubelet with this API makes that directory.
type absentError struct{ error }

func (c *Client) callError(call string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s at %s: %s", call, c.path, status.Convert(err).Message())
}

// storeHolders publishes the holders. After an error the last answer remains, with the error, until it is MaxAge old. The
// first answers of a new kubelet lack pods that it has not read yet, so they remove no holders.
func (c *Client) storeHolders(asked time.Time, pods *podsapi.ListPodResourcesResponse, err error) {
	last := c.Holders.Load()
	if err != nil {
		next := *last
		next.Err, next.Pending, next.Asked = err.Error(), false, asked
		if c.socket != nil && c.refusesSince.IsZero() { // without a socket the kubelet is about to start
			c.refusesSince = asked
		}
		_, absent := errors.AsType[*absentError](err)
		next.Silent = absent || !c.refusesSince.IsZero() && asked.Sub(c.refusesSince) > c.timing.Settle
		if asked.Sub(last.At) > c.timing.MaxAge {
			next.By, next.Admin = nil, nil
		}
		c.Holders.Store(&next)
		return
	}
	c.refusesSince = time.Time{}
	next := NewHolders(asked, pods, c.resolver())
	next.Settling = asked.Before(c.settledAt)
	if next.Settling {
		for device, holders := range last.By {
			if next.By[device] == nil {
				next.By[device] = holders
			}
		}
		for device, holders := range last.Admin {
			if next.Admin[device] == nil {
				next.Admin[device] = holders
			}
		}
	}
	c.Holders.Store(&next)
}

// logChange logs an error once, when it has lasted for LogAfter, and logs its end.
func (c *Client) logChange(podsErr, devicesErr error) {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	c.mu.Lock()
	c.allocatableErr = text(devicesErr)
	c.mu.Unlock()
	failure := text(devicesErr)
	if podsErr != nil {
		failure = text(podsErr)
	}
	switch now := time.Now(); {
	case failure == "":
		c.failingSince = time.Time{}
	case c.failingSince.IsZero(), podsErr != nil && c.KubeletLost():
		c.failingSince = now
		return
	case now.Sub(c.failingSince) < c.timing.LogAfter:
		return
	}
	switch {
	case !c.logged.Changed(failure):
	case failure == "":
		c.log.Info("pod-resources API answers")
	case podsErr == nil:
		c.log.Warn("cannot audit the kubelet's devices", zap.String("error", failure))
	default:
		c.log.Warn("cannot list pod resources; keeping the last holders", zap.String("error", failure), zap.Duration("maxAge", c.timing.MaxAge))
	}
}

// QueryAllocatable asks the kubelet at a pod-resources socket once for its healthy devices, by resource.
func QueryAllocatable(ctx context.Context, socket string) (ids map[string][]string, err error) {
	conn, err := Dial(socket)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	resp, err := podsapi.NewPodResourcesListerClient(conn).GetAllocatableResources(ctx, &podsapi.AllocatableResourcesRequest{})
	return allocatableIDs(resp), err
}

// maxAnswerBytes limits an answer of the kubelet, which lists every pod of the node. The kubelet's own clients have the
// same limit.
const maxAnswerBytes = 16 << 20

// Dial returns a connection to a socket of the kubelet. The first call opens it.
func Dial(path string) (*grpc.ClientConn, error) {
	// A unix: address would interpret some characters of a path, so a dialer takes it.
	unix := func(ctx context.Context, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	retry := backoff.DefaultConfig
	retry.MaxDelay = time.Second // the socket is local, and queries are rare
	return grpc.NewClient("passthrough:///kubelet", grpc.WithContextDialer(unix),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswerBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: time.Second}))
}
