package cdi

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"go.uber.org/zap"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The hook that sets the driver's memory limits of a container by its environment, NVIDIA_GPU_MEMORY_REQUEST and
// NVIDIA_GPU_MEMORY_LIMIT in MiB. It is part of the container toolkit since 1.20; without these variables it does nothing. With them and
// a driver without memory limits, or version 1 of control groups, it fails, and the container with it.
const (
	limitsHook     = "apply-cuda-memory-limits"
	driverRootFlag = "--driver-root"
	gpuFlag        = "--gpu-id"
)

// limitsDriver is the first driver with memory limits.
const limitsDriver = 615

// wantsLimits reports whether the spec has the hook that sets memory limits.
func (in Input) wantsLimits() bool {
	major, _, _ := strings.Cut(in.Driver, ".")
	n, err := strconv.Atoi(major)
	return in.MemoryLimits && in.Config.HookPath != "" && err == nil && n >= limitsDriver
}

// limits reports whether a device in the spec has the hook. The driver has no limits of MIG devices.
func (in Input) limits(d *health.Device) bool { return d.Kind != health.KindMIG && in.wantsLimits() }

// limitsHook returns the hook for a GPU. It runs on the host, as nvcdi's does.
func (in Input) limitsHook(gpu health.DeviceID) *specs.Hook {
	h := in.Config.hook(limitsHook, []string{driverRootFlag, cmp.Or(in.Host.DriverRoot, "/"), gpuFlag, string(gpu)})
	h.HookName = "createRuntime"
	return h
}

// LimitHooks finds the devices for which the specs have a hook that sets memory limits.
type LimitHooks struct {
	staticDir string // as in Writer
	log       *zap.Logger

	mu    sync.Mutex // guards the fields below
	kind  string     // for which the specs were read
	files []specFile
	gpus  map[string][]string
}

// NewLimitHooks returns LimitHooks for this host.
func NewLimitHooks(log *zap.Logger) *LimitHooks { return &LimitHooks{staticDir: staticDir, log: log} }

// GPUs returns the UUIDs of the GPUs for which a container gets the hook, by the CDI name of the device without the kind. If several
// specs have a name, each must have the hook. It only reads file metadata as long as no spec has changed. The caller must not modify
// the result.
func (l *LimitHooks) GPUs(c Config) map[string][]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	files, kind := specFiles([]string{l.staticDir, c.Dir}), c.EffectiveKind()
	if l.gpus == nil || kind != l.kind || !slices.Equal(files, l.files) {
		l.kind, l.files = kind, files
		l.read()
	}
	return l.gpus
}

// read reads the specs. The caller holds l.mu.
func (l *LimitHooks) read() {
	l.gpus = make(map[string][]string)
	for _, f := range l.files {
		spec, err := f.read()
		if err != nil {
			l.log.Debug("cannot read CDI spec", zap.String("file", f.path), zap.Error(err)) // Writer warns of it
			continue
		}
		if spec.Kind != l.kind {
			continue
		}
		for _, d := range spec.Devices {
			gpus := slices.Concat(d.ContainerEdits.limitedGPUs(), spec.ContainerEdits.limitedGPUs())
			if others, exists := l.gpus[d.Name]; exists {
				gpus = slices.DeleteFunc(gpus, func(gpu string) bool { return !slices.Contains(others, gpu) })
			}
			l.gpus[d.Name] = gpus
		}
	}
}

// limitedGPUs returns the UUIDs of the GPUs whose memory limits the hooks set.
func (e foreignEdits) limitedGPUs() (gpus []string) {
	for _, h := range e.Hooks {
		if !slices.Contains(h.Args, limitsHook) {
			continue
		}
		for i, arg := range h.Args {
			if value, ok := strings.CutPrefix(arg, gpuFlag+"="); ok {
				gpus = append(gpus, value)
			} else if arg == gpuFlag && i+1 < len(h.Args) {
				gpus = append(gpus, h.Args[i+1])
			}
		}
	}
	return gpus
}
