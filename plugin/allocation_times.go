package plugin

import (
	"maps"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// allocationTimes has the time of the last allocation of each device ID.
type allocationTimes struct {
	mu sync.Mutex // guards at
	at map[string]time.Time
}

// allocationMemory limits how long an allocation is remembered. Until then the kubelet has reported the new holder many times.
const allocationMemory = time.Hour

func (a *allocationTimes) add(req *pluginapi.AllocateRequest, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.at, func(_ string, at time.Time) bool { return now.Sub(at) > allocationMemory })
	if a.at == nil {
		a.at = make(map[string]time.Time)
	}
	for _, c := range req.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			a.at[id] = now
		}
	}
}

// last returns the last allocation of a device ID, or the zero time.
func (a *allocationTimes) last(id string) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.at[id]
}
