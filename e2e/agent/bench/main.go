// Bench measures the built agent from outside, as the kubelet and Prometheus use it, and prints one table. With the
// address of a running agent, it measures what does not need simulated GPUs.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

type options struct {
	agent, repo   string
	metrics, sock string
	pid           int
	onlyFloods    bool
	onlyEngine    bool
	onlyAlone     bool
	against       string
	quick, json   bool
	onlySoak      time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.agent, "agent", "bin/gpu-node-agent", "the agent's binary, started with simulated GPUs and a stand-in kubelet")
	flag.StringVar(&o.repo, "repo", ".", "the repository's root, for the cost of DCGM's bindings; \"\" skips it")
	flag.StringVar(&o.metrics, "metrics", "", "measure a running agent instead: the URL of its metrics, such as http://10.0.0.7:9400/metrics")
	flag.StringVar(&o.sock, "plugin", "", "measure a running agent instead: the socket of its device plugin; no pod gets a device")
	flag.IntVar(&o.pid, "pid", 0, "process of the running agent, if it is on this machine; 0 uses its metrics")
	flag.BoolVar(&o.onlyFloods, "floods", false, "measure only probes, scrapes and memory while thousands of clients keep connections open")
	flag.BoolVar(&o.onlyEngine, "engine", false, "measure only what needs the scripted DCGM and NVML")
	flag.BoolVar(&o.onlyAlone, "dcgm-alone", false, "measure only XIDs that DCGM alone reports")
	flag.StringVar(&o.against, "against", "", "another version of the agent's binary: measure both in turn and fail if -agent is worse; "+
		"with -dcgm-alone, run it beside the first")
	flag.BoolVar(&o.quick, "quick", false, "a tenth of everything: checks that it works, not how fast")
	flag.BoolVar(&o.json, "json", false, "print JSON")
	flag.DurationVar(&o.onlySoak, "soak", 0, "measure only what one arena of glibc changes: memory over this time, then latencies")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	b := &bench{options: o, table: table{Machine: machine(), Quick: o.quick}}
	var err error
	if o.metrics != "" || o.sock != "" {
		err = b.measureRunning(ctx)
	} else {
		err = b.measureStarted(ctx)
	}
	if o.json {
		text, jsonErr := json.MarshalIndent(b.table, "", "  ")
		if jsonErr != nil {
			return errors.Join(err, jsonErr)
		}
		fmt.Println(string(text))
		return err
	}
	fmt.Print(b.table.String())
	return err
}

// bench is one run of the benchmarks.
type bench struct {
	options
	table table
}

// scale returns n, or a tenth of it with -quick.
func (b *bench) scale(n int) int {
	if b.quick {
		return max(1, n/10)
	}
	return n
}

func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
}
