package dra

import (
	"context"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// publishTimeout limits one request. A watch has no limit.
const publishTimeout = 10 * time.Second

// sliceClient is the client that the controller of ResourceSlices gets. It limits the time of requests and reports to the publisher. It
// repeats the informer's requests itself, because the informer's pauses grow to a minute.
type sliceClient struct {
	kubernetes.Interface
	p *publisher
}

// ResourceV1 returns the client of the only API group and version that the controller may use.
func (c sliceClient) ResourceV1() resourceclient.ResourceV1Interface {
	return resourceV1{c.Interface.ResourceV1(), c}
}

type resourceV1 struct {
	resourceclient.ResourceV1Interface
	c sliceClient
}

func (r resourceV1) ResourceSlices() resourceclient.ResourceSliceInterface {
	return sliceRequests{r.ResourceV1Interface.ResourceSlices(), r.c}
}

type sliceRequests struct {
	resourceclient.ResourceSliceInterface
	c sliceClient
}

// List repeats until the API server answers.
func (s sliceRequests) List(ctx context.Context, opts metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
	return untilAnswered(ctx, s.c.p, func() (*resourceapi.ResourceSliceList, error) {
		ctx, cancel := context.WithTimeout(ctx, publishTimeout)
		defer cancel()
		return s.ResourceSliceInterface.List(ctx, opts)
	})
}

// Watch repeats until the API server answers.
func (s sliceRequests) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	w, err := untilAnswered(ctx, s.c.p, func() (watch.Interface, error) { return s.ResourceSliceInterface.Watch(ctx, opts) })
	if err != nil && w != nil { // answered while ctx ended; the informer stops no watch that came with an error
		w.Stop()
		return nil, err
	}
	return w, err
}

// untilAnswered repeats a request of the informer until it succeeds or has an error that the informer handles.
func untilAnswered[T any](ctx context.Context, p *publisher, request func() (T, error)) (answer T, err error) {
	ok := p.retry(ctx, opWatch, func() error {
		answer, err = request()
		err = withoutNotFound(err, errUnsupported)
		switch reasonOf(err) {
		case reasonUnreachable, reasonForbidden, reasonUnsupported:
			if !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) { // then the informer must list again
				return err
			}
		}
		return nil
	})
	if !ok {
		return answer, ctx.Err()
	}
	return answer, err
}

// Create sets the owner anew, because the node may have been deleted and created again: the garbage collector deletes what the former
// one owns.
func (s sliceRequests) Create(ctx context.Context, slice *resourceapi.ResourceSlice, opts metav1.CreateOptions) (*resourceapi.ResourceSlice,
	error,
) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	node, err := s.c.CoreV1().Nodes().Get(ctx, s.c.p.node, metav1.GetOptions{})
	if err != nil {
		return nil, withoutNotFound(err, errNode)
	}
	slice.OwnerReferences[0].UID = node.UID
	stored, err := s.ResourceSliceInterface.Create(ctx, slice, opts)
	s.c.p.refuse(slice, err)
	return stored, withoutNotFound(err, errUnsupported)
}

func (s sliceRequests) Update(ctx context.Context, slice *resourceapi.ResourceSlice, opts metav1.UpdateOptions) (*resourceapi.ResourceSlice,
	error,
) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	stored, err := s.ResourceSliceInterface.Update(ctx, slice, opts)
	s.c.p.refuse(slice, err)
	return stored, withoutNotFound(err, errDeleted)
}

func (s sliceRequests) Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return s.ResourceSliceInterface.Delete(ctx, name, opts)
}

// withoutNotFound returns other for "not found".
func withoutNotFound(err, other error) error {
	if apierrors.IsNotFound(err) {
		return other
	}
	return err
}

// sliceSelector selects the slices of a driver on a node.
func sliceSelector(driver, node string) string {
	return fields.Set{resourceapi.ResourceSliceSelectorDriver: driver, resourceapi.ResourceSliceSelectorNodeName: node}.String()
}

// features are what the API server lacks.
type features struct{ noTaints, noShares bool }

// The feature gates of the API server that keep the fields of taints and shares.
const (
	taintsGate = "DRADeviceTaints"
	sharesGate = "DRAConsumableCapacity"
)

// gates returns the feature gates that are off.
func (f features) gates() (off []string) {
	if f.noTaints {
		off = append(off, taintsGate)
	}
	if f.noShares {
		off = append(off, sharesGate)
	}
	return off
}

// without returns f without the features of some gates.
func (f features) without(gates []string) features {
	return features{f.noTaints || slices.Contains(gates, taintsGate), f.noShares || slices.Contains(gates, sharesGate)}
}

// neededBy reports whether a pool has a field that the API server would drop.
func (f features) neededBy(pool *Pool) bool {
	for _, s := range pool.Slices {
		for _, d := range s.Devices {
			if f.noTaints && len(d.Taints) > 0 || f.noShares && d.AllowMultipleAllocations != nil {
				return true
			}
		}
	}
	return false
}

// findLacks returns what the API server lacks. It makes the API server check a slice with the fields in question, without storing it: if
// a taint were dropped from a stored slice, the scheduler could choose an unhealthy device.
func findLacks(ctx context.Context, client kubernetes.Interface, driver, node string) (features, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	yes, all := true, resource.MustParse("2Mi")
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "gpu-node-agent-dry-run-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name:                     "probe",
				Taints:                   []resourceapi.DeviceTaint{{Key: Domain + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
				AllowMultipleAllocations: &yes,
				Capacity:                 map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: all}},
			}},
		},
	}
	stored, err := client.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	err = withoutNotFound(err, errUnsupported)
	switch reasonOf(err) {
	case reasonUnreachable, reasonForbidden, reasonUnsupported:
		return features{}, err
	}
	if err != nil { // an admission webhook that refuses dry runs; a dropped field is then found when it is dropped
		return features{}, nil
	}
	dropped := resourceslice.DroppedFieldsError{DesiredSlice: probe, ActualSlice: stored}
	return features{}.without(dropped.DisabledFeatures()), nil
}
