//go:build cgo && linux

package dcgm

import (
	"context"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// BenchmarkPoll polls 8 GPUs with 30 fields, and 8 GPUs with 7 MIG devices each: the health fields, also with the XID
// stream, and all fields. C-ns/op is the time in the scripted library.
func BenchmarkPoll(b *testing.B) {
	run := func(name string, mig bool, interval, step time.Duration, stream bool, rows int) {
		b.Run(name, func(b *testing.B) {
			n := newFixture(b, 8)
			cfg := Config{Interval: interval}
			for f := range uint(30 - len(healthFields()) - 2) { // thirty with the health fields, 230 and the MIG mode
				cfg.Fields = append(cfg.Fields, health.Field(600+f))
				for id := range uint(8) {
					n.lib.Int(script.GPU, id, 600+f, int64(f), 0, n.clock.now())
				}
			}
			if mig {
				cfg.Fields = append(cfg.Fields, health.FieldFBTotal, health.FieldFBUsed)
				n.sevenths(8)
			}
			for i := range rows {
				n.lib.Row(script.GPU, 0, 13, 0, n.clock.now().Add(-time.Duration(i)*time.Second))
			}
			n.open(cfg)
			n.add(kernelLogWindow)
			n.poll()
			spent := n.lib.Spent()
			b.ReportAllocs()
			for b.Loop() {
				n.add(step)
				if stream {
					n.wholeAt = time.Time{}
				}
				n.lib.Int(script.GPU, 0, 395, 0, 0, n.clock.now())
				if _, err := n.Poll(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n.lib.Spent()-spent)/float64(b.N), "C-ns/op")
		})
	}
	run("8x30/health", false, time.Hour, time.Microsecond, false, 0)
	run("8x30/stream", false, time.Hour, time.Microsecond, true, 0)
	run("8x30/stream-of-600", false, time.Hour, time.Microsecond, true, 600)
	run("8x30/metrics", false, time.Second, time.Second, false, 0)
	run("8x7MIG/health", true, time.Hour, time.Microsecond, false, 0)
	run("8x7MIG/stream", true, time.Hour, time.Microsecond, true, 0)
	run("8x7MIG/metrics", true, time.Second, time.Second, false, 0)
}

// BenchmarkXIDsChanged runs on 8 GPUs, and on 8 GPUs with 7 MIG devices each.
func BenchmarkXIDsChanged(b *testing.B) {
	for name, mig := range map[string]bool{"8": false, "8x7MIG": true} {
		b.Run(name, func(b *testing.B) {
			n := newFixture(b, 8)
			if mig {
				n.sevenths(8)
			}
			n.open(testConfig())
			n.poll()
			b.ReportAllocs()
			for b.Loop() {
				if changed, _, err := n.XIDsChanged(context.Background()); err != nil || changed {
					b.Fatal(changed, err)
				}
			}
		})
	}
}

// sevenths partitions each GPU into seven MIG devices.
func (b *fixture) sevenths(gpus uint) {
	for gpu := range gpus {
		partition := map[uint][]uint{}
		for i := range uint(7) {
			partition[gpu*7+i] = []uint{gpu*7 + i}
		}
		b.addInstances(gpu, partition)
	}
}

// BenchmarkRows polls and judges 8 GPUs for 15 minutes, without rows in the stream of XIDs and with 1,200. It compares the processor time
// and what is allocated.
func BenchmarkRows(b *testing.B) {
	var cpu, allocated [2]float64
	for b.Loop() {
		for i, rows := range []int{0, manyRows} {
			n := newFixture(b, 8)
			n.addRows(0, rows)
			n.open(testConfig()).poll()
			runtime.GC()
			before, bytes := used(b)
			for range 15 * 60 {
				n.add(time.Second)
				n.lib.Int(script.GPU, 0, 395, 0, 0, n.clock.now())
				n.poll()
			}
			after, total := used(b)
			cpu[i] += (after - before).Seconds()
			allocated[i] += float64(total - bytes)
			n.close()
		}
	}
	b.ReportMetric(cpu[1]/cpu[0], "cpu-ratio")
	b.ReportMetric(allocated[1]/allocated[0], "B-ratio")
	b.ReportMetric(cpu[0]/float64(b.N)/15/60*1e6, "cpu-µs/poll")
	b.ReportMetric(allocated[0]/float64(b.N)/15/60, "B/poll")
}

// used returns the processor time of the process and the bytes that it has allocated.
func used(b *testing.B) (cpu time.Duration, bytes uint64) {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), mem.TotalAlloc
}
