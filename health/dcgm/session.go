//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// session is a connection to DCGM.
type session struct {
	cfg     Config
	systems uint32 // of the health checks, as selected
	log     *zap.Logger
	now     func() time.Time
	history *history

	groupCount atomic.Uint64 // groups created so far
	allXIDs    atomic.Bool   // ReadAllXIDs was called

	mu       sync.Mutex // guards everything below
	closed   bool
	failed   error // of the first failed poll, which ends the session
	watches  *watches
	versions health.Versions // DCGM's are read by open, the driver's and CUDA's by polls
	entities entityWatch

	hierarchy      hierarchy
	inventoryDirty bool      // the inventory must be read again
	candidate      hierarchy // a changed hierarchy that is not confirmed yet
	candidateSince time.Time // zero if there is none
	builtAt        time.Time // when the inventory was last read
	openedAt       time.Time // when this engine was started or connected to

	hasUnnamed       bool                     // a reachable GPU or MIG device has no UUID
	unnamedInstances []health.UnnamedInstance // of reachable GPUs; shared with readings: immutable
	inventoryPending bool                     // a reachable GPU lacks a required field, which may arrive soon
	pendingSince     map[uint]time.Time       // since when a GPU lacks a required field, by DCGM's number
	presence         map[uint]*presence       // by DCGM's number of the GPU
	devicesOf        map[entity][]int         // indices in state of the devices that an entity's values belong to
	state            []deviceState
	devices          []health.Device // shared with readings: immutable

	fullAt    time.Time                // of the last full poll
	latestXID map[entity]health.XIDRow // as of the last poll
	unlisted  map[entity]health.XIDRow // of latestXID, the rows that no read of the stream has listed
	newestRow int64                    // the newest time of a row that a read of the stream has listed, 0 if none has
	wholeAt   time.Time                // of the last read of the whole stream; zero if the next is due
	wholeRead bool                     // the whole stream was read in this poll, for all devices
	xidHidden bool                     // latestMayHideXIDs was true in or after the last read of the whole stream
	actions   map[entity]float64       // the latest recovery actions of GPUs
	paceGPU   []dcgm.GroupEntityPair   // whose paceField tells when DCGM has measured; empty if none does
	measured  time.Time                // of that field, in this poll

	rewatchedAt  time.Time           // when the watches were last recreated because DCGM took no new samples
	allGPUs      staleness           // of all watched GPUs
	gpuStaleness map[uint]*staleness // of each watched GPU, by DCGM's number
	stale        map[uint]bool       // GPUs that DCGM does not measure while it measures others

	incidents     map[uint][]health.Incident // by GPU; the slices are shared with readings
	nodeIncidents []health.Incident          // incidents that name no device
	checks        healthChecks

	unsupported map[dcgm.Short][]uint // by field, the numbers of the GPUs without it; nil once logged

	loggedFields    bool
	loggedProfiling bool
	lastUnnamed     []uint
	lastUnsupported []string
}

var errClosed = errors.New("DCGM session is closed")

// Open connects to DCGM, or starts it in this process, and watches the fields of cfg. It blocks for as long as DCGM does:
// about 5 s if no engine responds at the address. It fails while another session of this process is open.
func Open(ctx context.Context, cfg Config, log *zap.Logger) (health.Session, error) {
	s, err := open(ctx, cfg, log, time.Now)
	if err != nil {
		return nil, err // not s: a nil *session in an interface is not nil
	}
	return s, nil
}

func open(ctx context.Context, cfg Config, log *zap.Logger, now func() time.Time) (*session, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if cfg.Interval <= 0 {
		cfg.Interval = DefaultInterval
	}
	systems, err := selectSystems(cfg.HealthSystems)
	if err != nil {
		return nil, fmt.Errorf("health systems: %w", err)
	}
	if err := lib.Acquire(cfg.Address, lib.Log{File: cfg.LogFile, Level: cfg.LogLevel}); err != nil {
		return nil, err
	}
	if err := connect(cfg.Address); err != nil {
		lib.Release()
		return nil, err
	}
	s := &session{
		cfg: cfg, systems: systems, log: log, now: now, history: processHistory, openedAt: now(), incidents: map[uint][]health.Incident{},
		presence: map[uint]*presence{}, latestXID: map[entity]health.XIDRow{}, watches: &watches{}, checks: newHealthChecks(health.ChecksUnknown),
		pendingSince: map[uint]time.Time{}, stale: map[uint]bool{}, unlisted: map[entity]health.XIDRow{}, actions: map[entity]float64{},
	}
	s.readVersions()
	s.takeEntityFields()
	var h hierarchy
	if err = attach(cfg); err == nil {
		h, err = readHierarchy()
	}
	if err == nil {
		s.updatePresence(h.gpus)
		err = s.rebuild(h)
	}
	if err != nil {
		s.failed = err
		if isResult(err, dcgm.DCGM_ST_VER_MISMATCH) {
			err = s.explainError(err)
		}
		return nil, errors.Join(err, s.Close())
	}
	log.Info("connected to DCGM",
		zap.String("address", cfg.Address), zap.String("library", s.versions.DCGM), zap.String("engine", s.versions.Engine),
		zap.String("driver", s.versions.Driver), zap.Int("devices", len(s.devices)))
	return s, nil
}

// connect starts DCGM in this process, or connects to a host engine. It uses dcgmConnect_v2, which every DCGM 4 has, and
// no URL, which needs the library of 4.5 (OBSERVED.md#url-addresses).
func connect(address string) error {
	if address == "" {
		if _, err := dcgm.Init(dcgm.Embedded); err != nil {
			return fmt.Errorf("start embedded DCGM: %w", err)
		}
		return nil
	}
	path, isSocket := strings.CutPrefix(address, "unix://")
	flag := "0"
	switch {
	case isSocket && !strings.HasPrefix(path, "/"):
		return fmt.Errorf("DCGM address %q: expected an absolute path, as in unix:///path", address)
	case isSocket:
		flag = "1"
	case strings.Contains(address, "://"):
		return fmt.Errorf("DCGM address %q: expected host:port or unix:///path", address)
	}
	if _, err := dcgm.Init(dcgm.Standalone, path, flag); err != nil {
		return fmt.Errorf("connect to DCGM host engine at %s: %w", address, err)
	}
	return nil
}

// readVersions reads DCGM's versions from its build information: "version:4.6.0;arch:x86_64;…".
func (s *session) readVersions() {
	version := func(info dcgm.VersionInfo, err error) string {
		if err != nil {
			return ""
		}
		for pair := range strings.SplitSeq(info.RawBuildInfoString, ";") {
			if v, ok := strings.CutPrefix(strings.TrimSpace(pair), "version:"); ok {
				return v
			}
		}
		return ""
	}
	if lib.Has("dcgmVersionInfo") {
		s.versions.DCGM = version(dcgm.GetVersionInfo())
	}
	if s.cfg.Address != "" && lib.Has("dcgmHostengineVersionInfo") {
		s.versions.Engine = version(dcgm.GetHostengineVersionInfo())
	}
}

// usable returns the error of a session that is closed or has failed. Called with mu held.
func (s *session) usable() error {
	if s.closed {
		return errClosed
	}
	return s.failed
}

// Wake never fires: DCGM's callbacks are unreliable (OBSERVED.md#lossy-callbacks). XIDsChanged replaces it.
func (s *session) Wake() <-chan struct{} { return nil }

// Close waits for the poll in progress, removes the watches and closes the connection; an embedded engine stops. In a
// failed session it leaves the watches to the end of the connection: a hung engine would make each call last a minute
// (OBSERVED.md#hung-engine). Close may be called again.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	defer lib.Release()
	return s.disconnect()
}

func (s *session) disconnect() error {
	s.stopEntities()
	var errs []error
	if s.failed == nil {
		errs = append(errs, s.watches.close())
	}
	s.watches = &watches{}
	if err := dcgm.Shutdown(); err != nil {
		errs = append(errs, fmt.Errorf("disconnect from DCGM: %w", err))
	}
	return errors.Join(errs...)
}

// MeasureOnce opens a session, polls once and closes it. It does not watch the profiling fields among cfg.Fields, because that could take
// them from another profiler, but returns the ones that some GPU supports. It runs the health checks that cfg.HealthSystems names, by
// default none. It logs an error of Close and does not return it: the measurement is valid, and DCGM releases everything with the
// connection.
func MeasureOnce(ctx context.Context, cfg Config, log *zap.Logger) (r *health.Reading, profiling []health.Field, err error) {
	requested := cfg.Fields
	if len(cfg.HealthSystems) == 0 {
		cfg.HealthSystems = []string{NoHealthSystems}
	}
	cfg.Fields = slices.DeleteFunc(slices.Clone(requested), func(f health.Field) bool { return isProfiling(dcgm.Short(f)) })
	s, err := open(ctx, cfg, log, time.Now)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err := s.Close(); err != nil {
			log.Warn("DCGM did not close cleanly", zap.Error(err))
		}
	}()
	if r, err = s.Poll(ctx); err != nil {
		return nil, nil, err
	}
	if len(requested) == len(cfg.Fields) {
		return r, nil, nil // a query would load DCGM's profiling module
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.watches.gpus {
		supported, err := supportedProfiling(e.id)
		if err != nil { // it supports none, or the module is missing
			log.Debug("cannot list the profiling fields of a GPU", zap.Uint("dcgm_id", e.id), zap.Error(err))
		}
		for _, f := range supported {
			if f := health.Field(f); slices.Contains(requested, f) && !slices.Contains(profiling, f) {
				profiling = append(profiling, f)
			}
		}
	}
	slices.Sort(profiling)
	return r, profiling, nil
}

// Library loads libdcgm, unless it is loaded already, and returns the path of its file.
func Library() (path string, err error) { return lib.Load(lib.Soname) }
