package processes

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const (
	interval = 10 * time.Second
	limit    = 15 * time.Second

	podUID      = "0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f"
	containerID = "3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f7081920"
)

// writeFiles writes files with their directories.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// behavior is what a fakeDriver does. It hangs while hang is open.
type behavior struct {
	reading      driver.ProcessReading
	err, openErr error
	hang         chan struct{} // nil: it does not
}

// fakeDriver lists processes.
type fakeDriver struct {
	now atomic.Pointer[behavior]

	calls, running, open, opened atomic.Int32
	parallel                     atomic.Bool // two calls at once
}

func newDriver(b behavior) *fakeDriver {
	d := new(fakeDriver)
	d.now.Store(&b)
	return d
}

func (d *fakeDriver) source() Source {
	return Source{Interval: interval, Limit: limit, AllProcesses: true, Open: func() (driver.ProcessLister, func(), error) {
		if err := d.now.Load().openErr; err != nil {
			return nil, nil, err
		}
		d.open.Add(1)
		d.opened.Add(1)
		return d.listProcesses, func() { d.open.Add(-1) }, nil
	}}
}

func (d *fakeDriver) listProcesses(context.Context, []health.Device) (*driver.ProcessReading, error) {
	d.calls.Add(1)
	if d.running.Add(1) > 1 {
		d.parallel.Store(true)
	}
	defer d.running.Add(-1)
	b := d.now.Load()
	if b.hang != nil {
		<-b.hang
	}
	if b.err != nil {
		return nil, b.err
	}
	r := b.reading
	r.At = time.Now()
	return &r, nil
}

// testFollower follows a node with the device GPU-a that pod-1 holds, and returns its log.
func testFollower(c Config) (*Follower, *health.Latest[Config], *observer.ObservedLogs) {
	core, logs := observer.New(zap.InfoLevel)
	configs, snapshots := new(health.Latest[Config]), new(health.Latest[health.Snapshot])
	configs.Store(&c)
	snapshots.Store(&health.Snapshot{Devices: []health.DeviceState{{Device: health.Device{ID: "GPU-a"}}}})
	return New(Options{
		Config: configs, Snapshots: snapshots, Log: zap.New(core),
		Holders: func() podresources.Holders {
			return podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-a": {holder("train-0", "main")}}}
		},
	}), configs, logs
}

func oneProcess() driver.ProcessReading {
	return driver.ProcessReading{Measured: []health.DeviceID{"GPU-a"}, Processes: []driver.Process{process("GPU-a", 4242, 1<<30)}}
}

// start measures until the test stops it, and checks that the source is released then.
func start(t *testing.T, f *Follower, d *fakeDriver, s Source) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Measure(ctx, s) }()
	synctest.Wait()
	return func() {
		t.Helper()
		cancel()
		<-done
		if n := d.open.Load(); n != 0 {
			t.Errorf("%d sources are open after the end", n)
		}
		if f.Latest().Load() != nil {
			t.Error("a measurement remains after the end")
		}
		if d.parallel.Load() {
			t.Error("two calls at once")
		}
	}
}

// advance lets time pass.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func enabled(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	writeFiles(t, dir, map[string]string{
		"proc/4242/cgroup": "0::/kubepods/pod" + podUID + "/" + containerID + "\n",
		"pods/team_train-0_" + podUID + "/main/0.log": "",
	})
	return Config{Enabled: true, Proc: filepath.Join(dir, "proc"), PodLogs: filepath.Join(dir, "pods")}
}

func TestFollowerMeasures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, logs := testFollower(enabled(t))
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		s := f.Latest().Load()
		want := []Usage{{Device: "GPU-a", Container: Container{"team", "train-0", "main"}, Processes: 1, Memory: 1 << 30, HasMemory: true}}
		if s == nil || s.Err != "" || s.Warning != "" || !reflect.DeepEqual(s.Usage, want) {
			t.Fatalf("%+v", s)
		}
		if c := s.ContainerOf(4242); c != want[0].Container || s.ContainerOf(1) != (Container{}) {
			t.Errorf("process 4242 belongs to %+v, process 1 to %+v", c, s.ContainerOf(1))
		}
		advance(interval)
		if next := f.Latest().Load(); !next.At.After(s.At) || d.calls.Load() != 2 || d.opened.Load() != 1 {
			t.Errorf("after an interval: at %v, %d calls, %d opens", next.At, d.calls.Load(), d.opened.Load())
		}
		if n := logs.Len(); n != 0 {
			t.Errorf("%d log entries: %v", n, logs.All())
		}
	})
}

// A call that hangs ends the measurement after the limit. No other call starts beside it, and its result is dropped.
func TestFollowerWhileDriverHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, logs := testFollower(enabled(t))
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		hang := make(chan struct{})
		d.now.Store(&behavior{reading: oneProcess(), hang: hang})
		advance(interval + limit - time.Second)
		if s := f.Latest().Load(); s.Err != "" || len(s.Usage) != 1 {
			t.Errorf("before the limit: %+v", s)
		}
		advance(time.Second)
		hung := f.Latest().Load()
		if hung.Err == "" || len(hung.Usage) > 0 || len(hung.Measured) > 0 {
			t.Errorf("after the limit: %+v", hung)
		}
		advance(10 * interval)
		if n := d.calls.Load(); n != 2 {
			t.Errorf("%d calls while one hangs", n)
		}
		d.now.Store(&behavior{err: errors.New("uninitialized")})
		hang <- struct{}{}
		synctest.Wait()
		if s := f.Latest().Load(); s.Err == "" {
			t.Errorf("the late result is published: %+v", s)
		}
		d.now.Store(&behavior{reading: oneProcess()})
		advance(interval)
		if s := f.Latest().Load(); s.Err != "" || len(s.Usage) != 1 {
			t.Errorf("after the driver has recovered: %+v", s)
		}
		if n := logs.Len(); n != 3 {
			t.Errorf("%d log entries, want one for each failure and one for their end: %v", n, logs.All())
		}
	})
}

// At the end the measurement disappears at once, and Measure returns when the hanging call has.
func TestFollowerEndsWhileDriverHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		d := newDriver(behavior{reading: oneProcess()})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); f.Measure(ctx, d.source()) }()
		synctest.Wait()
		hang := make(chan struct{})
		d.now.Store(&behavior{reading: oneProcess(), hang: hang})
		advance(interval)
		cancel()
		synctest.Wait()
		if f.Latest().Load() != nil {
			t.Error("a measurement remains after the end")
		}
		select {
		case <-done:
			t.Error("Measure has returned while the driver is in use")
		default:
		}
		close(hang)
		<-done
		if d.open.Load() != 0 || f.Latest().Load() != nil {
			t.Error("not released")
		}
	})
}

func TestFollowerOpensAgainAfterError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		d := newDriver(behavior{openErr: errors.New("no library")})
		defer start(t, f, d, d.source())()
		if s := f.Latest().Load(); s.Err != "no library" {
			t.Errorf("%+v", s)
		}
		d.now.Store(&behavior{err: errors.New("uninitialized")})
		advance(2 * interval)
		if s := f.Latest().Load(); s.Err != "uninitialized" || d.opened.Load() != 2 || d.open.Load() != 0 {
			t.Errorf("%+v; %d opened, %d open", s, d.opened.Load(), d.open.Load())
		}
		d.now.Store(&behavior{reading: oneProcess()})
		advance(interval)
		if s := f.Latest().Load(); s.Err != "" || len(s.Usage) != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// Enabling and disabling takes effect at once, and only an enabled follower uses the driver.
func TestFollowerFollowsConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := enabled(t)
		off := c
		off.Enabled = false
		f, configs, _ := testFollower(off)
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		for range 2 {
			opened := d.opened.Load()
			advance(10 * interval)
			if f.Latest().Load() != nil || d.open.Load() != 0 || d.opened.Load() != opened {
				t.Error("measures while disabled")
			}
			configs.Store(&c)
			synctest.Wait()
			if s := f.Latest().Load(); s == nil || len(s.Usage) != 1 {
				t.Errorf("enabled: %+v", s)
			}
			configs.Store(&off)
			synctest.Wait()
		}
	})
}

// The first measurement waits for the kubelet's first answer, but not for ever.
func TestFollowerAwaitsHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		var known atomic.Pointer[podresources.Holders]
		known.Store(&podresources.Holders{Err: "not asked yet"})
		holders := f.Holders()
		f.Holders = func() podresources.Holders { return *known.Load() }
		d := newDriver(behavior{reading: oneProcess()})
		stop := start(t, f, d, d.source())
		advance(time.Second)
		if s := f.Latest().Load(); s != nil {
			t.Errorf("measured without holders: %+v", s)
		}
		known.Store(&holders)
		advance(time.Second)
		if s := f.Latest().Load(); s == nil || len(s.Usage) != 1 || s.Usage[0].Container.Pod == "" {
			t.Errorf("%+v", s)
		}
		stop()

		known.Store(&podresources.Holders{Err: "no such socket"})
		opened := d.opened.Load()
		start(t, f, d, d.source())()
		if d.opened.Load() != opened {
			t.Error("opens the source although it has ended meanwhile")
		}
		defer start(t, f, d, d.source())()
		advance(holdersTimeout)
		if s := f.Latest().Load(); s == nil || s.WithoutPod[ReasonHoldersUnknown] != 1 {
			t.Errorf("without a kubelet: %+v", s)
		}
	})
}

func TestFollowerWithoutMeasuredDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		d := newDriver(behavior{})
		defer start(t, f, d, d.source())()
		if s := f.Latest().Load(); s.Err != errNothingListed.Error() {
			t.Errorf("%+v", s)
		}
	})
}

// Releasing the source may hang. No old measurement remains then.
func TestFollowerEndsBeforeRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		d := newDriver(behavior{reading: oneProcess()})
		source := d.source()
		source.Open = func() (driver.ProcessLister, func(), error) {
			list, release, err := d.source().Open()
			return list, func() {
				if f.Latest().Load() != nil {
					t.Error("a measurement remains while the source is released")
				}
				release()
			}, err
		}
		start(t, f, d, source)()
	})
}

// The first measurement follows the first devices at once, although an interval is long.
func TestFollowerAwaitsDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		devices := f.Snapshots.Load()
		f.Snapshots.Store(&health.Snapshot{})
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		advance(time.Second)
		f.Snapshots.Store(devices)
		synctest.Wait()
		if s := f.Latest().Load(); s == nil || len(s.Usage) != 1 {
			t.Errorf("%+v", s)
		}
	})
}

func TestFollowerWithoutDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		f.Snapshots.Store(nil)
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		if f.Latest().Load() != nil || d.calls.Load() != 0 {
			t.Error("measures no devices")
		}
	})
}

// If the driver hides processes, an empty list is no evidence that nothing uses the device.
func TestFollowerWhereDriverHidesProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := testFollower(enabled(t))
		f.Snapshots.Store(&health.Snapshot{Devices: []health.DeviceState{
			{Device: health.Device{ID: "GPU-a"}},
			{Device: health.Device{ID: "GPU-b"}},
		}})
		measured := []health.DeviceID{"GPU-b", "GPU-a"}
		d := newDriver(behavior{reading: driver.ProcessReading{Measured: measured}})
		source := d.source()
		source.AllProcesses = false
		defer start(t, f, d, source)()
		if s := f.Latest().Load(); s.Err != hiddenProcesses || len(s.Measured) != 0 {
			t.Errorf("%+v", s)
		}
		d.now.Store(&behavior{reading: driver.ProcessReading{Measured: measured, Processes: oneProcess().Processes}})
		advance(interval)
		s := f.Latest().Load()
		if _, measured := s.Of("GPU-b"); s.Err != "" || measured || len(s.Usage) != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// What an operator must correct is logged once with its key.
func TestFollowerWarns(t *testing.T) {
	for name, test := range map[string]struct {
		change func(t *testing.T, c *Config)
		want   string
	}{
		"other procfs":    {func(_ *testing.T, c *Config) { c.Proc = filepath.Dir(c.Proc) }, "metrics.processes.proc"},
		"no directory":    {func(_ *testing.T, c *Config) { c.PodLogs += "x" }, "metrics.processes.podLogs"},
		"other directory": {func(_ *testing.T, c *Config) { c.PodLogs = filepath.Dir(c.PodLogs) }, "metrics.processes.podLogs"},
		"podLogs not set": {func(_ *testing.T, c *Config) { c.PodLogs = "" }, "metrics.podUID"},
		"pod without the GPU": {func(t *testing.T, c *Config) {
			if err := os.Rename(filepath.Join(c.PodLogs, "team_train-0_"+podUID), filepath.Join(c.PodLogs, "team_other_"+podUID)); err != nil {
				t.Fatal(err)
			}
		}, "team/other on GPU-a"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := enabled(t)
				test.change(t, &c)
				f, _, logs := testFollower(c)
				d := newDriver(behavior{reading: oneProcess()})
				defer start(t, f, d, d.source())()
				advance(interval)
				if unlikely := f.Latest().Load().Warning; strings.Contains(unlikely, "metrics.processes.proc") {
					t.Errorf("warns although the process may have ended: %s", unlikely)
				}
				advance(interval)
				s := f.Latest().Load()
				if !strings.Contains(s.Warning, test.want) || logs.Len() != 1 || len(s.Usage) != 1 || s.Usage[0].Container != (Container{}) ||
					s.Usage[0].Memory != 1<<30 {
					t.Errorf("%+v; %d log entries", s, logs.Len())
				}
				for range 3 { // a process that comes and goes
					d.now.Store(&behavior{reading: driver.ProcessReading{Measured: s.Measured}})
					advance(interval)
					d.now.Store(&behavior{reading: oneProcess()})
					advance(5 * interval)
				}
				if logs.Len() != 1 || f.Latest().Load().Warning != s.Warning {
					t.Errorf("%d log entries, warning %q", logs.Len(), f.Latest().Load().Warning)
				}
			})
		})
	}
}

// A process that has ended since it was listed is normal beside others. Only if none can be read, the procfs is another one.
func TestFollowerToleratesEndedProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, logs := testFollower(enabled(t))
		both := oneProcess()
		both.Processes = append(both.Processes, process("GPU-a", 4243, 1))
		d := newDriver(behavior{reading: both})
		defer start(t, f, d, d.source())()
		advance(10 * interval)
		if s := f.Latest().Load(); s.Warning != "" || s.WithoutPod[ReasonUnreadable] != 1 || logs.Len() != 0 {
			t.Errorf("%+v; log %v", s, logs.All())
		}
	})
}

// While no device is listed, there is no measurement and no log entry.
func TestFollowerWhileDevicesAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, logs := testFollower(enabled(t))
		d := newDriver(behavior{reading: oneProcess()})
		defer start(t, f, d, d.source())()
		devices := f.Snapshots.Load()
		f.Snapshots.Store(&health.Snapshot{})
		advance(interval)
		if s := f.Latest().Load(); s != nil {
			t.Errorf("%+v", s)
		}
		f.Snapshots.Store(devices)
		advance(interval)
		if s := f.Latest().Load(); s == nil || len(s.Usage) != 1 || logs.Len() != 0 {
			t.Errorf("%+v; log %v", s, logs.All())
		}
	})
}

// Only there PID 2 is the kernel's.
func TestInHostPIDNamespace(t *testing.T) {
	comm, _ := os.ReadFile("/proc/2/comm")
	if got, want := InHostPIDNamespace(), string(comm) == "kthreadd\n"; got != want {
		t.Errorf("%v, and PID 2 is %q", got, comm)
	}
}

func TestConfigValidate(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		want   []string // the keys of the errors
	}{
		"default":        {func(*Config) {}, nil},
		"no podLogs":     {func(c *Config) { c.PodLogs = "" }, nil},
		"no proc":        {func(c *Config) { c.Proc = "" }, []string{"proc: "}},
		"relative paths": {func(c *Config) { c.Proc, c.PodLogs = "proc", "pods" }, []string{"proc: ", "podLogs: "}},
	} {
		config := DefaultConfig()
		c.change(&config)
		errs := config.Validate()
		ok := len(errs) == len(c.want)
		for i := range min(len(errs), len(c.want)) {
			ok = ok && strings.HasPrefix(errs[i].Error(), c.want[i])
		}
		if !ok {
			t.Errorf("%s: %v, want %q", name, errs, c.want)
		}
	}
}

// A directory of pods that hangs delays no measurement, and processes keep the containers that were found before.
func TestFollowerWhileDirectoryHangs(t *testing.T) {
	c := enabled(t)
	f, _, _ := testFollower(c)
	d := newDriver(behavior{reading: oneProcess()})
	source := d.source()
	source.Interval = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Measure(ctx, source) }()
	await := func(ready func(s *Snapshot) bool) {
		t.Helper()
		for {
			s, changed := f.Latest().Watch()
			if s != nil && (s.Err != "" || len(s.Usage) != 1 || s.Usage[0].Container.Name != "main") {
				t.Fatalf("%+v", s)
			}
			if s != nil && ready(s) {
				return
			}
			<-changed
		}
	}
	await(func(s *Snapshot) bool { return s.Warning == "" })
	if err := errors.Join(os.Rename(c.PodLogs, c.PodLogs+".away"), syscall.Mkfifo(c.PodLogs, 0o600)); err != nil { // nobody writes to it
		t.Fatal(err)
	}
	await(func(s *Snapshot) bool {
		return strings.Contains(s.Warning, "metrics.processes.podLogs") && strings.Contains(s.Warning, "no answer")
	})
	cancel()
	<-done // although the directory still hangs
	pods, err := os.OpenFile(c.PodLogs, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = pods.Close()
}
