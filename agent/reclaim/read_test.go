package reclaim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

func TestReadObjects(t *testing.T) {
	g := newAPIRig(t)
	for i := range 2*pageSize + 1 {
		g.Put(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "many", Name: fmt.Sprintf("p%04d", i)},
			Status:     corev1.PodStatus{Phase: corev1.PodPending},
		})
	}
	for _, phase := range []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed} {
		g.Put(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "many", Name: "ended-" + strings.ToLower(string(phase))},
			Status:     corev1.PodStatus{Phase: phase},
		})
	}
	g.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "many"}})
	g.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
	g.Put(&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "other"}})
	g.Put(&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "ending", DeletionTimestamp: new(metav1.Now())}})
	a, _ := g.connect()
	all, errs := a.readObjects(t.Context(), Policy{Namespaces: []string{"missing", "a", "many"}})
	if len(errs) != 1 || !strings.HasPrefix(errs[0], "missing: ") {
		t.Errorf("errors %q", errs)
	}
	if got := slices.Sorted(maps.Keys(all.Namespaces)); !slices.Equal(got, []string{"a", "many"}) || all.Namespaces["a"]["team"] != "red" {
		t.Errorf("namespaces %v", all.Namespaces)
	}
	if n := len(all.Pods); n != 1+2*pageSize+1 {
		t.Errorf("%d pods", n)
	}
	var kinds []string
	for ref := range all.Owners {
		kinds = append(kinds, ref.Kind+" "+ref.Name)
	}
	slices.Sort(kinds)
	if want := []string{
		"CronJob cronjob", "Deployment deployment", "Job job", "ReplicaSet replicaset",
		"StatefulSet statefulset",
	}; !slices.Equal(kinds, want) {
		t.Errorf("owners %q", kinds)
	}
	for _, r := range g.Requests() {
		switch {
		case r.Verb != "get" && r.Verb != "list":
			t.Errorf("a read changes something: %v", r)
		case r.Resource != "namespaces" && !strings.Contains(r.Path, "/namespaces/a/") && !strings.Contains(r.Path, "/namespaces/many/"):
			t.Errorf("a read of something else: %s", r.Path)
		}
	}
}

// A namespace that cannot be read as a whole is left out: without some of its pods an owner would look idle.
func TestReadObjectsOfUnreadableNamespace(t *testing.T) {
	for _, request := range []string{
		"get namespaces", "list pods", "list replicasets", "list deployments", "list statefulsets", "list jobs", "list cronjobs", "page 2",
	} {
		t.Run(request, func(t *testing.T) {
			g := newAPIRig(t)
			g.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "b"}})
			for i := range pageSize + 1 {
				g.Put(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprintf("p%04d", i)}})
			}
			g.Put(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "last"}})
			pages := 0
			g.Answer(func(r apiservertest.Request) error {
				if r.Resource == "pods" {
					pages++
				}
				if r.Verb+" "+r.Resource == request && !strings.Contains(r.Path, "/namespaces/b") ||
					request == "page 2" && pages == 2 && r.Resource == "pods" {
					return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no"))
				}
				return nil
			})
			a, _ := g.connect()
			all, errs := a.readObjects(t.Context(), Policy{Namespaces: []string{"a", "b"}})
			if len(errs) != 1 || len(all.Namespaces) != 1 || len(all.Owners) != 0 || len(all.Pods) != 1 || all.Pods[0].Name != "last" {
				t.Errorf("errors %q, namespaces %v, %d owners, %d pods", errs, all.Namespaces, len(all.Owners), len(all.Pods))
			}
		})
	}
}

func TestTrimPod(t *testing.T) {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "p", Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "long", "keep": "this"},
			OwnerReferences: []metav1.OwnerReference{{Kind: kindJob, Name: "j", Controller: new(true)}},
			ManagedFields:   make([]metav1.ManagedFieldsEntry, 1),
		},
		Spec: corev1.PodSpec{
			NodeName: "n", PriorityClassName: "high", Volumes: make([]corev1.Volume, 9),
			InitContainers: []corev1.Container{{Name: "s", RestartPolicy: new(corev1.ContainerRestartPolicyAlways)}},
			Containers: []corev1.Container{{
				Name: "c", Image: "i",
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": {}}},
			}},
		},
		Status: corev1.PodStatus{
			Phase:      corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	got := trimPod(p)
	c := got.Spec.Containers[0]
	if got.ManagedFields != nil || len(got.Annotations) != 1 || got.Spec.Volumes != nil || c.Image != "" {
		t.Errorf("not trimmed: %+v", got)
	}
	if got.OwnerReferences[0].Name != "j" || got.Spec.NodeName != "n" || got.Spec.PriorityClassName != "high" || c.Name != "c" ||
		len(c.Resources.Limits) != 1 || got.Spec.InitContainers[0].RestartPolicy == nil || !ready(&got) {
		t.Errorf("trimmed too much: %+v", got)
	}
}

func TestOwnerOf(t *testing.T) {
	entry := func(manager, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, FieldsV1: metav1.NewFieldsV1(fields)}
	}
	const replicas = `{"f:spec":{"f:replicas":{},"f:template":{}}}`
	for name, tt := range map[string]struct {
		entries []metav1.ManagedFieldsEntry
		want    string
	}{
		"none":          {nil, ""},
		"another field": {[]metav1.ManagedFieldsEntry{entry("kubectl", `{"f:spec":{"f:template":{}},"f:status":{"f:replicas":{}}}`)}, ""},
		"one":           {[]metav1.ManagedFieldsEntry{entry("kubectl", replicas)}, "kubectl"},
		"this command":  {[]metav1.ManagedFieldsEntry{entry(fieldManager, replicas)}, fieldManager},
		"two":           {[]metav1.ManagedFieldsEntry{entry(fieldManager, replicas), entry("flux", replicas)}, "flux"},
		"two, reversed": {[]metav1.ManagedFieldsEntry{entry("flux", replicas), entry(fieldManager, replicas)}, "flux"},
		"invalid":       {[]metav1.ManagedFieldsEntry{entry("flux", `[`), {Manager: "empty"}, entry("kubectl", replicas)}, "kubectl"},
	} {
		t.Run(name, func(t *testing.T) {
			o := ownerOf(&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{ManagedFields: tt.entries}})
			if o.ChangedBy != tt.want || o.Replicas != 1 { // 1 is the API's default
				t.Errorf("%+v", o)
			}
		})
	}
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Name: "j", OwnerReferences: []metav1.OwnerReference{{Kind: "Other"}, {Kind: kindCronJob, Name: "c", Controller: new(true)}},
		ManagedFields: []metav1.ManagedFieldsEntry{entry("kueue", `{"f:spec":{"f:suspend":{}}}`)},
	}, Spec: batchv1.JobSpec{Suspend: new(true), Parallelism: new(int32(4))}}
	job.Status.Active = 4
	if o := ownerOf(job); o.Kind != kindJob || o.Pods != 4 || !o.Suspended || o.Replicas != 1 || o.ChangedBy != "kueue" ||
		o.Controller == nil || o.Controller.Name != "c" {
		t.Errorf("%+v", o)
	}
}

// A scale to 0 keeps the volumes unless the StatefulSet deletes them, which is not the default.
func TestOwnerOfStatefulSet(t *testing.T) {
	set := &appsv1.StatefulSet{Status: appsv1.StatefulSetStatus{Replicas: 3}}
	policy := &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenDeleted: "Delete", WhenScaled: "Retain"}
	for _, tt := range []struct {
		policy  *appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy
		deletes bool
	}{{nil, false}, {policy, false}, {&appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenScaled: "Delete"}, true}} {
		set.Spec.PersistentVolumeClaimRetentionPolicy = tt.policy
		if o := ownerOf(set); o.DeletesVolumes != tt.deletes || o.Pods != 3 {
			t.Errorf("%+v: %+v", tt.policy, o)
		}
	}
}

func TestFindAgents(t *testing.T) {
	agent := func(name, node, ip string, change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: name, Labels: map[string]string{"app": "agent"}}}
		p.UID, p.CreationTimestamp = "u", metav1.Unix(1000, 0)
		p.Spec.NodeName, p.Status.PodIP = node, ip
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		p.Spec.Containers = []corev1.Container{{Name: "proxy"}, {
			Name:  "agent",
			Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9400}},
		}}
		if change != nil {
			change(p)
		}
		return p
	}
	unready := func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
	newer := func(p *corev1.Pod) { p.CreationTimestamp.Time = p.CreationTimestamp.Add(time.Hour) }
	intruder := agent("b", "n", "10.0.0.8", func(p *corev1.Pod) { p.Namespace = "tenant"; newer(p) })
	for name, tt := range map[string]struct {
		pods []*corev1.Pod
		port int
		want map[string]string // nil: an error
	}{
		"none":    {nil, 0, nil},
		"IPv4":    {[]*corev1.Pod{agent("a", "n", "10.0.0.7", nil)}, 0, map[string]string{"n": "http://10.0.0.7:9400"}},
		"IPv6":    {[]*corev1.Pod{agent("a", "n", "fd00::7", nil)}, 0, map[string]string{"n": "http://[fd00::7]:9400"}},
		"port":    {[]*corev1.Pod{agent("a", "n", "10.0.0.7", nil)}, 80, map[string]string{"n": "http://10.0.0.7:80"}},
		"no port": {[]*corev1.Pod{agent("a", "n", "10.0.0.7", func(p *corev1.Pod) { p.Spec.Containers = nil })}, 0, nil},
		"no IP":   {[]*corev1.Pod{agent("a", "n", "", nil), agent("b", "m", "10.0.0.8", nil)}, 0, map[string]string{"m": "http://10.0.0.8:9400"}},
		"unready": {[]*corev1.Pod{agent("a", "n", "10.0.0.7", unready)}, 0, nil},
		"ending":  {[]*corev1.Pod{agent("a", "n", "10.0.0.7", func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) })}, 0, nil},
		"newest": {
			[]*corev1.Pod{agent("a", "n", "10.0.0.7", newer), agent("b", "n", "10.0.0.8", nil)},
			0,
			map[string]string{"n": "http://10.0.0.7:9400"},
		},
		"replaced": {[]*corev1.Pod{
			agent("a", "n", "10.0.0.7", nil),
			agent("b", "n", "10.0.0.8", func(p *corev1.Pod) { newer(p); unready(p) }),
		}, 0, map[string]string{"n": "http://10.0.0.7:9400"}},
		"all namespaces":                 {[]*corev1.Pod{agent("a", "n", "10.0.0.7", nil)}, 0, map[string]string{"n": "http://10.0.0.7:9400"}},
		"all namespaces, and a tenant's": {[]*corev1.Pod{agent("a", "n", "10.0.0.7", nil), intruder}, 0, nil},
		"its namespace, and a tenant's": {
			[]*corev1.Pod{agent("a", "n", "10.0.0.7", nil), intruder},
			0,
			map[string]string{"n": "http://10.0.0.7:9400"},
		},
		"others": {[]*corev1.Pod{
			agent("a", "n", "10.0.0.7", nil), agent("b", "m", "10.0.0.8", func(p *corev1.Pod) { p.Namespace = "other" }),
			agent("c", "o", "10.0.0.9", func(p *corev1.Pod) { p.Labels = nil }),
		}, 0, map[string]string{"n": "http://10.0.0.7:9400"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := apiservertest.New(t)
			for _, p := range tt.pods {
				s.Put(p)
			}
			a, _ := connectTo(t, s.Kubeconfig(t))
			a.agents.Port = tt.port
			if strings.HasPrefix(name, "all namespaces") {
				a.agents.Namespace = ""
			}
			got, err := a.findAgents(t.Context())
			if (err != nil) != (tt.want == nil) || !maps.Equal(got, tt.want) {
				t.Errorf("%v, error %v", got, err)
			}
		})
	}
}
