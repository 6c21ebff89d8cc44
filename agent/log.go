package agent

import (
	"bytes"
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/logsink"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// logLevel returns the configured level, which is valid.
func logLevel(c config.LogConfig) zapcore.Level {
	l, _ := zapcore.ParseLevel(c.Level)
	return l
}

// newLogger returns a logger that writes to out, and its sink, which reports dropped entries in the format of the log.
func newLogger(out io.Writer, c config.LogConfig, level zap.AtomicLevel) (*zap.Logger, *logsink.Sink) {
	encoder := newEncoder(logFormat(out, c))
	sink := logsink.New(out, func(dropped uint64) []byte {
		entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "log entries dropped: standard error was blocked"}
		line, err := encoder.EncodeEntry(entry, []zap.Field{zap.Uint64("entries", dropped)})
		if err != nil {
			return nil
		}
		defer line.Free()
		return bytes.Clone(line.Bytes())
	})
	return zap.New(zapcore.NewCore(encoder, sink, level), zap.ErrorOutput(sink)), sink
}

// logFormat returns config.LogJSON or config.LogConsole.
func logFormat(out io.Writer, c config.LogConfig) string {
	if c.Format != config.LogAuto {
		return c.Format
	}
	if f, ok := out.(*os.File); ok && terminal.Is(f) {
		return config.LogConsole
	}
	return config.LogJSON
}

func newEncoder(format string) zapcore.Encoder {
	e := zap.NewProductionEncoderConfig()
	e.TimeKey, e.EncodeTime = "time", zapcore.RFC3339NanoTimeEncoder
	e.EncodeDuration = zapcore.StringDurationEncoder
	if format == config.LogConsole {
		e.EncodeTime, e.EncodeLevel = zapcore.TimeEncoderOfLayout("15:04:05.000"), zapcore.CapitalLevelEncoder
		return zapcore.NewConsoleEncoder(e)
	}
	return zapcore.NewJSONEncoder(e)
}

// captureStdLog redirects the standard logger, which go-dcgm uses, to log at debug level. It would otherwise write to
// standard error, which may block.
func captureStdLog(log *zap.Logger) (restore func(), err error) {
	return zap.RedirectStdLogAt(log.Named("stdlog"), zapcore.DebugLevel)
}
