package reclaim

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestParseObjects(t *testing.T) {
	o, notes, err := ParseObjects([]byte(`# kubectl get -o yaml
apiVersion: v1
kind: Namespace
metadata: {name: team-a, annotations: {a: b}}
---
---
apiVersion: v1
kind: List
items:
- apiVersion: apps/v1
  kind: Deployment
  metadata: {name: web, namespace: team-a, uid: u1, generation: 7, resourceVersion: "12", labels: {l: m}, annotations: {gpu-node-agent/reclaimed: x}}
  spec: {replicas: 3, template: {spec: {containers: [{name: c, image: x}]}}}
- {apiVersion: v1, kind: Service, metadata: {name: web}}
- {apiVersion: v1, kind: Service, metadata: {name: db}}
- {apiVersion: batch.volcano.sh/v1alpha1, kind: Job, metadata: {name: train}}
---
apiVersion: v1
kind: PodList
items:
- metadata: {name: a, namespace: team-a, labels: {pod-template-hash: 5d9f}, ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web-5d9f, uid: u2}]}
  spec: {nodeName: n1}
- metadata: {name: b}
---
{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db}}
---
{apiVersion: batch/v1, kind: Job, metadata: {name: train, ownerReferences: [{apiVersion: batch/v1, kind: CronJob, name: nightly}]}, spec: {suspend: true}}
---
{apiVersion: batch/v1, kind: CronJob, metadata: {name: nightly}}
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(notes) != 2 || !strings.Contains(notes[0], "document 2, items[1]: v1 Service") ||
		!strings.Contains(notes[1], "batch.volcano.sh/v1alpha1 Job") {
		t.Errorf("notes %q", notes)
	}
	if !o.Partial || len(o.Namespaces) != 1 || o.Namespaces["team-a"]["a"] != "b" {
		t.Errorf("partial %v, namespaces %v", o.Partial, o.Namespaces)
	}
	var pods []string
	for _, p := range o.Pods {
		pods = append(pods, p.Namespace+"/"+p.Name+" "+p.Spec.NodeName)
	}
	if !slices.Equal(pods, []string{"team-a/a n1", "default/b "}) {
		t.Errorf("pods %q", pods)
	}
	web := o.Owners[Ref{"team-a", kindDeployment, "web"}]
	if web == nil || web.Replicas != 3 || web.UID != "u1" || web.Generation != 7 || web.ResourceVersion != "12" || web.Labels["l"] != "m" ||
		web.Annotations[recordAnnotation] != "x" {
		t.Errorf("Deployment %+v", web)
	}
	if s := o.Owners[Ref{"default", kindStatefulSet, "db"}]; s == nil || s.Replicas != 1 {
		t.Errorf("StatefulSet %+v", s)
	}
	if j := o.Owners[Ref{"default", kindJob, "train"}]; j == nil || !j.Suspended || j.Controller == nil || j.Controller.Name != "nightly" {
		t.Errorf("Job %+v", j)
	}
	if o.Owners[Ref{"default", kindCronJob, "nightly"}] == nil {
		t.Error("no CronJob")
	}
	// The ReplicaSet is not in the file.
	found := candidateOf(&o.Pods[0], o.Owners)
	if found.owner != web || found.reason != "" {
		t.Errorf("the pod belongs to %+v", found)
	}
	if len(o.Owners) != 5 {
		t.Errorf("%d owners", len(o.Owners))
	}
}

func TestParseObjectsWithoutReplicaSet(t *testing.T) {
	pod := func(labels, replicaSet string) string {
		return "{apiVersion: v1, kind: Pod, metadata: {name: a, labels: {" + labels +
			"}, ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: " + replicaSet + ", controller: true}]}}\n"
	}
	const deployment = "---\n{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}\n"
	for name, c := range map[string]struct {
		text, want string
		reason     Reason
	}{
		"Deployment by the hash": {pod("pod-template-hash: x1", "web-x1") + deployment, "Deployment default/web", ""},
		"no hash":                {pod("", "web-x1") + deployment, "ReplicaSet default/web-x1", ReasonUnknown},
		"other hash":             {pod("pod-template-hash: x2", "web-x1") + deployment, "ReplicaSet default/web-x1", ReasonUnknown},
		"no Deployment":          {pod("pod-template-hash: x1", "web-x1"), "ReplicaSet default/web-x1", ReasonUnknown},
		"ReplicaSet in the file": {pod("pod-template-hash: x1", "web-x1") + deployment +
			"---\n{apiVersion: apps/v1, kind: ReplicaSet, metadata: {name: web-x1}}", "ReplicaSet default/web-x1", ""},
		"Deployment in namespace": {
			pod("pod-template-hash: x1", "web-x1") + strings.Replace(deployment, "{name", "{namespace: other, name", 1),
			"ReplicaSet default/web-x1", ReasonUnknown,
		},
	} {
		o, _, err := ParseObjects([]byte(c.text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if found := candidateOf(&o.Pods[0], o.Owners); found.String() != c.want || found.reason != c.reason {
			t.Errorf("%s: %s, %q", name, found.Ref, found.reason)
		}
	}
}

// A pod of a person's file is Ready since its creation, unless the file says otherwise.
func TestParseObjectsReady(t *testing.T) {
	for text, want := range map[string]bool{
		"metadata: {name: a, creationTimestamp: 2026-03-04T10:00:00Z}":                           true,
		"metadata: {name: a, creationTimestamp: 2026-03-04T10:00:00Z}\nstatus: {phase: Running}": true,
		"metadata: {name: a, creationTimestamp: 2026-03-04T10:00:00Z}\nstatus: {phase: Pending}": false,
		"metadata: {name: a, creationTimestamp: 2026-03-04T10:00:00Z}\nstatus: {phase: Running, conditions: [{type: PodScheduled, status: " +
			"'True'}]}": false,
		"metadata: {name: a, creationTimestamp: 2026-03-04T10:00:00Z}\nstatus: {phase: Running, conditions: [{type: Ready, status: 'False'}]}": false,
		"metadata: {name: a}\nstatus: {phase: Running}": false,
	} {
		o, _, err := ParseObjects([]byte("apiVersion: v1\nkind: Pod\n" + text))
		if err != nil || len(o.Pods) != 1 || ready(&o.Pods[0]) != want {
			t.Errorf("%s: %+v, %v", text, o.Pods, err)
		}
	}
}

func TestParseObjectsErrors(t *testing.T) {
	for text, want := range map[string][]string{
		"":                            {"got none"},
		"# only a comment":            {"got none"},
		"a: b":                        {"document 1: ", "kind: required"},
		"[]":                          {"document 1: ", "Kubernetes object"},
		"{kind: Pod, apiVersion: v1}": {"document 1: ", "metadata.name"},
		"{kind: Service, apiVersion: v1}\n---\n{kind: Pod, apiVersion: v1, metadata: {name: a}}\n---\n{kind: Pod, apiVersion: v1, metadata: " +
			"{name: a, namespace: default}}": {"document 3: ", "Pod default/a", "document 2"},
		"{kind: Deployment, apiVersion: apps/v1, metadata: {name: a}, spec: {replicas: many}}": {
			"document 1: ", "Deployment default/a",
			"replicas",
		},
		"{kind: List, items: [{kind: Pod, apiVersion: v1, metadata: {name: 1}}]}": {"document 1, items[0]: ", "name"},
		"{kind: List, items: [{a: b}]}":                                           {"document 1, items[0]: ", "kind"},
		"{kind: Pod\n---\na: b":                                                   {"document 1: ", "yaml"},
		"a: b\n--- !x\n":                                                          {"document 1: "},
	} {
		o, _, err := ParseObjects([]byte(text))
		if err == nil {
			t.Errorf("%s\n%+v", text, o)
			continue
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s\n%v\nlacks %q", text, err, part)
			}
		}
	}
}

// FuzzParseObjects checks that every object has a name and a namespace, and that a plan can be made from all.
func FuzzParseObjects(f *testing.F) {
	for _, text := range []string{
		"", "{kind: Pod, apiVersion: v1, metadata: {name: a}}\n---\n", "kind: List\nitems: [{kind: List, items: []}, null, 1]",
		"{kind: PodList, apiVersion: v1, items: [{metadata: {name: a}}]}",
		"{kind: Pod, apiVersion: v1, metadata: {name: a, labels: {pod-template-hash: x}, ownerReferences: [{apiVersion: apps/v1, kind: " +
			"ReplicaSet, name: d-x}]}, spec: {nodeName: n1, containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}}\n---\n{kind: Deployment, " +
			"apiVersion: apps/v1, metadata: {name: d, annotations: {gpu-node-agent/reclaimed: '{\"replicas\":1}'}}}",
		"{kind: ReplicaSet, apiVersion: apps/v1, metadata: {name: a, ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: a, " +
			"controller: true}]}}",
		"{kind: Deployment, apiVersion: apps/v1, metadata: {name: a, ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: a}]}}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		o, _, err := ParseObjects(text)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a text")
			}
			return
		}
		w := newTestWorld()
		p := testPolicy()
		p.Namespaces = append(p.Namespaces, metav1.NamespaceDefault)
		for _, pod := range o.Pods {
			if pod.Namespace == "" || pod.Name == "" {
				t.Errorf("%+v", pod.ObjectMeta)
			}
		}
		for ref, owner := range o.Owners {
			if ref != owner.Ref || ref.Namespace == "" || ref.Name == "" || kindGroups[ref.Kind] == "" {
				t.Errorf("%v: %+v", ref, owner)
			}
		}
		w.Objects = o
		for _, a := range plan(p, w.World).Actions {
			if a.GPUHours < 0 || len(a.Pods) == 0 || a.owner == nil && a.pod == nil {
				t.Errorf("%+v", a)
			}
		}
		planUndo(p, w.World)
	})
}
