// Package statefile keeps the state directory, which has what must outlive a restart: findings, rows of XIDs, a detach, the states of
// other components, and the last good configuration.
package statefile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	retryWriteAfter = 10 * time.Second // after a failed write
	retryLockAfter  = time.Second      // while another agent holds the lock

	// checkInterval is how often Run compares the files with what it wrote. It is also the longest delay for saving XIDs without a finding:
	// they may come in floods, and an XID that is counted twice after a crash does no harm.
	checkInterval = 10 * time.Second

	// readTimeout limits how long the agent waits for the disk at its start.
	readTimeout = 10 * time.Second

	// repairLogInterval is the shortest time between two log lines about a file that another process changed.
	repairLogInterval = time.Minute

	// setAsideShown is how long the status says that a file was set aside. What was lost with it does not come back.
	setAsideShown = 24 * time.Hour
)

// The files of the directory. Each has a spare file: see durable.Options.Replace.
const (
	nodeName          = "node.json"             // a Node
	configurationName = "last-good-config.json" // the last good configuration
)

// kinds returns the kinds of source, whose states have a file each.
func kinds() []string { return []string{kindDCGM, kindSim} }

const (
	kindDCGM = "dcgm"
	kindSim  = "sim"
)

// stateName returns the name of the file with the state of a kind of source.
func stateName(kind string) string {
	if kind == kindDCGM {
		return "state.json"
	}
	return "state." + kind + ".json"
}

// ConfigurationPath returns the path of the last good configuration in a state directory.
func ConfigurationPath(dir string) string { return filepath.Join(dir, configurationName) }

// Dir is the state directory. Load reads it at the start; Run writes a file whenever its content changes or the file differs from what was
// written. Only the holder of the directory's lock writes. Another agent on the node reads the files at its start and takes over when the
// lock is free; then its own state counts, because it has polled the same GPUs. No other component waits for a disk that is full or hangs.
type Dir struct {
	path      string // "" keeps nothing
	snapshots *health.Latest[health.Snapshot]
	left      *health.Latest[Saved] // the state of the source that another kind of source replaced last
	bootID    string
	log       *zap.Logger

	sections map[string]*health.Latest[[]byte] // Node.Sections

	configuration       *health.Latest[[]byte] // the content of ConfigurationPath
	configurationLogged logonce.State          // why it cannot be written

	read readFunc // fileOptions().Read

	late    func(Contents, error) // see LoadInTime
	loading <-chan loaded         // LoadInTime has not waited for it; nil if there is nothing to wait for

	// Load uses these, then Run.
	files
	kind           string        // of the latest snapshot
	logged         logonce.State // the error
	repairLoggedAt time.Time

	result health.Latest[result]
	writes durable.Writes

	mu     sync.Mutex // guards status
	status Status     // without the fields about writes
}

// files are the files of a directory.
type files struct {
	lock          *filelock.Held    // nil while not held
	states        map[string]*state // by kind of source
	node          node
	configuration document
	contents      Contents // as of the latest read
	unread        bool     // a file was neither read nor set aside, so none may be written
}

// state is the file of a kind of source.
type state struct {
	document
	saved             Saved     // the content that the file has or should have
	findings, ledgers []byte    // of the latest write: see Saved.stable and Saved.ledgers; nil before the first
	writtenAt         time.Time // of the latest write
}

// node is the file of a Node.
type node struct {
	document
	saved Node
	texts sectionTexts // of the latest write
}

func newFiles(dir string) files {
	file := func(name string, reserve int) document {
		return document{path: filepath.Join(dir, name), options: durable.WithSpare(reserve)}
	}
	f := files{
		states: make(map[string]*state), node: node{document: file(nodeName, reserve)}, configuration: file(configurationName, 0),
	}
	for _, kind := range kinds() {
		f.states[kind] = &state{document: file(stateName(kind), reserve)}
	}
	return f
}

// result is the outcome of the latest attempt to save a snapshot.
type result struct {
	seq      uint64
	sections map[string]json.RawMessage // of this boot
	err      error
}

// Status is the state of the state directory.
type Status struct {
	Path    string    // "" if nothing is kept
	Err     string    // why a restart would lose findings; "" if they are saved
	Since   time.Time // of Err
	Written time.Time // the latest write of this process; zero if there was none

	Unread     time.Time // since when the files should have been read: the verdicts from before the start are unknown; zero once they were
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

// Failure returns why a file cannot be written.
func (s Status) Failure() durable.Failure {
	return durable.Failure{Path: s.Path, Err: s.Err, Since: s.Since}
}

// New returns the state directory of the snapshots; without a path, it keeps nothing. Run also keeps configuration, the last good one.
func New(
	path string, snapshots *health.Latest[health.Snapshot], configuration *health.Latest[[]byte], bootID string, log *zap.Logger,
) *Dir {
	return &Dir{
		path: path, snapshots: snapshots, left: new(health.Latest[Saved]), configuration: configuration, bootID: bootID, log: log,
		read: fileOptions().Read, files: newFiles(path),
	}
}

// sectionTexts are the newest texts of sections that have one. They are compared by pointer.
type sectionTexts map[string]*[]byte

// AddSection adds the state of a component to the directory, as JSON. It keeps the section that Load has read until there is another.
// Call it before Run.
func (d *Dir) AddSection(name string, text *health.Latest[[]byte]) {
	if d.sections == nil {
		d.sections = make(map[string]*health.Latest[[]byte])
	}
	d.sections[name] = text
}

func (d *Dir) sectionTexts() sectionTexts {
	texts := make(sectionTexts)
	for name, latest := range d.sections {
		if text := latest.Load(); text != nil {
			texts[name] = text
		}
	}
	return texts
}

// Load reads the directory. Call it before Run. Without files the saved state is empty.
//
// A file that cannot be read or parsed is set aside, and the error names the new path; if that fails, Run writes nothing until each file
// was read or set aside: see LoadInTime. A file of a newer version is set aside, too, and Load returns what it can read of it and the
// error.
// While another agent holds the lock, Load only reads.
func (d *Dir) Load() (Contents, error) {
	if d.path == "" {
		return Contents{}, nil
	}
	if lockErr := d.acquire(); lockErr != nil {
		d.writes.Report(d.path, lockErr)
		c, err := readAll(d.path, d.read)
		if c.left = d.left; err != nil {
			err = fmt.Errorf("%w; left in place: %w", err, lockErr)
		}
		return c, err
	}
	replaced, err := d.adopt()
	d.writes.Report(d.path, err)
	return d.contents, errors.Join(replaced, err)
}

// Read reads a state directory that another process may write. Without files it returns the zero Contents.
func Read(dir string) (Contents, error) {
	if dir == "" {
		return Contents{}, nil
	}
	return readAll(dir, fileOptions().Read)
}

func readAll(dir string, read readFunc) (Contents, error) {
	c, all, errs := Contents{States: make(map[string]Saved)}, newFiles(dir), []error(nil)
	for _, kind := range kinds() {
		var s Saved
		_, _, err := all.states[kind].parse(read, &s)
		c.States[kind], errs = s, append(errs, err)
	}
	_, _, err := all.node.parse(read, &c.Node)
	return c, errors.Join(append(errs, err)...)
}

// loaded is the outcome of a Load.
type loaded struct {
	dir      *Dir // that has loaded it
	contents Contents
	err      error
}

// ErrUnread means that the disk has not answered in time.
var ErrUnread = errors.New("the disk has not answered")

// LoadInTime is Load, but it waits for the disk readTimeout at most, and not after ctx has ended. Then the error is ErrUnread, and
// Status.Unread is set as after a Load that could neither read a file nor set it aside. Run writes nothing until each file was read or set
// aside, and calls late once, with what it has.
func (d *Dir) LoadInTime(ctx context.Context, late func(Contents, error)) (Contents, error) {
	d.late = late
	loader := New(d.path, nil, nil, d.bootID, d.log)
	loader.read, loader.left = d.read, d.left
	done := make(chan loaded, 1)
	go func() { // abandoned if the disk hangs
		c, err := loader.Load()
		done <- loaded{loader, c, err}
	}()
	d.writes.Begin(d.path)
	begin := time.Now()
	timeout := time.NewTimer(readTimeout)
	defer timeout.Stop()
	select {
	case l := <-done:
		d.take(l.dir)
		return l.contents, l.err
	case <-timeout.C:
	case <-ctx.Done():
	}
	d.loading = done
	d.setUnread(begin)
	return Contents{}, fmt.Errorf("%s: %w; verdicts of before the start are unknown", d.path, ErrUnread)
}

// take continues with what another Dir has loaded.
func (d *Dir) take(from *Dir) {
	d.files = from.files
	status := from.Status()
	var err error
	if status.Err != "" {
		err = errors.New(status.Err)
	}
	d.writes.Report(d.path, err)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status = status
}

// awaitLoad waits until LoadInTime's Load has ended. It returns false when ctx ends.
func (d *Dir) awaitLoad(ctx context.Context) bool {
	if d.loading == nil {
		return true
	}
	d.storeResult(nil, fmt.Errorf("%s: %w", d.path, ErrUnread))
	select {
	case l := <-d.loading:
		if d.take(l.dir); !d.unread {
			d.lateRead(l.contents, l.err)
		}
		return true
	case <-ctx.Done():
		return false
	}
}

// lateRead passes what was read after the start to LoadInTime's late.
func (d *Dir) lateRead(c Contents, err error) {
	if d.late != nil {
		d.late(c, err)
	}
}

// acquire makes sure that this process holds the lock, also after its file was removed.
func (d *Dir) acquire() error {
	if d.lock.Of(lockPath(d.path)) {
		return nil
	}
	held := d.lock != nil
	d.release()
	l, err := acquireLock(d.path)
	if d.lock = l; err != nil || !held { // another agent may have written since the files were read
		for _, s := range d.states {
			s.adopted = false
		}
		d.node.adopted, d.files.configuration.adopted = false, false
	}
	return err
}

func (d *Dir) release() {
	d.lock.Release()
	d.lock = nil
}

// adopt reads or sets aside the files, so that they may be written. replaced reports what was set aside and why; err reports why nothing
// may be written. The caller holds the lock.
func (d *Dir) adopt() (replaced, err error) {
	var asides, errs []error
	d.contents.left = d.left
	for _, kind := range kinds() {
		s, saved := d.states[kind], Saved{}
		if s.adopted {
			continue
		}
		replaced, err := s.adopt(d.read, &saved)
		s.saved, s.findings, d.contents = saved, nil, d.contents.with(kind, saved)
		asides, errs = append(asides, replaced), append(errs, err)
	}
	if !d.node.adopted {
		var saved Node
		replaced, err := d.node.adopt(d.read, &saved)
		d.node.saved, d.node.texts, d.contents.Node = saved, nil, saved
		asides, errs = append(asides, replaced), append(errs, err)
	}
	if err = errors.Join(errs...); err != nil {
		d.setUnread(time.Now())
	}
	if replaced = errors.Join(asides...); replaced != nil {
		d.mu.Lock()
		d.status.SetAside, d.status.setAsideAt = strings.ReplaceAll(replaced.Error(), "\n", "; "), time.Now()
		d.mu.Unlock()
	}
	return replaced, err
}

// setUnread sets since when the files should have been read, zero once they were.
func (d *Dir) setUnread(since time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unread == !since.IsZero() {
		return // it is known already
	}
	d.unread, d.status.Unread = !since.IsZero(), since
}

// Run saves the snapshots until ctx ends, and a last time then, so that nothing is lost that the monitor found before it
// ended.
func (d *Dir) Run(ctx context.Context) error {
	if d.path == "" {
		<-ctx.Done()
		return nil
	}
	if !d.awaitLoad(ctx) {
		return nil
	}
	defer d.release()
	// A section must not wait for the next snapshot: a component may be about to change something outside that a later process has to undo.
	state := []health.Replaceable{d.snapshots}
	for _, section := range d.sections {
		state = append(state, section)
	}
	stateChanged, configurationChanged := health.Wake(ctx, state...), health.Wake(ctx, d.configuration)
	for {
		last := ctx.Err() != nil
		wait, ok := d.save(d.snapshots.Load(), last)
		d.saveConfiguration()
		if last {
			return nil
		}
		changed := stateChanged
		if !ok {
			changed = nil // retry after wait, not at every poll
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-configurationChanged:
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// save saves a snapshot and the sections. It reports whether it succeeded, and when to check the files again.
func (d *Dir) save(s *health.Snapshot, last bool) (wait time.Duration, ok bool) {
	d.writes.Begin(d.path)
	err := d.acquire()
	if err == nil {
		var replaced error
		if replaced, err = d.adopt(); replaced != nil {
			d.log.Warn("set aside an existing file", zap.String("flag", "--state-dir"), zap.Error(replaced))
		}
		if err == nil && d.unread {
			d.setUnread(time.Time{})
			d.lateRead(d.contents, replaced)
			s = d.snapshots.Load()
		}
	}
	if err == nil {
		err = errors.Join(d.writeStates(s, last), d.writeNode())
	}
	d.writes.Report(d.path, err)
	d.storeResult(s, err)
	switch {
	case !d.logged.ErrorChanged(err):
	case err == nil:
		d.log.Info("state is written again", zap.String("directory", d.path))
	default:
		d.log.Warn("cannot write the state; findings will be lost on restart", zap.String("flag", "--state-dir"), zap.Error(err))
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
func (d *Dir) WaitWritten(ctx context.Context, s *health.Snapshot) error {
	return d.wait(ctx, func(r *result) bool { return r.seq >= s.Seq })
}

// WaitSection is WaitWritten for the newest text of a section.
func (d *Dir) WaitSection(ctx context.Context, name string) error {
	text := d.sections[name].Load()
	return d.wait(ctx, func(r *result) bool { return bytes.Equal(r.sections[name], *text) })
}

// LacksSection reports whether the directory is known to lack a section of this boot.
func (d *Dir) LacksSection(name string) bool {
	r := d.result.Load()
	return d.bootID != "" && d.path != "" && r != nil && r.err == nil && r.sections[name] == nil
}

func (d *Dir) wait(ctx context.Context, written func(*result) bool) error {
	for d.path != "" { // without a directory, there is nothing to wait for
		r, changed := d.result.Watch()
		if r != nil && (r.err != nil || written(r)) {
			return r.err
		}
		if !wait.For(ctx, changed) {
			return fmt.Errorf("%s: not written in time: %w", d.path, ctx.Err())
		}
	}
	return nil
}

// writeStates writes a snapshot into the file of its kind of source if that lacks something. It writes each file again that differs from
// what was written, within checkInterval.
func (d *Dir) writeStates(s *health.Snapshot, last bool) error {
	if s != nil && d.kind != s.Source.Kind {
		if before := d.states[d.kind]; before != nil { // another kind of source replaces it
			saved := before.saved
			if left := d.left.Load(); left != nil && left.Source == d.kind {
				saved = *left
			}
			saved.Detachment = health.Detachment{} // it continues with the new source
			if err := d.writeState(before, saved, true); err != nil {
				return err
			}
		}
		d.kind = s.Source.Kind
	}
	var errs []error
	for _, kind := range kinds() {
		st := d.states[kind]
		if saved, ok := d.stateToSave(s, st); ok {
			errs = append(errs, d.writeState(st, saved, last))
		} else {
			errs = append(errs, d.write(&st.document, st.text))
		}
	}
	return errors.Join(errs...)
}

// writeState writes a state if its findings are new, or if its ledgers are and they are due.
func (d *Dir) writeState(st *state, saved Saved, due bool) error {
	findings, err := json.Marshal(saved.stable())
	if err != nil {
		return err
	}
	same := st.findings != nil && bytes.Equal(findings, st.findings)
	if same && !due && time.Since(st.writtenAt) < checkInterval {
		return nil
	}
	ledgers, err := json.Marshal(saved.ledgers())
	if err != nil {
		return err
	}
	if same && bytes.Equal(ledgers, st.ledgers) {
		return d.write(&st.document, st.text)
	}
	text, err := json.Marshal(saved)
	if err != nil {
		return err
	}
	if err := d.write(&st.document, text); err != nil {
		return err
	}
	st.saved, st.findings, st.ledgers, st.writtenAt = saved, findings, ledgers, time.Now()
	return nil
}

// writeNode writes the sections if one of them has another text.
func (d *Dir) writeNode() error {
	texts := d.sectionTexts()
	if maps.Equal(texts, d.node.texts) {
		return d.write(&d.node.document, d.node.text)
	}
	saved := d.node.saved.withSections(d.bootID, texts)
	text, err := json.Marshal(saved)
	if err != nil {
		return err
	}
	if err := d.write(&d.node.document, text); err != nil {
		return err
	}
	d.node.saved, d.node.texts = saved, texts
	return nil
}

// write writes a text into a file that lacks it. If another process changed the file, it says so.
func (d *Dir) write(f *document, text []byte) error {
	before := f.written
	w, difference, err := f.replace(text)
	if err != nil || w.Info == nil {
		return err
	}
	if difference != "" && before && time.Since(d.repairLoggedAt) >= repairLogInterval {
		d.repairLoggedAt = time.Now()
		d.log.Warn("another process changed the state; writing it again", zap.String("file", f.path), zap.String("found", difference))
	}
	unreserved := []error{d.node.unreserved}
	for _, kind := range kinds() {
		unreserved = append(unreserved, d.states[kind].unreserved)
	}
	if err := errors.Join(unreserved...); d.writes.SetUnreserved(err) {
		d.log.Warn("no space is reserved for the state; a full disk would lose findings", zap.String("file", f.path), zap.Error(err))
	}
	if w.Aside != "" {
		d.log.Warn("set aside what was in the place of a state file", zap.String("file", f.path), zap.String("aside", w.Aside))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Written = time.Now()
	return nil
}

// saveConfiguration writes the last good configuration. Without one, the file stays as it is. Only the holder of the lock writes.
func (d *Dir) saveConfiguration() {
	text, f := d.configuration.Load(), &d.files.configuration
	if text == nil || len(*text) == 0 || !d.lock.Of(lockPath(d.path)) {
		return
	}
	d.writes.Begin(d.path)
	defer d.writes.End()
	if !f.adopted {
		f.text, f.info, _ = d.read(f.path) // what cannot be read is replaced
		f.adopted = true
	}
	_, _, err := f.replace(bytes.TrimRight(*text, " \n"))
	if d.configurationLogged.ErrorChanged(err) && err != nil {
		d.log.Warn("cannot save the configuration; the agent will not start if the file becomes invalid", zap.String("file", f.path),
			zap.Error(err))
	}
}

// stateToSave returns the state of a snapshot, and whether a file should have it. Before the first poll, the file should have it during a
// detach, and once event sources have reported XIDs of the devices in the file.
func (d *Dir) stateToSave(s *health.Snapshot, st *state) (Saved, bool) {
	if s == nil || d.states[s.Source.Kind] != st {
		return Saved{}, false
	}
	saved, before := FromSnapshot(s, d.bootID), &st.saved
	if s.Polled() || saved.Detachment.InForce() {
		return saved, true
	}
	saved.History, saved.Polled = before.History, before.Polled
	sameDevices := saved.BootID == before.BootID && saved.Source == before.Source && saved.Inventory == before.Inventory
	return saved, sameDevices && slices.ContainsFunc(s.Devices, func(d health.DeviceState) bool { return d.XIDs.Last != 0 })
}

// stable returns the state without its ledgers, and without the times and values that change at every poll.
func (s Saved) stable() Saved {
	s.Polled = time.Time{}
	s.Devices = slices.Clone(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		d.XIDs = health.Ledger{}
		d.Memory.Findings, d.Verdict.Findings = judge.Stable(d.Memory.Findings), judge.Stable(d.Verdict.Findings)
	}
	return s
}

// ledgers returns the ledgers of the state, without the time that passes while XIDs are owed.
func (s Saved) ledgers() (all Saved) {
	for _, d := range s.Devices {
		ledger := health.DeviceState{Device: health.Device{ID: d.Device.ID}, XIDs: health.Ledger{Rows: d.XIDs.Rows}}
		for _, o := range d.XIDs.Owed {
			ledger.XIDs.Owed = append(ledger.XIDs.Owed, health.OwedXIDs{Code: o.Code, Count: o.Count})
		}
		all.Devices = append(all.Devices, ledger)
	}
	return all
}

// Status may be called from any goroutine.
func (d *Dir) Status() Status {
	d.mu.Lock()
	s := d.status
	d.mu.Unlock()
	failure := d.writes.Failure()
	s.Path, s.Err, s.Since, s.Unreserved = d.path, failure.Err, failure.Since, d.writes.Unreserved()
	if time.Since(s.setAsideAt) > setAsideShown {
		s.SetAside = ""
	}
	return s
}

// storeResult publishes the outcome of an attempt to save a snapshot.
func (d *Dir) storeResult(s *health.Snapshot, err error) {
	r := result{err: err}
	if sameBoot(d.node.saved.BootID, d.bootID) {
		r.sections = d.node.saved.Sections
	}
	if s != nil {
		r.seq = s.Seq
	}
	d.result.Store(&r)
}
