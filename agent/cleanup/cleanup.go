// Package cleanup removes what agents have left in the API server: taints, labels and the condition of nodes, and NodeFeatures, that no
// agent's configuration has now. An agent itself removes what its configuration drops, if it has the rights. The agents of the chart lose
// the rights together with the configuration.
//
//	nodes, agents' pods, DaemonSets and ConfigMaps ─► plan ─► kube.Cleaner ─► PATCH nodes, DELETE nodefeatures
//	                                                                      └─► the annotation gpu-node-agent/cleaned of the agent's pod
//
// Only what agents have recorded as theirs is removed. Each write is one that an agent makes too, so that two runs at once, and a run
// beside agents, do no harm. If a configuration comes back between the plan and the write, its agent writes what it has at its next check,
// within minutes.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// cluster is what a run needs of the API server.
type cluster interface {
	jobCreated(ctx context.Context, name string) (time.Time, error)
	readTraces(ctx context.Context) ([]traces, error)
	readNode(ctx context.Context, name string) (traces, error)
	readFeatures(ctx context.Context) (map[string][]string, error)
	readAgents(ctx context.Context) (agents, error)
	remove(ctx context.Context, i Item) error
	mark(ctx context.Context, p agentPod, at time.Time) error
}

const (
	// These bound the pause between two looks at the nodes that wait; see backoff.Backoff.
	minPause = time.Second
	maxPause = 10 * time.Second

	// lastRound is how long requests may take after --wait is over.
	lastRound = 30 * time.Second

	// startWait is how long a run waits for the start of an agent on a node that it has cleaned, to mark its pod: a taint may have kept the
	// agent away.
	startWait = 30 * time.Second

	// workers is the number of nodes that are cleaned at once.
	workers = 16
)

// options are the flags of the command.
type options struct {
	kubeconfig, context, namespace string
	apply                          bool
	hook                           string
	wait                           time.Duration
	format                         *terminal.Format

	connect func(kubeconfig, context, namespace string) (cluster, error)
}

// Command returns the command cleanup. It needs no configuration of an agent.
func Command() *cobra.Command {
	o := options{connect: connect}
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove the taints, labels and conditions that agents have left on nodes",
		Long: `Remove the taints, labels and conditions that agents have left on nodes.

An agent that loses its rights with its configuration, or is uninstalled, leaves what it wrote: a taint then keeps pods off the node
for ever. The command compares what agents have recorded on each node with the configurations of the agents that run now, and
removes what none of them has: taints in the annotation gpu-node-agent/taints, labels of the field manager gpu-node-agent,
NodeFeatures and the condition GPUHealthy. Nothing of others is touched.

Without --apply the command changes nothing and prints what it would do. A node waits while its agent's pod is not of the newest
revision of its DaemonSet, has not started or is ending. If the configuration of a node's agent is unknown, or, without an agent, of a
DaemonSet of agents that selects the node, nothing of the node is removed.

It needs the rights to get, list and patch nodes, to patch nodes/status and pods/status, to list pods, daemonsets and
controllerrevisions, to get configmaps, and to list and delete nodefeatures. The exit code is 1 if something could not be read or written.`,
		Example: `  gpu-node-agent cleanup --context NAME
  gpu-node-agent cleanup --context NAME --apply --wait 10m`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := terminal.NewLogger(cmd.ErrOrStderr())
			report, err := o.run(cmd.Context(), log)
			if report != nil {
				text := func() string { return report.Table(terminal.Of(os.Stdout)) }
				err = errors.Join(err, o.format.Print(cmd.OutOrStdout(), text, report))
			}
			if o.hook != "" && err != nil {
				log.Warn("cleanup is incomplete", zap.Error(err), zap.String("later", kube.CleanupCommand))
				return nil
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.apply, "apply", false, "remove it; without it, the command prints what it would do")
	flags.DurationVar(&o.wait, "wait", 0, "repeat until no node waits and no request fails, for this time at most")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"file with the access to the API server (default: $KUBECONFIG, ~/.kube/config, or the pod's service account)")
	flags.StringVar(&o.context, "context", "", "context in the kubeconfig file (default: its current one)")
	flags.StringVar(&o.namespace, "namespace", "",
		"read ConfigMaps and NodeFeatures of this namespace only; the configuration of agents in others is unknown (default: all)")
	flags.StringVar(&o.hook, "hook", "",
		"as this Job in --namespace, the hook of the chart: --wait counts from its creation, the exit code is always 0, "+
			"and pods of nodes on which nothing was left get no annotation")
	o.format = terminal.AddFormat(flags, "table", terminal.JSON)
	return cmd
}

// run plans, and removes with --apply. With an error there may be a report too.
func (o *options) run(ctx context.Context, log *zap.Logger) (*Report, error) {
	api, err := o.connect(o.kubeconfig, o.context, o.namespace)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{options: o, api: api, log: log, started: time.Now(), items: make(map[string]Item)}
	r.counted = r.started
	if o.wait > 0 {
		r.end = time.AfterFunc(o.wait+lastRound, cancel)
		defer r.end.Stop()
	}
	pauses := backoff.Backoff{Min: minPause, Max: maxPause}
	for r.round(ctx) {
		if pause := pauses.Next(); time.Since(r.counted)+pause > o.wait || !wait.Sleep(ctx, pause) {
			break
		}
	}
	report := r.report()
	return &report, report.err()
}

// run is one run of the command.
type run struct {
	*options
	api     cluster
	log     *zap.Logger
	started time.Time
	counted time.Time   // from when --wait counts
	end     *time.Timer // ends all requests; nil without --wait

	jobRead     bool  // counted is the Job's time
	read        bool  // pending was read
	featuresErr error // why it is without the NodeFeatures
	pending     []traces
	err         error // of the last round

	mu       sync.Mutex // guards the fields below
	items    map[string]Item
	unmarked []cleaned // whose agents are not marked yet
}

// cleaned is a node that was cleaned.
type cleaned struct {
	traces // from before
	at     time.Time
}

// round does what can be done now. It returns whether another round may do more.
func (r *run) round(ctx context.Context) (more bool) {
	defer func() {
		if r.err != nil {
			r.log.Warn("cannot read", zap.Error(r.err))
		}
	}()
	if r.hook != "" && !r.jobRead {
		if r.err = r.countFromJob(ctx); r.err != nil {
			return true
		}
	}
	if !r.read {
		if r.pending, r.err = r.api.readTraces(ctx); r.err != nil {
			return true
		}
		r.read = true
		var features map[string][]string
		if features, r.featuresErr = r.api.readFeatures(ctx); r.featuresErr != nil {
			r.log.Warn("cannot read", zap.Error(r.featuresErr))
		}
		for i := range r.pending {
			r.pending[i].features = features[r.pending[i].Node]
		}
	}
	if !slices.ContainsFunc(r.pending, anything) && len(r.unmarked) == 0 && (!r.apply || r.hook != "") {
		return false // most upgrades end here
	}
	var all agents
	if all, r.err = r.api.readAgents(ctx); r.err != nil {
		return true
	}
	slots := make(chan struct{}, workers)
	var wg sync.WaitGroup
	for _, t := range r.pending {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			r.clean(ctx, all, t)
		})
	}
	wg.Wait()
	r.markAgents(ctx, all)
	r.pending = slices.DeleteFunc(r.pending, func(t traces) bool {
		i, found := r.items[t.Node]
		return !found || i.Done || i.Unknown != "" || i.Waits == "" && i.Error == ""
	})
	return len(r.pending) > 0 || slices.ContainsFunc(r.unmarked, func(c cleaned) bool { return mayMark(all, c) })
}

// countFromJob makes --wait count from the creation of the hook's Job, as the Job's deadline does. The Job's pods may start late, or one
// after another.
func (r *run) countFromJob(ctx context.Context) error {
	created, err := r.api.jobCreated(ctx, r.hook)
	if err != nil {
		return err
	}
	r.jobRead = true
	// Unless this node's clock is behind, or so far ahead that the Job would be past its deadline, and this pod would not run.
	if age := r.counted.Sub(created); age > 0 && age <= r.wait+2*lastRound {
		r.counted = created
	}
	if r.end != nil {
		r.end.Reset(time.Until(r.counted.Add(r.wait + lastRound)))
	}
	return nil
}

// mayMark reports whether a node that was cleaned has an agent that can be marked, or may soon have one.
func mayMark(all agents, c cleaned) bool {
	if plan(all, c.traces).Unknown != "" {
		return false
	}
	if len(all.pods[c.Node]) > 0 {
		return true
	}
	for _, d := range all.daemonSets {
		if d.selects(c.traces) {
			return time.Since(c.at) < startWait
		}
	}
	return false
}

// anything reports whether agents have written something to a node.
func anything(t traces) bool { return len(t.Taints)+len(t.Labels)+len(t.features) > 0 || t.Condition }

// clean plans one node, and removes what the plan has with --apply.
func (r *run) clean(ctx context.Context, all agents, t traces) {
	item := plan(all, t)
	if r.apply && !item.empty() && item.Waits == "" && item.Unknown == "" {
		now, err := r.api.readNode(ctx, t.Node) // it may have waited for minutes
		if err != nil {
			item.Error = err.Error()
		} else {
			now.features = t.features
			t = now
			item = r.remove(ctx, plan(all, t))
		}
	}
	marked := false
	if r.apply && item.pod != nil && item.Error == "" && r.featuresErr == nil && (item.Done || item.empty() && r.hook == "") {
		item.Error = r.mark(ctx, *item.pod)
		marked = item.Error == ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.items, t.Node)
	if !item.empty() || item.Error != "" {
		r.items[t.Node] = item
	}
	if item.Done && !marked && r.featuresErr == nil {
		r.unmarked = append(r.unmarked, cleaned{t, time.Now()})
	}
}

// remove removes what an item has.
func (r *run) remove(ctx context.Context, item Item) Item {
	if item.empty() {
		return item
	}
	fields := []zap.Field{
		zap.String("node", item.Node), zap.Strings("taints", item.Taints), zap.Strings("labels", item.Labels),
		zap.Strings("nodeFeatures", item.Features),
		zap.Bool("condition", item.Condition),
	}
	if err := r.api.remove(ctx, item); err != nil {
		item.Error = err.Error()
		r.log.Warn("cannot clean the node", append(fields, zap.Error(err))...)
		return item
	}
	item.Done = true
	r.log.Info("node cleaned", fields...)
	return item
}

// markAgents marks the pods of agents that have started since their nodes were cleaned, and the pods that could not be marked before.
func (r *run) markAgents(ctx context.Context, all agents) {
	r.unmarked = slices.DeleteFunc(r.unmarked, func(c cleaned) bool {
		i := plan(all, c.traces)
		if i.pod == nil {
			return false
		}
		done := r.items[c.Node]
		done.Error = r.mark(ctx, *i.pod)
		r.items[c.Node] = done
		return done.Error == ""
	})
}

// mark records in an agent's pod that its node was cleaned. It returns why it could not.
func (r *run) mark(ctx context.Context, p agentPod) string {
	if err := r.api.mark(ctx, p, time.Now()); err != nil {
		return fmt.Sprintf("cannot mark in pod %v that its node was cleaned: %v", p, err)
	}
	return ""
}

// report returns what was done so far.
func (r *run) report() Report {
	report := Report{Time: r.started.UTC(), DryRun: !r.apply, Nodes: []Item{}, Errors: []string{}}
	for _, err := range []error{r.featuresErr, r.err} {
		if err != nil {
			report.Errors = append(report.Errors, err.Error())
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range r.items {
		report.Nodes = append(report.Nodes, i)
	}
	slices.SortFunc(report.Nodes, func(a, b Item) int { return strings.Compare(a.Node, b.Node) })
	return report
}
