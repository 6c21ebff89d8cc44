package podlabels

import (
	"context"
	"errors"
	"net/http"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// trouble says once what goes wrong, and its end.
type trouble struct {
	*Follower
	key  string                       // of the configuration that asks for them
	said map[metav1.StatusReason]bool // classes of errors since all was well; guarded as the status
}

// connect returns a client whose every request is looked at.
func (t *trouble) connect(kubeconfig string) (metadata.Interface, error) {
	c, err := t.open(kubeconfig)
	if err != nil {
		return nil, err
	}
	c = rest.CopyConfig(c)
	c.Timeout = 0 // a watch has none
	c.UserAgent, c.WarningHandler = "gpu-node-agent", rest.NoWarnings{}
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return looker{next, t} })
	return metadata.NewForConfig(c)
}

// looker sees how each request goes. client-go makes one that fails some more times before it says so, and takes
// a watch that was cut off at once for an empty one.
type looker struct {
	http.RoundTripper
	*trouble
}

func (l looker) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := l.RoundTripper.RoundTrip(r)
	switch {
	case err != nil:
		l.say(err)
	case res.StatusCode < http.StatusBadRequest: // the others are errors of the request, which know more
		l.over()
	}
	return res, err
}

func (t *trouble) say(err error) {
	// The end, and a history that is too short: then all is listed anew.
	if errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return
	}
	class := apierrors.ReasonForError(err)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Up, t.status.Err = false, err.Error()
	if !t.said[class] {
		t.said[class] = true
		t.Log.Warn("the labels of pods cannot be read; those that are known stay", zap.Error(err),
			zap.String("needed", "a cluster role with list and watch on pods"), zap.String("key", t.key))
	}
}

func (t *trouble) over() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Up, t.status.Err = true, ""
	if len(t.said) > 0 {
		clear(t.said)
		t.Log.Info("the labels of pods can be read again")
	}
}
