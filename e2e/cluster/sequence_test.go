//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
)

var (
	sequenceSeed   = flag.Uint64("sequence-seed", 1, "seed of TestSequence")
	sequenceSteps  = flag.Int("sequence-steps", 30, "least number of steps of TestSequence, which ends when each situation has occurred")
	sequenceReplay = flag.String("sequence-replay", "", "TestSequence plays these steps instead, in the form that it prints")
)

const (
	sequenceNamespace = "sequence"

	// nodePatience is how long the node may have what no agent is to set, after helm has returned.
	nodePatience = time.Minute

	// startPatience is how long a step waits for its pod. One that does not start stays.
	startPatience = 8 * time.Second
)

// TestSequence plays a random sequence of what operators, pods and faults do on the cluster, and checks what is true after each step. The
// model is what e2e/agent/chaos/holders has. cluster/run leaves this test out; make sequences-cluster runs it.
func TestSequence(t *testing.T) {
	plan := sequence.NewPlan(*sequenceSeed, sequence.Options{NoDisk: true, NoAPI: true, Single: true, Chart: true})
	var replay, played []sequence.Step
	if *sequenceReplay != "" {
		var err error
		if replay, err = sequence.Parse(*sequenceReplay); err != nil {
			t.Fatal(err)
		}
	}
	var counts sequence.Counts
	begin := time.Now()
	defer func() {
		t.Logf("seed %d, %d steps in %v; changed something: %v", *sequenceSeed, counts.Sum(), time.Since(begin).Round(time.Second), &counts)
		if t.Failed() {
			t.Logf("rerun with CLUSTER_FLAGS: -sequence-replay '%s'", sequence.Format(played))
		}
	}()
	p := newPlayer(t)
	for n := 0; ; n++ {
		var s sequence.Step
		switch {
		case replay != nil && n < len(replay):
			s = replay[n]
		case replay != nil || n >= *sequenceSteps && len(plan.Missing()) == 0:
			step(t, "the end leaves nothing, and a new installation works", p.finish)
			return
		case n >= 3**sequenceSteps+30:
			t.Fatalf("%d steps without: %s", n, strings.Join(plan.Missing(), ", "))
		default:
			s = plan.Next(p.state)
		}
		played = append(played, s)
		before, changed := p.state, false
		step(t, fmt.Sprintf("step %d, %v", n+1, s), func(t *testing.T) {
			t.Logf("%s: %v", time.Now().Format(time.TimeOnly), p.state)
			changed = p.play(t, s)
			if !s.Overlap || !p.overlaps(s.Kind) {
				p.check(t)
			}
		})
		counts.Add(s.Kind, changed)
		if changed {
			plan.Played(before, s, p.state)
		}
		t.Logf("%s: changed %v; situations that are missing: %s", time.Now().Format(time.TimeOnly), changed, strings.Join(plan.Missing(), ", "))
	}
}

// player plays steps on the cluster's node.
type player struct {
	*node
	state            sequence.State
	revisions        []int // of the release, one for each of state.History
	revision, latest int
	number           int // of the last pod
}

func newPlayer(t *testing.T) *player {
	t.Helper()
	labels := map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"}
	if _, err := theCluster.client.CoreV1().Namespaces().Create(t.Context(), &v1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: sequenceNamespace, Labels: labels},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the namespace has a service account", func(ctx context.Context) error {
		_, err := theCluster.client.CoreV1().ServiceAccounts(sequenceNamespace).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	return &player{node: newNode(t)}
}

// helmValues are the values of the chart. The simulation equals the one of e2e/agent/chaos/holders with the built binary.
func helmValues(v sequence.Values) []string {
	values := []string{
		neverFlaps, simulated, fmt.Sprintf(`dra.enabled=%t`, v.DRA || v.DRAMounts), fmt.Sprintf(`config.health.kubernetes.enabled=%t`, v.Labels),
		fmt.Sprintf(`rbac.cleanupHook=%t`, !v.NoHook),
	}
	of := string(gpu)
	if v.Resource != "" {
		of = v.Resource
		values = append(values, fmt.Sprintf(`config.plugin.resource="%s"`, of))
	}
	if v.DRAMounts {
		values = append(values, servesPlugin)
	}
	if v.MIG != "" {
		values = append(values, fmt.Sprintf(`config.plugin.migStrategy="%s"`, v.MIG))
	}
	switch v.Sharing {
	case sequence.TimeSlicing:
		values = append(values, fmt.Sprintf(`config.plugin.sharing.timeSlicing.resources=[{"name": "%s", "replicas": 2}]`, of))
	case sequence.Memory:
		// not the GPU in MIG mode
		values = append(values, `config.plugin.sharing.memory=`+
			`{"resource": "nvidia.com/gpu-memory", "unit": "4Gi", "enforcement": "none", "devices": ["0", "2", "3"]}`)
	}
	if v.Taints {
		values = append(values, `config.node.taints=[{"when": "anyUnhealthy", "key": "gpu-node-agent/unhealthy", "effect": "NoSchedule"}]`)
	}
	if v.Labels {
		values = append(values, `config.node.labels.output="api"`)
	}
	return values
}

const (
	simProfile = `"profile": "mixed-4", "scenario": [{"gpu": 1, "mig": "balanced"}]`
	simulated  = `config.source.sim={` + simProfile + `}`
)

// upgradeTo installs or upgrades the release.
func (p *player) upgradeTo(t *testing.T, v sequence.Values) {
	t.Helper()
	args := append(upgradeArgs(oldTag, helmValues(v)...), "--history-max", "0", "--wait", "--timeout", (2 * patience).String())
	helm(t, args...)
	p.latest++
	p.revision = p.latest
	p.helmReturned()
}

// overlaps reports whether the next step can begin before a step has settled. After others it needs to know what pods have. After the kill
// of a driver, or of an agent while the kubelet was down, an uninstall would leave no agent that removes the sockets.
func (p *player) overlaps(k sequence.Kind) bool {
	switch k {
	case sequence.Kill:
		return !p.state.Values.DRA
	case sequence.KubeletRestart, sequence.KubeletStart:
		return len(agentProcesses()) > 0 || !p.state.Installed
	}
	return false
}

// play plays a step. It reports whether the step changed something.
func (p *player) play(t *testing.T, s sequence.Step) bool {
	after, possible := p.state.After(s)
	if !possible {
		return false
	}
	switch s.Kind {
	case sequence.Install:
		p.revisions, p.latest = nil, 0
		p.upgradeTo(t, after.Values)
	case sequence.Upgrade, sequence.Reload:
		agent := mustAgentPod(t)
		p.revisions = append(p.revisions, p.revision)
		p.upgradeTo(t, after.Values)
		if s.Kind == sequence.Reload {
			checkSamePod(t, agent)
		}
	case sequence.Rollback:
		last := len(p.revisions) - 1
		helm(t, "rollback", release, fmt.Sprint(p.revisions[last]), "-n", namespace, "--history-max", "0", "--wait", "--timeout",
			(2 * patience).String())
		p.latest++
		p.revision, p.revisions = p.latest, p.revisions[:last]
		p.helmReturned()
	case sequence.Uninstall:
		uninstallBeside(t, p.claimSpecs(t))
		if p.state.Values.NoHook { // as docs/install.md says
			cleanUp(t)
		}
		p.helmReturned()
	case sequence.Kill:
		if !p.state.KubeletDown {
			killAgent(t)
			break
		}
		all := agentProcesses()
		for _, dir := range all {
			var pid int
			if _, err := fmt.Sscanf(dir, "/proc/%d", &pid); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		return len(all) > 0 // it was killed before, and no kubelet has started it
	case sequence.KubeletRestart:
		replaceKubelet(t)
	case sequence.KubeletStop:
		theCluster.kubelet.Kill()
	case sequence.KubeletStart:
		startKubelet(t)
	case sequence.Fault:
		p.fail(t, p.healthy()[int(s.Pick)%len(p.healthy())])
	case sequence.Heal:
		p.heal(t, slices.Sorted(maps.Keys(p.unhealthy))[int(s.Pick)%len(p.unhealthy)])
	case sequence.Pod, sequence.Claim:
		p.startPod(t, s)
	case sequence.PodEnd, sequence.PodForce:
		return p.endPod(t, s)
	}
	p.state.Installed, p.state.Values, p.state.History, p.state.KubeletDown = after.Installed, after.Values, after.History, after.KubeletDown
	return true
}

// healthy returns the indexes of the GPUs that are not unhealthy.
func (p *player) healthy() (all []int) {
	for i := range len(p.gpus) {
		if !p.unhealthy[i] {
			all = append(all, i)
		}
	}
	return all
}

// fail makes a GPU unhealthy, and waits until no restart forgets it.
func (p *player) fail(t *testing.T, gpu int) {
	t.Helper()
	inject(t, "{gpu: %d, xid: 79}", gpu)
	p.unhealthy[gpu] = true
	eventually(t, "the XID is saved", func(context.Context) error {
		text, err := os.ReadFile(filepath.Join(stateDir, "state.sim.json"))
		if err != nil {
			return err
		}
		var file struct{ Devices []json.RawMessage }
		if err := json.Unmarshal(text, &file); err != nil {
			return err
		}
		for _, d := range file.Devices {
			if strings.Contains(string(d), fmt.Sprintf(`"id":"%s"`, p.gpus[gpu])) && strings.Contains(string(d), "xid-79") {
				return nil
			}
		}
		return fmt.Errorf("no xid-79 of %s in:\n%s", p.gpus[gpu], text)
	})
}

// heal clears what fail did.
func (p *player) heal(t *testing.T, gpu int) {
	t.Helper()
	eventually(t, "the finding is cleared", func(ctx context.Context) error { // the agent's socket may come after its metrics
		_, err := tryInAgent(ctx, "clear", "--gpu", fmt.Sprint(gpu))
		return err
	})
	delete(p.unhealthy, gpu)
}

// startPod creates a pod, and waits for a while until it runs. One that cannot run waits for another step.
func (p *player) startPod(t *testing.T, s sequence.Step) {
	t.Helper()
	p.number++
	name := fmt.Sprintf("p%d", p.number)
	pod := workloadPod(name, p.pickResource(t, s.Pick), "1")
	if s.Kind == sequence.Claim {
		claims := theCluster.client.ResourceV1().ResourceClaimTemplates(sequenceNamespace)
		template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}}
		template.Spec.Spec.Devices = claim(*sequence.Request(int(s.Pick % sequence.ClaimForms)), "")
		if _, err := claims.Create(t.Context(), template, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		pod.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &name}}
		pod.Spec.Containers[0].Resources = v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}}
	}
	pod.Spec.Tolerations = []v1.Toleration{{Key: asTaint(unhealthyTaint).Key, Operator: v1.TolerationOpExists}}
	p.add(name)
	if _, err := theCluster.client.CoreV1().Pods(sequenceNamespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if p.state.KubeletDown {
		return
	}
	if _, err := process.Await(t.Context(), startPatience, func(ctx context.Context) error {
		p.observe(ctx)
		if p.running(name) {
			return nil
		}
		return errors.New(podState(ctx, name))
	}); err != nil {
		t.Logf("pod %s does not run: %v", name, err)
	}
}

// podState describes why a pod does not run.
func podState(ctx context.Context, name string) string {
	pod, err := getPod(ctx, sequenceNamespace+"/"+name)
	if err != nil {
		return err.Error()
	}
	words := []string{string(pod.Status.Phase), pod.Status.Reason, pod.Status.Message}
	for _, c := range pod.Status.Conditions {
		if c.Type == v1.PodScheduled {
			words = append(words, c.Message)
		}
	}
	return strings.Join(words, " ")
}

// pickResource returns a resource that the node has, or the default.
func (p *player) pickResource(t *testing.T, pick uint32) v1.ResourceName {
	t.Helper()
	names := []string{string(gpu)}
	for name, n := range nodeAmounts(getNode(t)) {
		if n > 0 && name != names[0] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return v1.ResourceName(names[int(pick)%len(names)])
}

// endPod deletes a pod, if there is one.
func (p *player) endPod(t *testing.T, s sequence.Step) bool {
	t.Helper()
	group, found := p.state.Ends(s)
	names := p.endable(group)
	if !found || len(names) == 0 {
		return false
	}
	name := names[int(s.Pick/3)%len(names)]
	p.delete(t, name, s.Kind == sequence.PodForce)
	if !p.state.KubeletDown {
		eventually(t, "the container of pod "+name+" has ended", func(ctx context.Context) error {
			p.observe(ctx)
			if p.running(name) {
				return fmt.Errorf("it runs")
			}
			return nil
		})
	}
	return true
}

// delete deletes a pod.
func (p *player) delete(t *testing.T, name string, force bool) {
	t.Helper()
	p.noteDeleted(name, force)
	var o metav1.DeleteOptions
	if force {
		o.GracePeriodSeconds = ptr.To[int64](0)
	}
	if err := theCluster.client.CoreV1().Pods(sequenceNamespace).Delete(t.Context(), name, o); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}

// finish ends everything, and checks that the cluster is as it was before the sequence, and that a new installation works.
func (p *player) finish(t *testing.T) {
	play := func(s sequence.Step) { p.play(t, s); p.check(t) }
	play(sequence.Step{Kind: sequence.KubeletStart})
	dra := sequence.Values{DRA: true} // only a driver ends the pods of claims
	play(sequence.Step{Kind: sequence.Install, Values: dra})
	play(sequence.Step{Kind: sequence.Upgrade, Values: dra})
	for g := range sequence.Groups {
		for _, name := range p.endable(g) {
			p.delete(t, name, false)
		}
	}
	eventually(t, "all pods and claims are gone", func(ctx context.Context) error {
		pods, err := theCluster.client.CoreV1().Pods(sequenceNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		claims, err := theCluster.client.ResourceV1().ResourceClaims(sequenceNamespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items)+len(claims.Items) > 0 {
			err = fmt.Errorf("%d pods and %d claims", len(pods.Items), len(claims.Items))
		}
		return err
	})
	for len(p.unhealthy) > 0 {
		play(sequence.Step{Kind: sequence.Heal})
	}
	play(sequence.Step{Kind: sequence.Uninstall})
	p.checkFresh(t)
	play(sequence.Step{Kind: sequence.Install})
	play(sequence.Step{Kind: sequence.Pod})
	if p.state.Plugin != 1 {
		t.Errorf("no pod runs after a new installation")
	}
	play(sequence.Step{Kind: sequence.PodEnd})
	play(sequence.Step{Kind: sequence.Uninstall})
	p.checkFresh(t)
	if err := theCluster.client.CoreV1().Namespaces().Delete(t.Context(), sequenceNamespace, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}
