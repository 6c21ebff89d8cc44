package reclaim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// maxPlanAge is the time after which no action of a plan begins, because pods may have used their GPUs since.
const maxPlanAge = 10 * time.Minute

// maxReplaced is the number of refused actions of a run that others replace: a policy of the cluster may refuse them all.
const maxReplaced = 100

// maxLoggedErrors is the number of errors in the last log line: each node can have one. The report has all.
const maxLoggedErrors = 10

// errOldPlan is why an action was not begun.
var errOldPlan = fmt.Errorf("the plan is older than %v; the next run plans anew", maxPlanAge)

// options are the flags of the command.
type options struct {
	policy      string // file
	snapshots   []string
	apply, undo bool
	format      *terminal.Format
	kubeconfig  string
	agents      agentSelection
	access      status.Access

	connect func(kubeconfig string, agents agentSelection) (cluster, error)
}

// Command returns the command reclaim. It needs no configuration of an agent.
func Command() *cobra.Command {
	o := options{connect: connect}
	cmd := &cobra.Command{
		Use:   "reclaim",
		Short: "Give back the GPUs that pods hold and do not use, by a policy",
		Long: `Give back the GPUs that pods hold and do not use, by a policy.

Without --apply the command changes nothing and prints what it would do. With it, it scales Deployments, ReplicaSets and StatefulSets
to 0, suspends Jobs, and evicts pods without an owner. An owner is left alone unless all its pods that hold GPUs have been idle
on all their devices. --undo restores what earlier runs changed, unless somebody has changed it since.

The agents measure; they are found by their pods, or named by --snapshot. The command uses no configuration file of an agent, and
reads the password for --user from $` + status.PasswordEnv + `. It logs each action.

The exit code is 1 if an action failed, or no agent responds. What a PodDisruptionBudget refuses, or changed since it was read, has not
failed.`,
		Example: `  gpu-node-agent reclaim --policy policy.yaml
  gpu-node-agent reclaim --policy policy.yaml --kubeconfig ~/.kube/config --snapshot http://10.0.0.7:9400 -o json
  gpu-node-agent reclaim --policy policy.yaml --apply`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.access.Password = os.Getenv(status.PasswordEnv)
			o.agents.Namespace = cmp.Or(o.agents.Namespace, os.Getenv("POD_NAMESPACE"))
			if err := o.validate(); err != nil {
				return err
			}
			p, err := LoadPolicy(o.policy)
			if err != nil {
				return err
			}
			report, err := o.run(cmd.Context(), p, terminal.NewLogger(cmd.ErrOrStderr()))
			if report != nil {
				text := func() string { return report.Table(terminal.Of(os.Stdout)) }
				err = cmp.Or(err, o.format.Print(cmd.OutOrStdout(), text, report))
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.policy, "policy", "", "file with the policy; required")
	flags.BoolVar(&o.apply, "apply", false, "make the changes; without it, the command prints them")
	flags.BoolVar(&o.undo, "undo", false, "restore what earlier runs changed in the namespaces of the policy")
	flags.StringArrayVar(&o.snapshots, "snapshot", nil,
		"HOST:PORT or URL of an agent, instead of the agents that the API server lists; repeatable")
	o.format = terminal.AddFormat(flags, "table", terminal.JSON)
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "file with the access to the API server (default: the pod's service account)")
	flags.StringVar(&o.agents.Namespace, "agent-namespace", "",
		"namespace of the agents' pods (default: $POD_NAMESPACE, else the only one that has some)")
	flags.StringVar(&o.agents.Selector, "agent-selector", "app.kubernetes.io/name=gpu-node-agent", "labels of the agents' pods")
	flags.StringVar(&o.agents.Scheme, "agent-scheme", "http", "http, or https if the agents have a certificate")
	flags.IntVar(&o.agents.Port, "agent-port", 0, "port of the agents (default: the container port named metrics)")
	o.access.AddFlags(flags)
	return cmd
}

// validate returns the first error in the flags.
func (o *options) validate() error {
	switch {
	case o.policy == "":
		return errors.New("--policy: required; expected a file with a policy")
	case o.agents.Scheme != "http" && o.agents.Scheme != "https":
		return fmt.Errorf("--agent-scheme: expected http or https, got %q", o.agents.Scheme)
	case o.agents.Port < 0 || o.agents.Port > 65535:
		return fmt.Errorf("--agent-port: expected 1 to 65535, got %d", o.agents.Port)
	case slices.ContainsFunc(o.snapshots, func(u string) bool { return strings.Contains(u, "@") }): // errors name the URL
		return errors.New("--snapshot: expected a URL without a user; use --user with the password in $" + status.PasswordEnv)
	}
	return o.access.Validate()
}

// run plans, and acts with --apply. With an error there may be a report too.
func (o *options) run(ctx context.Context, p Policy, log *zap.Logger) (*Report, error) {
	api, err := o.connect(o.kubeconfig, o.agents)
	if err != nil {
		return nil, err
	}
	w := World{Now: time.Now()}
	var errs []string
	if w.Objects, errs = api.readObjects(ctx, p); len(w.Namespaces) == 0 {
		return nil, fmt.Errorf("no namespace of the policy could be read:\n%s", strings.Join(errs, "\n"))
	}
	read := time.Now()
	var r Report
	var noAgent error
	if o.undo {
		r = planUndo(p, w)
	} else {
		var agentErrs []string
		w.Agents, agentErrs = o.askAgents(ctx, api, w.Objects)
		errs = append(errs, agentErrs...)
		r = plan(p, w)
		if !responds(w.Agents) && (len(o.snapshots) > 0 || r.skips(ReasonNoAgent)) {
			noAgent = errors.New("no agent responds")
		}
	}
	r.Errors = append(r.Errors, errs...)
	if o.apply {
		ctx, cancel := context.WithDeadlineCause(ctx, read.Add(maxPlanAge), errOldPlan)
		defer cancel()
		return &r, cmp.Or(r.apply(ctx, api, p, log), noAgent)
	}
	return &r, noAgent
}

// askAgents returns the responses of the agents by node, and why there are no others.
func (o *options) askAgents(ctx context.Context, api cluster, objects Objects) (map[string]Agent, []string) {
	if len(o.snapshots) > 0 {
		return askURLs(ctx, o.snapshots, o.access)
	}
	nodes := agentNodes(objects)
	if len(nodes) == 0 {
		return nil, nil
	}
	urls, err := api.findAgents(ctx)
	if err != nil {
		return nil, []string{err.Error()}
	}
	nodes = slices.DeleteFunc(nodes, func(n string) bool { return urls[n] == "" }) // the plan leaves their pods alone
	return askNodes(ctx, nodes, urls, o.access)
}

// apply does the actions in their order. An error of one does not stop the others. After the end of ctx it begins none.
func (r *Report) apply(ctx context.Context, api cluster, p Policy, log *zap.Logger) error {
	r.DryRun = false
	failed, refusals := 0, 0
	for i := 0; i < len(r.Actions); i++ { // takeNext adds to them
		a := &r.Actions[i]
		err := api.apply(ctx, p, *a, time.Now())
		_, late := errors.AsType[lateError](err)
		a.Done = err == nil || late
		fields := []zap.Field{
			zap.String("action", string(a.Kind)), zap.String("object", a.String()), zap.Strings("pods", a.Pods), zap.Float64("gpus", a.GPUs),
			zap.Float64("gpuHours", a.GPUHours), zap.String("reason", a.Reason),
		}
		switch {
		case err == nil:
			log.Info("action done", fields...)
		case late:
			a.Error = err.Error()
			log.Warn("action done with an error", append(fields, zap.Error(err))...)
		default:
			a.Error = err.Error()
			if isOrdinary(err) {
				log.Warn("action refused", append(fields, zap.Error(err))...)
			} else {
				failed++
				log.Error("action failed", append(fields, zap.Error(err))...)
			}
			if !refused(err) {
				continue
			}
			if refusals++; refusals <= maxReplaced && ctx.Err() == nil {
				r.takeNext()
			}
		}
	}
	r.sum()
	log.Info("run ended", zap.Int("actions", len(r.Actions)), zap.Int("failed", failed), zap.Int("leftAlone", len(r.Skipped)),
		zap.Float64("gpus", rounded(r.GPUs-r.Announced)), zap.Float64("announcedGPUs", r.Announced), zap.Float64("restoredGPUs", r.Restored),
		zap.Float64("gpuHours", r.GPUHours), zap.Strings("errors", firstOf(r.Errors, maxLoggedErrors)))
	if failed > 0 {
		return fmt.Errorf("%d of %s failed", failed, status.Plural(len(r.Actions), "action"))
	}
	return nil
}

// takeNext adds the next action above Policy.MaxPerRun. Actions that are always refused, such as by a PodDisruptionBudget, would otherwise
// take the place of others in every run.
func (r *Report) takeNext() {
	if len(r.rest) == 0 {
		return
	}
	next := r.rest[0]
	r.Actions, r.rest = append(r.Actions, next), r.rest[1:]
	r.Skipped = slices.DeleteFunc(r.Skipped, func(s Skipped) bool { return s.Ref == next.Ref })
}

// firstOf returns the first of some texts, and how many more there are.
func firstOf(texts []string, most int) []string {
	if len(texts) <= most {
		return texts
	}
	return append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", len(texts)-most))
}
