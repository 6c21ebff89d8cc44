package plugin

import (
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
)

// The limits of the lines about refused allocations of one resource: a controller replaces a refused pod at once, for hours.
const (
	refusalLines    = 10          // in a row
	refusalInterval = time.Minute // between further lines
)

// refusalLog logs refused Allocate calls, each with one line until there are too many, and then the newest with the number of
// the others.
type refusalLog struct {
	log *zap.Logger // of the resource

	mu       sync.Mutex // guards the fields below
	limit    *rate.Limiter
	unlogged uint64 // refusals since the last line
	newest   []zap.Field
}

func newRefusalLog(log *zap.Logger) *refusalLog {
	return &refusalLog{log: log, limit: rate.NewLimiter(rate.Every(refusalInterval), refusalLines)}
}

func (l *refusalLog) add(req *pluginapi.AllocateRequest, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unlogged++
	l.newest = []zap.Field{zap.String("reason", refusalReason(err)), zap.String("ids", requestedIDs(req)), zap.Error(err)}
	l.write(false)
}

// flush logs refusals that add did not, as soon as the limit allows a line, or at once with the last call.
func (l *refusalLog) flush(last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.write(last)
}

// write is called with l.mu held.
func (l *refusalLog) write(last bool) {
	if l.unlogged == 0 || !last && !l.limit.Allow() {
		return
	}
	if l.unlogged > 1 {
		l.newest = append(l.newest, zap.Uint64("suppressed", l.unlogged-1))
	}
	l.log.Warn(msgRefused, l.newest...)
	l.unlogged, l.newest = 0, nil
}

// requestedIDs lists the first IDs of a request.
func requestedIDs(req *pluginapi.AllocateRequest) string {
	var ids []string
	for _, c := range req.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			ids = append(ids, abbreviated(id))
		}
	}
	return grouped.Abbreviate(ids)
}
