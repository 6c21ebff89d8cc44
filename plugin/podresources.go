package plugin

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// podResources asks the kubelet who has which device, and what it believes of ours, over one connection
// to its pod-resources API. Nobody waits for it: it publishes what it knows.
type podResources struct {
	timing
	cfg       *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	log       *zap.Logger
	away      func() bool            // reports whether it is said elsewhere that the kubelet is not there
	holders   health.Latest[Holders] // never empty
	beliefs   health.Latest[belief]

	// Everything from here to mu belongs to the goroutine of run.
	path    string      // of the socket
	seen    fs.FileInfo // the socket as it was seen last, nil if it was not there
	settled time.Time   // before this a new kubelet may not know its pods yet
	conn    *grpc.ClientConn
	failing time.Time // since when something is missing, zero while all is well
	said    string    // what was logged last, empty while all is well

	mu    sync.Mutex // guards what others ask for
	due   time.Time  // of the next look
	busy  time.Time  // until then there is a look every l.hurry
	noAPI string     // why there is no audit, in words; empty if there is one
}

// belief is what the kubelet believes of all device plugins at one moment.
type belief struct {
	asked   time.Time           // when the question was asked
	devices map[string][]string // by resource: the ids it may hand out, sorted, each once
	err     string              // why it is not known, in words
}

func newPodResources(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], t timing, log *zap.Logger) *podResources {
	p := &podResources{timing: t, cfg: cfg, snapshots: snapshots, log: log, away: func() bool { return false }}
	p.holders.Store(&Holders{Err: "the kubelet has not been asked yet"})
	return p
}

// ask asks for a look no later than after so long. It may be called from any goroutine.
func (p *podResources) ask(after time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := time.Now().Add(after); at.Before(p.due) {
		p.due = at
	}
}

// gave is told of every allocation. The kubelet books it only after our answer, so there are some looks.
func (p *podResources) gave() {
	p.mu.Lock()
	p.busy = time.Now().Add(3 * p.hurry)
	p.mu.Unlock()
	p.ask(p.hurry / 10)
}

func (p *podResources) run(ctx context.Context) {
	tick := time.NewTicker(p.poll)
	defer tick.Stop()
	defer p.disconnect()
	for {
		p.step(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// step looks for the socket, and asks if that is due.
func (p *podResources) step(ctx context.Context) {
	cfg := p.cfg.Load()
	if cfg == nil {
		return
	}
	p.look(filepath.Join(cfg.KubeletDir, "pod-resources", "kubelet.sock"))
	now := time.Now()
	p.mu.Lock()
	due := !now.Before(p.due)
	if due {
		p.due = now.Add(p.refresh)
		if now.Before(p.busy) {
			p.due = now.Add(p.hurry)
		}
	}
	p.mu.Unlock()
	if !due {
		return
	}
	list, devices, listErr, devicesErr := p.query(ctx, cfg.Enabled)
	if ctx.Err() != nil {
		return
	}
	p.publish(*cfg, now, list, listErr)
	b := &belief{asked: now, devices: believed(devices)}
	switch {
	case !cfg.Enabled:
		b.err, devicesErr = "plugin.enabled is false", nil
	case devicesErr != nil:
		b.err = devicesErr.Error()
	}
	p.beliefs.Store(b)
	p.report(listErr, devicesErr)
}

// look notices a new kubelet, which has a new socket, and connects anew.
func (p *podResources) look(path string) {
	info, err := os.Lstat(path)
	if err != nil {
		info = nil // gone or hidden: either way there is nobody to ask
	}
	if path == p.path && unixsock.SameSocket(p.seen, info) {
		return
	}
	p.disconnect()
	p.path, p.seen = path, info
	if info == nil {
		return
	}
	p.settled = time.Now().Add(5 * p.hurry)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due, p.busy = time.Time{}, p.settled.Add(p.hurry)
}

func (p *podResources) disconnect() {
	if p.conn != nil {
		_ = p.conn.Close() // it can only have been closed before
		p.conn = nil
	}
}

// query asks who has what and, if there is something of ours to believe, what the kubelet believes.
func (p *podResources) query(ctx context.Context, audit bool) (
	list *podsapi.ListPodResourcesResponse, devices *podsapi.AllocatableResourcesResponse, listErr, devicesErr error,
) {
	if p.seen == nil {
		err := fmt.Errorf("%s is not there", p.path)
		return nil, nil, err, err
	}
	if p.conn == nil {
		conn, err := dial(p.path)
		if err != nil {
			return nil, nil, err, err
		}
		p.conn = conn
	}
	api := podsapi.NewPodResourcesListerClient(p.conn)
	ctx, cancel := context.WithTimeout(ctx, p.call)
	defer cancel()
	list, listErr = api.List(ctx, &podsapi.ListPodResourcesRequest{})
	if !audit {
		return list, nil, p.explain("List", listErr), nil
	}
	devices, devicesErr = api.GetAllocatableResources(ctx, &podsapi.AllocatableResourcesRequest{})
	return list, devices, p.explain("List", listErr), p.explain("GetAllocatableResources", devicesErr)
}

func (p *podResources) explain(call string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s at %s: %s", call, p.path, status.Convert(err).Message())
}

// publish stores who has what. Without an answer the last one stands for a while, marked as old; the
// first answers of a new kubelet lack pods that it has not read yet, and take nothing away.
func (p *podResources) publish(cfg Config, asked time.Time, list *podsapi.ListPodResourcesResponse, err error) {
	last := p.holders.Load()
	if err != nil {
		next := *last
		next.Err = err.Error()
		if asked.Sub(last.At) > p.stale {
			next.By = nil
		}
		p.holders.Store(&next)
		return
	}
	by := holdersOf(list, resolver(cfg, p.snapshots.Load()))
	if asked.Before(p.settled) {
		for device, holders := range last.By {
			if by[device] == nil {
				by[device] = holders
			}
		}
	}
	p.holders.Store(&Holders{At: asked, By: by})
}

// believed returns the ids by resource. The kubelet names a device once for each of its NUMA nodes.
func believed(resp *podsapi.AllocatableResourcesResponse) map[string][]string {
	devices := make(map[string][]string)
	for _, d := range resp.GetDevices() {
		devices[d.GetResourceName()] = append(devices[d.GetResourceName()], d.GetDeviceIds()...)
	}
	for resource, ids := range devices {
		slices.Sort(ids)
		devices[resource] = slices.Compact(ids)
	}
	return devices
}

// report logs what is news. A restart of the kubelet is over before it is.
func (p *podResources) report(listErr, devicesErr error) {
	why := ""
	if devicesErr != nil {
		why = devicesErr.Error()
	}
	p.mu.Lock()
	p.noAPI = why
	p.mu.Unlock()
	if listErr != nil {
		why = listErr.Error()
	}
	switch now := time.Now(); {
	case why == "":
		p.failing = time.Time{}
	case p.failing.IsZero(), listErr != nil && p.away():
		p.failing = now
		return
	case now.Sub(p.failing) < 3*p.hurry:
		return
	}
	switch {
	case why == p.said:
		return
	case why == "":
		p.log.Info("the kubelet says who has which device")
	case listErr == nil:
		p.log.Warn("what the kubelet believes of our devices cannot be checked", zap.String("why", why))
	default:
		p.log.Warn("the kubelet does not say who has which device; the last answer stands for a while",
			zap.String("why", why), zap.Duration("stands", p.stale))
	}
	p.said = why
}
