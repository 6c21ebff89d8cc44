package plugin

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// maxAnswer bounds an answer of the kubelet, in bytes. It lists every pod of the node; the kubelet's own
// clients take as much.
const maxAnswer = 16 << 20

// dial makes a connection to a unix socket, which is opened by the first call.
func dial(path string) (*grpc.ClientConn, error) {
	// A dialer and not a unix: address, in which some characters of a path mean something else.
	unix := func(ctx context.Context, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	retry := backoff.DefaultConfig
	retry.MaxDelay = time.Second // the socket is near, and asked for seldom
	return grpc.NewClient("passthrough:///kubelet", grpc.WithContextDialer(unix),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: time.Second}))
}

// register makes one Register call over a connection of its own.
func register(ctx context.Context, kubelet, resource, endpoint string) (err error) {
	conn, err := dial(kubelet)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: endpoint, ResourceName: resource, Options: options(),
	})
	return err
}
