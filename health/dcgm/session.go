//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// session is one connection to DCGM.
type session struct {
	cfg     Config
	systems dcgm.HealthSystem // of DCGM's own health checks
	log     *zap.Logger
	now     func() time.Time
	ledger  *ledger

	mu       sync.Mutex // guards all below: a poll at a time, and Close after it
	closed   bool
	failed   error // the first failed poll ends the session
	watches  *watches
	names    int             // groups made so far
	versions health.Versions // those of DCGM are read once, by open

	topology  topology
	dirty     bool      // the inventory is to be read again
	suspected topology  // another than the present one, not yet believed
	since     time.Time // when suspected was first seen; zero if there is none
	builtAt   time.Time // when the inventory was last read
	textsAt   time.Time // when its texts were last looked at
	openedAt  time.Time // when this engine was started or connected to

	known       map[entity]health.Device // by entity, for when it reads blank
	incomplete  bool                     // something that can be reached could not be named
	waiting     bool                     // a GPU that can be reached lacks a field of the inventory, and may have it soon
	waitedSince map[uint]time.Time       // since when such a GPU is waited for, by DCGM's number
	presence    map[uint]*presence       // by DCGM's number of the GPU
	owners      map[entity][]int         // the devices that an entity's values are of, as indices of state
	state       []deviceState
	devices     []health.Device // given away: not modified

	fullAt    time.Time         // of the last poll that read the metrics
	xidsAt    time.Time         // when the stream of XIDs was last read
	xidsDue   bool              // there is more in it
	xidsWhole bool              // it was read in this poll
	latestXID map[entity]xidRow // as last read of each entity

	rewatchedAt time.Time       // when the watches were made anew because no GPU was measured
	node        sight           // of all GPUs
	sights      map[uint]*sight // of each GPU that is watched, by DCGM's number
	stale       map[uint]bool   // GPUs that DCGM does not see while it sees others

	incidents map[uint][]health.Incident // by GPU; the slices are given away

	unsupported map[dcgm.Short][]uint // by field, the GPUs without it, by DCGM's number; nil if nobody asks

	healthFailing   bool
	saidLeft        bool
	saidProfiling   bool
	saidNameless    []uint
	saidUnsupported []string
}

// Open connects to DCGM, or starts it in this process, and has it watch what cfg asks for. It blocks for
// as long as DCGM does: about 5 s if nobody answers at the address. A process has one session at a
// time; Open fails while another is open. The error says in words what is missing.
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
	systems, err := healthMask(cfg.HealthSystems)
	if err != nil {
		return nil, fmt.Errorf("health systems: %w", err)
	}
	seen, err := take(cfg)
	if err != nil {
		return nil, err
	}
	if err := connect(cfg.Address); err != nil {
		release()
		return nil, err
	}
	s := &session{
		cfg: cfg, systems: dcgm.HealthSystem(systems), log: log, now: now, ledger: seen, openedAt: now(),
		known: map[entity]health.Device{}, incidents: map[uint][]health.Incident{},
		presence: map[uint]*presence{}, latestXID: map[entity]xidRow{}, watches: &watches{},
		waitedSince: map[uint]time.Time{}, stale: map[uint]bool{},
	}
	s.readVersions()
	var t topology
	if err = attach(cfg); err == nil {
		t, err = readTopology()
	}
	if err == nil {
		s.updatePresence(t.gpus)
		err = s.rebuild(t)
	}
	if err != nil {
		s.failed = err
		return nil, errors.Join(err, s.Close())
	}
	log.Info("connected to DCGM",
		zap.String("address", cfg.Address), zap.String("library", s.versions.DCGM), zap.String("engine", s.versions.Engine),
		zap.String("driver", s.versions.Driver), zap.Int("devices", len(s.devices)))
	return s, nil
}

// connect starts DCGM in this process, or connects to a host engine: with dcgmConnect_v2, which every DCGM
// 4 has, and not by a URL, which needs the library of 4.5 and does no more for us.
func connect(address string) error {
	if address == "" {
		if _, err := dcgm.Init(dcgm.Embedded); err != nil {
			return fmt.Errorf("start DCGM in this process: %w", err)
		}
		return nil
	}
	path, isSocket := strings.CutPrefix(address, "unix://")
	flag := "0"
	switch {
	case isSocket && !strings.HasPrefix(path, "/"):
		return fmt.Errorf("DCGM address %q: a unix socket is written unix:///path", address)
	case isSocket:
		flag = "1"
	case strings.Contains(address, "://"):
		return fmt.Errorf("DCGM address %q: it is host:port or unix:///path", address)
	}
	if _, err := dcgm.Init(dcgm.Standalone, path, flag); err != nil {
		return fmt.Errorf("connect to DCGM's host engine at %s: %w", address, err)
	}
	return nil
}

// readVersions reads what DCGM says of its builds: "version:4.6.0;arch:x86_64;…".
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
	if has("dcgmVersionInfo") {
		s.versions.DCGM = version(dcgm.GetVersionInfo())
	}
	if s.cfg.Address != "" && has("dcgmHostengineVersionInfo") {
		s.versions.Engine = version(dcgm.GetHostengineVersionInfo())
	}
}

// Wake never fires: DCGM has no callback that could be relied on (5, 6, 7). XIDsChanged takes its place.
func (s *session) Wake() <-chan struct{} { return nil }

// Close waits for a poll under way, takes everything back and ends the connection, and the engine if it
// is in this process. Of a session that failed it takes nothing back: the connection's end does that, and
// an engine that hangs would make each call last a minute (15). Close may be called again.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	defer release()
	return s.disconnect()
}

func (s *session) disconnect() error {
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
