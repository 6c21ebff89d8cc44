package plugin

import "time"

// timing is how long things may take. It is a value so that tests need not wait.
type timing struct {
	poll     time.Duration // between two looks at the sockets: two lstat calls
	settle   time.Duration // of quiet before a registration
	answer   time.Duration // for the kubelet to answer Register; it dials us meanwhile
	stream   time.Duration // for the kubelet to open ListAndWatch after that
	retryMin time.Duration // between two attempts, doubled each time
	retryMax time.Duration
	goodbye  time.Duration // for the kubelet to receive the last list

	refresh time.Duration // between two looks at the pod resources
	hurry   time.Duration // the same while something is going on
	call    time.Duration // for the kubelet to answer one
	stale   time.Duration // after which an old answer is no more use
	doubt   time.Duration // between the first two registrations for a mismatch, doubled each time
	audits  time.Duration // between two registrations for a mismatch that those do not end, at most
}

// defaultTiming settles for a second: when a stream ends, the kubelet cleans up by resource name and takes
// a newer registration of ours with it (kubernetes#127803). A tenth of that was never seen to be lost.
func defaultTiming() timing {
	return timing{
		poll: 250 * time.Millisecond, settle: time.Second, answer: 15 * time.Second,
		stream: 5 * time.Second, retryMin: time.Second, retryMax: 30 * time.Second, goodbye: time.Second,
		refresh: 2 * time.Second, hurry: time.Second, call: 5 * time.Second, stale: 5 * time.Minute, doubt: 10 * time.Second, audits: 10 * time.Minute,
	}
}
