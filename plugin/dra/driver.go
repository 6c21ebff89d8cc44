// Package dra is a driver of dynamic resource allocation (DRA): it publishes the devices of a snapshot as ResourceSlices, prepares
// ResourceClaims for the kubelet and reports the health of devices to it.
//
//	Snapshot, Config ─► Pool ─► publisher ─► ResourceSlices, with taints ─► scheduler
//	kubelet ─► claims: Prepare, Unprepare ─► checkpoint, CDI specs
//	Snapshot ─► WatchHealthStatus ─► kubelet ─► status of pods
//
// Decisions are pure: pool.go decides what is published. The libraries of k8s.io/dynamic-resource-allocation speak to the kubelet
// and to the API server.
package dra

import (
	"context"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Domain qualifies the taints and attributes that are not NVIDIA's.
const Domain = "gpu-node-agent"

// Options configure a Driver. All fields are required.
type Options struct {
	Config    *health.Latest[plugin.Config]
	Snapshots *health.Latest[health.Snapshot]
	Node      string                               // the node's name in Kubernetes, which is also the name of the pool
	BootID    string                               // identifies the boot; "" if unknown
	Connect   func() (kubernetes.Interface, error) // opens a client of the API server, without a request
	Released  *health.Latest[plugin.Handover]      // whether the device plugin has released the devices
	Holders   func() podresources.Holders
	MPS       *health.Latest[mps.Desired] // which MPS daemons run; the driver stores it while it serves
	Simulated func() bool                 // the devices are not real: a container needs no device nodes
	// Properties returns what NVML knows of the devices that have none in the snapshot. It may take seconds and leave devices out.
	Properties func(context.Context, []health.Device) map[health.DeviceID]*health.Properties
	Log        *zap.Logger
}

// Driver publishes devices and prepares claims while plugin.api is dra.
type Driver struct {
	Options
	released health.Latest[plugin.Handover]
	claims   health.Latest[Claims]
}

// New returns a driver. It does nothing while plugin.api is not dra and no claim of it is prepared.
func New(o Options) *Driver { return &Driver{Options: o} }

// Run serves until ctx ends. It retries after errors and reports them in Status.
func (d *Driver) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Released holds whether the driver has released the devices: with plugin.api devicePlugin, when no claim is prepared and no slice is
// published.
func (d *Driver) Released() *health.Latest[plugin.Handover] { return &d.released }

// Claims holds the prepared claims.
func (d *Driver) Claims() *health.Latest[Claims] { return &d.claims }

// Device returns the device that the driver publishes under a name; ok is false if there is none. It has the form of
// podresources.Resolver for the devices of claims.
func (d *Driver) Device(driver, pool, name string) (id health.DeviceID, ok bool) { return "", false }

// Status is the state of the driver. It is immutable.
type Status struct {
	Enabled bool   // plugin.api is dra, or the driver still releases the devices
	Err     string // why it does not serve; empty if it does
	Warning string // what works only in part, such as features that the API server lacks

	DriverName string
	Pool       string
	Registered bool // the kubelet has accepted the registration

	Devices    int       // desired in slices
	Tainted    int       // of these, with a taint NoSchedule or NoExecute
	Slices     int       // desired
	Published  time.Time // when the API server last had what is desired; zero before
	Behind     bool      // the API server has something else than what is desired
	PublishErr string    // of the last try to publish; empty after success

	DroppedFeatures []string          // feature gates of the API server that are off
	PublishErrors   map[string]uint64 // failed tries by reason, see PublishErrors
	PrepareErrors   map[string]uint64 // refused claims by reason, see PrepareErrors
	Prepares        Durations
	Unprepares      Durations
}

// Durations is a histogram of the durations of calls.
type Durations struct {
	Counts []uint64 // by bound of DurationBounds, not cumulative; the last is for longer calls
	Sum    float64  // seconds
}

// DurationBounds returns the bounds of Durations in seconds.
func DurationBounds() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
}

// Status may be called from any goroutine.
func (d *Driver) Status() Status { return Status{} }
