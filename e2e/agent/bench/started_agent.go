package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// measureStarted measures an agent that it starts.
func (b *bench) measureStarted(ctx context.Context) error {
	switch {
	case b.onlyFloods:
		return b.measureFloods(ctx)
	case b.onlyEngine:
		return b.measureEngine(ctx)
	case b.onlyAlone:
		return b.measureDCGMAlone(ctx)
	case b.onlySoak != 0:
		return errors.Join(b.measureSoak(ctx, b.onlySoak), b.measureArenaLatency(ctx))
	case b.against != "":
		return b.measureAgainst(ctx)
	}
	parts := []func(context.Context) error{
		b.measureStart, b.measureEightGPUs, b.measureSixteenGPUs, b.measureMIG, b.measureEngine, b.measureDCGMAlone, b.measureFloods,
		b.measureBindings,
	}
	if !b.quick {
		return inOrder(ctx, append(parts, b.soakBriefly))
	}
	// Beside the others, whose figures are too few to rely on anyway.
	soak := &bench{options: b.options}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	soaked := make(chan error, 1)
	go func() { soaked <- soak.soakBriefly(ctx) }()
	err := inOrder(ctx, parts)
	if err != nil {
		cancel()
	}
	err = errors.Join(err, <-soaked)
	b.table.Rows, b.table.Left = append(b.table.Rows, soak.table.Rows...), append(b.table.Left, soak.table.Left...)
	return err
}

// inOrder measures one part after the other.
func inOrder(ctx context.Context, parts []func(context.Context) error) error {
	for _, part := range parts {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// measureStart measures the time until the kubelet has the devices.
func (b *bench) measureStart(ctx context.Context) error {
	b.progress("start to registered")
	var took []time.Duration
	for range b.scale(10) {
		r, err := startSim(ctx, b.agent, "h100-8", 8)
		if err != nil {
			return err
		}
		took = append(took, r.ready)
		if err := r.stop(); err != nil {
			return err
		}
	}
	b.table.addDurations("start to registered, 1 s of it settling", took, noAim)
	return nil
}

// measureEightGPUs measures the rows that have targets.
func (b *bench) measureEightGPUs(ctx context.Context) (err error) {
	r, err := startSim(ctx, b.agent, "h100-8", 8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := b.measureIdle(ctx, r.Pid()); err != nil {
		return err
	}
	if err := b.measureEvents(ctx, r); err != nil {
		return err
	}
	c, err := kubelettest.Dial(r.socket())
	if err != nil {
		return err
	}
	defer c.Close()
	if err := b.measureAllocate(ctx, c, deviceIDs(r)); err != nil {
		return err
	}
	if err := b.measurePreferred(ctx, c, deviceIDs(r)); err != nil {
		return err
	}
	p := target{url: r.URL + "/metrics", pid: r.Pid()}
	if err := b.measureScrapes(ctx, p, "8 GPUs", true); err != nil {
		return err
	}
	return b.measureFootprint(ctx, p)
}

// measureSixteenGPUs measures what depends on the number of GPUs.
func (b *bench) measureSixteenGPUs(ctx context.Context) (err error) {
	r, err := startSim(ctx, b.agent, "v100-16", 16)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	c, err := kubelettest.Dial(r.socket())
	if err != nil {
		return err
	}
	defer c.Close()
	return b.measurePreferred(ctx, c, deviceIDs(r))
}

// measureMIG measures eight GPUs with seven MIG devices each.
func (b *bench) measureMIG(ctx context.Context) (err error) {
	r, err := startSim(ctx, b.agent, "h100-8", 8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := r.partition(ctx); err != nil {
		return err
	}
	return b.measureScrapes(ctx, target{url: r.URL + "/metrics", pid: r.Pid()}, "8x7 MIG", false)
}

// partition gives each of eight GPUs seven MIG devices.
func (r *testNode) partition(ctx context.Context) error {
	for gpu := range 8 {
		if err := r.Event(ctx, fmt.Sprintf("{gpu: %d, mig: sevenths}", gpu)); err != nil {
			return err
		}
	}
	return r.await(ctx, func(s kubelettest.State) bool { return s.Resources["nvidia.com/mig-1g.10gb"].Allocatable() == 56 })
}

func deviceIDs(r *testNode) (all []string) {
	for _, d := range r.kubelet.State().Resources[resource].Devices {
		all = append(all, d.ID)
	}
	return all
}

// measureIdle measures an agent without requests.
func (b *bench) measureIdle(ctx context.Context, pid int) error {
	var usage node.Usage
	err := b.measureIdleCPU(ctx, "", 0.5, "", func() (_ time.Duration, err error) {
		usage, err = node.UsageOf(pid)
		return usage.CPU, err
	})
	if err != nil {
		return err
	}
	b.table.addValue("RSS idle", mebibytes(usage.RSS), "MiB", 40, "")
	return nil
}

// measureIdleCPU adds a row with the share of a core that an agent uses without requests. cpu returns its CPU time.
func (b *bench) measureIdleCPU(ctx context.Context, agent string, aim float64, note string, cpu func() (time.Duration, error)) error {
	length := time.Duration(b.scale(60)) * time.Second
	b.progress("idle%s, for %v", agent, length)
	before, err := cpu()
	if err != nil {
		return err
	}
	if err := pause(ctx, length); err != nil {
		return err
	}
	after, err := cpu()
	if err != nil {
		return err
	}
	b.table.addValue(fmt.Sprintf("idle CPU over %v%s", length, agent), 100*(after-before).Seconds()/length.Seconds(), "% of a core", aim, note)
	return nil
}

func mebibytes(n uint64) float64 { return float64(n) / (1 << 20) }

// toKubelet measures the time from an XID to the kubelet.
func (b *bench) toKubelet(ctx context.Context, r *testNode) (took []time.Duration, err error) {
	devices := deviceIDs(r)
	order := make(map[string]int, len(devices)) // the kubelet's order differs from the driver's
	page, err := r.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_device_info" {
			if order[s.Labels["UUID"]], err = strconv.Atoi(s.Labels["gpu"]); err != nil {
				return nil, err
			}
		}
	}
	for i := range b.scale(200) {
		id := devices[i%len(devices)]
		begin := time.Now()
		if err := r.Event(ctx, fmt.Sprintf("{gpu: %d, xid: 48}", order[id])); err != nil {
			return nil, err
		}
		if err := r.awaitHealth(ctx, id, false); err != nil {
			return nil, err
		}
		took = append(took, time.Since(begin))
		if err := r.Clear(ctx, id, "xid-48"); err != nil {
			return nil, err
		}
		if err := r.awaitHealth(ctx, id, true); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// measureEvents measures the time from an XID to the kubelet and to /metrics.
func (b *bench) measureEvents(ctx context.Context, r *testNode) error {
	b.progress("event to kubelet")
	toKubelet, err := b.toKubelet(ctx, r)
	if err != nil {
		return err
	}
	b.table.addDurations("event to kubelet", toKubelet, 10)

	b.progress("event to /metrics")
	devices := len(deviceIDs(r))
	var toMetrics []time.Duration
	for i := range b.scale(200) {
		gpu := strconv.Itoa(i % devices)
		want := float64(1 + i/devices)
		begin := time.Now()
		if err := r.Event(ctx, "{gpu: "+gpu+", xid: 31}"); err != nil {
			return err
		}
		for {
			page, err := r.Metrics(ctx)
			if err != nil {
				return err
			}
			if n, _ := page.Value("gpu_node_agent_xid_errors_total", "gpu", gpu, "xid", "31"); n >= want {
				break
			}
			if time.Since(begin) > patience {
				return fmt.Errorf("an XID of GPU %s is not on /metrics after %v", gpu, patience)
			}
		}
		toMetrics = append(toMetrics, time.Since(begin))
	}
	b.table.addDurations("event to /metrics, scraped without pause", toMetrics, noAim)
	return nil
}

// measureAllocate requests one device after the other.
func (b *bench) measureAllocate(ctx context.Context, c *kubelettest.Client, deviceIDs []string) error {
	b.progress("Allocate")
	took := make([]time.Duration, b.scale(10_000))
	for i := range took {
		begin := time.Now()
		if _, err := c.Allocate(ctx, deviceIDs[i%len(deviceIDs)]); err != nil {
			return err
		}
		took[i] = time.Since(begin)
	}
	b.table.addDurations("Allocate", took, 1)
	return nil
}

// measurePreferred requests half of all devices, which leaves the most choices.
func (b *bench) measurePreferred(ctx context.Context, c *kubelettest.Client, deviceIDs []string) error {
	b.progress("GetPreferredAllocation")
	took := make([]time.Duration, b.scale(2000))
	for i := range took {
		begin := time.Now()
		got, err := c.PreferredAllocation(ctx, deviceIDs, (len(deviceIDs)+1)/2)
		if err != nil {
			return err
		}
		took[i] = time.Since(begin)
		if len(got) != (len(deviceIDs)+1)/2 {
			return fmt.Errorf("GetPreferredAllocation returned %d devices of %d, want half of them", len(got), len(deviceIDs))
		}
	}
	b.table.addDurations(fmt.Sprintf("GetPreferredAllocation, %d of %d GPUs", (len(deviceIDs)+1)/2, len(deviceIDs)), took, 1)
	return nil
}
