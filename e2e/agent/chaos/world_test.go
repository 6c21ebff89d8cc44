package chaos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/agent/chaos/internal/apart"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// config returns the agent's configuration without its end, which reloads change. Faults that exist when the agent
// starts are a scenario, because simulated GPUs begin with it.
func (w *world) config() string {
	source, health := "mode: sim, events: "+map[bool]string{true: "nvml", false: "off"}[w.events]+
		", sim: {profile: h100-8, control: DIR/sim.sock, scenario: ["+w.scenario+"]}", ""
	if w.engine != nil {
		// Polling finds everything except XIDs.
		source, health = "interval: 1s, mode: embedded", "interval: 200ms, "
		if w.engine.host {
			source = "interval: 1s, address: localhost:5555"
		}
	}
	return "source: {stallAfter: 1s, " + source + "}\nhealth: {" + health +
		`socket: DIR/agent.sock, recoverAfter: 1s, flap: {trips: 0, within: 100h}}
plugin: {kubeletDir: DIR, migStrategy: mixed}
log: {level: info}
`
}

// goodConfigs and badConfigs return valid and invalid ends of the configuration.
func goodConfigs() []string {
	return []string{
		"metrics: {listen: ADDRESS}\n",
		"metrics: {listen: ADDRESS, idleBelow: 7, fields: [default, DCGM_FI_DEV_FB_TOTAL]}\n",
		"metrics: {listen: ADDRESS, fields: [DCGM_FI_DEV_GPU_TEMP]}\n",
	}
}

func badConfigs() []string {
	return []string{"metrics: {listen: ADDRESS, fields: [default]}\nplugin: {}\n", "metrics: {listen: 17}\nnonsense: true\n"}
}

// violation is a violated invariant.
type violation struct{ what, text string }

func (v violation) Error() string { return v.what + ": " + v.text }

func violated(what, format string, args ...any) error {
	return violation{what, fmt.Sprintf(format, args...)}
}

// world is an agent with its kubelet and the model.
type world struct {
	*node.Node
	*model
	agent    string  // the binary
	engine   *engine // nil with simulated GPUs
	kubelet  *kubelet
	disk     *apart.Disk
	log      *buffer
	streams  []*kubelettest.Client
	baseline *footprint // of the first calm
	endpoint map[string]string

	registration registration
	orphans      map[string]bool       // resources of previous agents
	measuredAt   time.Time             // last measurement before the detach
	savedCauses  [gpus]map[string]bool // causes that the agent restored
	patience     time.Duration
	scenario     string // of the agent's last start
	configEnd    string // end of the last valid configuration

	stopScrapes func()
	mu          sync.Mutex // guards scraped and scrapeErr
	scraped     int
	scrapeErr   error
}

// buffer keeps the newest part of the agent's log.
type buffer struct {
	blocked sync.Mutex // held while the log is not read

	mu sync.Mutex // guards b and race
	b  bytes.Buffer

	race bool
}

const maxLog = 4 << 20

func (b *buffer) Write(p []byte) (int, error) {
	b.blocked.Lock()
	b.blocked.Unlock() //nolint:staticcheck // it only waits
	b.mu.Lock()
	defer b.mu.Unlock()
	b.race = b.race || bytes.Contains(p, []byte("DATA RACE"))
	if b.b.Len()+len(p) > maxLog {
		b.b.Next(maxLog / 2)
	}
	return b.b.Write(p)
}

// last returns the last n bytes of the log.
func (b *buffer) last(n int) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := b.b.Bytes()
	return string(text[max(0, len(text)-n):])
}

func (b *buffer) raced() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.race
}

// newWorld starts the kubelet and the agent and waits until the invariants hold.
func newWorld(ctx context.Context, with setup) (_ player, err error) {
	n, err := node.New(ctx, with.agent)
	if err != nil {
		return nil, err
	}
	w := &world{
		Node: n, agent: with.agent, model: newModel(), log: &buffer{}, endpoint: map[string]string{}, orphans: map[string]bool{},
		patience: scaled(stepTimeout), configEnd: goodConfigs()[0],
	}
	w.events = with.events
	defer func() {
		if err != nil {
			err = errors.Join(err, w.end())
		}
	}()
	if with.library != "" {
		w.engine = &engine{library: with.library, script: filepath.Join(n.Dir, "dcgm"), host: with.host}
	}
	if w.disk, err = apart.NewDisk(n.StateDir()); err != nil {
		return nil, err
	}
	if w.kubelet, err = startKubelet(n.Dir); err != nil {
		return nil, err
	}
	if err = w.start(ctx); err != nil {
		return nil, err
	}
	w.patience = 30 * time.Second
	err = w.check(ctx)
	w.patience = scaled(stepTimeout)
	w.scrape(context.WithoutCancel(ctx))
	return w, err
}

// await calls try until it returns nil or the time is up.
func (w *world) await(ctx context.Context, d time.Duration, try func(context.Context) error) error {
	return await(ctx, w.Node, d, 10*time.Millisecond, try)
}

func await(ctx context.Context, n *node.Node, d, interval time.Duration, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last error
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err // an error after the end of ctx adds nothing
		}
		select {
		case <-ctx.Done():
			return last
		case <-n.Exited():
			return violated("life", "the agent has exited")
		case <-tick.C:
		}
	}
}

// hold repeats a check for a time, and returns its first error.
func hold(ctx context.Context, d time.Duration, check func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); time.Since(begin) < d; {
		if err := check(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// scrape scrapes in the background until stopScrapes.
func (w *world) scrape(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	w.stopScrapes = func() { cancel(); <-done }
	go func() {
		defer close(done)
		client := &http.Client{Transport: &http.Transport{}}
		defer client.CloseIdleConnections()
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			err := w.scrapeOnce(ctx, client)
			if ctx.Err() != nil {
				return
			}
			w.mu.Lock()
			w.scraped++
			if w.scrapeErr == nil {
				w.scrapeErr = err
			}
			w.mu.Unlock()
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
}

// scrapeOnce scrapes as Prometheus does, with its timeout of ten seconds.
func (w *world) scrapeOnce(ctx context.Context, c *http.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	status, text, err := node.Get(ctx, c, w.URL+"/metrics", "gzip")
	switch {
	case err != nil:
		return violated("scrape", "%v", err)
	case status != http.StatusOK:
		return violated("scrape", "status %d: %s", status, text)
	}
	return nil
}

func diskDescription(d *apart.Disk) string {
	if d.Mounted {
		return "a tmpfs"
	}
	return "a directory, moved away when full: mounting is not permitted"
}

// description describes the world for the test's log.
func (w *world) description() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("the disk is %s; %d concurrent scrapes", diskDescription(w.disk), w.scraped)
}

func (w *world) logged() *buffer { return w.log }

// end stops everything. It returns an error if the agent does not stop properly.
func (w *world) end() error {
	if w.stopScrapes != nil {
		w.stopScrapes()
	}
	w.closeStreams()
	w.readLog() // Stop waits for the end of the log
	var errs []error
	if w.kubelet != nil {
		errs = append(errs, w.kubelet.thaw())
	}
	if err := w.Stop(); err != nil {
		errs = append(errs, violated("end", "%v", err))
	}
	if w.kubelet != nil {
		errs = append(errs, w.kubelet.end())
	}
	if w.disk != nil {
		errs = append(errs, w.disk.End())
	}
	if w.log.raced() {
		errs = append(errs, violated("race", "see the log"))
	}
	return errors.Join(append(errs, w.Remove())...)
}
