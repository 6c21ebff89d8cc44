package prometheus

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

const (
	gpuHours = "namespace:gpu_node_agent_gpu_hours:increase15s"
	podHours = "pod:gpu_node_agent_gpu_hours:increase15s"
)

// gpusByUse is how many GPUs are in each use, by namespace and use: "team-a used", or " unallocated".
type gpusByUse map[string]float64

// phase is a time in which no device changes its use.
type phase struct {
	from, until time.Time
	gpus        gpusByUse                // empty: Prometheus scrapes nothing
	seen        func(node.Metrics) error // whether the agent exports it
}

// outlasts reports whether the phase lasts, by a scrape or its error.
func (p phase) outlasts(m node.Metrics, err error) bool {
	if p.seen == nil {
		return err != nil
	}
	return err == nil && p.seen(m) == nil
}

// usageTest is a node, and the phases so far.
type usageTest struct {
	machine
	server *process.Process // Prometheus
	phases []phase
}

// TestUsage plays phases whose GPU-hours are known, and compares what Prometheus records with them: GPU-seconds here, because it
// scrapes each second. GPU 6 has four replicas, and GPU 7 MIG devices, of which one is half of the GPU.
func TestUsage(t *testing.T) {
	prometheus := tool(t, "prometheus")
	address := node.Host() + ":19093"
	u := &usageTest{machine: machine{node.New(t), &promapi.API{URL: "http://" + address}}}
	u.StartKubelet()
	u.configureUsage(100)
	u.StartAgent()
	// Two jobs scrape the agent as one instance.
	u.Write("prometheus.yaml", u.prometheusConfig(fmt.Sprintf(`- job_name: a
  honor_labels: true
  static_configs: [{targets: [%[1]q], labels: {cluster: lab, instance: node-1}}]
- job_name: b
  honor_labels: true
  static_configs: [{targets: [%[1]q], labels: {cluster: lab, instance: node-1}}]
`, u.Address)))
	u.server = u.Start(prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--web.listen-address="+address)
	const shared, half v1.ResourceName = "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb"
	u.Eventually("the kubelet has the GPUs", func() error {
		return errors.Join(u.KubeletHas(node.GPU, 6, 6), u.KubeletHas(shared, 4, 4), u.KubeletHas(half, 1, 1))
	})

	u.play("free", gpusByUse{" unallocated": 8}, func() {}, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "pod_resources_up", 1, isOne), countGauges(m, "device_allocated_gpus", 0, isPositive))
	})
	u.phases[0].from = time.Now() // before, Prometheus was starting

	u.play("never used", gpusByUse{"team-a neverUsed": 2.25, "team-b neverUsed": 1.5, " unallocated": 4.25}, func() {
		u.runPod("team-a", "train", node.GPU, 2)
		u.runPod("team-a", "notebook", shared, 1)
		u.runPod("team-b", "serve", node.GPU, 1)
		u.runPod("team-b", "part", half, 1)
	}, func(m node.Metrics) error { return countGauges(m, "device_never_used", 5, isOne) })

	u.play("used", gpusByUse{"team-a used": 2.25, "team-b used": 1.5, " unallocated": 4.25}, func() {
		u.configureUsage(0)
	}, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "device_never_used", 5, isZero), countGauges(m, "device_idle_for_seconds", 5, isZero))
	})

	u.play("idle", gpusByUse{"team-a idle": 2.25, "team-b idle": 1.5, " unallocated": 4.25}, func() {
		u.configureUsage(100)
	}, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "device_idle_for_seconds", 5, isPositive), countGauges(m, "device_allocated_gpus", 5, isPositive))
	})

	waste := gpusByUse{"team-a idle": 2.25, "team-b idle": 1.5, "team-c neverUsed": 1, " unallocated": 3.25}
	u.play("another pod", waste, func() {
		u.runPod("team-c", "late", node.GPU, 1)
	}, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "device_idle_for_seconds", 6, isPositive), countGauges(m, "device_never_used", 1, isOne))
	})

	held, free := u.gpuOf("serve"), u.freeGPU()
	u.play("unhealthy", gpusByUse{
		"team-a idle": 2.25, "team-b idle": 0.5, "team-b unhealthy": 1, "team-c neverUsed": 1, " unallocated": 2.25,
		" unhealthy": 1,
	}, func() {
		u.Inject(`{gpu: %s, lost: true}`, held)
		u.Inject(`{gpu: %s, lost: true}`, free)
	}, func(m node.Metrics) error { return countGauges(m, "gpu_unhealthy", 2, isOne) })

	u.play("no scrapes", nil, func() { u.signalAgent(syscall.SIGSTOP) }, nil)

	u.play("healthy again", waste, func() {
		u.signalAgent(syscall.SIGCONT)
		u.Inject(`{gpu: %s, lost: false}`, held)
		u.Inject(`{gpu: %s, lost: false}`, free)
	}, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "gpu_unhealthy", 0, isOne), countGauges(m, "device_idle_for_seconds", 6, isPositive))
	})

	u.play("no agent", nil, u.EndAgent, nil)
	u.play("another process", waste, u.StartAgent, func(m node.Metrics) error {
		return errors.Join(countGauges(m, "device_idle_for_seconds", 6, isPositive), countGauges(m, "device_never_used", 1, isOne),
			countGauges(m, "device_allocated_gpus", 6, isPositive))
	})

	u.play("not measured", gpusByUse{"team-a unknown": 2.25, "team-b unknown": 1.5, "team-c unknown": 1, " unallocated": 3.25}, func() {
		u.Inject(`{source: down}`)
	}, func(m node.Metrics) error { return countGauges(m, "source_up", 1, isZero) })

	u.check()
	u.checkCost()
}

// configureUsage makes every device idle with 100, and busy with 0. With this seed no device has a load of 100 % in an agent's first 280 s.
func (u *usageTest) configureUsage(idleBelow int) {
	u.T.Helper()
	u.Configure(fmt.Sprintf(`source: {interval: 1s, sim: {profile: h100-8, seed: 501, scenario: [{at: 0s, gpu: 7, mig: balanced}]}}
health: {recoverAfter: 1s, flap: {trips: 0}}
metrics: {fields: [default, profiling], idleBelow: %d}
plugin:
  migStrategy: mixed
  sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [6], rename: nvidia.com/gpu.shared}]}}
`, idleBelow))
}

// play starts a phase with start, and waits until the agent exports it and Prometheus has recorded it, and until it has lasted a while. The
// phase before lasts as long as the agent exports it.
func (u *usageTest) play(name string, gpus gpusByUse, start func(), seen func(node.Metrics) error) {
	u.T.Helper()
	before := new(phase)
	if n := len(u.phases); n > 0 {
		before = &u.phases[n-1]
	}
	before.until = time.Now()
	start()
	if seen != nil {
		u.Eventually(name+": the agent exports it", func() error {
			at := time.Now()
			m, err := u.Scrape()
			if before.outlasts(m, err) {
				before.until = at
			}
			if err != nil {
				return err
			}
			return seen(m)
		})
	}
	from := time.Now()
	u.Eventually(name+": Prometheus records it", func() error {
		result, err := u.prom.Query(u.T.Context(), fmt.Sprintf(`sum by (namespace, use) (%s) * 3600`, gpuHours))
		if err != nil {
			return err
		}
		if got := byUse(result); !maps.EqualFunc(got, gpus, nearlyEqual) {
			return fmt.Errorf("%v, want %v", got, gpus)
		}
		if lasted := time.Since(from); lasted < 3*time.Second {
			return fmt.Errorf("it has lasted %v", lasted)
		}
		return nil
	})
	u.phases = append(u.phases, phase{from: from, gpus: gpus, seen: seen})
}

func byUse(result []promapi.Series) gpusByUse {
	gpus := make(gpusByUse)
	for _, s := range result {
		gpus[s.Labels["namespace"]+" "+s.Labels["use"]] = s.Value
	}
	return gpus
}

// check compares the recorded GPU-seconds of all phases with what the phases say. Each change of the use of a GPU is exact to one
// interval; between two phases it is not known which of them Prometheus saw.
func (u *usageTest) check() {
	u.T.Helper()
	end := time.Now()
	u.phases[len(u.phases)-1].until = end
	u.Eventually("Prometheus has evaluated the rules at the end", func() error {
		return u.checkSeries(fmt.Sprintf("timestamp(%s) > %d", gpuHours, end.Unix()+1), len(u.phases[len(u.phases)-1].gpus))
	})
	begin := u.phases[0].from
	over := func(expr string) gpusByUse {
		result, err := u.prom.Query(u.T.Context(), fmt.Sprintf("sum by (namespace, use) (sum_over_time(%s[%dms] @ %.3f)) * 3600", expr,
			end.Sub(begin).Milliseconds(), float64(end.UnixMilli())/1000))
		if err != nil {
			u.T.Fatal(err)
		}
		return byUse(result)
	}
	all := over(gpuHours)

	// A busy machine skips scrapes and evaluations: such seconds are missing, but not the seconds of a phase without scrapes.
	const gpus = 8
	recorded := 0.0
	for _, seconds := range all {
		recorded += seconds / gpus
	}
	low, high := 0.0, 0.0
	uses := make(map[string]bool)
	for i, p := range u.phases {
		for use := range p.gpus {
			uses[use] = true
		}
		if p.gpus != nil {
			low += p.until.Sub(p.from).Seconds()
			high += p.until.Sub(p.from).Seconds()
		}
		if i > 0 {
			high += p.from.Sub(u.phases[i-1].until).Seconds()
		}
	}
	const changes = 4 // of whether Prometheus scrapes
	missing := max(0, low-recorded-changes)
	if recorded > high+changes || missing > 0.2*low {
		u.T.Fatalf("%.0f s are recorded, want %.0f to %.0f", recorded, low, high)
	}

	for use := range all {
		if !uses[use] && !strings.HasSuffix(use, " unknown") { // which it is while an agent starts
			u.T.Errorf("%q has GPU-seconds", use)
		}
	}
	for _, use := range slices.Sorted(maps.Keys(uses)) {
		low, high, most := u.expected(use)
		low -= missing * most
		u.T.Logf("%-20s %6.2f GPU-seconds, expected %6.2f to %6.2f", use, all[use], low, high)
		if all[use] < low || all[use] > high {
			u.T.Errorf("%q: %.2f GPU-seconds are recorded, want %.2f to %.2f", use, all[use], low, high)
		}
	}
	held := maps.Clone(all)
	maps.DeleteFunc(held, func(use string, _ float64) bool { return strings.HasPrefix(use, " ") })
	if pods := over(podHours); !maps.EqualFunc(pods, held, nearlyEqual) {
		u.T.Errorf("GPU-seconds of the pods: %v, want %v", pods, held)
	}
}

// expected returns the limits of the GPU-seconds of a use, and the most GPUs that had it.
func (u *usageTest) expected(use string) (low, high, most float64) {
	const interval = 1.0
	for i, p := range u.phases {
		n := p.gpus[use]
		most = max(most, n)
		low += n * p.until.Sub(p.from).Seconds()
		high += n * p.until.Sub(p.from).Seconds()
		if i == 0 {
			continue
		}
		before := u.phases[i-1]
		between, was := p.from.Sub(before.until).Seconds(), before.gpus[use]
		low += min(was, n) * between
		high += max(was, n) * between
		low -= interval * abs(n-was)
		high += interval * abs(n-was)
		if len(p.gpus) == 0 {
			high += interval * was // until the first scrape of a stopped agent times out
		}
		if strings.HasSuffix(use, " unknown") && len(before.gpus) == 0 {
			high += 8 * between // an agent starts
		}
	}
	// Rules see a change up to one interval after the scrape, which matters where the first and the last phase differ.
	if len(u.phases) > 0 {
		shift := interval * abs(u.phases[len(u.phases)-1].gpus[use]-u.phases[0].gpus[use])
		low, high = low-shift, high+shift
	}
	return low, high, most
}

func abs(x float64) float64 { return max(x, -x) }

// checkCost checks that the dashboard's costs are the GPU-hours times the documented price.
func (u *usageTest) checkCost() {
	u.T.Helper()
	d := dashboards(u.T)["usage.json"]
	values := u.variableValues(d, true)
	expr := func(title string, query int) string {
		return "(" + substitute(u.find(d, title).Targets[query].Expr, values) + ")"
	}
	const hours = `sum_over_time(` + gpuHours + `{%s}[1h])`
	for title, want := range map[string]string{
		"Cost":                       "2.5 * sum(" + fmt.Sprintf(hours, "") + ")",
		"Cost of idle or never used": "2.5 * sum(" + fmt.Sprintf(hours, `use=~"idle|neverUsed"`) + ")",
	} {
		u.Eventually(title, func() error { return u.checkSeries(fmt.Sprintf("abs(%s / (%s) - 1) < 1e-9", expr(title, 0), want), 1) })
	}
	u.Eventually("Cost by namespace", func() error {
		return u.checkSeries(fmt.Sprintf("abs(%s / on (namespace) (2.5 * sum by (namespace) (%s)) - 1) < 1e-9", expr("Cost by namespace", 0),
			fmt.Sprintf(hours, `namespace!=""`)), 3)
	})
	u.Eventually("every model has a price", func() error { return u.checkSeries(expr("GPU-hours without a price", 0)+" == 0", 1) })
	u.Write("prices.yaml", strings.ReplaceAll(documentedPrices(u.T), "NVIDIA H100 80GB HBM3", "another model"))
	if err := u.server.Signal(syscall.SIGHUP); err != nil {
		u.T.Fatal(err)
	}
	u.Eventually("the GPU-hours without a price are all GPU-hours", func() error {
		return u.checkSeries(fmt.Sprintf("%s == %s", expr("GPU-hours without a price", 0), expr("GPU-hours", 0)), 1)
	})
	u.Eventually("and the model has no price in the table", func() error { return u.checkSeries(expr("Prices", 1)+" == -1", 1) })
}

// gpuOf returns the index of the GPU that a pod holds.
func (u *usageTest) gpuOf(pod string) string {
	u.T.Helper()
	return u.awaitGPU(fmt.Sprintf("gpu_node_agent_device_allocated{pod=%q, job=\"a\"}", pod), 1)
}

// freeGPU returns the index of a GPU that no container holds.
func (u *usageTest) freeGPU() string {
	u.T.Helper()
	return u.awaitGPU(`unallocated:gpu_node_agent_device_gpus:sum{GPU_I_ID="", gpu!="6", gpu!="7"} == 1`, 2)
}

func (u *usageTest) signalAgent(s syscall.Signal) {
	u.T.Helper()
	if err := u.Agent.Signal(s); err != nil {
		u.T.Fatal(err)
	}
}

// countGauges checks how many series of a metric have a value.
func countGauges(m node.Metrics, name string, count int, holds func(float64) bool) error {
	n := 0
	for _, s := range m["gpu_node_agent_"+name].GetMetric() {
		if holds(s.GetGauge().GetValue()) {
			n++
		}
	}
	if n != count {
		return fmt.Errorf("%d series of %s, want %d", n, name, count)
	}
	return nil
}

func isZero(v float64) bool     { return v == 0 }
func isOne(v float64) bool      { return v == 1 }
func isPositive(v float64) bool { return v > 0 }
