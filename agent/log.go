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

// level is the least that is logged. The word for it was validated.
func logLevel(c config.LogConfig) zapcore.Level {
	l, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return zapcore.InfoLevel
	}
	return l
}

// newSink returns the sink in front of out, which reports missing entries in the log's own format.
func newSink(out io.Writer, c config.LogConfig) *logsink.Sink {
	encoder := newEncoder(c)
	return logsink.New(out, func(missing uint64) []byte {
		entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "log entries dropped: standard error did not take them"}
		line, err := encoder.EncodeEntry(entry, []zap.Field{zap.Uint64("entries", missing)})
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

// captureStdLog sends the standard logger's output to log, at the debug level: go-dcgm logs there what it does. Left
// alone, it would write to standard error, which may block.
func captureStdLog(log *zap.Logger) (restore func(), err error) {
	return zap.RedirectStdLogAt(log.Named("stdlog"), zapcore.DebugLevel)
}
