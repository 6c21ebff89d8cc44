//go:build cgo && linux

package dcgm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// childAddress is an environment variable. If set, the test binary opens a session at its address and prints the result; "-"
// stands for an embedded engine.
const childAddress = "GNA_TEST_OPEN"

// childThreads is the number of threads in which a child polls.
const childThreads = 8

// childFailed is the exit code of a child whose Open returned an error.
const childFailed = 3

func TestMain(m *testing.M) {
	if address, ok := os.LookupEnv(childAddress); ok {
		os.Exit(child(strings.TrimPrefix(address, "-")))
	}
	os.Exit(run(m))
}

func child(address string) int {
	s, err := Open(context.Background(), Config{Address: address, Attach: true}, zap.NewNop())
	if lib, found := script.Find(); found == nil {
		fmt.Println("log:", lib.Log())
		defer func() { fmt.Printf("arenas: %d, gap: %v\n", lib.Arenas(), lib.Gap()) }()
	}
	if err != nil {
		fmt.Println(err)
		return childFailed
	}
	fmt.Println("opened")
	pollInThreads(s)
	fmt.Println("detach:", s.(health.Detacher).Detach(context.Background()))
	if err := s.Close(); err != nil {
		fmt.Println("close:", err)
		return 1
	}
	return 0
}

// pollInThreads polls in childThreads threads that exist at the same time.
func pollInThreads(s health.Session) {
	var polled, wg sync.WaitGroup
	polled.Add(childThreads)
	for range childThreads {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if _, err := s.Poll(context.Background()); err != nil {
				fmt.Println("poll:", err)
			}
			polled.Done()
			polled.Wait()
		})
	}
	wg.Wait()
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "libdcgm")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path, err := compile(dir)
	if err == nil {
		_, err = lib.Load(path) // go-dcgm finds the loaded library by its soname
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the scripted libdcgm.so.4:", err)
		return 1
	}
	return m.Run()
}

// compile builds the scripted libdcgm.so.4 from testdata and the headers in go-dcgm.
func compile(dir string, flags ...string) (string, error) {
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-dcgm").Output()
	if err != nil {
		return "", fmt.Errorf("find go-dcgm: %w", err)
	}
	path := filepath.Join(dir, lib.Soname)
	args := append([]string{
		"-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden",
		"-Wl,-soname," + lib.Soname, "-I" + filepath.Join(strings.TrimSpace(string(module)), "pkg", "dcgm"),
		"-o", path, "testdata/libdcgm.c", "testdata/groups.c", "testdata/checks.c", "testdata/entities.c", "testdata/messages.c",
		"testdata/script.c", "-lpthread",
	}, flags...)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile: %w\n%s", err, out)
	}
	return path, nil
}

// DCGM's statuses and errors (dcgm_structs.h).
const (
	statusOK, statusInaccessible, statusLost, statusDetached = 1, 3, 4, 7

	errTimeout, errNoData, errNotConnected, errInit, errNoFunction, errNotWatched, errModuleNotLoaded = -11, -14, -21, -7, -20, -16, -33
)

// clock is the time of a session, which the test sets; the zero clock is real time.
type clock struct {
	mu sync.Mutex // guards at
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return time.Now()
	}
	return c.at
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// fixture holds the library, clock and session of a test.
type fixture struct {
	t   testing.TB
	lib *script.Library
	*clock
	*session
	log *zap.Logger

	judged []health.DeviceState      // from the polls of all sessions
	past   map[health.DeviceID][]int // the XIDs from before the start that the latest poll showed first
}

// newFixture resets the library and the history of this process, and adds n GPUs.
func newFixture(t testing.TB, n uint) *fixture {
	t.Helper()
	lib, err := script.Find()
	if err != nil {
		t.Fatal(err)
	}
	lib.Reset()
	processHistory = newHistory()
	log := zap.NewNop()
	if test, ok := t.(*testing.T); ok {
		t.Cleanup(func() { goleak.VerifyNone(t) })
		log = zaptest.NewLogger(test)
	}
	b := &fixture{t: t, lib: lib, clock: &clock{at: time.Now()}, log: log}
	b.addGPUs(n)
	return b
}

// addGPUs adds n GPUs with all values.
func (b *fixture) addGPUs(n uint) {
	at := b.clock.now()
	b.setStatus(n, statusOK)
	for id := range n {
		b.lib.Text(script.GPU, id, 54, gpuUUID(id), 0, at)
		b.lib.Text(script.GPU, id, 50, "NVIDIA H100 80GB HBM3", 0, at)
		b.lib.Text(script.GPU, id, 57, fmt.Sprintf("00000000:%02X:00.0", 0x10+id), 0, at)
		b.lib.Text(script.GPU, id, 1, "580.95.05", 0, at)
		b.lib.Int(script.GPU, id, 5, 13000, 0, at)
		b.lib.Int(script.GPU, id, 52, int64(id), 0, at)
		b.lib.Int(script.GPU, id, 55, int64(n-1-id), 0, at) // minors can have another order
		b.lib.Int(script.GPU, id, 67, 0, 0, at)
		b.lib.Int(script.GPU, id, 86, 1<<(id*2/n), 0, at)
		for i := range uint(3) {
			b.lib.Int(script.GPU, id, 87+i, 0, 0, at)
		}
		b.lib.Int(script.GPU, id, 63, 9<<16, 0, at)
		b.lib.Int(script.GPU, id, 250, 81559, 0, at)
		b.lib.Int(script.GPU, id, 253, 551, 0, at)
	}
	b.sampleGPUs(n)
}

// sampleGPUs adds a sample of the health fields, temperature and power to n GPUs.
func (b *fixture) sampleGPUs(n uint) {
	at := b.clock.now()
	for id := range n {
		for _, f := range []uint{395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, id, f, 0, 0, at)
		}
		b.lib.Int(script.GPU, id, 150, int64(40+id), 0, at)
		b.lib.Float(script.GPU, id, 155, 70.5+float64(id), 0, at)
	}
}

// setStatus sets DCGM's status of n GPUs.
func (b *fixture) setStatus(n uint, status int) {
	for id := range n {
		b.lib.Entity(script.GPU, id, status)
	}
}

func gpuUUID(id uint) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", id) }
func migUUID(id uint) string { return fmt.Sprintf("MIG-%08d-0000-0000-0000-000000000000", id) }

func gpuID(id uint) health.DeviceID { return health.DeviceID(gpuUUID(id)) }
func migID(id uint) health.DeviceID { return health.DeviceID(migUUID(id)) }

// hostConfig is testConfig with a host engine.
func hostConfig() Config {
	cfg := testConfig()
	cfg.Address = "node:5555"
	return cfg
}

// testConfig watches temperature, power and other fields every ten seconds.
func testConfig(others ...health.Field) Config {
	return Config{Interval: 10 * time.Second, Fields: append([]health.Field{health.FieldGPUTemp, health.FieldPower}, others...)}
}

// open opens a session. The cleanup closes it and checks that it leaves nothing in DCGM.
func (b *fixture) open(cfg Config) *fixture {
	b.t.Helper()
	s, err := open(context.Background(), cfg, b.log, b.clock.now)
	if err != nil {
		b.t.Fatal(err)
	}
	b.session = s
	b.t.Cleanup(func() {
		failed := s.failed
		if err := s.Close(); err != nil {
			b.t.Errorf("close: %v", err)
		}
		if n := b.lib.Leaked(); n != 0 && failed == nil {
			b.t.Errorf("%d groups, watches or registrations left", n)
		}
		if b.lib.Initialized() {
			b.t.Error("the library is still initialized after Close")
		}
		if n := b.lib.Live(); n != 0 {
			b.t.Errorf("%d live reads, which call the driver", n)
		}
	})
	return b
}

// openFixture returns a fixture with n GPUs and an open session.
func openFixture(t testing.TB, n uint, cfg Config) *fixture {
	t.Helper()
	return newFixture(t, n).open(cfg)
}

// startFixture is openFixture with testConfig and a first poll.
func startFixture(t testing.TB, n uint) *fixture {
	t.Helper()
	b := openFixture(t, n, testConfig())
	b.poll()
	return b
}

// startMIG is startFixture with MIG instances on one GPU.
func startMIG(t testing.TB, n, gpu uint, instances map[uint][]uint) *fixture {
	t.Helper()
	b := newFixture(t, n)
	b.addInstances(gpu, instances)
	b.open(testConfig()).poll()
	return b
}

// close closes the session before the test ends.
func (b *fixture) close() {
	b.t.Helper()
	if err := b.Close(); err != nil {
		b.t.Errorf("Close: %v", err)
	}
}

func (b *fixture) expectCalls(function string, want int) {
	b.t.Helper()
	if n := b.lib.Calls(function); n != want {
		b.t.Errorf("%d calls of %s, want %d", n, function, want)
	}
}

// poll polls and returns the samples by device.
func (b *fixture) poll() (map[health.DeviceID]health.Sample, *health.Reading) {
	b.t.Helper()
	r, err := b.Poll(context.Background())
	if err != nil {
		b.t.Fatal(err)
	}
	samples := map[health.DeviceID]health.Sample{}
	for _, s := range r.Samples {
		if _, twice := samples[s.Device]; twice {
			b.t.Errorf("two samples of %s", s.Device)
		}
		samples[s.Device] = s
	}
	b.judge(r, samples)
	return samples, r
}

// judge judges a reading and sets the XIDs that count in the samples.
func (b *fixture) judge(r *health.Reading, samples map[health.DeviceID]health.Sample) {
	known := map[health.DeviceID]int{} // rows
	for _, d := range b.judged {
		known[d.Device.ID] = len(d.XIDs.Rows)
	}
	b.judged = judge.Measure(judge.DefaultConfig(), b.judged, r, judge.ReadingContext{FirstReading: b.judged == nil}, b.clock.now())
	b.past = map[health.DeviceID][]int{}
	for _, d := range b.judged {
		id := d.Device.ID
		if s, ok := samples[id]; ok {
			s.XIDs = d.Sample.XIDs
			samples[id] = s
		}
		for _, row := range d.XIDs.Rows[known[id]:] {
			if row.Skipped {
				b.past[id] = append(b.past[id], row.Code)
			}
		}
	}
}

// device returns a device as of the latest poll.
func (b *fixture) device(id health.DeviceID) health.DeviceState {
	b.t.Helper()
	for _, d := range b.judged {
		if d.Device.ID == id {
			return d
		}
	}
	b.t.Errorf("%s is not listed", id)
	return health.DeviceState{}
}

// expectLastXID compares field 230 of a device as judged; want is negative if it is unknown.
func (b *fixture) expectLastXID(id health.DeviceID, want float64) {
	b.t.Helper()
	got, ok := b.device(id).Sample.Values[health.FieldXID]
	if !ok {
		got = -1
	}
	if got != want {
		b.t.Errorf("%s: field 230 is %v, want %v", id, got, want)
	}
}

// pollUntilFailure polls once a second after sample, passes each reading to check, and returns the second in which a poll
// fails with its error; nil after 120 seconds.
func (b *fixture) pollUntilFailure(sample func(), check func(second int, r *health.Reading)) (seconds int, err error) {
	for second := range 120 {
		b.add(time.Second)
		sample()
		r, err := b.Poll(context.Background())
		if err != nil {
			return second + 1, err
		}
		check(second, r)
	}
	return 120, nil
}

// pollAfter advances the clock, samples n GPUs and polls.
func (b *fixture) pollAfter(d time.Duration, n uint) map[health.DeviceID]health.Sample {
	b.t.Helper()
	b.add(d)
	b.sampleGPUs(n)
	samples, _ := b.poll()
	return samples
}
