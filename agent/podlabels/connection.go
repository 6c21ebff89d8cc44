package podlabels

import (
	"context"
	"errors"
	"net/http"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/metadata"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
)

// connection is the connection to the API server. It keeps the follower's status up to date.
type connection struct {
	*Follower
	errs *kube.ErrorLog
}

func newConnection(f *Follower, c Config) *connection {
	key := "metrics.podLabels" // that requires the connection
	if len(c.Labels.Named) == 0 && len(c.Labels.Patterns) == 0 {
		key = "metrics.podUID"
	}
	return &connection{f, kube.NewErrorLog(f.Log.With(zap.String("key", key)), "cannot read the labels of pods; the last known ones stay",
		"read the labels of pods again", "a cluster role with list and watch on pods")}
}

// open returns a client that reports the result of each request to the connection.
func (c *connection) open(kubeconfig string) (metadata.Interface, error) {
	config, err := c.Follower.open(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return transport{next, c} })
	return metadata.NewForConfig(config)
}

// transport observes requests. client-go does not report all failures: it retries some requests, and it takes a watch
// that was cut off at once for an empty one.
type transport struct {
	next http.RoundTripper
	conn *connection
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.next.RoundTrip(r)
	switch {
	case err != nil:
		t.conn.failed(err)
	case res.StatusCode < http.StatusBadRequest: // list and watch report the others, with the API's message
		t.conn.succeeded()
	}
	return res, err
}

// failed reports the error of a request. It ignores the end of the context, and a resource version that is too old: the
// reflector then lists again.
func (c *connection) failed(err error) {
	if errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return
	}
	c.setStatus(false, err.Error())
	c.errs.Report(err)
}

func (c *connection) succeeded() {
	c.setStatus(true, "")
	c.errs.Recovered()
}

func (c *connection) setStatus(up bool, err string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.Up, c.status.Err = up, err
}
