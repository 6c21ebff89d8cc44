package plugin

import (
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// The limits of the lines about refused allocations of one resource: a controller replaces a refused pod at once, for hours.
const (
	refusalLines    = 10          // in a row
	refusalInterval = time.Minute // between further ones
)

// refusalLog logs refused Allocate calls, each with one line until there are too many. The server's counters have all.
type refusalLog struct {
	log   *zap.Logger // of the resource
	limit *rate.Limiter

	mu         sync.Mutex // guards suppressed
	suppressed uint64     // refusals since the last line
}

func newRefusalLog(log *zap.Logger) *refusalLog {
	return &refusalLog{log: log, limit: rate.NewLimiter(rate.Every(refusalInterval), refusalLines)}
}

func (l *refusalLog) add(req *pluginapi.AllocateRequest, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.limit.Allow() {
		l.suppressed++
		return
	}
	fields := []zap.Field{zap.String("reason", refusalReason(err)), zap.String("ids", requestedIDs(req)), zap.Error(err)}
	if l.suppressed > 0 {
		fields = append(fields, zap.Uint64("suppressed", l.suppressed))
	}
	l.log.Warn(msgRefused, fields...)
	l.suppressed = 0
}

// requestedIDs lists the first IDs of a request.
func requestedIDs(req *pluginapi.AllocateRequest) string {
	var ids []string
	for _, c := range req.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			ids = append(ids, abbreviated(id))
		}
	}
	return cdi.Abbreviate(ids)
}
