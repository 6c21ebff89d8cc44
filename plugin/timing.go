package plugin

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// timing holds the intervals and timeouts; tests shorten them.
type timing struct {
	poll            time.Duration // between checks of the sockets: two lstat calls
	settle          time.Duration // without a disturbance before a registration
	registerTimeout time.Duration // of the Register call, during which the kubelet dials the plugin
	streamTimeout   time.Duration // from the registration to ListAndWatch
	retryMin        time.Duration // between two attempts; doubles up to retryMax
	retryMax        time.Duration
	withdrawTimeout time.Duration // for the kubelet to receive the last list
	handshake       time.Duration // for a new connection to speak HTTP/2

	pods          podresources.Timing
	auditRetryMin time.Duration // between two registrations after audit mismatches; doubles up to auditRetryMax
	auditRetryMax time.Duration
}

// defaultTiming settles for a second: when a stream ends, the kubelet cleans up by resource name, and removes a newer
// registration of the same name (kubernetes#127803). No registration was lost in tests after a tenth of that.
func defaultTiming() timing {
	return timing{
		poll: 250 * time.Millisecond, settle: time.Second, registerTimeout: 15 * time.Second, streamTimeout: 5 * time.Second,
		retryMin: time.Second, retryMax: 30 * time.Second, withdrawTimeout: time.Second, handshake: 5 * time.Second,
		pods: podresources.Timing{
			Poll: 250 * time.Millisecond, Refresh: 2 * time.Second, QuickRefresh: time.Second, Call: 5 * time.Second, MaxAge: 5 * time.Minute,
		},
		auditRetryMin: 10 * time.Second, auditRetryMax: 10 * time.Minute,
	}
}
