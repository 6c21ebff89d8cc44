package plugin

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zapgrpc"
	"google.golang.org/grpc/grpclog"
)

// CaptureGRPCLog sends the errors that gRPC logs to log; by default it writes them to standard error. Call it once, before
// New: gRPC does not guard its logger.
func CaptureGRPCLog(log *zap.Logger) {
	grpclog.SetLoggerV2(zapgrpc.NewLogger(log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel))))
}
