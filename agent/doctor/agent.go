package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// agentSockets returns the plugin sockets at which an agent listens.
func agentSockets(ctx context.Context, c plugin.Config) []string {
	sockets, err := filepath.Glob(filepath.Join(c.KubeletDir, pluginsDir, agentSocketPattern))
	if err != nil {
		return nil // the directory's name is an invalid pattern
	}
	return slices.DeleteFunc(sockets, func(s string) bool { return !hasListener(ctx, s) })
}

// checkAgent reports whether an agent already runs here, and whether it is ready.
func checkAgent(ctx context.Context, c config.Config) []Check {
	sockets := agentSockets(ctx, c.Plugin)
	code, reasons := get(ctx, c, web.ReadyzPath)
	serving := isAgent(ctx, c)
	switch {
	case serving && code == http.StatusOK:
		return []Check{{Status: CheckOK, Found: "running and ready"}}
	case serving:
		return []Check{{
			Status: CheckWarn, Found: strings.TrimSuffix("running, but not ready: "+strings.ReplaceAll(strings.TrimSpace(reasons), "\n", "; "), ": not ready"),
			Fix: "see the other checks and the log of the agent",
		}}
	case len(sockets) > 0:
		return []Check{{Status: CheckInfo, Found: "one listens at " + strings.Join(sockets, ", ")}}
	default:
		return []Check{{Status: CheckInfo, Found: "not running"}}
	}
}

// isAgent reports whether the server at metrics.listen is an agent. One that requires a password is recognized too.
func isAgent(ctx context.Context, c config.Config) bool {
	code, text := get(ctx, c, "/")
	return (code == http.StatusOK || code == http.StatusUnauthorized) && strings.Contains(text, web.Realm)
}

// get requests a page at metrics.listen. The code is 0 without a response, for example if a client certificate is required.
func get(ctx context.Context, c config.Config, path string) (code int, text string) {
	var access status.Access
	base, err := status.URL(access.Local(c.Metrics.Listen, c.Web.Certificate()))
	if err != nil {
		return 0, "" // the address is valid
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return 0, ""
	}
	client, err := access.Client()
	if err != nil {
		return 0, "" // only for files that are not set here
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = res.Body.Close() }()
	var b bytes.Buffer
	if _, err := io.Copy(&b, io.LimitReader(res.Body, 64<<10)); err != nil {
		return 0, ""
	}
	return res.StatusCode, b.String()
}

// checkPort checks whether the web server could listen.
func checkPort(ctx context.Context, c config.Config) []Check {
	listen := c.Metrics.Listen
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	switch {
	case err == nil:
		_ = l.Close() // without accepting connections
		return []Check{{Status: CheckOK, Found: listen + " is free"}}
	case !errors.Is(err, syscall.EADDRINUSE):
		return []Check{{Status: CheckFail, Found: err.Error(), Fix: "set metrics.listen to an address of this node and a port that the agent may use"}}
	case isAgent(ctx, c):
		return []Check{{Status: CheckOK, Found: listen + " is used by the running agent"}}
	case len(agentSockets(ctx, c.Plugin)) > 0: // it may require a client certificate
		return []Check{{Status: CheckInfo, Found: listen + " is in use, probably by the running agent"}}
	default:
		return []Check{{
			Status: CheckFail, Found: listen + " is in use by another program",
			Fix: "stop it (dcgm-exporter has the same default), or set metrics.listen to a free port",
		}}
	}
}

// checkAgentFiles checks whether the agent could create its state file and its socket, which it can work without.
func checkAgentFiles(c config.Config) []Check {
	var checks []Check
	for _, f := range [][2]string{{"health.stateFile", c.Health.StateFile}, {"health.socket", c.Health.Socket}} {
		key, path := f[0], f[1]
		if path == "" {
			continue
		}
		dir := filepath.Dir(path)
		for dir != filepath.Dir(dir) { // the agent creates missing directories
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				break
			}
			dir = filepath.Dir(dir)
		}
		if err := writable(dir); err != nil {
			checks = append(checks, Check{
				Status: CheckWarn, Found: fmt.Sprintf("user %d cannot create %s in %s: %v", os.Geteuid(), path, dir, err),
				Fix: "make " + filepath.Dir(path) + " writable, in a container by a mount, or set " + key,
			})
		}
	}
	if len(checks) == 0 {
		checks = []Check{{Status: CheckOK, Found: "writable"}}
	}
	return checks
}
