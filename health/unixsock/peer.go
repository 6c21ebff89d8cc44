package unixsock

import (
	"context"
	"net"
	"syscall"
)

type peerKey struct{}

// Peer returns the process that has sent the request of a Route: 0 if the kernel does not tell, as for one in another PID namespace.
func Peer(ctx context.Context) int {
	pid, _ := ctx.Value(peerKey{}).(int)
	return pid
}

// PeerPID returns the process at the other end of a connection: 0 if the kernel does not tell.
func PeerPID(conn net.Conn) (pid int) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { // an error leaves 0
		if cred, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil { //nolint:gosec // a descriptor
			pid = int(cred.Pid)
		}
	})
	return pid
}
