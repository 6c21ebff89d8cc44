//go:build cgo && linux

package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// propertiesTimeout limits one reading of the properties of all devices. A healthy driver needs milliseconds for each.
const propertiesTimeout = 5 * time.Second

// Properties returns a function that reads the properties of devices. It leaves out devices that do not answer in time or whose
// properties cannot be read now, such as lost ones: ask again for these. Each GPU is read beside the others with its MIG devices, and
// not again before an earlier reading has ended, so that a GPU that hangs costs one thread and delays no other.
//
// The instances of MIG devices need CAP_SYS_ADMIN or the capability of MIG's monitor. Without it, MIG devices have Properties with a nil
// MIG. The function may be called from any goroutine.
func Properties(log *zap.Logger) func(context.Context, []health.Device) map[health.DeviceID]*health.Properties {
	r := &propertyReader{log: log, logged: map[health.DeviceID]string{}}
	r.calls.Limit = propertiesTimeout
	return r.read
}

type propertyReader struct {
	log   *zap.Logger
	calls health.Guard[health.DeviceID, gpuProperties] // by GPU

	mu     sync.Mutex                 // guards logged
	logged map[health.DeviceID]string // the last error of each GPU
}

// gpuProperties is the result of reading a GPU.
type gpuProperties struct {
	all map[health.DeviceID]*health.Properties
	err error
}

func (r *propertyReader) read(ctx context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
	gpus := map[health.DeviceID][]health.Device{}
	for _, d := range devices {
		gpus[d.GPU()] = append(gpus[d.GPU()], d)
	}
	results := make(chan map[health.DeviceID]*health.Properties, len(gpus))
	for gpu, devices := range gpus {
		go func() { results <- r.readInTime(ctx, gpu, devices) }()
	}
	all := map[health.DeviceID]*health.Properties{}
	for range gpus {
		maps.Copy(all, <-results)
	}
	return all
}

var errHangs = errors.New("NVML has not answered")

func (r *propertyReader) readInTime(
	ctx context.Context, gpu health.DeviceID, devices []health.Device,
) map[health.DeviceID]*health.Properties {
	got, err := r.calls.Call(ctx.Done(), gpu, func() gpuProperties {
		all, err := readGPU(gpu, devices)
		return gpuProperties{all, err}
	}, nil)
	switch {
	case err == nil:
		r.report(gpu, got.err)
	case errors.Is(err, health.ErrLate) || errors.Is(ctx.Err(), context.DeadlineExceeded):
		r.report(gpu, errHangs)
	}
	return got.all
}

// report logs an error of a GPU once.
func (r *propertyReader) report(gpu health.DeviceID, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.logged, gpu)
		return
	}
	if text := err.Error(); r.logged[gpu] != text {
		r.logged[gpu] = text
		r.log.Warn("properties of a GPU or of its MIG devices are unknown", zap.String("device", string(gpu)), zap.Error(err))
	}
}

// readGPU reads the properties of a GPU and its MIG devices among the devices. It may take as long as the driver hangs.
func readGPU(gpu health.DeviceID, devices []health.Device) (all map[health.DeviceID]*health.Properties, err error) {
	err = withGPU(gpu, func(device nvml.Device) error {
		common, err := gpuPropertiesOf(device)
		if err != nil {
			return err
		}
		failed := setFabric(&common, device)
		all = make(map[health.DeviceID]*health.Properties, len(devices))
		profiles := instanceProfiles{device: device}
		for i := range devices {
			d, p := &devices[i], common
			if d.Kind == health.KindMIG {
				var err error
				if p.MIG, err = profiles.instance(d.GI); err != nil {
					failed = fmt.Errorf("%s: %w", d.ID, err)
					if !isPermanent(err) {
						continue
					}
				}
			}
			all[d.ID] = &p
		}
		return failed
	})
	return all, err
}

// isPermanent reports whether another try would have the same result.
func isPermanent(err error) bool {
	code, _ := errors.AsType[Error](err)
	switch nvml.Return(code) {
	case nvml.ERROR_NO_PERMISSION, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return true
	}
	return false
}

// gpuPropertiesOf returns the properties of a GPU without its fabric; what its driver does not have is empty.
func gpuPropertiesOf(device nvml.Device) (p health.Properties, err error) {
	brand, ret := device.GetBrand()
	if err := failure("nvmlDeviceGetBrand", ret); err != nil && !isPermanent(err) {
		return p, err
	} else if err == nil {
		p.Brand = brandName(brand)
	}
	mode, ret := device.GetAddressingMode() // since driver 575
	if err := failure("nvmlDeviceGetAddressingMode", ret); err != nil && !isPermanent(err) && ret != nvml.ERROR_ARGUMENT_VERSION_MISMATCH {
		return p, err
	} else if err == nil {
		p.AddressingMode = addressingModeName(nvml.DeviceAddressingModeType(mode.Value)) //nolint:gosec // an enumeration
	}
	serial, ret := device.GetSerial()
	if err := failure("nvmlDeviceGetSerial", ret); err != nil && !isPermanent(err) {
		return p, err
	} else if err == nil {
		p.Serial = serial
	}
	return p, nil
}

// setFabric sets what NVML knows of the fabric. After an error the fabric counts as pending, as before the GPU has joined it.
func setFabric(p *health.Properties, device nvml.Device) error {
	fabric, ret := device.GetGpuFabricInfoV().V1() // since driver 525
	if err := failure("nvmlDeviceGetGpuFabricInfo", ret); err != nil {
		if isPermanent(err) {
			return nil
		}
		p.FabricPending = true
		return err
	}
	p.Clique = cliqueOf(fabric)
	p.FabricPending = fabric.State == nvml.GPU_FABRIC_STATE_NOT_STARTED || fabric.State == nvml.GPU_FABRIC_STATE_IN_PROGRESS
	return nil
}

// cliqueOf returns health.Properties.Clique. The NVSwitches of a single node form a fabric without a cluster.
func cliqueOf(f nvml.GpuFabricInfo) string {
	cluster := f.ClusterUuid
	if f.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(f.Status) != nvml.SUCCESS ||
		cluster == [16]uint8{} { //nolint:gosec // a code of NVML
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x.%d", cluster[:4], cluster[4:6], cluster[6:8], cluster[8:10], cluster[10:], f.CliqueId)
}

// instanceProfiles reads the GPU instances of a GPU, and the profiles of instances once.
type instanceProfiles struct {
	device nvml.Device
	byID   map[uint32]nvml.GpuInstanceProfileInfo
}

// instance returns the properties of a GPU instance.
func (p *instanceProfiles) instance(id int) (*health.MIGProperties, error) {
	gi, ret := p.device.GetGpuInstanceById(id)
	if err := failure("nvmlDeviceGetGpuInstanceById", ret); err != nil {
		return nil, err
	}
	info, ret := gi.GetInfo()
	if err := failure("nvmlGpuInstanceGetInfo", ret); err != nil {
		return nil, err
	}
	profile, err := p.profile(info.ProfileId)
	if err != nil {
		return nil, err
	}
	return &health.MIGProperties{
		ProfileID: int(info.ProfileId), PlacementStart: int(info.Placement.Start), MemorySlices: int(info.Placement.Size),
		Multiprocessors: int(profile.MultiprocessorCount), CopyEngines: int(profile.CopyEngineCount), Decoders: int(profile.DecoderCount),
		Encoders: int(profile.EncoderCount), JPEGEngines: int(profile.JpegCount), OFAEngines: int(profile.OfaCount),
	}, nil
}

// profile returns the profile with an ID. NVML finds profiles by another number than their ID.
func (p *instanceProfiles) profile(id uint32) (nvml.GpuInstanceProfileInfo, error) {
	if p.byID == nil {
		p.byID = map[uint32]nvml.GpuInstanceProfileInfo{}
		for i := range nvml.GPU_INSTANCE_PROFILE_COUNT {
			info, ret := p.device.GetGpuInstanceProfileInfo(i)
			switch ret {
			case nvml.SUCCESS:
				p.byID[info.Id] = info
			case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT: // by this GPU, or by an older driver
			default:
				p.byID = nil
				return nvml.GpuInstanceProfileInfo{}, failure("nvmlDeviceGetGpuInstanceProfileInfo", ret)
			}
		}
	}
	info, ok := p.byID[id]
	if !ok {
		return info, fmt.Errorf("nvmlDeviceGetGpuInstanceProfileInfo: no profile with the ID %d", id)
	}
	return info, nil
}

// brandName returns the name of a brand in NVIDIA's driver of DRA (NVIDIA/go-nvlib, pkg/nvlib/device/device.go); empty if it is unknown.
func brandName(b nvml.BrandType) string {
	names := [...]string{
		nvml.BRAND_QUADRO: "Quadro", nvml.BRAND_TESLA: "Tesla", nvml.BRAND_NVS: "NVS", nvml.BRAND_GRID: "Grid", nvml.BRAND_GEFORCE: "GeForce",
		nvml.BRAND_TITAN: "Titan", nvml.BRAND_NVIDIA_VAPPS: "NvidiaVApps", nvml.BRAND_NVIDIA_VPC: "NvidiaVPC", nvml.BRAND_NVIDIA_VCS: "NvidiaVCS",
		nvml.BRAND_NVIDIA_VWS: "NvidiaVWS", nvml.BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming", nvml.BRAND_QUADRO_RTX: "QuadroRTX",
		nvml.BRAND_NVIDIA_RTX: "NvidiaRTX", nvml.BRAND_NVIDIA: "Nvidia", nvml.BRAND_GEFORCE_RTX: "GeForceRTX", nvml.BRAND_TITAN_RTX: "TitanRTX",
	}
	if b < 0 || int(b) >= len(names) {
		return ""
	}
	return names[b]
}

func addressingModeName(m nvml.DeviceAddressingModeType) string {
	switch m {
	case nvml.DEVICE_ADDRESSING_MODE_NONE:
		return "None"
	case nvml.DEVICE_ADDRESSING_MODE_HMM:
		return "HMM"
	case nvml.DEVICE_ADDRESSING_MODE_ATS:
		return "ATS"
	}
	return ""
}
