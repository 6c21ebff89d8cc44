package plugin

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// What one connection to a resource's socket may cost. Only root can open one, so this is against programs that
// have gone wrong rather than against people: the kubelet must get its lists whatever another client does. The
// kubelet itself has one connection, with one ListAndWatch for as long as it lives and one other call at a time.
const (
	maxStreams      = 32              // calls at once, of one connection; more wait at the client
	maxRequestBytes = 4 << 20         // as much as the kubelet takes of a list, and it asks for no device that was not listed
	maxContainers   = 1000            // in one Allocate; the kubelet asks for one container at a time
	maxHeaderBytes  = 16 << 10        // the kubelet sends some 200
	handshakeWithin = 5 * time.Second // for a new connection to speak HTTP/2
	idleWithin      = 2 * time.Minute // without any call; the kubelet's ListAndWatch is one
	bufferBytes     = 4 << 10         // of a connection, each way: a list of 16 GPUs has 1 KiB
)

// serverOptions are those of the gRPC server of a resource. What grpc does by itself is not repeated: it ends a
// connection that pings more often than every five minutes, and stops reading from one that does not read.
func serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshakeWithin),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleWithin}),
		grpc.ReadBufferSize(bufferBytes), grpc.WriteBufferSize(bufferBytes),
		grpc.UnaryInterceptor(bounded),
	}
}

// bounded refuses an Allocate whose answer would be out of all proportion.
func bounded(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if a, ok := req.(*pluginapi.AllocateRequest); ok && len(a.GetContainerRequests()) > maxContainers {
		return nil, status.Errorf(codes.ResourceExhausted, "%d containers in one request; use at most %d", len(a.GetContainerRequests()), maxContainers)
	}
	return handle(ctx, req)
}
