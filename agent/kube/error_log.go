package kube

import (
	"cmp"
	"sync"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ErrorLog logs each class of API errors once, and the recovery from them. It is safe for concurrent use.
type ErrorLog struct {
	log               *zap.Logger
	failed, recovered string
	hint              zap.Field

	mu     sync.Mutex                   // guards logged
	logged map[metav1.StatusReason]bool // classes of errors since the last success
}

// NewErrorLog returns an ErrorLog with the messages for an error and for the recovery, and what a request requires, such
// as a cluster role.
func NewErrorLog(log *zap.Logger, failed, recovered, required string) *ErrorLog {
	return &ErrorLog{
		log: log, failed: failed, recovered: recovered, hint: zap.String("required", required),
		logged: make(map[metav1.StatusReason]bool),
	}
}

// Report logs an error if it is the first of its class since the last success. Errors that the API server did not send
// are one class: an outage shows in many ways.
func (l *ErrorLog) Report(err error) {
	class := cmp.Or(apierrors.ReasonForError(err), "Unreachable")
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.logged[class] {
		l.logged[class] = true
		l.log.Warn(l.failed, zap.Error(err), l.hint)
	}
}

// Recovered logs the first success after errors.
func (l *ErrorLog) Recovered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.logged) > 0 {
		clear(l.logged)
		l.log.Info(l.recovered)
	}
}

// Forget makes the next error count as the first one, as after a success. It logs nothing.
func (l *ErrorLog) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.logged)
}
