// Package statefile saves what must outlive a restart: findings, delivered XIDs, a detach, and the last good configuration.
package statefile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

const (
	retryWriteAfter = 10 * time.Second // after a failed write
	retryLockAfter  = time.Second      // while another agent holds the lock

	// checkInterval is how often Run compares the file with what it wrote. It is also the longest delay for saving XIDs without a finding:
	// they may come in floods, and an XID that is counted twice after a crash does no harm.
	checkInterval = 10 * time.Second

	// readTimeout limits how long the agent waits for the disk at its start.
	readTimeout = 10 * time.Second

	// repairLogInterval is the shortest time between two log lines about a file that another process changed.
	repairLogInterval = time.Minute

	// setAsideShown is how long the status says that a file was set aside. What was lost with it does not come back.
	setAsideShown = 24 * time.Hour
)

// File is the state file. Load reads it at the start; Run writes it whenever the state changes or the file differs from what
// was written. Only the holder of the lock beside the file writes it. Another agent on the node reads the file at its start
// and takes over when the lock is free; then its own state counts, because it has polled the same GPUs. No other component
// waits for a disk that is full or hangs.
type File struct {
	config    *health.Latest[health.Config]
	snapshots *health.Latest[health.Snapshot]
	bootID    string
	log       *zap.Logger

	sections map[string]*health.Latest[[]byte] // Saved.Sections

	configuration     *health.Latest[[]byte] // the content of ConfigurationPath
	configurationFile configurationFile      // used by Run

	read readFunc // fileOptions().Read

	late    func(Saved, error) // see LoadInTime
	loading <-chan loaded      // LoadInTime has not waited for it; nil if there is nothing to wait for

	// Load uses these, then Run.
	lock           *filelock.Held // nil while not held
	path           string         // that may be written: its content was read or set aside
	unreadPath     string         // that must not be written: its content was neither read nor set aside; "" if there is none
	saved          Saved          // the content that the file has or should have
	written        *Saved         // the fingerprint of the latest write; nil before the first
	writtenTexts   sectionTexts   // of the latest write
	info           fs.FileInfo    // of the file as read or written last; nil if there should be none
	logged         logonce.State  // the error
	repairLoggedAt time.Time

	result health.Latest[result]
	writes durable.Writes

	mu     sync.Mutex // guards status
	status Status     // without the fields about writes
}

// result is the outcome of the latest attempt to save a snapshot.
type result struct {
	seq      uint64
	sections map[string]json.RawMessage // of the file; nil if there is none
	err      error
}

// Status is the state of the state file.
type Status struct {
	Path    string    // "" if there is no state file
	Err     string    // why a restart would lose findings; "" if they are saved
	Since   time.Time // of Err
	Written time.Time // the latest write of this process; zero if there was none

	Unread     time.Time // since when the file should have been read: the verdicts from before the start are unknown; zero once it was
	Unreserved string    // why a full disk would lose the next findings; "" if it would not

	SetAside   string // what was set aside at the start instead of being restored, and why; "" a day later
	setAsideAt time.Time
}

// Problems returns what a restart would lose, or has lost so far.
func (s Status) Problems() (all []string) {
	if !s.Unread.IsZero() {
		all = append(all, fmt.Sprintf("verdicts of before the start are unknown: %s could not be read since %s", s.Path,
			s.Unread.UTC().Format(time.RFC3339)))
	}
	if s.Err != "" {
		all = append(all, s.Failure().String()+"; findings will be lost on restart")
	}
	if s.SetAside != "" {
		all = append(all, s.SetAside+"; findings may be lost")
	}
	return all
}

// Failure returns why the file cannot be written.
func (s Status) Failure() durable.Failure {
	return durable.Failure{Path: s.Path, Err: s.Err, Since: s.Since}
}

// New returns the state file of the snapshots. Its path is in config. Run also keeps configuration, the last good one, in a
// file beside it.
func New(config *health.Latest[health.Config], snapshots *health.Latest[health.Snapshot], configuration *health.Latest[[]byte],
	bootID string,
	log *zap.Logger,
) *File {
	return &File{config: config, snapshots: snapshots, configuration: configuration, bootID: bootID, log: log, read: fileOptions().Read}
}

// sectionTexts are the newest texts of sections that have one. They are compared by pointer.
type sectionTexts map[string]*[]byte

// AddSection adds the state of a component to the file, as JSON. The file keeps the section that Load has read until there is another.
// Call it before Run.
func (f *File) AddSection(name string, text *health.Latest[[]byte]) {
	if f.sections == nil {
		f.sections = make(map[string]*health.Latest[[]byte])
	}
	f.sections[name] = text
}

func (f *File) sectionTexts() sectionTexts {
	texts := make(sectionTexts)
	for name, latest := range f.sections {
		if text := latest.Load(); text != nil {
			texts[name] = text
		}
	}
	return texts
}

// Load reads the state file. Call it before Run. Without a file the saved state is empty.
//
// A file that cannot be read or parsed is set aside, and the error names the new path; if that fails, Run writes nothing until the file was
// read or set aside: see LoadInTime. A file of a newer version is set aside too, and Load returns what it can read of it with the error.
// While another agent holds the lock, Load only reads.
func (f *File) Load(path string) (Saved, error) {
	if path == "" {
		return Saved{}, nil
	}
	if lockErr := f.acquire(path); lockErr != nil {
		f.report(path, lockErr)
		s, _, _, err := f.read.saved(path)
		if err != nil {
			err = fmt.Errorf("%s %w; left in place: %w", path, err, lockErr)
		}
		return s, err
	}
	s, replaced, err := f.adoptPath(path)
	f.report(path, err)
	return s, errors.Join(replaced, err)
}

// loaded is the outcome of a Load.
type loaded struct {
	file  *File // that has loaded it
	saved Saved
	err   error
}

// ErrUnread means that the disk has not answered in time.
var ErrUnread = errors.New("the disk has not answered")

// LoadInTime is Load, but it waits for the disk readTimeout at most, and not after ctx has ended. Then the error is ErrUnread, and
// Status.Unread is set as after a Load that could neither read the file nor set it aside. Run writes nothing until the file was read or set
// aside, and calls late once, with what it has, or with an error when another file is configured.
func (f *File) LoadInTime(ctx context.Context, path string, late func(Saved, error)) (Saved, error) {
	f.late = late
	loader := &File{bootID: f.bootID, log: f.log, read: f.read}
	done := make(chan loaded, 1)
	go func() { // abandoned if the disk hangs
		s, err := loader.Load(path)
		done <- loaded{loader, s, err}
	}()
	f.writes.Begin(path)
	begin := time.Now()
	timeout := time.NewTimer(readTimeout)
	defer timeout.Stop()
	select {
	case l := <-done:
		f.adopt(l)
		return l.saved, l.err
	case <-timeout.C:
	case <-ctx.Done():
	}
	f.loading = done
	f.setUnread(path, begin)
	return Saved{}, fmt.Errorf("%s: %w; verdicts of before the start are unknown", path, ErrUnread)
}

// adopt continues with what another File has loaded.
func (f *File) adopt(l loaded) {
	f.lock, f.path, f.unreadPath, f.saved, f.info = l.file.lock, l.file.path, l.file.unreadPath, l.file.saved, l.file.info
	status := l.file.Status()
	var err error
	if status.Err != "" {
		err = errors.New(status.Err)
	}
	f.writes.Report(status.Path, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = status
}

// awaitLoad waits until LoadInTime's Load has ended, or is useless because another configuration came. It returns false when ctx ends.
func (f *File) awaitLoad(ctx context.Context) bool {
	if f.loading == nil {
		return true
	}
	loading, path := f.loading, f.unreadPath
	f.loading = nil
	f.storeResult(nil, fmt.Errorf("%s: %w", path, ErrUnread))
	for {
		config, changed := f.config.Watch()
		if config.StateFile != path {
			go func() { l := <-loading; l.file.release() }()
			return true
		}
		select {
		case l := <-loading:
			f.adopt(l)
			if l.file.unreadPath == "" {
				f.lateRead(l.saved, l.err)
			}
			return true
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// giveUnreadUp reports to LoadInTime's late that the file will not be restored, because another file is configured.
func (f *File) giveUnreadUp() {
	err := fmt.Errorf("%s is not configured any more, and was not read; verdicts of before the start stay unknown", f.unreadPath)
	f.setUnread("", time.Time{})
	f.lateRead(Saved{}, err)
}

// lateRead passes the state that was read after the start to LoadInTime's late.
func (f *File) lateRead(s Saved, err error) {
	if f.late != nil {
		f.late(s, err)
	}
}

// acquire makes sure that this process holds the lock of path, also after its file was removed.
func (f *File) acquire(path string) error {
	if f.lock.Of(lockPath(path)) {
		return nil
	}
	reacquired := f.lock != nil && f.lock.Path == lockPath(path)
	f.release()
	l, err := acquireLock(path)
	if err != nil {
		f.path = ""
		return err
	}
	f.lock = l
	if !reacquired {
		f.path = ""
	}
	return nil
}

func (f *File) release() {
	f.lock.Release()
	f.lock = nil
}

// adoptPath reads or sets aside the content of path, so that path may be written. replaced reports what was set aside and why;
// err reports why path may not be written. The caller holds the lock.
func (f *File) adoptPath(path string) (s Saved, replaced, err error) {
	s, text, info, err := f.read.saved(path)
	suffix := ".damaged"
	switch {
	case err != nil && text == nil:
		suffix = ".unread"
	case err == nil && s.newer > 0:
		err, suffix = fmt.Errorf("has version %d of a newer release", s.newer), fmt.Sprintf(".version%d", s.newer)
	}
	if err != nil {
		info = nil
		aside, asideErr := durable.SetAside(path, suffix)
		if asideErr != nil {
			f.setUnread(path, time.Now())
			return s, nil, fmt.Errorf("%s %w; cannot set it aside: %w; writing nothing there", path, err, asideErr)
		}
		replaced = fmt.Errorf("%s %w; set aside as %s", path, err, aside)
		f.mu.Lock()
		f.status = Status{Path: path, SetAside: replaced.Error(), setAsideAt: time.Now()}
		f.mu.Unlock()
	}
	f.path, f.written, f.info, f.saved = path, nil, info, s
	return s, replaced, nil
}

// setUnread sets the path of a file that was neither read nor set aside, and since when; "" if there is none.
func (f *File) setUnread(path string, since time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case path == "":
		f.status.Unread = time.Time{}
	case f.unreadPath != path:
		f.status = Status{Path: path, Unread: since}
	}
	f.unreadPath = path
}

// Run saves the snapshots until ctx ends, and a last time then, so that nothing is lost that the monitor found before it
// ended.
func (f *File) Run(ctx context.Context) error {
	if !f.awaitLoad(ctx) {
		return nil
	}
	defer f.release()
	sections := f.watchSections(ctx)
	for {
		last := ctx.Err() != nil
		config, configChanged := f.config.Watch()
		s, changed := f.snapshots.Watch()
		_, configurationChanged := f.configuration.Watch()
		wait, ok := f.save(config.StateFile, s, last)
		f.saveConfiguration(config.StateFile)
		if last {
			return nil
		}
		sectionsChanged := sections
		if !ok {
			changed, sectionsChanged = nil, nil // retry after wait, not at every poll
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-configChanged:
		case <-configurationChanged:
		case <-changed:
		case <-sectionsChanged:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// watchSections returns a channel that receives when a section has a newer text, until ctx ends. The text must not wait for the next
// snapshot: a component may be about to change something outside that a later process has to undo.
func (f *File) watchSections(ctx context.Context) <-chan struct{} {
	all := make(chan struct{}, 1)
	for _, section := range f.sections {
		_, changed := section.Watch()
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-changed:
				}
				_, changed = section.Watch() // before the caller reads the text
				select {
				case all <- struct{}{}:
				default: // the caller reads the text later
				}
			}
		}()
	}
	return all
}

// save saves a snapshot. It reports whether it succeeded, and when to check the file again.
func (f *File) save(path string, s *health.Snapshot, last bool) (wait time.Duration, ok bool) {
	if f.unreadPath != "" && path != f.unreadPath {
		f.giveUnreadUp()
		s = f.snapshots.Load()
	}
	if path == "" {
		f.release()
		f.path = ""
		f.logged.Clear()
		f.report("", nil)
		f.storeResult(s, nil)
		return checkInterval, true
	}
	f.writes.Begin(path)
	err := f.acquire(path)
	if err == nil && path != f.path {
		var saved Saved
		var replaced error
		if saved, replaced, err = f.adoptPath(path); replaced != nil {
			f.log.Warn("set aside an existing file", zap.String("key", "health.stateFile"), zap.Error(replaced))
		}
		if err == nil && path == f.unreadPath {
			f.setUnread("", time.Time{})
			f.lateRead(saved, replaced)
			s = f.snapshots.Load()
		}
	}
	if err == nil {
		err = f.write(path, s, last)
	}
	f.report(path, err)
	f.storeResult(s, err)
	switch {
	case !f.logged.ErrorChanged(err):
	case err == nil:
		f.log.Info("state file is written again", zap.String("file", path))
	default:
		f.log.Warn("cannot write the state file; findings will be lost on restart", zap.String("key", "health.stateFile"), zap.Error(err))
	}
	switch _, locked := errors.AsType[*lockedError](err); {
	case locked:
		return retryLockAfter, false
	case err != nil:
		return retryWriteAfter, false
	}
	return checkInterval, true
}

// WaitWritten returns nil when the file holds a snapshot or a later one. It returns an error if the file cannot be written
// or ctx ends.
func (f *File) WaitWritten(ctx context.Context, s *health.Snapshot) error {
	return f.wait(ctx, func(r *result) bool { return r.seq >= s.Seq })
}

// WaitSection is WaitWritten for the newest text of a section. Without a file it does not wait.
func (f *File) WaitSection(ctx context.Context, name string) error {
	text := f.sections[name].Load()
	return f.wait(ctx, func(r *result) bool { return f.config.Load().StateFile == "" || bytes.Equal(r.sections[name], *text) })
}

// LacksSection reports whether the file is known to lack a section of this boot.
func (f *File) LacksSection(name string) bool {
	r := f.result.Load()
	return f.bootID != "" && f.config.Load().StateFile != "" && r != nil && r.err == nil && r.sections[name] == nil
}

func (f *File) wait(ctx context.Context, written func(*result) bool) error {
	for {
		r, changed := f.result.Watch()
		if r != nil && (r.err != nil || written(r)) {
			return r.err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("health.stateFile: not written in time: %w", ctx.Err())
		case <-changed:
		}
	}
}

// write writes a snapshot if its fingerprint is new or the file differs from what was written.
func (f *File) write(path string, s *health.Snapshot, last bool) error {
	difference := f.difference(path)
	if difference != "" {
		f.adoptOtherSources(path)
	}
	var fingerprint *Saved
	texts := f.sectionTexts()
	saved, worthSaving := f.stateToSave(s)
	if worthSaving {
		p := saved.fingerprint()
		due := last || time.Since(f.Status().Written) >= checkInterval
		if difference == "" && f.written != nil && reflect.DeepEqual(p, *f.written) && maps.Equal(texts, f.writtenTexts) &&
			(!due || sameXIDs(saved.Devices, f.saved.Devices)) {
			return nil
		}
		if f.written != nil && saved.Source != f.saved.Source {
			f.saved.Detachment = health.Detachment{} // it continues with the new source
		}
		f.saved, fingerprint = saved.withOthers(f.saved).withSections(texts), &p
	} else if f.saved.Source == "" || difference == "" {
		return nil // nothing to add to the file
	}
	text, err := json.Marshal(f.saved)
	if err != nil {
		return err
	}
	w, err := fileOptions().Replace(path, text)
	if err != nil {
		return err
	}
	if difference != "" && f.written != nil && time.Since(f.repairLoggedAt) >= repairLogInterval {
		f.repairLoggedAt = time.Now()
		f.log.Warn("another process changed the state file; writing it again", zap.String("file", path), zap.String("found", difference))
	}
	f.info, f.written, f.writtenTexts = w.Info, fingerprint, texts
	f.reportWritten(w)
	return nil
}

// reportWritten updates the status after a write.
func (f *File) reportWritten(w durable.Written) {
	if f.writes.SetUnreserved(w.Unreserved) {
		f.log.Warn("no space is reserved for the state; a full disk would lose findings", zap.String("file", f.path), zap.Error(w.Unreserved))
	}
	if w.Aside != "" {
		f.log.Warn("set aside what was in the place of the state file", zap.String("file", f.path), zap.String("aside", w.Aside))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status.Written = time.Now()
}

// stateToSave returns the state of a snapshot, and whether the file should have it. Before the first poll, the file should have it during a
// detach, and once event sources have reported XIDs of the devices in the file.
func (f *File) stateToSave(s *health.Snapshot) (Saved, bool) {
	if s == nil {
		return Saved{}, false
	}
	saved := FromSnapshot(s, f.bootID)
	if s.Polled() || saved.Detachment.InForce() {
		return saved, true
	}
	saved.History, saved.Polled = f.saved.History, f.saved.Polled
	sameDevices := saved.BootID == f.saved.BootID && saved.Source == f.saved.Source && saved.Inventory == f.saved.Inventory
	return saved, sameDevices && slices.ContainsFunc(s.Devices, func(d health.DeviceState) bool { return d.XIDs.Last != 0 })
}

// difference describes how the file differs from what this process read or wrote, "" if it does not.
func (f *File) difference(path string) string {
	info, err := os.Stat(path)
	switch {
	case err != nil && f.info == nil && f.saved.Source == "":
		return "" // there was no file and nothing to write
	case err != nil:
		return "no file"
	case f.info == nil || !os.SameFile(f.info, info):
		return "another file"
	case !durable.Same(f.info, info):
		return "other content"
	}
	return ""
}

// adoptOtherSources keeps what another process saved of kinds of source that this one has no saved state of.
func (f *File) adoptOtherSources(path string) {
	s, _, _, err := f.read.saved(path)
	if err != nil {
		return
	}
	others := Saved{}.withOthers(s).others
	delete(others, f.saved.Source)
	maps.Copy(others, f.saved.others)
	f.saved.others = others
}

// withSections returns s with newer texts of sections.
func (s Saved) withSections(texts sectionTexts) Saved {
	all := maps.Clone(s.Sections)
	for name, text := range texts {
		if all == nil {
			all = make(map[string]json.RawMessage)
		}
		all[name] = *text
	}
	s.Sections = all
	return s
}

// fingerprint returns the state without what changes at every poll or may be saved later.
func (s Saved) fingerprint() Saved {
	s.Polled = time.Time{}
	s.Devices = slices.Clone(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		d.XIDs, d.Memory, d.Verdict = health.Ledger{}, d.Memory.Stable(), d.Verdict.Stable()
	}
	return s
}

// sameXIDs reports whether two lists of devices have the same rows of XIDs and owed XIDs.
func sameXIDs(a, b []health.DeviceState) bool {
	return slices.EqualFunc(a, b, func(a, b health.DeviceState) bool {
		return a.Device.ID == b.Device.ID &&
			slices.EqualFunc(a.XIDs.Rows, b.XIDs.Rows, func(r, s health.LedgerRow) bool { return r.XIDRow == s.XIDRow }) &&
			slices.EqualFunc(a.XIDs.Owed, b.XIDs.Owed, func(x, y health.OwedXIDs) bool { return x.Code == y.Code && x.Count == y.Count })
	})
}

// Status may be called from any goroutine.
func (f *File) Status() Status {
	f.mu.Lock()
	s := f.status
	f.mu.Unlock()
	failure := f.writes.Failure()
	s.Err, s.Since, s.Unreserved = failure.Err, failure.Since, f.writes.Unreserved()
	if time.Since(s.setAsideAt) > setAsideShown {
		s.SetAside = ""
	}
	return s
}

// storeResult publishes the outcome of an attempt to save a snapshot.
func (f *File) storeResult(s *health.Snapshot, err error) {
	r := result{err: err}
	if f.path != "" {
		r.sections = f.saved.Sections
	}
	if s != nil {
		r.seq = s.Seq
	}
	f.result.Store(&r)
}

// report updates the status after a disk access. Load does not answer WaitWritten.
func (f *File) report(path string, err error) {
	f.writes.Report(path, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	if path != f.status.Path {
		f.status = Status{Path: path}
	}
}
