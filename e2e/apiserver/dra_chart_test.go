package apiserver

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	dracel "k8s.io/dynamic-resource-allocation/cel"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/manifests"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

const draDriver = "gpu.nvidia.com"

// TestDRAChart checks the chart's DeviceClasses, rights and policy for DRA on an API server.
func TestDRAChart(t *testing.T) {
	installChart(t, "dra-values.yaml")
	classes := deviceClasses(t)
	t.Run("DeviceClasses", func(t *testing.T) { checkDeviceClasses(t, classes) })
	t.Run("rights", checkDRARights)
	t.Run("policy", checkSlicePolicy)
	t.Run("agent", checkConfinedAgent)
}

// deviceClasses returns the DeviceClasses as the API server stores them.
func deviceClasses(t *testing.T) map[string]*resourcev1.DeviceClass {
	t.Helper()
	list, err := theCluster.client.ResourceV1().DeviceClasses().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	classes := make(map[string]*resourcev1.DeviceClass)
	for i := range list.Items {
		classes[list.Items[i].Name] = &list.Items[i]
	}
	return classes
}

// checkConfinedAgent checks that the rights and the policy suffice for an agent with the token of its pod: it publishes its devices,
// changes and withdraws them.
func checkConfinedAgent(t *testing.T) {
	n := newMachine(t, "confined", unprivileged)
	configure := func(api string) {
		n.Configure(fmt.Sprintf("source: {sim: {profile: h100-8}}\nplugin: {api: %s, cdi: {dir: %s}}\nhealth: {kubernetes: {kubeconfig: %s}}\n",
			api, n.File("cdi"), podKubeconfig(t, n)))
	}
	tainted := func() (devices, tainted int, err error) {
		list, err := theCluster.client.ResourceV1().ResourceSlices().List(t.Context(),
			metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
		if err != nil {
			return 0, 0, err
		}
		for i := range list.Items {
			for _, d := range list.Items[i].Spec.Devices {
				devices++
				tainted += len(d.Taints)
			}
		}
		return devices, tainted, nil
	}
	await := func(what string, devices, taints int) {
		n.Eventually(what, func() error {
			d, tt, err := tainted()
			if err == nil && (d != devices || tt != taints) {
				err = fmt.Errorf("%d devices with %d taints, want %d with %d", d, tt, devices, taints)
			}
			return err
		})
	}
	if err := os.Mkdir(n.File("plugins_registry"), 0o700); err != nil { // as the kubelet's plugin watcher does
		t.Fatal(err)
	}
	configure("dra")
	n.StartAgent()
	await("the devices are published", 8, 0)
	n.Inject("{gpu: 3, xid: 79}")
	await("one device has a taint", 8, 1)
	configure("devicePlugin")
	await("no device is published", 0, 0)
	n.Eventually("the device plugin serves the others", func() error { return n.KubeletHas(node.GPU, 8, 7) })
}

// podKubeconfig returns the path of a kubeconfig with the token of a pod of the chart's account on a node.
func podKubeconfig(t *testing.T, n machine) string {
	t.Helper()
	namespace, name, _ := strings.Cut(strings.TrimPrefix(agentsAccount, "system:serviceaccount:"), ":")
	core := theCluster.client.CoreV1()
	_, err := core.Namespaces().Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	_, err2 := core.ServiceAccounts(namespace).Create(t.Context(), &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	pod := node.Pod(namespace, n.name, node.GPU, 0)
	pod.Spec.NodeName, pod.Spec.ServiceAccountName = n.name, name
	_, err3 := core.Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	for _, err := range []error{err, err2, err3} {
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	pod, err = core.Pods(namespace).Get(t.Context(), n.name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	token, err := core.ServiceAccounts(namespace).CreateToken(t.Context(), name, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(theCluster.pki.Kubeconfig(admin))
	if err != nil {
		t.Fatal(err)
	}
	config.AuthInfos = map[string]*clientcmdapi.AuthInfo{"test": {Token: token.Status.Token}}
	if err := clientcmd.WriteToFile(*config, n.File("kubeconfig")); err != nil {
		t.Fatal(err)
	}
	return n.File("kubeconfig")
}

// draDevice returns a device of the driver as it is published.
func draDevice(kind string, more map[resourcev1.QualifiedName]resourcev1.DeviceAttribute) dracel.Device {
	d := dracel.Device{Driver: draDriver, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: &kind}}}
	maps.Copy(d.Attributes, more)
	return d
}

func checkDeviceClasses(t *testing.T, classes map[string]*resourcev1.DeviceClass) {
	model, plain, engines := "NVIDIA H100 80GB HBM3", "1g.10gb", "1g.10gb+me"
	type attributes = map[resourcev1.QualifiedName]resourcev1.DeviceAttribute
	product := resourcev1.DeviceAttribute{StringValue: &model}
	foreign := draDevice("gpu", nil)
	foreign.Driver = "gpu.example.com"
	devices := map[string]dracel.Device{
		"a GPU":                   draDevice("gpu", attributes{"productName": product}),
		"a GPU in MIG mode":       draDevice("mig-parent", attributes{"productName": product}),
		"a MIG device":            draDevice("mig", attributes{"productName": product, "profile": {StringValue: &plain}}),
		"with media engines":      draDevice("mig", attributes{"productName": product, "profile": {StringValue: &engines}}),
		"a GPU of another driver": foreign,
	}
	want := map[string][]string{
		"gpu.nvidia.com":            {"a GPU"},
		"mig.nvidia.com":            {"a MIG device", "with media engines"},
		"mig-1g.10gb.nvidia.com":    {"a MIG device"},
		"mig-1g.10gb.me.nvidia.com": {"with media engines"},
		"h100.nvidia.com":           {"a GPU"},
		"monitor.nvidia.com":        {"a GPU", "a GPU in MIG mode"},
		"shared.nvidia.com":         {"a GPU"},
	}
	resources := map[string]string{
		"gpu.nvidia.com": "nvidia.com/gpu", "mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb",
		"mig-1g.10gb.me.nvidia.com": "nvidia.com/mig-1g.10gb.me",
		"h100.nvidia.com":           "nvidia.com/h100",
	}
	if len(classes) != len(want) {
		t.Errorf("%d classes, want %d", len(classes), len(want))
	}
	for name, selected := range want {
		class := classes[name]
		if class == nil {
			t.Errorf("no class %s", name)
			continue
		}
		resource := ""
		if r := class.Spec.ExtendedResourceName; r != nil {
			resource = *r
		}
		if resource != resources[name] {
			t.Errorf("%s serves the extended resource %q, want %q", name, resource, resources[name])
		}
		var got []string
		for device, d := range devices {
			matches, err := selects(t, class, d)
			if err != nil { // such a claim would stay pending
				t.Errorf("%s: %s: %v", name, device, err)
			}
			if matches {
				got = append(got, device)
			}
		}
		if slices.Sort(got); !slices.Equal(got, selected) {
			t.Errorf("%s selects %q, want %q", name, got, selected)
		}
	}
}

// selects reports whether all selectors of a class match a device, as the scheduler evaluates them.
func selects(t *testing.T, class *resourcev1.DeviceClass, d dracel.Device) (bool, error) {
	t.Helper()
	for _, s := range class.Spec.Selectors {
		result := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true}).CompileCELExpression(s.CEL.Expression, dracel.Options{})
		if result.Error != nil {
			t.Fatalf("%s: %v", class.Name, result.Error)
		}
		if selects, _, err := result.DeviceMatches(t.Context(), d); err != nil || !selects {
			return false, err
		}
	}
	return true, nil
}

// checkDRARights checks that the account can do what the libraries of DRA do, and no more.
func checkDRARights(t *testing.T) {
	allowed := map[string][]string{
		"nodes": {"get"}, "resourceclaims": {"get"}, "resourceslices": {"create", "delete", "list", "update", "watch"},
		"resourceclaimtemplates": nil, "deviceclasses": nil, "resourceclaims/status": nil, "resourceclaims/binding": nil, "secrets": nil,
	}
	client := agentClient(t, "n1")
	for resource, want := range allowed {
		var got []string
		for _, verb := range []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"} {
			group := resourcev1.GroupName
			if resource == "nodes" || resource == "secrets" {
				group = ""
			}
			name, subresource, _ := strings.Cut(resource, "/")
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: verb, Group: group, Resource: name, Subresource: subresource,
					Namespace: "default",
				},
			}}
			result, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if result.Status.Allowed {
				got = append(got, verb)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("the account can %v %s, want %v", got, resource, want)
		}
	}
}

// slice returns a ResourceSlice of a node, or of all nodes if that is "".
func slice(name, driver, nodeName string) *resourcev1.ResourceSlice {
	s := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: driver, Pool: resourcev1.ResourcePool{Name: "pool", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}},
		},
	}
	if s.Spec.NodeName = &nodeName; nodeName == "" {
		all := true
		s.Spec.NodeName, s.Spec.AllNodes = nil, &all
	}
	return s
}

func refusedBySlicePolicy(err error) error { return refusedByPolicy(err, "resource-slices") }

// checkSlicePolicy checks that a token writes only slices of its node and of the agent's driver.
func checkSlicePolicy(t *testing.T) {
	slices := theCluster.client.ResourceV1().ResourceSlices()
	own := agentClient(t, "n1").ResourceV1().ResourceSlices()
	create := func(s *resourcev1.ResourceSlice) error {
		_, err := own.Create(t.Context(), s, metav1.CreateOptions{})
		return err
	}
	// The API server reads the policies a moment later.
	_, err := process.Await(t.Context(), node.Timeout,
		func(context.Context) error { return refusedBySlicePolicy(create(slice("early", draDriver, "n2"))) })
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		token, driver, node string
		admitted            bool
	}{
		"own-node":       {"n1", draDriver, "n1", true},
		"other-node":     {"n1", draDriver, "n2", false},
		"all-nodes":      {"n1", draDriver, "", false},
		"other-driver":   {"n1", "gpu.example.com", "n1", false},
		"token-of-none":  {"", draDriver, "n1", false},
		"none-all-nodes": {"", draDriver, "", false},
	} {
		client := agentClient(t, c.token).ResourceV1().ResourceSlices()
		// A slice that is there already, created by another user, whom the policy does not concern.
		present, err := slices.Create(t.Context(), slice(name+"-present", c.driver, c.node), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, created := client.Create(t.Context(), slice(name, c.driver, c.node), metav1.CreateOptions{})
		present.Spec.Devices[0].Name = "gpu-1"
		_, updated := client.Update(t.Context(), present, metav1.UpdateOptions{})
		deleted := client.Delete(t.Context(), present.Name, metav1.DeleteOptions{})
		for verb, err := range map[string]error{"create": created, "update": updated, "delete": deleted} {
			if !c.admitted {
				err = refusedBySlicePolicy(err)
			}
			if err != nil {
				t.Errorf("%s: %s: %v", name, verb, err)
			}
		}
	}
	list, err := slices.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		if err := slices.Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
}

// TestDRADocument checks that an API server accepts every manifest of docs/dra.md, with every field. e2e/cluster applies them.
func TestDRADocument(t *testing.T) {
	blocks, err := manifests.Read(filepath.Join("..", "..", "docs", "dra.md"))
	if err != nil || len(blocks) < 8 {
		t.Fatalf("%d blocks: %v", len(blocks), err)
	}
	c := newCreator(t)
	for _, block := range blocks {
		t.Run(block.Heading, func(t *testing.T) {
			for _, object := range block.Objects {
				namespace := object.GetKind() == "Namespace" // the objects in it need it
				created, err := c.create(t.Context(), object, !namespace)
				if meta.IsNoMatchError(err) && object.GetKind() == "DeviceTaintRule" {
					t.Skip("this release of Kubernetes has no DeviceTaintRules of version v1")
				}
				if err != nil {
					t.Errorf("%s %s: %v", object.GetKind(), object.GetName(), err)
					continue
				}
				if namespace {
					t.Cleanup(func() { c.remove(t, created) })
				}
				// The API server drops fields of features that it lacks.
				if lost := missing(object.Object["spec"], created.Object["spec"], "spec"); lost != "" {
					t.Errorf("%s %s: the API server dropped %s", object.GetKind(), object.GetName(), lost)
				}
			}
		})
	}
}

// missing returns the path of a value of want that got lacks; "" if it has all.
func missing(want, got any, path string) string {
	switch w := want.(type) {
	case map[string]any:
		g, _ := got.(map[string]any)
		for key, value := range w {
			if _, ok := g[key]; !ok {
				return path + "." + key
			}
			if lost := missing(value, g[key], path+"."+key); lost != "" {
				return lost
			}
		}
	case []any:
		g, _ := got.([]any)
		for i, value := range w {
			if i >= len(g) {
				return fmt.Sprintf("%s[%d]", path, i)
			}
			if lost := missing(value, g[i], fmt.Sprintf("%s[%d]", path, i)); lost != "" {
				return lost
			}
		}
	}
	return ""
}
