package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// perThousandScrapes is the row with the cost of a thousand scrapes.
const perThousandScrapes = "CPU of 1,000 such scrapes"

// target is a metrics page to measure.
type target struct {
	url string
	pid int // 0 if not on this machine
}

// scraper returns a client that keeps one connection, as Prometheus does.
func scraper() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1, DisableCompression: true}, Timeout: patience}
}

// scrape scrapes n times and returns the durations and the size of the last page.
func scrape(ctx context.Context, url, encoding string, n int) (took []time.Duration, size int, err error) {
	c := scraper()
	defer c.CloseIdleConnections()
	for range n {
		begin := time.Now()
		status, text, err := node.Get(ctx, c, url, encoding)
		if err != nil {
			return nil, 0, err
		}
		took = append(took, time.Since(begin))
		if status != http.StatusOK {
			return nil, 0, fmt.Errorf("%s: status %d", url, status)
		}
		size = len(text)
	}
	return took, size, nil
}

// usage returns the resource usage of the target, from /proc or from its metrics.
func (p target) usage(ctx context.Context) (node.Usage, node.Page, error) {
	c := scraper()
	defer c.CloseIdleConnections()
	_, text, err := node.Get(ctx, c, p.url, "")
	if err != nil {
		return node.Usage{}, nil, err
	}
	page, err := node.ParsePage(text)
	if err != nil {
		return node.Usage{}, nil, fmt.Errorf("%s is not a metrics page: %w", p.url, err)
	}
	if p.pid != 0 {
		u, err := node.UsageOf(p.pid)
		return u, page, err
	}
	cpu, ok := page.Value("process_cpu_seconds_total")
	rss, _ := page.Value("process_resident_memory_bytes")
	threads, _ := page.Value("go_threads")
	if !ok {
		return node.Usage{}, page, errors.New("no process metrics on the page, and no -pid")
	}
	return node.Usage{CPU: time.Duration(cpu * float64(time.Second)), RSS: uint64(rss), Threads: int(threads)}, page, nil
}

// measureScrapes measures the metrics page. aims sets the targets of the default configuration.
func (b *bench) measureScrapes(ctx context.Context, p target, of string, aims bool) error {
	b.progress("/metrics, %s", of)
	aim := 0.0
	if aims {
		aim = 2
	}
	n := b.scale(1000)
	before, _, noUsage := p.usage(ctx)
	took, zipped, err := scrape(ctx, p.url, "gzip", n)
	if err != nil {
		return err
	}
	after, _, _ := p.usage(ctx)
	b.table.addDurations("/metrics, "+of+", gzip as Prometheus asks", took, aim)
	if noUsage == nil {
		b.table.addValue(perThousandScrapes, (after.CPU-before.CPU).Seconds()*1000/float64(n), "s", noAim, "")
	} else {
		b.table.notMeasured("CPU of 1,000 scrapes: %v", noUsage)
	}
	took, plain, err := scrape(ctx, p.url, "", n)
	if err != nil {
		return err
	}
	b.table.addDurations("/metrics, "+of+", not compressed", took, noAim)

	const scrapers = 10
	var (
		wg  sync.WaitGroup
		all [scrapers][]time.Duration
		bad [scrapers]error
	)
	for i := range scrapers {
		wg.Go(func() { all[i], _, bad[i] = scrape(ctx, p.url, "gzip", max(1, n/scrapers)) })
	}
	wg.Wait()
	if err := errors.Join(bad[:]...); err != nil {
		return err
	}
	b.table.addDurations(fmt.Sprintf("/metrics, %s, %d scrapers without pause", of, scrapers), slices.Concat(all[:]...), noAim)
	b.table.addValue("/metrics, "+of+", size", float64(plain)/1024, "KiB", noAim, fmt.Sprintf("%s KiB as gzip", short(float64(zipped)/1024)))
	return nil
}

// measureFootprint measures memory and threads after many scrapes.
func (b *bench) measureFootprint(ctx context.Context, p target) error {
	n := b.scale(5000)
	b.progress("memory after %d scrapes", n)
	if _, _, err := scrape(ctx, p.url, "gzip", n); err != nil {
		return err
	}
	u, page, err := p.usage(ctx)
	if err != nil {
		b.table.notMeasured("memory and threads: %v", err)
		return nil
	}
	b.table.addValue(fmt.Sprintf("RSS after %d scrapes", n), mebibytes(u.RSS), "MiB", 40, "")
	if g, ok := page.Value("go_goroutines"); ok {
		b.table.addValue("goroutines", g, "", noAim, "")
	}
	if u.Threads > 0 {
		b.table.addValue("threads", float64(u.Threads), "", noAim, "")
	}
	return nil
}
