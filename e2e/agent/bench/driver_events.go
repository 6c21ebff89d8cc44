package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// eventTypeXID is NVML's number of the type of events (nvml.h: nvmlEventTypeXidCriticalError).
const eventTypeXID = 8

// driver controls the scripted libnvidia-ml.so.1 in the agent.
type driver struct {
	net.Conn
	replies *bufio.Reader
}

func dialDriver(ctx context.Context, socket string) (*driver, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("the scripted libnvidia-ml: %w", err)
	}
	return &driver{conn, bufio.NewReader(conn)}, nil
}

// report makes the driver report XIDs of GPUs, in one write.
func (d *driver) report(code int, gpus ...int) error {
	var lines strings.Builder
	for _, gpu := range gpus {
		fmt.Fprintf(&lines, "event %d %d %d -1 -1\n", gpu, eventTypeXID, code)
	}
	if _, err := d.Write([]byte(lines.String())); err != nil {
		return err
	}
	for range gpus {
		if _, err := d.replies.ReadString('\n'); err != nil {
			return err
		}
	}
	return nil
}

// measureDriverEvents measures from the moment when NVML reports an XID until the kubelet has it. The time of the driver itself is
// not included. DCGM reports each XID, too, but late.
func (b *bench) measureDriverEvents(ctx context.Context, r *testNode, socket string, dcgm *engineScript) (err error) {
	b.progress("NVML's event of an XID to kubelet")
	d, err := dialDriver(ctx, socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in each run
	calm := func() error {                // the agent judges the events of a storm together, at most every 50 ms
		return pause(ctx, 150*time.Millisecond+time.Duration(random.Int64N(int64(200*time.Millisecond))))
	}
	took := make([]time.Duration, b.scale(300))
	for i := range took {
		if err := calm(); err != nil {
			return err
		}
		if took[i], err = b.measureDriverEvent(ctx, r, d, dcgm, []int{i % engineGPUs}); err != nil {
			return err
		}
	}
	b.table.addMedian("NVML's event of an XID to kubelet", took, 1)
	b.table.addDurations("the same", took, 3)

	b.progress("16 XIDs of NVML on 8 GPUs to kubelet")
	storms := make([]time.Duration, b.scale(100))
	for i := range storms {
		if err := calm(); err != nil {
			return err
		}
		var gpus []int
		for n := range 15 {
			gpus = append(gpus, n%(engineGPUs-1))
		}
		gpus = append(gpus, engineGPUs-1) // the last XID is the only one of its GPU, so the kubelet's message shows that all are judged
		if storms[i], err = b.measureDriverEvent(ctx, r, d, dcgm, gpus); err != nil {
			return err
		}
	}
	b.table.addDurations("16 XIDs of NVML on 8 GPUs to kubelet, the last", storms, 20)
	return nil
}

// measureDriverEvent reports XIDs of GPUs and returns the time until the kubelet has them all. Then DCGM reports them, too, and they
// are cleared.
func (b *bench) measureDriverEvent(ctx context.Context, r *testNode, d *driver, dcgm *engineScript, gpus []int) (time.Duration, error) {
	ids := map[string]bool{}
	for _, gpu := range gpus {
		ids[engineGPU(gpu)] = true
	}
	begin := time.Now()
	if err := d.report(xidNumber, gpus...); err != nil {
		return 0, err
	}
	err := r.await(ctx, func(s kubelettest.State) bool {
		return !slices.ContainsFunc(s.Resources[resource].Devices, func(k kubelettest.Device) bool { return ids[k.ID] && k.Healthy })
	})
	took := time.Since(begin)
	if err != nil {
		return 0, err
	}
	if err := dcgm.report(xidNumber, gpus...); err != nil {
		return 0, err
	}
	for id := range ids {
		if err := r.clearXID(ctx, id); err != nil {
			return 0, err
		}
	}
	return took, nil
}
