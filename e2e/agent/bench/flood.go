package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// measureFloods measures probes, scrapes and memory while clients that do not behave open thousands of connections.
func (b *bench) measureFloods(ctx context.Context) error {
	for _, f := range node.Floods() {
		n := b.scale(6000)
		if f.Text == "" {
			n *= 2
		}
		if err := b.measureFlood(ctx, f, n); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) measureFlood(ctx context.Context, f node.Flood, n int) (err error) {
	name := fmt.Sprintf("beside %d %s", n, f.Name)
	b.progress("%s", name)
	r, err := startSim(ctx, b.agent, "h100-8", 8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := r.partition(ctx); err != nil { // a page that does not fit into the kernel's buffers
		return err
	}
	if _, _, err := scrape(ctx, r.URL+"/metrics", "gzip", 100); err != nil { // as memory is in operation
		return err
	}
	before, err := node.UsageOf(r.Pid())
	if err != nil {
		return err
	}
	var (
		wg             sync.WaitGroup
		stop           = make(chan struct{})
		probes, served requests
		most           node.Usage
	)
	wg.Go(func() { probes.repeat(ctx, r.URL+"/livez", stop) })
	wg.Go(func() { served.repeat(ctx, r.URL+"/metrics", stop) })
	wg.Go(func() {
		for done := false; !done; {
			select {
			case <-stop:
				done = true
			case <-time.After(100 * time.Millisecond):
			}
			if u, err := node.UsageOf(r.Pid()); err == nil {
				most.RSS, most.Files = max(most.RSS, u.RSS), max(most.Files, u.Files)
			}
		}
	})
	begin := time.Now()
	conns, err := r.Flood(ctx, f, n)
	opened := time.Since(begin)
	if err == nil {
		err = pause(ctx, 3*time.Second)
	}
	close(stop)
	wg.Wait()
	conns.Close()
	if err != nil {
		b.table.notMeasured("%s: %v", name, err) // such as too many open files of this process
		return ctx.Err()
	}
	b.table.addDurations("probe "+name, probes.took, noAim)
	b.table.addValue("slowest probe "+name, milliseconds(probes.slowest()), "ms", 1000, fmt.Sprintf("%d failed", probes.failed))
	b.table.addDurations("scrape "+name, served.took, noAim)
	b.table.addValue("slowest scrape "+name, milliseconds(served.slowest()), "ms", noAim, fmt.Sprintf("%d failed", served.failed))
	b.table.addValue("memory growth "+name, mebibytes(most.RSS)-mebibytes(before.RSS), "MiB", noAim,
		fmt.Sprintf("at most %d open files; opened in %v", most.Files, opened.Round(time.Millisecond)))
	return nil
}

// requests are requests for one page.
type requests struct {
	took   []time.Duration
	failed int
}

// repeat requests a page on a new connection each time, as the kubelet does, until stop is closed.
func (r *requests) repeat(ctx context.Context, url string, stop <-chan struct{}) {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}, Timeout: patience}
	for {
		begin := time.Now()
		status, _, err := node.Get(ctx, c, url, "gzip")
		r.took = append(r.took, time.Since(begin))
		if err != nil || status != http.StatusOK {
			r.failed++
		}
		select {
		case <-stop:
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *requests) slowest() (d time.Duration) {
	for _, took := range r.took {
		d = max(d, took)
	}
	return d
}
