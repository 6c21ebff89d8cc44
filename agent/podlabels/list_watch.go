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

// listTimeout limits the list request. client-go's HTTP/2 pings detect a watch whose server no longer answers.
const listTimeout = 30 * time.Second

// listWatch lists and watches the metadata of one node's pods until ctx ends, and reports errors to the connection.
func listWatch(ctx context.Context, client metadata.Interface, node string, conn *connection) cache.ListerWatcher {
	pods := client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
	onNode := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector = "spec.nodeName=" + node
		return o
	}
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, listTimeout) // the reflector does not cancel its own context
			defer cancel()
			list, err := pods.List(ctx, onNode(o))
			if err != nil {
				conn.failed(err)
				return nil, err
			}
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := pods.Watch(ctx, onNode(o))
			if err != nil {
				conn.failed(err)
				return nil, err
			}
			return w, nil
		},
	}, listFirst{})
}

// listFirst makes the reflector list before it watches. A streamed list would save the API server memory only for lists
// longer than a node's pods, and the reflector cannot be stopped while it tries to open one.
type listFirst struct{}

func (listFirst) IsWatchListSemanticsUnSupported() bool { return true }
