package agent

import (
	"bytes"
	"io"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/logsink"
)

// logLevel returns the configured level, which is valid.
func logLevel(c config.LogConfig) zapcore.Level {
	l, _ := zapcore.ParseLevel(c.Level)
	return l
}

// newSink returns a sink that writes to out and reports dropped entries in the format of the log.
func newSink(out io.Writer, c config.LogConfig) *logsink.Sink {
	encoder := newEncoder(c)
	return logsink.New(out, func(dropped uint64) []byte {
		entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "log entries dropped: standard error was blocked"}
		line, err := encoder.EncodeEntry(entry, []zap.Field{zap.Uint64("entries", dropped)})
		if err != nil {
			return nil
		}
		defer line.Free()
		return bytes.Clone(line.Bytes())
	})
}

func newLogger(sink *logsink.Sink, c config.LogConfig, level zap.AtomicLevel) *zap.Logger {
	return zap.New(zapcore.NewCore(newEncoder(c), sink, level), zap.ErrorOutput(sink))
}

func newEncoder(c config.LogConfig) zapcore.Encoder {
	e := zap.NewProductionEncoderConfig()
	e.TimeKey, e.EncodeTime = "time", zapcore.RFC3339NanoTimeEncoder
	e.EncodeDuration = zapcore.StringDurationEncoder
	if c.Format == "console" {
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
