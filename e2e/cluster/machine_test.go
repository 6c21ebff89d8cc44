//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const (
	nodeName  = "node1"
	nodeIP    = "10.99.0.1"
	serviceIP = "10.96.0.1" // of the API server, and an address of the node: kube-proxy does not run
	podSubnet = "10.244.1.0/24"
)

// privateDirs returns the directories that the machine does not share with the host.
func privateDirs() []string {
	return []string{
		"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/lib/gpu-node-agent",
		"/etc/cni", "/etc/cdi", "/etc/kubernetes", "/var/log/pods", "/var/log/containers",
	}
}

// makeMountPoints creates the mount points of privateDirs on the host, and returns a function that removes the ones that were
// missing. The file list names them until then, so that the next run in this clone removes them if this one is killed.
func makeMountPoints(list string) (remove func(), err error) {
	previous, err := os.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	created := strings.Fields(string(previous))
	for _, dir := range privateDirs() {
		if _, e := os.Lstat(dir); errors.Is(e, fs.ErrNotExist) && !slices.Contains(created, dir) {
			created = append(created, dir)
		}
	}
	err = errors.Join(err, os.WriteFile(list, []byte(strings.Join(created, "\n")+"\n"), 0o644))
	for _, dir := range privateDirs() {
		if e := os.Mkdir(dir, 0o755); !errors.Is(e, fs.ErrExist) {
			err = errors.Join(err, e)
		}
	}
	return func() {
		// Removing a mount point would unmount it in the machine of another clone's run.
		if _, alive, err := runs(); err != nil || len(alive) > 0 {
			return
		}
		for _, dir := range created {
			_ = os.Remove(dir) // not empty if something else uses it now
		}
		_ = os.Remove(list) // otherwise the next run does
	}, err
}

// makeMachine turns the current namespaces into a machine. It writes its files to state and the output of containers to
// logs.
func makeMachine(state, logs string) error {
	mount := func(source, target, kind string, flags uintptr) error {
		if err := syscall.Mount(source, target, kind, flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", source, target, err)
		}
		return nil
	}
	errs := []error{
		mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE),
		mount("proc", "/proc", "proc", 0),
	}
	for _, dir := range privateDirs() {
		from := filepath.Join(state, strings.ReplaceAll(dir[1:], "/", "_"))
		if strings.HasPrefix(dir, "/var/log/") {
			from = filepath.Join(logs, filepath.Base(dir))
		}
		errs = append(errs, os.MkdirAll(from, 0o755), mount(from, dir, "", syscall.MS_BIND))
	}
	errs = append(errs, mount("tmpfs", "/run", "tmpfs", 0), os.MkdirAll("/run/lock", 0o755), syscall.Sethostname([]byte(nodeName)))
	// The first two files belong to the machine. The others are settings of the whole host, which the kubelet would
	// change, so it gets files with its values.
	for file, text := range map[string]string{
		"/etc/hosts": "127.0.0.1 localhost\n" + nodeIP + " " + nodeName + "\n", "/etc/resolv.conf": "",
		"/proc/sys/vm/overcommit_memory": "1\n", "/proc/sys/vm/panic_on_oom": "0\n",
		"/proc/sys/kernel/panic": "10\n", "/proc/sys/kernel/panic_on_oops": "1\n",
		"/proc/sys/kernel/keys/root_maxkeys": "1000000\n", "/proc/sys/kernel/keys/root_maxbytes": "25000000\n",
	} {
		if to, err := os.Readlink(file); err == nil { // with systemd-resolved it is a link into /run, which is empty now
			if !filepath.IsAbs(to) {
				to = filepath.Join(filepath.Dir(file), to)
			}
			file = to
			errs = append(errs, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o644))
		}
		own := filepath.Join(state, strings.ReplaceAll(file[1:], "/", "_"))
		errs = append(errs, os.WriteFile(own, []byte(text), 0o644), mount(own, file, "", syscall.MS_BIND))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return errors.Join(makeNetwork(), mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED))
}

// makeNetwork creates a bridge with the node's addresses. A pair of devices keeps it up, and the kubelet requires a
// default route, which leads nowhere.
func makeNetwork() error {
	for line := range strings.Lines(`
link set lo up
link add br0 type bridge
link set br0 up
link add up0 type veth peer name up1
link set up1 master br0
link set up0 up
link set up1 up
addr add ` + nodeIP + `/24 dev br0
addr add ` + serviceIP + `/32 dev br0
route add default via 10.99.0.254 dev br0
`) {
		args := strings.Fields(line)
		if len(args) == 0 {
			continue
		}
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.TrimSpace(line), err, out)
		}
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

// snapshotter returns overlayfs, or native if the state is on an overlay itself, as in a container.
func snapshotter(state string) string {
	const overlay = 0x794c7630 // OVERLAYFS_SUPER_MAGIC, linux/magic.h
	var stat syscall.Statfs_t
	if err := syscall.Statfs(state, &stat); err == nil && stat.Type == overlay {
		return "native"
	}
	return "overlayfs"
}

// nodeFiles writes the configurations of containerd, the pod network and the kubelet.
func nodeFiles(c *cluster) error {
	files := map[string]string{
		"/etc/cni/net.d/10-bridge.conflist": `{"cniVersion": "1.0.0", "name": "bridge", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "` + podSubnet + `"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`,
		// Lowering oom_score_adj requires CAP_SYS_RESOURCE, hence restrict_oom_score_adj.
		c.file("state", "containerd.toml"): `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "` + snapshotter(c.file("state")) + `"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "` + pauseImage + `"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
  # As the GPU Operator's toolkit would add it: here it is runc again.
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
      SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
`,
		// The short periods make the tests faster. No threshold of the disk: it is the host's, and evicted pods say nothing about the agent.
		c.file("state", "kubelet.yaml"): `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: ` + c.pki.File("ca.crt") + `}}
authorization: {mode: Webhook}
tlsCertFile: ` + c.pki.File("kubelet.crt") + `
tlsPrivateKeyFile: ` + c.pki.File("kubelet.key") + `
cgroupDriver: cgroupfs
cgroupRoot: /` + os.Getenv(cgroupEnv) + `
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
resolvConf: ""
evictionHard: {memory.available: "50Mi"}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
nodeStatusUpdateFrequency: 1s
nodeStatusReportFrequency: 5s
syncFrequency: 5s
volumePluginDir: /var/lib/kubelet/volumeplugins
`,
	}
	var errs []error
	for name, text := range files {
		errs = append(errs, os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644))
	}
	return errors.Join(errs...)
}
