package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Names below the kubelet's directory.
const (
	pluginsDir      = "device-plugins"
	podResourcesDir = "pod-resources"
	kubeletSocket   = "kubelet.sock"
)

// checkKubelet checks whether the device plugin could listen and register.
func checkKubelet(ctx context.Context, kubeletDir string) []Check {
	const mount = "set plugin.kubeletDir to the kubelet's --root-dir; in a container, mount it there"
	dir := filepath.Join(kubeletDir, pluginsDir)
	socket := filepath.Join(dir, kubeletSocket)
	if info, err := os.Stat(dir); err != nil {
		return fail(fmt.Sprintf("no directory %s: %v", dir, rootCause(err)), "start the kubelet, or "+mount)
	} else if !info.IsDir() {
		return fail(dir+" is not a directory", mount)
	}
	var checks []Check
	if err := writable(dir); err != nil {
		checks = fail(fmt.Sprintf("user %[2]d cannot create a socket in %[1]s: %[3]v", dir, os.Geteuid(), err),
			"run the agent as root, or mount the directory writable")
	}
	switch err := dialGRPC(ctx, socket); {
	case errors.Is(err, os.ErrNotExist):
		checks = append(checks, fail("no socket "+socket, "start the kubelet, or "+mount)...)
	case errors.Is(err, os.ErrPermission):
		checks = append(checks, fail("no permission to connect to "+socket, "run the agent as root")...)
	case err != nil:
		checks = append(checks, fail(fmt.Sprintf("no gRPC connection to %s: %v", socket, rootCause(err)),
			"start the kubelet, or read its log (journalctl -u kubelet)")...)
	case len(checks) == 0:
		checks = pass("connected to " + socket + "; the directory is writable")
	}
	return checks
}

// writable reports whether files can be created in a directory. access(2) also knows about read-only mounts.
func writable(dir string) error {
	const write, search = 2, 1 // of access(2)
	return syscall.Access(dir, write|search)
}

// checkPodResources checks the kubelet's pod-resources socket, which the agent can work without.
func checkPodResources(ctx context.Context, kubeletDir string) []Check {
	socket := filepath.Join(kubeletDir, podResourcesDir, kubeletSocket)
	err := dialGRPC(ctx, socket)
	if err == nil {
		return pass("connected to " + socket)
	}
	return warn(fmt.Sprintf("no gRPC connection to %s: %v", socket, rootCause(err)),
		"start the kubelet, which creates it; in a container, mount "+filepath.Dir(socket))
}

// rootCause returns the cause of an error without the path.
func rootCause(err error) error {
	for _, cause := range []error{os.ErrNotExist, os.ErrPermission, syscall.ECONNREFUSED} {
		if errors.Is(err, cause) {
			return cause
		}
	}
	return err
}

// dialGRPC checks that a gRPC server responds at a unix socket. A connection is not enough, because the kernel accepts
// connections for a process that hangs: dialGRPC sends the start of HTTP/2, to which a server must reply with its settings.
func dialGRPC(ctx context.Context, socket string) error {
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	const preface, settings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x00\x00\x00\x04\x00\x00\x00\x00\x00" // RFC 9113, 3.4
	if _, err := io.WriteString(conn, preface+settings); err != nil {
		return err
	}
	head := make([]byte, len(settings))
	if _, err := io.ReadFull(conn, head); err != nil {
		return fmt.Errorf("no response: %w", err)
	}
	if head[3] != settings[3] {
		return errors.New("not a gRPC server")
	}
	return nil
}

// countedWithoutAgent reports whether the kubelet counts healthy devices of the resource, although no agent listens. An
// agent that starts meanwhile has no allocatable devices for a second.
func countedWithoutAgent(ctx context.Context, c plugin.Config, allocatable map[string][]string) bool {
	return len(agentSockets(ctx, c)) == 0 && len(allocatable[c.Resource]) > 0
}

// allocatable returns the devices that the kubelet may allocate, by resource; nil if it does not answer, which the check of the pod
// resources reports.
func allocatable(ctx context.Context, c plugin.Config) map[string][]string {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	ids, err := podresources.QueryAllocatable(ctx, filepath.Join(c.KubeletDir, podResourcesDir, kubeletSocket))
	if err != nil {
		return nil
	}
	return ids
}

// checkOtherPlugins looks for another device plugin that serves GPUs, by what the kubelet counts and by its sockets. It only connects to
// these: a second ListAndWatch would take health events of NVIDIA's plugin from the kubelet, and restart GKE's.
func checkOtherPlugins(ctx context.Context, c plugin.Config) []Check {
	counted := allocatable(ctx, c)
	var others []string
	if c.Enabled {
		agent := len(pluginSockets(ctx, c)) > 0
		ours := func(resource string) bool { return c.CanServe(resource) && (agent || !c.ServesDRA()) }
		for resource, n := range c.OtherPlugins(counted, ours, nil) {
			others = append(others, fmt.Sprintf("%s (%d devices)", resource, n))
		}
		slices.Sort(others)
	}
	dir := filepath.Join(c.KubeletDir, pluginsDir)
	for _, pattern := range []string{"nvidia-*.sock", "nvidiaGPU-*.sock"} { // NVIDIA's and GKE's
		sockets, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			continue // the directory's name is an invalid pattern
		}
		for _, s := range sockets {
			if dial(ctx, "unix", s) == nil {
				others = append(others, filepath.Base(s))
			}
		}
	}
	switch {
	case len(others) == 0 && c.Enabled && countedWithoutAgent(ctx, c, counted):
		return warn("the kubelet has allocatable "+c.Resource+", but no plugin is found that serves it",
			"start the agent; or remove another plugin that serves it; if none runs, restart the kubelet, which since 1.37 can keep the devices "+
				"of a plugin that has ended")
	case len(others) == 0 && c.Enabled:
		return pass("no other plugin serves GPUs")
	case len(others) == 0: // it may have an unknown name
		return info("plugin.enabled is false, and no other plugin is found")
	case !c.Enabled:
		return pass(strings.Join(others, ", ") + " serves GPUs; plugin.enabled is false")
	}
	checks := warn("another device plugin serves GPUs: "+strings.Join(others, ", "),
		"remove it from this node, since both would allocate the same GPUs, or set plugin.enabled to false")
	sameResource := slices.ContainsFunc(others, func(s string) bool { return s == "nvidia-gpu.sock" || strings.HasPrefix(s, "nvidiaGPU-") })
	if sameResource && c.Resource == plugin.DefaultConfig().Resource { // the last registration wins
		checks[0].Status = CheckFail
	}
	return checks
}
