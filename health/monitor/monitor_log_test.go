package monitor

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// blockedLog is a log whose writer blocks until the channel is closed.
type blockedLog chan struct{}

func (b blockedLog) Write(p []byte) (int, error) {
	<-b
	return len(p), nil
}

// logger returns a logger that begins to block when it is told to.
func (b blockedLog) logger() (log *zap.Logger, block func()) {
	level := zap.NewAtomicLevelAt(zapcore.FatalLevel)
	encoder := zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())
	return zap.New(zapcore.NewCore(encoder, zapcore.AddSync(b), level)), func() { level.SetLevel(zapcore.DebugLevel) }
}

// Every change of the snapshot is stored first and logged outside the mutex: a log that blocks delays no verdict.
func TestMonitorStoresBeforeItLogs(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*bench, blockedLog)
		shown  func(*health.Snapshot) bool
	}{
		"XID": {
			func(b *bench, _ blockedLog) {
				b.set(func(s *script) { s.xids = []health.XID{{Code: 79, At: time.Now()}} })
				b.wake <- struct{}{}
			},
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has("xid-79") },
		},
		"source": {
			func(b *bench, _ blockedLog) {
				b.set(func(s *script) { s.pollErr = errors.New("connection lost") })
				b.wake <- struct{}{}
			},
			func(s *health.Snapshot) bool { return s.Source.Status == health.SourceDown },
		},
		"config": {
			func(b *bench, blocked blockedLog) {
				b.set(func(s *script) { s.hang = blocked }) // Run is not what decides
				c := cordoning("0")
				b.config.Store(&c)
			},
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has(health.CauseCordoned) },
		},
		"detach": {
			func(b *bench, _ blockedLog) { go func() { _, _ = b.m.Detach(t.Context(), time.Hour) }() },
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has(health.CauseReleased) },
		},
		"clear": {
			func(b *bench, _ blockedLog) { go func() { _, _ = b.m.Clear("GPU-0", "xid-48") }() },
			func(s *health.Snapshot) bool { return !s.Devices[0].Verdict.Has("xid-48") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				blocked := make(blockedLog)
				log, block := blocked.logger()
				b := monitorWith(t, log)
				b.set(func(s *script) { s.xids = []health.XID{{Code: 48, At: time.Now()}} })
				b.wake <- struct{}{}
				synctest.Wait()
				block()
				c.change(b, blocked)
				synctest.Wait()
				stored := c.shown(b.out.Load())
				free := stored && b.m.mu.TryLock()
				if free {
					b.m.mu.Unlock()
				}
				close(blocked)
				b.stop()
				if !stored || !free {
					t.Errorf("while the log is blocked: stored is %v, the mutex is free is %v", stored, free)
				}
			})
		})
	}
}
