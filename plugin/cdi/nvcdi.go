//go:build cgo && linux

package cdi

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"go.uber.org/zap"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
)

// nvcdiEdits returns nvcdi's edits of a device, or its edits of all devices if the ID is empty.
//
// The spec must work with every toolkit and runtime that the agent's own generator serves. So it has only hooks that all releases of
// nvidia-cdi-hook and nvidia-ctk have: before 1.18 the programs fail on an unknown hook, and the container with them. Where memory is
// shared and the driver can limit it, there is also the hook of 1.20 that sets the limits. There are no additional group IDs, which need
// CDI 0.7. nvsandboxutils stays off: it is another library of the driver, and a function that it lacks would end the process.
func nvcdiEdits(r request, id health.DeviceID, log *zap.Logger) (*specs.ContainerEdits, error) {
	library, release, err := nvml.Use()
	if err != nil {
		return nil, err
	}
	defer release()
	h := r.host
	hooks := []nvcdi.HookName{nvcdi.CreateSymlinksHook, nvcdi.UpdateLDCacheHook}
	if r.limits {
		hooks = append(hooks, limitsHook)
	}
	toolkit, err := nvcdi.New(
		nvcdi.WithLogger(quietLog{log.Sugar()}), nvcdi.WithNvmlLib(library), nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithDriverRoot(h.driverRoot()), nvcdi.WithDevRoot(h.visibleDevRoot()), nvcdi.WithNVIDIACDIHookPath(r.hookPath),
		nvcdi.WithDisabledHooks(nvcdi.AllHooks), nvcdi.WithEnabledHooks(hooks...),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils, nvcdi.FeatureNoAdditionalGIDsForDeviceNodes),
	)
	if err != nil {
		return nil, err
	}
	if id == "" {
		common, err := toolkit.GetCommonEdits()
		if err != nil {
			return nil, err
		}
		return h.finish(common)
	}
	devices, err := toolkit.GetDeviceSpecsByID(string(id))
	if err != nil {
		return nil, err
	}
	if len(devices) != 1 {
		return nil, fmt.Errorf("nvcdi: expected one device %s, got %d", id, len(devices))
	}
	return h.finish(&cdi.ContainerEdits{ContainerEdits: &devices[0].ContainerEdits})
}

// finish removes duplicates, and replaces the agent's paths of the driver's files by the host's. It removes the numbers of device nodes,
// which a container runtime finds itself: the numbers of nvidia-uvm and nvidia-caps change when the modules are loaded again.
func (h Host) finish(edits *cdi.ContainerEdits) (*specs.ContainerEdits, error) {
	spec := specs.Spec{ContainerEdits: *edits.ContainerEdits}
	dedupe, err := transform.NewDedupe()
	if err != nil {
		return nil, err
	}
	if err := dedupe.Transform(&spec); err != nil {
		return nil, err
	}
	e := &spec.ContainerEdits
	for _, n := range e.DeviceNodes {
		if n.HostPath = h.HostPath(n.Path); n.HostPath == n.Path {
			n.HostPath = ""
		}
		n.Major, n.Minor = 0, 0
	}
	for _, m := range e.Mounts {
		// nvcdi mounts the host's /dev/null, for the runtime's own injection of devices; a driver's root may have no /dev.
		if m.HostPath == os.DevNull {
			continue
		}
		m.HostPath = path.Join(h.DriverRoot, below(h.driverRoot(), m.HostPath))
	}
	for _, hook := range e.Hooks {
		for i, arg := range hook.Args {
			// nvcdi prepends the device root to links in /dev/dri/by-path, which it does not prepend to the device nodes.
			if target, link, ok := strings.Cut(arg, "::"); ok {
				hook.Args[i] = target + "::" + below(h.visibleDevRoot(), link)
			}
			if i > 0 && hook.Args[i-1] == driverRootFlag {
				hook.Args[i] = cmp.Or(h.DriverRoot, "/") // the hook runs on the host
			}
		}
	}
	return e, nil
}

// below returns a path relative to a root, with a leading slash. A path that is not below the root is relative already: an absolute link in
// the root leads to it.
func below(root, p string) string {
	if rest, ok := strings.CutPrefix(p, strings.TrimSuffix(root, "/")+"/"); ok {
		return "/" + rest
	}
	return p
}

// quietLog logs all that nvcdi logs at debug level: it warns of every file that a driver may have and this one has not.
type quietLog struct{ log *zap.SugaredLogger }

func (l quietLog) Debugf(format string, args ...any)   { l.log.Debugf(format, args...) }
func (l quietLog) Tracef(format string, args ...any)   { l.log.Debugf(format, args...) }
func (l quietLog) Infof(format string, args ...any)    { l.log.Debugf(format, args...) }
func (l quietLog) Warningf(format string, args ...any) { l.log.Debugf(format, args...) }
func (l quietLog) Errorf(format string, args ...any)   { l.log.Debugf(format, args...) }
