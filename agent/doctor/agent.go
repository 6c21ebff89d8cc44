package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// agentSockets returns the sockets at which an agent listens: of the lock of the node, and of the plugin.
func agentSockets(ctx context.Context, c plugin.Config) []string {
	sockets := pluginSockets(ctx, c)
	if lock := filepath.Join(c.KubeletDir, pluginsDir, nodelock.Socket); dial(ctx, "unix", lock) == nil {
		sockets = append(sockets, lock)
	}
	return sockets
}

// pluginSockets returns the sockets of registered resources at which an agent listens.
func pluginSockets(ctx context.Context, c plugin.Config) []string {
	sockets, err := filepath.Glob(filepath.Join(c.KubeletDir, pluginsDir, plugin.SocketPattern))
	if err != nil {
		return nil // the directory's name is an invalid pattern
	}
	return slices.DeleteFunc(sockets, func(s string) bool { return dial(ctx, "unix", s) != nil })
}

// checkAgent reports whether an agent already runs here, and whether it is ready. A host engine that serves nobody outweighs /readyz, which
// changes with the agent's next poll, or if a call hangs after source.stallAfter.
func checkAgent(ctx context.Context, c config.Config, s survey) []Check {
	sockets := agentSockets(ctx, c.Plugin)
	code, reasons := get(ctx, c, web.ReadyzPath)
	serving := isAgent(ctx, c)
	switch {
	case serving && code == http.StatusOK:
		if failed := s.failedEngine(); failed != nil {
			return warn("running, and ready until its next measurement; "+failed.Name+": "+failed.Found, "see "+failed.Name+" above")
		}
		if _, warnings, _ := strings.Cut(strings.TrimSpace(reasons), "\n"); warnings != "" {
			return warn("running and ready; "+strings.ReplaceAll(warnings, "\n", "; "), "see the other checks and the log of the agent")
		}
		return pass("running and ready")
	case serving:
		return warn(strings.TrimSuffix("running, but not ready: "+strings.ReplaceAll(strings.TrimSpace(reasons), "\n", "; "), ": not ready"),
			"see the other checks and the log of the agent")
	case len(sockets) > 0:
		return info("one listens at " + strings.Join(sockets, ", "))
	default:
		return info("not running")
	}
}

// isAgent reports whether the server at metrics.listen is an agent. One that requires a password is recognized too.
func isAgent(ctx context.Context, c config.Config) bool {
	code, text := get(ctx, c, "/")
	return (code == http.StatusOK || code == http.StatusUnauthorized) && strings.Contains(text, web.Realm)
}

// get requests a page at metrics.listen. The code is 0 without a response, for example if a client certificate is required.
func get(ctx context.Context, c config.Config, path string) (code int, text string) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var access status.Access
	code, body, err := access.Get(ctx, access.Local(c.Metrics.Listen, c.Web.Certificate()), path)
	if err != nil {
		return 0, ""
	}
	return code, string(body)
}

// checkPort checks whether the web server could listen.
func checkPort(ctx context.Context, c config.Config) []Check {
	listen := c.Metrics.Listen
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	switch {
	case err == nil:
		_ = l.Close() // without accepting connections
		return pass(listen + " is free")
	case !errors.Is(err, syscall.EADDRINUSE):
		return fail(err.Error(), "set metrics.listen to an address of this node and a port that the agent may use")
	case isAgent(ctx, c):
		return pass(listen + " is used by the running agent")
	case len(agentSockets(ctx, c.Plugin)) > 0: // it may require a client certificate
		return info(listen + " is in use, probably by the running agent")
	default:
		return fail(listen+" is in use by another program",
			"stop it (dcgm-exporter has the same default), or set metrics.listen to a free port")
	}
}

// checkAgentFiles checks whether the agent could create its state and its socket, which it can work without.
func checkAgentFiles(c config.Config) []Check {
	var checks []Check
	state := c.StateDir
	if state != "" {
		state = filepath.Join(state, "state.json")
	}
	for _, f := range [][2]string{{"--" + config.StateDirFlag, state}, {"health.socket", c.Health.Socket}} {
		setting, path := f[0], f[1]
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
			checks = append(checks, warn(fmt.Sprintf("user %d cannot create %s in %s: %v", os.Geteuid(), path, dir, err),
				"make "+filepath.Dir(path)+" writable, in a container by a mount, or set "+setting)...)
		}
	}
	if len(checks) == 0 {
		checks = pass("writable")
	}
	return checks
}

// runningAgent returns the status of the agent that runs here; ok is false if none answers, or if it requires a password.
func runningAgent(ctx context.Context, c config.Config) (s status.Node, ok bool) {
	code, text := get(ctx, c, status.SnapshotPath)
	ok = code == http.StatusOK && json.Unmarshal([]byte(text), &s) == nil
	return s, ok
}

// problemsOf returns a check for each problem of a part that a running agent reports.
func problemsOf(s status.Node, part string) (checks []Check) {
	for _, p := range s.Problems {
		fix := cmp.Or(p.Fix, "see the log of the agent")
		switch {
		case p.Part != part:
		case p.Level == view.Unready:
			checks = append(checks, failure("", p.Text, fix))
		default:
			checks = append(checks, warn(p.Text, fix)...)
		}
	}
	return checks
}
