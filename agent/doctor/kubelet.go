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
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The kubelet's names below its directory.
const (
	pluginsDir       = "device-plugins"
	podResourcesDir  = "pod-resources"
	kubeletSocket    = "kubelet.sock"
	ownSocketPattern = "gpu-node-agent-*.sock" // as package plugin names ours
)

// checkKubelet looks whether a device plugin of ours could listen and register.
func checkKubelet(ctx context.Context, kubeletDir string) []Check {
	const mount = "set plugin.kubeletDir to the kubelet's --root-dir; in a container, mount it there"
	dir := filepath.Join(kubeletDir, pluginsDir)
	socket := filepath.Join(dir, kubeletSocket)
	fail := func(found, fix string) []Check { return []Check{{Status: CheckFail, Found: found, Fix: fix}} }
	if info, err := os.Stat(dir); err != nil {
		return fail(fmt.Sprintf("no directory %s: %v", dir, reason(err)), "start the kubelet, or "+mount)
	} else if !info.IsDir() {
		return fail(dir+" is no directory", mount)
	}
	var checks []Check
	if err := writable(dir); err != nil {
		checks = fail(fmt.Sprintf("no right to make a socket in %s as user %d: %v", dir, os.Geteuid(), err),
			"run the agent as root, or mount the directory so that it can be written to")
	}
	switch err := answers(ctx, socket); {
	case errors.Is(err, os.ErrNotExist):
		checks = append(checks, fail(socket+" is not there", "start the kubelet, or "+mount)...)
	case errors.Is(err, os.ErrPermission):
		checks = append(checks, fail("no right to reach "+socket, "run the agent as root")...)
	case err != nil:
		checks = append(checks, fail(fmt.Sprintf("nobody answers at %s: %v", socket, reason(err)),
			"start the kubelet, or read its log (journalctl -u kubelet)")...)
	case len(checks) == 0:
		checks = []Check{{Status: CheckOK, Found: "answers at " + socket + "; we may make a socket there"}}
	}
	return checks
}

// writable asks for the kernel's opinion, which knows more than a directory's mode.
func writable(dir string) error {
	const write, search = 2, 1 // of access(2)
	return syscall.Access(dir, write|search)
}

// checkPodResources looks for the socket that tells which pod holds which device. The agent does its
// job without.
func checkPodResources(ctx context.Context, kubeletDir string) []Check {
	socket := filepath.Join(kubeletDir, podResourcesDir, kubeletSocket)
	err := answers(ctx, socket)
	if err == nil {
		return []Check{{Status: CheckOK, Found: "answers at " + socket}}
	}
	return []Check{{
		Status: CheckWarn, Found: fmt.Sprintf("nobody answers at %s: %v", socket, reason(err)),
		Fix: "start the kubelet, which makes it; in a container, mount " + filepath.Dir(socket),
	}}
}

// reason is an error without the path, which the text has already.
func reason(err error) error {
	for _, known := range []error{os.ErrNotExist, os.ErrPermission, syscall.ECONNREFUSED} {
		if errors.Is(err, known) {
			return known
		}
	}
	return err
}

// answers reports whether a gRPC server is alive at a unix socket: the kernel takes connections for a
// process that hangs. It speaks just so much of HTTP/2 that a server must reply with its settings.
func answers(ctx context.Context, socket string) error {
	d := net.Dialer{Timeout: dialLimit}
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(dialLimit)); err != nil {
		return err
	}
	const preface, settings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x00\x00\x00\x04\x00\x00\x00\x00\x00" // RFC 9113, 3.4
	if _, err := io.WriteString(conn, preface+settings); err != nil {
		return err
	}
	head := make([]byte, len(settings))
	if _, err := io.ReadFull(conn, head); err != nil {
		return fmt.Errorf("it takes connections, but does not reply: %w", err)
	}
	if head[3] != settings[3] {
		return errors.New("what replies there is no gRPC server")
	}
	return nil
}

// live reports whether somebody listens at a unix socket.
func live(ctx context.Context, socket string) bool {
	d := net.Dialer{Timeout: dialLimit}
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// checkOtherPlugins looks for another device plugin that serves NVIDIA's resources.
func checkOtherPlugins(ctx context.Context, c plugin.Config) []Check {
	var others []string
	dir := filepath.Join(c.KubeletDir, pluginsDir)
	for _, pattern := range []string{"nvidia-*.sock", "nvidiaGPU-*.sock"} { // NVIDIA's and GKE's
		sockets, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			continue // the directory has a name that is a bad pattern
		}
		for _, s := range sockets {
			if live(ctx, s) {
				others = append(others, filepath.Base(s))
			}
		}
	}
	switch {
	case len(others) == 0 && c.Enabled:
		return []Check{{Status: CheckOK, Found: "none serves GPUs"}}
	case len(others) == 0: // it may have a name that is not known here, or be no device plugin
		return []Check{{Status: CheckInfo, Found: "the plugin is off (plugin.enabled), and no other is seen that serves GPUs"}}
	case !c.Enabled:
		return []Check{{Status: CheckOK, Found: strings.Join(others, ", ") + " serves GPUs; the plugin is off (plugin.enabled)"}}
	}
	check := Check{
		Status: CheckWarn, Found: "another device plugin serves " + strings.Join(others, ", ") + " in " + dir,
		Fix: "take it off this node: both would hand out the same GPUs; or set plugin.enabled to false",
	}
	serves := slices.ContainsFunc(others, func(s string) bool { return s == "nvidia-gpu.sock" || strings.HasPrefix(s, "nvidiaGPU-") })
	if serves && c.Resource == plugin.DefaultConfig().Resource { // the kubelet listens to who registers last
		check.Status = CheckFail
	}
	return []Check{check}
}

// ownSockets are those at which an agent listens now.
func ownSockets(ctx context.Context, c plugin.Config) []string {
	sockets, err := filepath.Glob(filepath.Join(c.KubeletDir, pluginsDir, ownSocketPattern))
	if err != nil {
		return nil // as above
	}
	return slices.DeleteFunc(sockets, func(s string) bool { return !live(ctx, s) })
}

// checkRunning says whether an agent runs here already, and how it is.
func checkRunning(ctx context.Context, c config.Config) []Check {
	sockets := ownSockets(ctx, c.Plugin)
	code, ready := page(ctx, c, web.ReadyzPath)
	served := isAgent(ctx, c)
	switch {
	case served && code == http.StatusOK:
		return []Check{{Status: CheckOK, Found: "runs and is ready"}}
	case served:
		return []Check{{
			Status: CheckWarn, Found: strings.TrimSuffix("runs, but is not ready: "+strings.ReplaceAll(strings.TrimSpace(ready), "\n", "; "), ": not ready"),
			Fix: "see what else is not ok here, and its log",
		}}
	case len(sockets) > 0:
		return []Check{{Status: CheckInfo, Found: "one listens at " + strings.Join(sockets, ", ")}}
	default:
		return []Check{{Status: CheckInfo, Found: "none runs here"}}
	}
}

// isAgent tells whether who serves at metrics.listen is an agent, which also one that wants a password says.
func isAgent(ctx context.Context, c config.Config) bool {
	code, text := page(ctx, c, "/")
	return (code == http.StatusOK || code == http.StatusUnauthorized) && strings.Contains(text, web.Realm)
}

// page gets a page of whoever serves at metrics.listen, 0 if nobody does, or only to who has a certificate.
func page(ctx context.Context, c config.Config, path string) (code int, text string) {
	var access status.Access
	base, err := status.URL(access.Local(c.Metrics.Listen, c.Web.Certificate()))
	if err != nil {
		return 0, "" // it was validated
	}
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return 0, ""
	}
	client, err := access.Client()
	if err != nil {
		return 0, "" // there are no files of ours to be read
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

// checkPort looks whether the web server could listen.
func checkPort(ctx context.Context, c config.Config) []Check {
	listen := c.Metrics.Listen
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	switch {
	case err == nil:
		_ = l.Close() // nothing was accepted
		return []Check{{Status: CheckOK, Found: listen + " is free"}}
	case !errors.Is(err, syscall.EADDRINUSE):
		return []Check{{Status: CheckFail, Found: err.Error(), Fix: "set metrics.listen to an address of this node and a port that we may have"}}
	case isAgent(ctx, c):
		return []Check{{Status: CheckOK, Found: listen + " is that of the agent that runs here"}}
	case len(ownSockets(ctx, c.Plugin)) > 0: // it may want a password, or speak TLS
		return []Check{{Status: CheckInfo, Found: listen + " is taken, most likely by the agent that runs here"}}
	default:
		return []Check{{
			Status: CheckFail, Found: listen + " is taken by another program",
			Fix: "end it (dcgm-exporter has the same default), or set metrics.listen to a free port",
		}}
	}
}

// checkOwnFiles looks whether the agent could write where it keeps its state and its socket. It does its
// job without.
func checkOwnFiles(c config.Config) []Check {
	var checks []Check
	for _, f := range [][2]string{{"health.stateFile", c.Health.StateFile}, {"health.socket", c.Health.Socket}} {
		key, path := f[0], f[1]
		if path == "" {
			continue
		}
		dir := filepath.Dir(path)
		for dir != filepath.Dir(dir) { // the agent makes what is missing
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				break
			}
			dir = filepath.Dir(dir)
		}
		if err := writable(dir); err != nil {
			checks = append(checks, Check{
				Status: CheckWarn, Found: fmt.Sprintf("no right to make %s in %s as user %d: %v", path, dir, os.Geteuid(), err),
				Fix: "make " + filepath.Dir(path) + " writable, in a container by a mount, or set " + key,
			})
		}
	}
	if len(checks) == 0 {
		checks = []Check{{Status: CheckOK, Found: "can be written"}}
	}
	return checks
}
