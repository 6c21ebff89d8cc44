package agent

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func TestDCGMLogLevel(t *testing.T) {
	for level, want := range map[zapcore.Level]string{
		zapcore.DebugLevel: "DEBUG", zapcore.InfoLevel: "FATAL", zapcore.WarnLevel: "FATAL", zapcore.ErrorLevel: "FATAL",
	} {
		if got := dcgmLogLevel(level); got != want {
			t.Errorf("at %v DCGM logs %s, want %s", level, got, want)
		}
	}
}

// Only a host engine has to be told to take the driver back.
func TestWhoTakesTheDriverBack(t *testing.T) {
	for mode, want := range map[string]bool{ModeEmbedded: false, ModeSim: false, ModeStandalone: true} {
		c := DefaultConfig()
		c.Source.Mode = mode
		if mode == ModeStandalone {
			c.Source.Address = "localhost:5555"
		}
		open, attach, run, err := newSource(sourceOf(c), zap.NewAtomicLevel(), zap.NewNop())
		if err != nil || open == nil || run == nil || (attach != nil) != want {
			t.Errorf("%s: attach %v, want %v; %v", mode, attach != nil, want, err)
		}
	}
}
