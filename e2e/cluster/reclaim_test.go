//go:build cluster

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authentication/v1"
	batchv1 "k8s.io/api/batch/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
)

const (
	reclaimer         = account + "-reclaim" // CronJob, and its account
	research, exempt  = "research", "exempt" // the namespaces of the policy
	reclaimRecord     = "gpu-node-agent/reclaimed"
	reclaimNotice     = "gpu-node-agent/reclaim-notice"
	reclaimOptOut     = "gpu-node-agent/reclaim-opt-out"
	reclaimPolicyText = `{"namespaces": ["research", "exempt"], "minimumAge": "0s", "notice": "4s", ` +
		`"idle": {"after": "4s", "evidence": "noProcess"}}`
)

// reclaimReport is what the command prints with -o json.
type reclaimReport struct {
	DryRun  bool
	Actions []struct {
		Action, Namespace, Kind, Name, Error string
		Pods                                 []string
		GPUs, GPUHours                       float64
		Replicas                             int32
		Done                                 bool
	}
	Skipped []struct {
		Namespace, Kind, Name, Reason, Text string
	}
	Errors []string
	GPUs   float64
}

// actions returns the actions as ACTION KIND NAMESPACE/NAME, in order of name.
func (r reclaimReport) actions() []string {
	var all []string
	for _, a := range r.Actions {
		all = append(all, a.Action+" "+a.Kind+" "+a.Namespace+"/"+a.Name)
	}
	slices.Sort(all)
	return all
}

// reason returns why an object is skipped; "" if it is not.
func (r reclaimReport) reason(kind, ref string) string {
	for _, s := range r.Skipped {
		if s.Kind == kind && s.Namespace+"/"+s.Name == ref {
			return s.Reason
		}
	}
	return ""
}

// accountKubeconfig returns a kubeconfig of a service account of the release.
func accountKubeconfig(t *testing.T, account string) string {
	t.Helper()
	token, err := theCluster.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authv1.TokenRequest{},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["cluster"] = &clientcmdapi.Cluster{Server: theCluster.config.Host, CertificateAuthority: theCluster.config.CAFile}
	config.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	config.Contexts["context"] = &clientcmdapi.Context{Cluster: "cluster", AuthInfo: "user"}
	config.CurrentContext = "context"
	file := theCluster.file("state", account+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// reclaim runs the command with the policy and the account of the CronJob.
func reclaim(ctx context.Context, kubeconfig string, args ...string) (reclaimReport, error) {
	policy := theCluster.file("state", "reclaim-policy.yaml")
	if err := os.WriteFile(policy, []byte(reclaimPolicyText), 0o600); err != nil {
		return reclaimReport{}, err
	}
	cmd := exec.CommandContext(ctx, theCluster.file("gpu-node-agent-"+oldTag),
		append([]string{"reclaim", "--policy", policy, "--kubeconfig", kubeconfig, "--agent-namespace", namespace, "-o", "json"}, args...)...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	runErr := cmd.Run()
	var report reclaimReport
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		return report, fmt.Errorf("%w; %w\n%s%s", runErr, err, out.Bytes(), stderr.Bytes())
	}
	return report, nil
}

// awaitPlan waits until a dry run has exactly these actions.
func awaitPlan(t *testing.T, kubeconfig string, want ...string) (report reclaimReport) {
	t.Helper()
	eventually(t, fmt.Sprintf("a dry run has the actions %v", want), func(ctx context.Context) (err error) {
		report, err = reclaim(ctx, kubeconfig)
		if err == nil && (!report.DryRun || !slices.Equal(report.actions(), want)) {
			err = fmt.Errorf("report: %+v", report)
		}
		return err
	})
	return report
}

// runReclaim runs the CronJob now, and returns the output of its pod.
func runReclaim(t *testing.T, name string) (output string, succeeded bool) {
	t.Helper()
	cron, err := theCluster.client.BatchV1().CronJobs(namespace).Get(t.Context(), reclaimer, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	template := cron.Spec.JobTemplate
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: template.Labels,
		Annotations: map[string]string{"cronjob.kubernetes.io/instantiate": "manual"},
	}, Spec: template.Spec}
	if _, err := theCluster.client.BatchV1().Jobs(namespace).Create(t.Context(), job, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var pod string
	eventually(t, "job "+name+" ends", func(ctx context.Context) error {
		pods, err := theCluster.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "job-name=" + name})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed {
				pod, succeeded = p.Name, p.Status.Phase == v1.PodSucceeded
				return nil
			}
		}
		return fmt.Errorf("pods: %v", pods.Items)
	})
	output, err = logsOf(t.Context(), namespace+"/"+pod)
	if err != nil {
		t.Fatal(err)
	}
	if err := theCluster.client.BatchV1().Jobs(namespace).Delete(t.Context(), name,
		metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}); err != nil {
		t.Error(err)
	}
	return output, succeeded
}

// workloadTemplate is a template of pods that request a resource, with the label app.
func workloadTemplate(app string, of v1.ResourceName) v1.PodTemplateSpec {
	pod := workloadPod("", of, "1")
	return v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}}, Spec: pod.Spec}
}

func startDeployment(t *testing.T, in, name string, of v1.ResourceName, replicas int32) {
	t.Helper()
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Template: workloadTemplate(name, of),
	}}
	if _, err := theCluster.client.AppsV1().Deployments(in).Create(t.Context(), d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// appPods returns the running pods with the label app.
func appPods(ctx context.Context, in, app string, want int) ([]v1.Pod, error) {
	pods, err := theCluster.client.CoreV1().Pods(in).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		return nil, err
	}
	running := slices.DeleteFunc(pods.Items, func(p v1.Pod) bool { return p.Status.Phase != v1.PodRunning || p.DeletionTimestamp != nil })
	if len(running) != want || len(pods.Items) != want {
		return nil, fmt.Errorf("%s/%s: %d pods, %d running, want %d: %v", in, app, len(pods.Items), len(running), want, pods.Items)
	}
	return running, nil
}

func awaitApp(t *testing.T, in, app string, want int) (pods []v1.Pod) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s/%s has %d pods", in, app, want), func(ctx context.Context) (err error) {
		pods, err = appPods(ctx, in, app, want)
		return err
	})
	return pods
}

func getDeployment(t *testing.T, in, name string) *appsv1.Deployment {
	t.Helper()
	d, err := theCluster.client.AppsV1().Deployments(in).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// checkReplicas checks what the Deployments of research are scaled to.
func checkReplicas(t *testing.T, want map[string]int32) {
	t.Helper()
	for name, n := range want {
		if d := getDeployment(t, research, name); *d.Spec.Replicas != n {
			t.Errorf("%s has %d replicas, want %d: %v", name, *d.Spec.Replicas, n, d.Annotations)
		}
	}
}

func setReplicas(t *testing.T, name string, replicas int32) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"spec": {"replicas": %d}}`, replicas)
	if _, err := theCluster.client.AppsV1().Deployments(research).Patch(t.Context(), name, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// giveProcess gives the GPU of a pod a process of the pod's container.
func giveProcess(t *testing.T, pod *v1.Pod) {
	t.Helper()
	var index string
	eventually(t, "pod "+pod.Name+" holds a GPU", func(ctx context.Context) error {
		page, err := scrape(ctx)
		if err != nil {
			return err
		}
		line, err := findLine(page, "gpu_node_agent_device_allocated{", fmt.Sprintf(`pod=%q`, pod.Name))
		index = label(line, "gpu")
		return err
	})
	inject(t, "{gpu: %s, processes: [{pid: %d, memory: 1073741824, sm: 0.5}]}", index, pidOf(t, pod.Status.ContainerStatuses[0]))
	awaitSeries(t, "gpu_node_agent_process_memory_bytes{", fmt.Sprintf(`pod=%q`, pod.Name))
}

// reclaimObjects are the owners of the test, to compare them before and after a run: the generation changes with the spec.
func reclaimObjects(t *testing.T) string {
	t.Helper()
	var all []string
	for _, in := range []string{research, exempt} {
		deployments, err := theCluster.client.AppsV1().Deployments(in).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range deployments.Items {
			all = append(all, fmt.Sprint(d.Name, d.Generation, *d.Spec.Replicas, d.Annotations))
		}
		jobs, err := theCluster.client.BatchV1().Jobs(in).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, j := range jobs.Items {
			all = append(all, fmt.Sprint(j.Name, j.Generation, ptr.Deref(j.Spec.Suspend, false), j.Annotations))
		}
		pods, err := theCluster.client.CoreV1().Pods(in).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pods.Items {
			all = append(all, fmt.Sprint(p.Name, p.UID, p.Annotations, p.DeletionTimestamp))
		}
	}
	return strings.Join(all, "\n")
}

// TestReclaim has idle and busy pods, and gives the GPUs of the idle ones back with the chart's CronJob.
func TestReclaim(t *testing.T) {
	const slice v1.ResourceName = "example.com/sliced"
	values := []string{
		withdrawOnStop, neverFlaps,
		`config.metrics.processes.enabled=true`,
		`config.plugin.sharing={"timeSlicing": {"resources": [` +
			`{"name": "nvidia.com/gpu", "replicas": 4, "devices": ["7"], "rename": "example.com/sliced"}]}}`,
		`reclaim.enabled=true`, `reclaim.schedule="0 0 1 1 *"`, `reclaim.policy=` + reclaimPolicyText,
	}
	createNamespace(t, research, nil)
	createNamespace(t, exempt, map[string]string{reclaimOptOut: "true"})
	var kubeconfig string
	pdb := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "bare"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "bare"}},
	}}
	step(t, "install, and pods that use GPUs or do not", func(t *testing.T) {
		startDeployment(t, research, "idle", gpu, 2)
		startDeployment(t, research, "busy", gpu, 1)
		startDeployment(t, research, "idle-share", slice, 1)
		startDeployment(t, research, "busy-share", slice, 1)
		startDeployment(t, exempt, "idle", gpu, 1)
		job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: batchv1.JobSpec{Template: workloadTemplate("job", gpu)}}
		job.Spec.Template.Spec.RestartPolicy = v1.RestartPolicyNever
		bare := workloadPod("bare", gpu, "1")
		bare.Labels = map[string]string{"app": "bare"}
		_, errJob := theCluster.client.BatchV1().Jobs(research).Create(t.Context(), job, metav1.CreateOptions{})
		_, errPod := theCluster.client.CoreV1().Pods(research).Create(t.Context(), bare, metav1.CreateOptions{})
		_, errPDB := theCluster.client.PolicyV1().PodDisruptionBudgets(research).Create(t.Context(), pdb, metav1.CreateOptions{})
		if err := errors.Join(errJob, errPod, errPDB); err != nil {
			t.Fatal(err)
		}
		upgrade(t, oldTag, values...)
		for app, n := range map[string]int{"idle": 2, "busy": 1, "idle-share": 1, "busy-share": 1, "job": 1, "bare": 1} {
			awaitApp(t, research, app, n)
		}
		awaitApp(t, exempt, "idle", 1)
		for _, app := range []string{"busy", "busy-share"} {
			giveProcess(t, &awaitApp(t, research, app, 1)[0])
		}
		kubeconfig = accountKubeconfig(t, reclaimer)
	})
	notices := []string{
		"notify Deployment research/idle", "notify Deployment research/idle-share", "notify Job research/job",
		"notify Pod research/bare",
	}
	step(t, "a dry run changes nothing", func(t *testing.T) { checkDryRun(t, kubeconfig, notices) })
	step(t, "the first run announces", func(t *testing.T) { checkAnnouncement(t, values) })
	taken := []string{
		"evict Pod research/bare", "scale Deployment research/idle", "scale Deployment research/idle-share",
		"suspend Job research/job",
	}
	step(t, "the next run after the notice gives the GPUs back", func(t *testing.T) { checkGivenBack(t, kubeconfig, taken) })
	step(t, "without its budget the pod is evicted", func(t *testing.T) {
		if err := theCluster.client.PolicyV1().PodDisruptionBudgets(research).Delete(t.Context(), pdb.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		awaitPlan(t, kubeconfig, "evict Pod research/bare")
		if report, err := reclaim(t.Context(), kubeconfig, "--apply"); err != nil || len(report.Actions) != 1 || !report.Actions[0].Done {
			t.Errorf("%+v: %v", report, err)
		}
		awaitApp(t, research, "bare", 0)
	})
	step(t, "an owner that is scaled back is left alone", func(t *testing.T) { checkScaledBack(t, kubeconfig) })
	step(t, "undo restores what nobody changed", func(t *testing.T) { checkUndo(t, kubeconfig) })
	step(t, "without measurements nothing is taken", func(t *testing.T) {
		awaitPlan(t, kubeconfig, "notify Deployment research/idle-share", "notify Job research/job")
		before := reclaimObjects(t)
		skipped := func(reason string) {
			t.Helper()
			eventually(t, "all is skipped: "+reason, func(ctx context.Context) error {
				report, err := reclaim(ctx, kubeconfig, "--apply")
				if err == nil && (report.reason("Deployment", "research/idle") != reason || report.reason("Job", "research/job") != reason ||
					len(report.Actions) > 0) {
					err = fmt.Errorf("report: %+v", report)
				}
				return err
			})
		}
		inject(t, "{source: down}")
		awaitSeries(t, "gpu_node_agent_source_up 0") // a run before would do what is planned
		skipped("sourceDown")
		// The agent's pod ends, and none starts.
		patch := []byte(`{"spec": {"template": {"spec": {"nodeSelector": {"example.com/none": "true"}}}}}`)
		if _, err := theCluster.client.AppsV1().DaemonSets(namespace).Patch(t.Context(), account, types.StrategicMergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "no agent", func(ctx context.Context) error {
			if all, err := agentPods(ctx); err != nil || len(all) > 0 {
				return fmt.Errorf("%d pods: %w", len(all), err)
			}
			return nil
		})
		skipped("noAgent")
		if report, err := reclaim(t.Context(), kubeconfig, "--apply"); err != nil || len(report.Errors) == 0 {
			t.Errorf("no error names the missing agent: %+v: %v", report, err)
		}
		if after := reclaimObjects(t); after != before {
			t.Errorf("objects without an agent:\n%s\nbefore:\n%s", after, before)
		}
	})
	step(t, "helm uninstall", uninstall)
}

// checkScaledBack checks that reclaim takes nothing from an owner that a person has scaled back.
func checkScaledBack(t *testing.T, kubeconfig string) {
	setReplicas(t, "idle", 1)
	awaitApp(t, research, "idle", 1)
	eventually(t, "it is skipped, because it was scaled back", func(ctx context.Context) error {
		report, err := reclaim(ctx, kubeconfig, "--apply")
		if err == nil && (len(report.Actions) > 0 || report.reason("Deployment", "research/idle") != "scaledBack") {
			err = fmt.Errorf("report: %+v", report)
		}
		return err
	})
	checkReplicas(t, map[string]int32{"idle": 1})
}

// checkUndo checks that undo restores the owners, but for the one that was scaled back.
func checkUndo(t *testing.T, kubeconfig string) {
	report, err := reclaim(t.Context(), kubeconfig, "--undo", "--apply")
	if want := []string{"restore Deployment research/idle-share", "resume Job research/job"}; err != nil ||
		!slices.Equal(report.actions(), want) {
		t.Errorf("actions %v, want %v; %v", report.actions(), want, err)
	}
	if got := report.reason("Deployment", "research/idle"); got != "changed" {
		t.Errorf("the Deployment that was scaled back is skipped for %q, want changed", got)
	}
	awaitApp(t, research, "idle-share", 1)
	awaitApp(t, research, "job", 1)
	if d := getDeployment(t, research, "idle-share"); d.Annotations[reclaimRecord] != "" {
		t.Errorf("the record is left: %v", d.Annotations)
	}
	awaitEventIn(t, research, "idle-share", "GPURestored", "")
}

// checkGivenBack checks that the CronJob's run after the notice does what is planned, but for a pod with a budget.
func checkGivenBack(t *testing.T, kubeconfig string, taken []string) {
	awaitPlan(t, kubeconfig, taken...)
	output, ok := runReclaim(t, "act")
	awaitApp(t, research, "idle", 0)
	awaitApp(t, research, "idle-share", 0)
	awaitApp(t, research, "job", 0)
	awaitApp(t, research, "bare", 1) // the budget holds
	checkReplicas(t, map[string]int32{"idle": 0, "idle-share": 0, "busy": 1, "busy-share": 1})
	if d := getDeployment(t, exempt, "idle"); *d.Spec.Replicas != 1 || len(d.Annotations) > 1 {
		t.Errorf("the opted-out Deployment: %d replicas, %v", *d.Spec.Replicas, d.Annotations)
	}
	var record struct{ Replicas int32 }
	if err := json.Unmarshal([]byte(getDeployment(t, research, "idle").Annotations[reclaimRecord]), &record); err != nil ||
		record.Replicas != 2 {
		t.Errorf("record %+v, want 2 replicas; %v", record, err)
	}
	awaitEventIn(t, research, "idle", "GPUReclaimed", "")
	awaitEventIn(t, research, "job", "GPUReclaimed", "")
	if !ok || !strings.Contains(output, "disruption budget") {
		t.Errorf("the run failed, or does not say that a budget refuses an eviction (it ended well: %v):\n%s", ok, output)
	}
}

// checkAnnouncement checks that the CronJob's first run only marks the owners and writes events.
func checkAnnouncement(t *testing.T, values []string) {
	upgrade(t, oldTag, append(slices.Clone(values), `reclaim.dryRun=false`)...)
	if output, ok := runReclaim(t, "announce"); !ok {
		t.Errorf("the CronJob's run failed:\n%s", output)
	}
	for _, name := range []string{"idle", "idle-share"} {
		if d := getDeployment(t, research, name); d.Annotations[reclaimNotice] == "" {
			t.Errorf("%s has no notice: %v", name, d.Annotations)
		}
		awaitEventIn(t, research, name, "GPUReclaimNotice", "")
	}
	checkReplicas(t, map[string]int32{"idle": 2, "idle-share": 1, "busy": 1, "busy-share": 1})
}

// checkDryRun checks what a dry run with the account's rights plans and skips, and that the CronJob's changes nothing.
func checkDryRun(t *testing.T, kubeconfig string, notices []string) {
	before := reclaimObjects(t)
	report := awaitPlan(t, kubeconfig, notices...)
	if report.GPUs != 2+0.25+1+1 {
		t.Errorf("%v GPUs, want 4.25: %+v", report.GPUs, report)
	}
	for ref, want := range map[string]string{"research/busy": "busy", "research/busy-share": "busy", "exempt/idle": "optedOut"} {
		if got := report.reason("Deployment", ref); got != want {
			t.Errorf("%s is skipped for %q, want %q", ref, got, want)
		}
	}
	output, ok := runReclaim(t, "dry")
	if !ok || !strings.Contains(output, "research/idle") && !strings.Contains(output, "idle-share") {
		t.Errorf("the CronJob's dry run prints:\n%s", output)
	}
	if after := reclaimObjects(t); after != before {
		t.Errorf("objects after a dry run:\n%s\nbefore:\n%s", after, before)
	}
}
