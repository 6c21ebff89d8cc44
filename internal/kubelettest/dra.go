package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// DRA is a stand-in for the kubelet's manager of dynamic resource allocation. As a driver observes the real one, it finds registration
// sockets in plugins_registry, calls the driver back at its endpoint, uses the newest of several drivers of one name, and keeps a health
// stream open, which it opens again after its end. It forgets health that is not sent again in time. With WipeSlices it wipes
// ResourceSlices. Unlike the real one it gets no pods: that is for the test.
type DRA struct {
	version  Version
	registry string

	wipingDelay time.Duration
	wipe        func(driver string) error // nil: it wipes nothing

	mu      sync.Mutex // guards the fields below
	cancel  context.CancelFunc
	running sync.WaitGroup
	drivers []*draDriver                  // in order of registration
	known   map[string]bool               // the names of drivers that have been registered
	wipes   map[string]context.CancelFunc // by driver that is lost: ends the wait for its return
	refusal string                        // the error with which registrations are refused; empty for none
	health  map[string]DeviceHealth
	notify  chan struct{} // closed when anything changes
}

// draDriver is a registered driver.
type draDriver struct {
	name, path string // of its registration socket
	file       fs.FileInfo
	conn       *grpc.ClientConn // to its endpoint
	connected  bool             // it has been connected to the endpoint
	stop       func()           // ends its calls; it does not wait
}

// DeviceHealth is what a driver has sent about a device.
type DeviceHealth struct {
	Health   string // HEALTHY, UNHEALTHY, UNKNOWN
	Message  string
	Reports  int // how often the driver has sent it
	received time.Time
	timeout  time.Duration
}

// healthTimeout is the kubelet's default time after which it forgets the health of a device.
const healthTimeout = 30 * time.Second

// draPoll is how often the stand-in looks for sockets, and the pause before it opens a health stream again. The real kubelet gets events,
// and waits for 5 s.
const draPoll = 20 * time.Millisecond

// StartDRA starts a manager with the kubelet's root directory. The caller must call Stop.
func StartDRA(dir string, v Version) (*DRA, error) {
	d := &DRA{version: v, registry: filepath.Join(dir, "plugins_registry"), notify: make(chan struct{})}
	return d, d.Start()
}

// WipingDelay is how long the kubelet waits for a driver whose socket is lost before it deletes the ResourceSlices of the driver on its
// node (k8s.io/kubernetes v1.37.0, pkg/kubelet/cm/dra/manager.go, defaultWipingDelay).
const WipingDelay = 30 * time.Second

// StartDRAWith is StartDRA for a manager that wipes ResourceSlices as the kubelet does. At each of its starts it wipes all slices of the
// node: driver is empty then. It wipes a driver's slices when it has had no connection to the driver for the delay. It tries until wipe
// succeeds or the driver is back.
func StartDRAWith(dir string, v Version, delay time.Duration, wipe func(driver string) error) (*DRA, error) {
	d := &DRA{version: v, registry: filepath.Join(dir, "plugins_registry"), notify: make(chan struct{}), wipingDelay: delay, wipe: wipe}
	return d, d.Start()
}

// wipeSlices wipes the slices of a driver after a delay, or all of the node for "". It tries until it succeeds or ctx ends.
func (d *DRA) wipeSlices(ctx context.Context, driver string, delay time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		if d.wipe(driver) == nil {
			return
		}
		delay = min(max(delay, d.wipingDelay/30), time.Second)
	}
}

// followConnections waits to wipe the slices of drivers whose connections are lost, and ends the wait for drivers that are connected again.
func (d *DRA) followConnections(ctx context.Context) {
	if d.wipe == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	connected := make(map[string]bool)
	for _, r := range d.drivers {
		state := r.conn.GetState()
		if state == connectivity.Idle {
			r.conn.Connect()
		}
		r.connected = r.connected || state == connectivity.Ready
		connected[r.name] = connected[r.name] || state == connectivity.Ready || !r.connected
	}
	for name := range connected {
		d.known[name] = true
	}
	for name := range d.known {
		wait := d.wipes[name]
		switch {
		case connected[name] && wait != nil:
			wait()
			delete(d.wipes, name)
		case !connected[name] && wait == nil:
			lost, end := context.WithCancel(ctx)
			d.wipes[name] = end
			d.running.Go(func() { d.wipeSlices(lost, name, d.wipingDelay) })
		}
	}
}

// Connected reports whether the manager keeps the ResourceSlices of a driver: it has a connection to the driver. It wipes
// the slices of others.
func (d *DRA) Connected(driver string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known[driver] && d.wipes[driver] == nil
}

// Start starts the manager again after Stop, as the start of a kubelet: it has no drivers, and finds the drivers whose sockets exist.
func (d *DRA) Start() error {
	if err := os.MkdirAll(d.registry, 0o750); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	d.change(func() {
		d.cancel, d.health = cancel, make(map[string]DeviceHealth)
		d.known, d.wipes = make(map[string]bool), make(map[string]context.CancelFunc)
	})
	if d.wipe != nil {
		d.running.Go(func() { d.wipeSlices(ctx, "", 0) })
	}
	d.running.Go(func() { d.watch(ctx) })
	return nil
}

// Stop ends the manager as if the kubelet were killed. It may be called twice.
func (d *DRA) Stop() {
	d.mu.Lock()
	cancel := d.cancel
	d.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	d.running.Wait()
}

func (d *DRA) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	close(d.notify)
	d.notify = make(chan struct{})
}

// Refuse makes the manager refuse registrations with an error, or accept them again if it is empty.
func (d *DRA) Refuse(err string) { d.change(func() { d.refusal = err }) }

// watch registers a driver when its socket appears, and forgets it when its socket vanishes, until ctx ends.
func (d *DRA) watch(ctx context.Context) {
	defer d.change(func() {
		for _, driver := range d.drivers {
			driver.stop()
		}
		d.drivers = nil
	})
	tick := time.NewTicker(draPoll)
	defer tick.Stop()
	for {
		d.scan(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (d *DRA) scan(ctx context.Context) {
	files, _ := os.ReadDir(d.registry) // none while the directory is missing
	present := make(map[string]fs.FileInfo)
	for _, f := range files {
		if info, err := f.Info(); err == nil && info.Mode().Type() == fs.ModeSocket {
			present[filepath.Join(d.registry, f.Name())] = info
		}
	}
	d.mu.Lock()
	lost := slices.ContainsFunc(d.drivers, func(r *draDriver) bool { return !unixsock.SameSocket(r.file, present[r.path]) })
	drivers := slices.Clone(d.drivers)
	d.mu.Unlock()
	if lost {
		d.change(func() {
			d.drivers = slices.DeleteFunc(d.drivers, func(r *draDriver) bool {
				if unixsock.SameSocket(r.file, present[r.path]) {
					return false
				}
				r.stop()
				return true
			})
		})
	}
	for path, info := range present {
		if !slices.ContainsFunc(drivers, func(r *draDriver) bool { return r.path == path && unixsock.SameSocket(r.file, info) }) {
			_ = d.register(ctx, path, info) // the next scan tries again
		}
	}
	d.followConnections(ctx)
}

// register registers the driver at a socket.
func (d *DRA) register(ctx context.Context, path string, file fs.FileInfo) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := dialUnix(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	api := registerapi.NewRegistrationClient(conn)
	info, err := api.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if info.GetType() != registerapi.DRAPlugin {
		return nil
	}
	d.mu.Lock()
	refusal := d.refusal
	d.mu.Unlock()
	if !slices.Contains(info.GetSupportedVersions(), drav1.DRAPluginService) {
		refusal = "no supported version: " + fmt.Sprint(info.GetSupportedVersions())
	}
	if refusal != "" {
		_, err := api.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{Error: refusal})
		return err
	}
	endpoint, err := dialUnix(info.GetEndpoint())
	if err != nil {
		return err
	}
	watchCtx, stopWatch := context.WithCancel(context.WithoutCancel(ctx))
	r := &draDriver{name: info.GetName(), path: path, file: file, conn: endpoint, stop: func() {
		stopWatch()
		_ = endpoint.Close() // fails only if it is closed already
	}}
	if service := d.healthService(info.GetSupportedVersions()); service != nil {
		d.running.Go(func() { d.watchHealth(watchCtx, endpoint, service) })
	}
	d.change(func() { d.drivers = append(d.drivers, r) })
	_, err = api.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	return err
}

func dialUnix(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// receiveHealth reads from one health stream.
type receiveHealth func() (*drahealthv1.NodeWatchResourcesResponse, error)

// healthService returns what opens a health stream, nil if the driver has none.
func (d *DRA) healthService(versions []string) func(context.Context, *grpc.ClientConn) (receiveHealth, error) {
	if d.version != V136 && slices.Contains(versions, drahealthv1.DRAResourceHealthService) {
		return func(ctx context.Context, conn *grpc.ClientConn) (receiveHealth, error) {
			stream, err := drahealthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &drahealthv1.NodeWatchResourcesRequest{})
			if err != nil {
				return nil, err
			}
			return stream.Recv, nil
		}
	}
	if !slices.Contains(versions, drahealthv1alpha1.DRAResourceHealthService) {
		return nil
	}
	return func(ctx context.Context, conn *grpc.ClientConn) (receiveHealth, error) {
		stream, err := drahealthv1alpha1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &drahealthv1alpha1.NodeWatchResourcesRequest{})
		if err != nil {
			return nil, err
		}
		return func() (*drahealthv1.NodeWatchResourcesResponse, error) {
			old, err := stream.Recv()
			if err != nil {
				return nil, err
			}
			now := &drahealthv1.NodeWatchResourcesResponse{}
			for _, o := range old.GetDevices() {
				now.Devices = append(now.Devices, &drahealthv1.DeviceHealth{
					Device:  &drahealthv1.DeviceIdentifier{PoolName: o.GetDevice().GetPoolName(), DeviceName: o.GetDevice().GetDeviceName()},
					Health:  drahealthv1.HealthStatus(o.GetHealth()),
					Message: o.GetMessage(), HealthCheckTimeoutSeconds: o.GetHealthCheckTimeoutSeconds(),
				})
			}
			return now, nil
		}, nil
	}
}

// watchHealth stores what a driver sends until ctx ends. The end of a stream drops everything.
func (d *DRA) watchHealth(ctx context.Context, conn *grpc.ClientConn, open func(context.Context, *grpc.ClientConn) (receiveHealth, error)) {
	for ctx.Err() == nil {
		if receive, err := open(ctx, conn); err == nil {
			for {
				resp, err := receive()
				if err != nil {
					break
				}
				d.change(func() { d.storeHealth(resp) })
			}
			d.change(func() { d.health = make(map[string]DeviceHealth) })
		}
		select {
		case <-ctx.Done():
		case <-time.After(draPoll):
		}
	}
}

func (d *DRA) storeHealth(resp *drahealthv1.NodeWatchResourcesResponse) {
	for _, h := range resp.GetDevices() {
		name := h.GetDevice().GetPoolName() + "/" + h.GetDevice().GetDeviceName()
		timeout := time.Duration(h.GetHealthCheckTimeoutSeconds()) * time.Second
		if timeout <= 0 {
			timeout = healthTimeout
		}
		d.health[name] = DeviceHealth{
			Health: h.GetHealth().String(), Message: h.GetMessage(), Reports: d.health[name].Reports + 1, received: time.Now(), timeout: timeout,
		}
	}
}

// Health returns the health of a device, by pool/name, that the driver has sent and the kubelet has not forgotten.
func (d *DRA) Health(device string) (h DeviceHealth, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h, ok = d.health[device]
	return h, ok && time.Since(h.received) < h.timeout
}

// Registered reports whether a driver of the name is registered.
func (d *DRA) Registered(driver string) bool { return d.newest(driver) != nil }

// newest returns the driver that was registered last, nil if there is none.
func (d *DRA) newest(driver string) *draDriver {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range slices.Backward(d.drivers) {
		if r.name == driver {
			return r
		}
	}
	return nil
}

// Changed returns a channel that closes when anything changes.
func (d *DRA) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.notify
}

// Claim identifies a ResourceClaim as the kubelet does.
type Claim struct{ Namespace, Name, UID string }

// PreparedDevice is a device of a prepared claim.
type PreparedDevice struct {
	Requests            []string
	Pool, Name, ShareID string
	CDI                 []string
}

var errNotRegistered = errors.New("DRA driver is not registered")

// Prepare prepares one claim, once: the real kubelet tries again with each sync of the pod.
func (d *DRA) Prepare(ctx context.Context, driver string, c Claim) ([]PreparedDevice, error) {
	r := d.newest(driver)
	if r == nil {
		return nil, fmt.Errorf("%s: %w", driver, errNotRegistered)
	}
	resp, err := drav1.NewDRAPluginClient(r.conn).NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{
		Claims: []*drav1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: c.UID}},
	})
	if err != nil {
		return nil, err
	}
	answer, ok := resp.GetClaims()[c.UID]
	switch {
	case !ok:
		return nil, fmt.Errorf("NodePrepareResources left out claim %s/%s", c.Namespace, c.Name)
	case answer.GetError() != "":
		return nil, errors.New(answer.GetError())
	}
	var devices []PreparedDevice
	for _, p := range answer.GetDevices() {
		devices = append(devices, PreparedDevice{p.GetRequestNames(), p.GetPoolName(), p.GetDeviceName(), p.GetShareId(), p.GetCdiDeviceIds()})
	}
	return devices, nil
}

// Unprepare unprepares one claim.
func (d *DRA) Unprepare(ctx context.Context, driver string, c Claim) error {
	r := d.newest(driver)
	if r == nil {
		return fmt.Errorf("%s: %w", driver, errNotRegistered)
	}
	resp, err := drav1.NewDRAPluginClient(r.conn).NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{
		Claims: []*drav1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: c.UID}},
	})
	if err != nil {
		return err
	}
	answer, ok := resp.GetClaims()[c.UID]
	switch {
	case !ok:
		return fmt.Errorf("NodeUnprepareResources left out claim %s/%s", c.Namespace, c.Name)
	case answer.GetError() != "":
		return errors.New(answer.GetError())
	}
	return nil
}
