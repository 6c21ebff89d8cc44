package monitor

import (
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// bindings holds the entries that name a GPU by its index.
type bindings struct {
	entries *health.Latest[health.IndexEntries] // nil without such entries
	onBus   func() []string                     // Source.OnBus
}

// SetIndexEntries sets the entries of the configuration that name a GPU by its index. Call it before Run.
func (m *Monitor) SetIndexEntries(entries *health.Latest[health.IndexEntries]) {
	m.bindings.entries = entries
}

// restoreBindings replaces bindings made since the start by the saved ones. m.mu is held.
func (m *Monitor) restoreBindings(saved health.Bindings) {
	made := m.now.Bindings
	m.now.Bindings = slices.Clone(saved)
	for _, b := range made { // that the file lacks
		if m.now.Bindings.Find(b.IndexRef) == nil {
			m.now.Bindings = append(m.now.Bindings, b)
		}
	}
}

// bind binds the entries after a reading, or after a change of the configuration, and logs those that match no device. m.mu is held.
func (m *Monitor) bind() {
	if entries := m.indexEntries(); entries != nil {
		before := m.now.Bindings
		m.now.Bindings = health.Bind(*entries, before, m.now.Devices, m.gpusOnBus())
		m.logBindings(before)
	}
	if m.now.Polled() {
		m.logUnmatchedCordons()
	}
}

// indexEntries returns nil while there are none.
func (m *Monitor) indexEntries() *health.IndexEntries {
	if m.bindings.entries == nil {
		return nil
	}
	return m.bindings.entries.Load()
}

// gpusOnBus returns the argument of health.Bind. m.mu is held.
func (m *Monitor) gpusOnBus() []string {
	if m.bindings.onBus == nil {
		return nil
	}
	return m.bindings.onBus()
}

// logBindings logs new bindings and new warnings. m.mu is held.
func (m *Monitor) logBindings(before health.Bindings) {
	for _, b := range m.now.Bindings {
		var old health.Binding
		if found := before.Find(b.IndexRef); found != nil {
			old = *found
		}
		fields := []zap.Field{zap.String("key", b.Key), zap.String("entry", b.Entry)}
		switch {
		case b.Warning.Reason != old.Warning.Reason || b.Warning.Reason != "" && b.GPU != old.GPU:
			if b.Warning.Reason == "" {
				m.logLater(func() {
					m.log.Info("the GPU of an entry has the index again", append(fields, zap.String("device", string(b.GPU)))...)
				})
				continue
			}
			m.logLater(func() {
				m.log.Warn("an entry by index may mean another GPU", append(fields, zap.String("cause", b.Warning.Reason),
					zap.String("reason", b.Warning.Text))...)
			})
		case b.GPU != old.GPU:
			m.logLater(func() {
				m.log.Info("entry by index bound to a GPU", append(fields, zap.String("device", string(b.GPU)))...)
			})
		}
	}
}

// Rebind binds the entries with a text, such as 3, to the GPU that has this index now. It returns the new bindings.
func (m *Monitor) Rebind(entry string) (health.Bindings, error) {
	m.mu.Lock()
	defer m.unlock()
	switch {
	case m.unrestored:
		return nil, errors.New("the bindings from before the start are unknown: --state-dir is not read yet; retry later, or name a UUID instead")
	case m.now.Source.Status != health.SourceUp:
		return nil, fmt.Errorf("the source is %v, so which GPU has an index is unknown; see gpu-node-agent status", m.now.Source.Status)
	}
	before := m.now.Bindings
	rebound, err := health.Rebind(before, entry, m.now.Devices, m.gpusOnBus())
	if err != nil {
		return nil, err
	}
	m.now.Bindings = rebound
	m.store()
	rebound = slices.DeleteFunc(slices.Clone(rebound), func(b health.Binding) bool { return b.Entry != entry })
	for _, b := range rebound {
		m.logLater(func() {
			m.log.Warn("bound by an operator", zap.String("key", b.Key), zap.String("entry", b.Entry), zap.String("device", string(b.GPU)))
		})
	}
	return rebound, nil
}
