// Package helm tests the chart with Helm, Kubernetes' types and the agent, in seconds and without a cluster. It is a
// separate module, because Helm's dependencies conflict with Kubernetes'.
package helm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

var chart = filepath.Join("..", "..", "charts", "gpu-node-agent")

// Programs that TestMain builds, but for an agent in $AGENT_BIN.
var helmBinary, agentBinary string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "chart")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	defer func() { _ = os.RemoveAll(dir) }()
	helmBinary, agentBinary = filepath.Join(dir, "helm"), os.Getenv("AGENT_BIN")
	builds := []*exec.Cmd{exec.Command("go", "build", "-o", helmBinary, "helm.sh/helm/v4/cmd/helm")}
	if agentBinary == "" {
		agentBinary = filepath.Join(dir, "gpu-node-agent")
		builds = append(builds, exec.Command("go", "-C", filepath.Join("..", ".."), "build", "-o", agentBinary, "."))
	}
	for _, build := range builds {
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%v: %v\n%s", build, err, out)
			return 2
		}
	}
	return m.Run()
}

func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), helmBinary, args...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("helm %s: %w\n%s%s", strings.Join(args, " "), err, out.Bytes(), stderr.Bytes())
	}
	return out.String(), nil
}

// valuesFiles returns the chart's example values.
func valuesFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chart, "ci", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no values files: %v", err)
	}
	return files
}

// objects are the rendered objects; the objects of Prometheus' operator stay YAML. A field that Kubernetes does not know
// fails the test.
type objects struct {
	daemonSets      []*appsv1.DaemonSet
	cronJobs        []*batchv1.CronJob
	jobs            []*batchv1.Job
	accounts        []*corev1.ServiceAccount
	services        []*corev1.Service
	networkPolicies []*networkingv1.NetworkPolicy
	configMaps      []*corev1.ConfigMap
	roles           []*rbacv1.ClusterRole
	bindings        []*rbacv1.ClusterRoleBinding
	localRoles      []*rbacv1.Role
	localBinds      []*rbacv1.RoleBinding
	policies        []*admissionv1.ValidatingAdmissionPolicy
	policyBinds     []*admissionv1.ValidatingAdmissionPolicyBinding
	deviceClasses   []*resourcev1.DeviceClass
	kinds           map[string]int
	unstructured    map[string]string // by kind
}

// agents returns the DaemonSets of agents.
func (o objects) agents() []*appsv1.DaemonSet {
	return slices.DeleteFunc(slices.Clone(o.daemonSets), func(ds *appsv1.DaemonSet) bool { return isMPS(ds) })
}

// mps returns the DaemonSets of MPS control daemons.
func (o objects) mps() []*appsv1.DaemonSet {
	return slices.DeleteFunc(slices.Clone(o.daemonSets), func(ds *appsv1.DaemonSet) bool { return !isMPS(ds) })
}

func isMPS(ds *appsv1.DaemonSet) bool {
	return slices.Contains(ds.Spec.Template.Spec.Containers[0].Args, "mps-daemon")
}

// settings returns values as --set arguments of Helm.
func settings(values []string) (args []string) {
	for _, v := range values {
		args = append(args, "--set", v)
	}
	return args
}

// template returns the objects of a release without its hooks'.
func template(t *testing.T, args ...string) objects {
	t.Helper()
	return parse(t, render(t, append([]string{"--no-hooks"}, args...)...))
}

// hooks returns the objects of hooks.
func hooks(t *testing.T, args ...string) objects {
	t.Helper()
	const separator = "\n---\n"
	documents := strings.Split(render(t, args...), separator)
	documents = slices.DeleteFunc(documents, func(d string) bool { return !strings.Contains(d, "helm.sh/hook:") })
	return parse(t, strings.Join(documents, separator))
}

func render(t *testing.T, args ...string) string {
	t.Helper()
	text, err := helm(t, append([]string{"template", "gna", chart, "-n", "gpu"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func parse(t *testing.T, text string) objects {
	t.Helper()
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	o := objects{kinds: make(map[string]int), unstructured: make(map[string]string)}
	for document := range strings.SplitSeq(text, "\n---\n") {
		document = strings.TrimPrefix(document, "---\n")
		if strings.TrimSpace(document) == "" {
			continue
		}
		object, kind, err := strict.Decode([]byte(document), nil, nil)
		switch {
		case runtime.IsNotRegisteredError(err) && kind != nil && kind.Group == "monitoring.coreos.com":
			if err := yaml.UnmarshalStrict([]byte(document), new(map[string]any)); err != nil {
				t.Fatalf("%v\n%s", err, document)
			}
			o.kinds[kind.Kind]++
			o.unstructured[kind.Kind] = document
			continue
		case err != nil:
			t.Fatalf("%v\n%s", err, document)
		}
		o.kinds[kind.Kind]++
		switch x := object.(type) {
		case *appsv1.DaemonSet:
			o.daemonSets = append(o.daemonSets, x)
		case *batchv1.CronJob:
			o.cronJobs = append(o.cronJobs, x)
		case *batchv1.Job:
			o.jobs = append(o.jobs, x)
		case *corev1.ServiceAccount:
			o.accounts = append(o.accounts, x)
		case *corev1.Service:
			o.services = append(o.services, x)
		case *networkingv1.NetworkPolicy:
			o.networkPolicies = append(o.networkPolicies, x)
		case *corev1.ConfigMap:
			o.configMaps = append(o.configMaps, x)
		case *rbacv1.ClusterRole:
			o.roles = append(o.roles, x)
		case *rbacv1.ClusterRoleBinding:
			o.bindings = append(o.bindings, x)
		case *rbacv1.Role:
			o.localRoles = append(o.localRoles, x)
		case *rbacv1.RoleBinding:
			o.localBinds = append(o.localBinds, x)
		case *admissionv1.ValidatingAdmissionPolicy:
			o.policies = append(o.policies, x)
		case *resourcev1.DeviceClass:
			o.deviceClasses = append(o.deviceClasses, x)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			o.policyBinds = append(o.policyBinds, x)
		}
	}
	return o
}

// TestValuesFiles lints and renders each file, and checks the resulting configuration with the agent.
func TestValuesFiles(t *testing.T) {
	for _, file := range valuesFiles(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			if _, err := helm(t, "lint", "--strict", chart, "-f", file); err != nil {
				t.Error(err)
			}
			o := template(t, "-f", file)
			if len(o.daemonSets) == 0 {
				t.Fatal("no DaemonSet")
			}
			for _, ds := range o.agents() {
				var config string
				for _, c := range o.configMaps {
					if c.Name == ds.Name {
						config = c.Data["config.yaml"]
					}
				}
				if found := faults(t, config); len(found) > 0 {
					t.Errorf("%s: the agent reports %v\n%s", ds.Name, found, config)
				}
			}
		})
	}
}
