package podlabels

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
)

// listTimeout is how long the API server may take for the list. A server that takes a watch and then says
// nothing is noticed by client-go's pings.
const listTimeout = 30 * time.Second

// podsOf lists and watches the metadata of one node's pods until ctx ends, and tells how that goes.
func podsOf(ctx context.Context, client metadata.Interface, node string, t *trouble) cache.ListerWatcher {
	pods := client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
	here := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector = "spec.nodeName=" + node
		return o
	}
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, listTimeout) // the reflector's own does not end
			defer cancel()
			list, err := pods.List(ctx, here(o))
			if err != nil {
				t.say(err)
				return nil, err
			}
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := pods.Watch(ctx, here(o))
			if err != nil {
				t.say(err)
				return nil, err
			}
			return w, nil
		},
	}, listFirst{})
}

// listFirst makes the reflector list before it watches. To stream the list spares the API server memory for long
// ones; this has a node's pods. And the reflector cannot be ended while it tries to.
type listFirst struct{}

func (listFirst) IsWatchListSemanticsUnSupported() bool { return true }
