package reclaim

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// LoadObjects reads the objects of a file, as `kubectl get -o yaml` writes them. notes are on objects that are ignored.
func LoadObjects(file string) (o Objects, notes []string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Objects{}, nil, fmt.Errorf("--objects: %w", err)
	}
	if o, notes, err = ParseObjects(text); err != nil {
		return Objects{}, nil, fmt.Errorf("%s: %w", file, err)
	}
	for i, n := range notes {
		notes[i] = file + ": " + n
	}
	return o, notes, nil
}

// ParseObjects returns the Pods, their owners and Namespaces of YAML documents, which may be lists. It ignores other kinds, with a note for
// each kind.
func ParseObjects(text []byte) (Objects, []string, error) {
	all, err := documents(text)
	if err != nil {
		return Objects{}, nil, err
	}
	r := objectReader{
		Objects: Objects{Namespaces: make(map[string]map[string]string), Owners: make(map[Ref]*Owner), Partial: true},
		places:  make(map[Ref]string), ignored: make(map[string]bool),
	}
	for _, d := range all {
		if err := r.add(d.json, "", fmt.Sprintf("document %d", d.number)); err != nil {
			return Objects{}, nil, err
		}
	}
	if len(all) == 0 {
		return Objects{}, nil, errors.New("expected YAML documents such as Pods and Deployments, got none")
	}
	r.addReplicaSets()
	return r.Objects, r.notes, nil
}

// objectReader collects objects.
type objectReader struct {
	Objects
	places  map[Ref]string // where each object is in the file
	ignored map[string]bool
	notes   []string
}

// manifest is what all kinds have.
type manifest struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
	Items           []json.RawMessage `json:"items"` // of a list
}

// add adds an object, or those of a list. defaultKind is the kind of an item that has none, as in a PodList.
func (r *objectReader) add(document []byte, defaultKind, place string) error {
	var m manifest
	if err := json.Unmarshal(document, &m); err != nil {
		return fmt.Errorf("%s: expected a Kubernetes object: %w", place, err)
	}
	m.Kind = cmp.Or(m.Kind, defaultKind)
	if m.Kind == "" {
		return fmt.Errorf("%s: kind: required; expected a Kubernetes object, or a List of them", place)
	}
	if kind, isList := strings.CutSuffix(m.Kind, "List"); isList {
		if kind != "" { // an item of a PodList may have neither
			kind = m.APIVersion + "/" + kind
		}
		for i, item := range m.Items {
			if err := r.add(item, kind, fmt.Sprintf("%s, items[%d]", place, i)); err != nil {
				return err
			}
		}
		return nil
	}
	if i := strings.LastIndexByte(m.Kind, '/'); i >= 0 { // of a list
		m.APIVersion, m.Kind = m.Kind[:i], m.Kind[i+1:]
	}
	if want, supported := kindGroups[m.Kind]; !supported || groupOf(m.APIVersion) != want {
		if name := strings.TrimPrefix(m.APIVersion+" "+m.Kind, " "); !r.ignored[name] {
			r.ignored[name] = true
			r.notes = append(r.notes, fmt.Sprintf("%s: %s is ignored; expected Pod, Deployment, ReplicaSet, StatefulSet, Job, CronJob or Namespace",
				place, name))
		}
		return nil
	}
	if m.Metadata.Name == "" {
		return fmt.Errorf("%s: metadata.name: required; expected the name of the %s", place, m.Kind)
	}
	ref := Ref{Kind: m.Kind, Name: m.Metadata.Name}
	if m.Kind != kindNamespace {
		m.Metadata.Namespace = cmp.Or(m.Metadata.Namespace, metav1.NamespaceDefault)
		ref.Namespace = m.Metadata.Namespace
	}
	if other, twice := r.places[ref]; twice {
		return fmt.Errorf("%s: %s is also in %s; expected each object once", place, ref, other)
	}
	r.places[ref] = place
	if owners := m.Metadata.OwnerReferences; len(owners) == 1 && owners[0].Controller == nil {
		owners[0].Controller = new(true) // the author of the file left it out: the API server has it for every controller
	}
	if err := r.decode(document, m); err != nil {
		return fmt.Errorf("%s: %s: %w", place, ref, err)
	}
	return nil
}

// decode adds an object of a supported kind.
func (r *objectReader) decode(document []byte, m manifest) error {
	var object runtime.Object
	switch m.Kind {
	case kindNamespace:
		r.Namespaces[m.Metadata.Name] = m.Metadata.Annotations
		return nil
	case kindPod:
		var pod corev1.Pod
		if err := json.Unmarshal(document, &pod); err != nil {
			return err
		}
		pod.ObjectMeta = m.Metadata
		if phase := pod.Status.Phase; len(pod.Status.Conditions) == 0 && (phase == "" || phase == corev1.PodRunning) &&
			!pod.CreationTimestamp.IsZero() {
			// The author of the file left them out: the kubelet writes them for every pod that runs.
			pod.Status.Conditions = []corev1.PodCondition{{
				Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: pod.CreationTimestamp,
			}}
		}
		r.Pods = append(r.Pods, pod)
		return nil
	case kindDeployment:
		object = new(appsv1.Deployment)
	case kindReplicaSet:
		object = new(appsv1.ReplicaSet)
	case kindStatefulSet:
		object = new(appsv1.StatefulSet)
	case kindJob:
		object = new(batchv1.Job)
	case kindCronJob:
		object = new(batchv1.CronJob)
	}
	if err := json.Unmarshal(document, object); err != nil {
		return err
	}
	o := ownerOf(object)
	o.Namespace, o.Controller = m.Metadata.Namespace, metav1.GetControllerOf(&m.Metadata)
	r.Owners[o.Ref] = o
	return nil
}

// addReplicaSets adds the missing ReplicaSets of Deployments: people export pods and Deployments. The name of a Deployment's ReplicaSet is
// its own and the label pod-template-hash.
func (r *objectReader) addReplicaSets() {
	for i := range r.Pods {
		controller := metav1.GetControllerOf(&r.Pods[i])
		if controller == nil {
			continue
		}
		ref := ownerRef(r.Pods[i].Namespace, *controller)
		if ref.Kind != kindReplicaSet || r.Owners[ref] != nil {
			continue
		}
		name, isOf := strings.CutSuffix(ref.Name, "-"+r.Pods[i].Labels[appsv1.DefaultDeploymentUniqueLabelKey])
		deployment := r.Owners[Ref{ref.Namespace, kindDeployment, name}]
		if !isOf || deployment == nil {
			continue
		}
		r.Owners[ref] = &Owner{
			Ref: ref, UID: controller.UID, Replicas: deployment.Replicas,
			Controller: &metav1.OwnerReference{APIVersion: "apps/v1", Kind: kindDeployment, Name: name, UID: deployment.UID},
		}
	}
}

// document is one of several YAML documents.
type document struct {
	number int // from 1
	json   []byte
}

// documents returns the YAML documents of a text without those that are empty.
func documents(text []byte) ([]document, error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	var all []document
	for n := 1; ; n++ {
		part, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		d, err := yaml.YAMLToJSONStrict(part)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if string(d) != "null" {
			all = append(all, document{n, d})
		}
	}
}
