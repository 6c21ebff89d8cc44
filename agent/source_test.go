package agent

import (
	"context"
	"io"
	stdlog "log"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// go-dcgm speaks through the standard logger: that is for debugging, and ends with the source.
func TestStandardLoggerIsForDebugging(t *testing.T) {
	before := stdlog.Writer()
	stdlog.SetOutput(io.Discard)
	defer stdlog.SetOutput(before)
	core, logs := observer.New(zapcore.DebugLevel)
	_, _, run, err := newSource(sourceOf(DefaultConfig()), zap.NewAtomicLevel(), zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- run(ctx) }()
	for logs.Len() == 0 {
		stdlog.Print("error destroying group")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for _, line := range logs.All() {
		if line.Level != zapcore.DebugLevel || line.LoggerName != "dcgm" || line.Message != "error destroying group" {
			t.Errorf("logged %+v", line)
		}
	}
	n := logs.Len()
	stdlog.Print("after the source")
	if logs.Len() != n {
		t.Error("the standard logger still comes to us")
	}
}

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
