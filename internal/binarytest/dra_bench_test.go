package binarytest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// BenchmarkDRA calls the built binary as a kubelet does, and reports quantiles in milliseconds: of a prepare, which asks the kubelet who
// holds the device, and from the fault of a GPU to its taint on the API server.
func BenchmarkDRA(b *testing.B) {
	b.Run("prepare", func(b *testing.B) {
		n := startDRANode(b, kubelettest.V137)
		var took []time.Duration
		for i := 0; b.Loop(); i++ {
			c := n.claim(fmt.Sprint("c", i), fmt.Sprint("gpu-", i%8))
			begin := time.Now()
			n.prepare(c)
			took = append(took, time.Since(begin))
			n.unprepare(c)
		}
		reportQuantiles(b, took)
	})
	b.Run("taint", func(b *testing.B) {
		var took []time.Duration
		for b.Loop() {
			n := startDRANode(b, kubelettest.V137) // a GPU stays broken
			for i := range 8 {
				name := fmt.Sprint("gpu-", i)
				begin := time.Now()
				n.sim(fmt.Sprintf("{gpu: %d, xid: 79}", i))
				for len(n.taints(name)) == 0 {
					time.Sleep(time.Millisecond) //nolint:forbidigo // the resolution of the measurement
				}
				took = append(took, time.Since(begin))
			}
		}
		reportQuantiles(b, took)
	})
}

func reportQuantiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	for _, percent := range []int{50, 99} {
		b.ReportMetric(float64(took[len(took)*percent/100].Microseconds())/1000, fmt.Sprintf("p%d-ms", percent))
	}
}
