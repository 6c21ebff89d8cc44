package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// measureRunning measures a running agent.
func (b *bench) measureRunning(ctx context.Context) error {
	b.table.notMeasured("start to registered, event to kubelet and to /metrics: they need an agent with simulated GPUs")
	var errs []error
	if b.sock != "" {
		errs = append(errs, b.measurePlugin(ctx))
	} else {
		b.table.notMeasured("Allocate, GetPreferredAllocation: no -plugin")
	}
	if b.metrics != "" {
		errs = append(errs, b.measureExporter(ctx))
	} else {
		b.table.notMeasured("/metrics: no -metrics")
	}
	return errors.Join(errs...)
}

func (b *bench) measureExporter(ctx context.Context) error {
	p := target{url: b.metrics, pid: b.pid}
	if b.pid != 0 {
		if err := b.measureIdle(ctx, b.pid); err != nil {
			return err
		}
	} else {
		b.table.notMeasured("idle CPU, RSS idle: no -pid")
	}
	if err := b.measureScrapes(ctx, p, "as it is", false); err != nil {
		return err
	}
	return b.measureFootprint(ctx, p)
}

func (b *bench) measurePlugin(ctx context.Context) error {
	c, err := kubelettest.Dial(b.sock)
	if err != nil {
		return err
	}
	defer c.Close()
	var healthy []string
	begin := time.Now()
	list, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = c.Devices(list, func(devices []kubelettest.Device) bool {
		for _, d := range devices {
			if d.Healthy {
				healthy = append(healthy, d.ID)
			}
		}
		return false
	})
	if err != nil {
		return fmt.Errorf("%s: ListAndWatch: %w", b.sock, err)
	}
	b.table.addDurations("ListAndWatch, first list", []time.Duration{time.Since(begin)}, noAim)
	if len(healthy) == 0 {
		return fmt.Errorf("%s has no healthy device", b.sock)
	}
	if err := b.measureAllocate(ctx, c, healthy); err != nil {
		return fmt.Errorf("%s: Allocate: %w", b.sock, err)
	}
	if err := b.measurePreferred(ctx, c, healthy); err != nil {
		b.table.notMeasured("GetPreferredAllocation: %v", err)
	}
	return nil
}
