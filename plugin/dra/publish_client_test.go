package dra

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// The informer leaves a watch that comes with an error to itself, and the watch's goroutine would wait for a reader forever.
func TestWatchAnsweredAtTheEndIsStopped(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answered, api := watch.NewFake(), fake.NewClientset()
	api.PrependWatchReactor("resourceslices", func(clienttesting.Action) (bool, watch.Interface, error) {
		cancel()
		return true, answered, nil
	})
	p := newPublisher(publishDriver, publishNode, nil, zap.NewNop())
	w, err := sliceClient{api, p}.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{})
	if w != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("Watch: %v, %v; want no watch, %v", w, err, context.Canceled)
	}
	if !answered.IsStopped() {
		t.Error("the watch goes on")
	}
}
