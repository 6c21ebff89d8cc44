package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// openSocket listens at path, below plugin.kubeletDir.
func openSocket(ctx context.Context, path string) (*unixsock.Socket, error) {
	if n := unixsock.PathLen(path); n > unixsock.MaxPath {
		return nil, fmt.Errorf("plugin.kubeletDir: the path %s is %d bytes too long for a unix socket; use a shorter directory",
			path, n-unixsock.MaxPath)
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("plugin.kubeletDir: %w; is this the kubelet's directory, and is it mounted here?", err)
	}
	return unixsock.Listen(ctx, path)
}
