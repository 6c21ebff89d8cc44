package kube

import (
	"context"
	"time"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The pause between two attempts grows from the one to the other.
const (
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// wait waits until the channel closes or the time is over, if it is not negative; false if ctx ended first.
func wait(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
	var over <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-c:
	case <-over:
	}
	return true
}

// backoff is a pause that grows.
type backoff struct{ last time.Duration }

// wait pauses, and returns false if ctx ended first.
func (b *backoff) wait(ctx context.Context) bool {
	b.last = min(max(2*b.last, minBackoff), maxBackoff)
	return wait(ctx, nil, b.last)
}

// trouble logs what goes wrong once, and its end.
type trouble struct {
	log         *zap.Logger
	what, needs string
	said        map[metav1.StatusReason]bool // classes of errors since all was well
}

func newTrouble(log *zap.Logger, what, needs string) *trouble {
	return &trouble{log, what, needs, make(map[metav1.StatusReason]bool)}
}

func (t *trouble) say(err error) {
	c := class(err)
	if !t.said[c] {
		t.said[c] = true
		t.log.Warn(t.what+" cannot be written", zap.Error(err), zap.String("needed", t.needs))
	}
}

func (t *trouble) over() {
	if len(t.said) > 0 {
		clear(t.said)
		t.log.Info(t.what + " can be written again")
	}
}
