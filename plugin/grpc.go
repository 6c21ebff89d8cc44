package plugin

import (
	"context"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zapgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// The limits of one connection to a resource's socket. Only root can connect, so the limits protect against faulty
// programs: the kubelet must get its lists whatever another client does. The kubelet has one connection, with one
// ListAndWatch for its lifetime and one other call at a time.
const (
	maxStreams      = 32              // concurrent calls; more wait in the client
	maxRequestBytes = 4 << 20         // the kubelet's own limit of a list; it requests only listed devices
	maxContainers   = 1000            // in one Allocate; the kubelet sends one
	maxHeaderBytes  = 16 << 10        // the kubelet sends some 200 bytes
	maxIdle         = 2 * time.Minute // without a call; ListAndWatch is one
	bufferBytes     = 4 << 10         // each way; a list of 16 GPUs has 1 KiB
)

// serverOptions returns the options of the gRPC server of a resource. By default gRPC also ends connections that ping
// more often than every five minutes, and stops reading from connections that do not read.
func serverOptions(handshake time.Duration) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshake),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle}),
		grpc.ReadBufferSize(bufferBytes), grpc.WriteBufferSize(bufferBytes),
		grpc.UnaryInterceptor(limitContainers),
	}
}

// limitContainers refuses an Allocate with too many containers, because its answer would be far larger than the request.
func limitContainers(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if a, ok := req.(*pluginapi.AllocateRequest); ok && len(a.GetContainerRequests()) > maxContainers {
		return nil, status.Errorf(codes.ResourceExhausted, "%d containers in one request; use at most %d", len(a.GetContainerRequests()), maxContainers)
	}
	return handle(ctx, req)
}

// CaptureGRPCLog sends the errors that gRPC logs to log; by default gRPC writes them to standard error. Call it once,
// before New: gRPC does not guard its logger.
func CaptureGRPCLog(log *zap.Logger) {
	grpclog.SetLoggerV2(zapgrpc.NewLogger(log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel))))
}
