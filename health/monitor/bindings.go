package monitor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// bindings holds the entries that name a GPU by its index, and their bindings.
type bindings struct {
	entries *health.Latest[health.IndexEntries] // nil without such entries
	source  health.SourceID                     // whose bindings the snapshot has
	onBus   func() []string                     // Source.OnBus of it
	all     map[string]savedBindings            // by SourceID.Kind
	read    bool                                // RestoreBindings was called: saved bindings are known, and newer ones may replace them
	saved   health.Latest[[]byte]               // all, in JSON
}

// savedBindings are the bindings of one kind of source.
type savedBindings struct {
	Inventory string          `json:"inventory,omitempty"` // of simulated devices
	Bindings  health.Bindings `json:"bindings"`
}

// SetIndexEntries sets the entries of the configuration that name a GPU by its index. Call it before Run.
func (m *Monitor) SetIndexEntries(entries *health.Latest[health.IndexEntries]) {
	m.bindings.entries = entries
}

// SavedBindings are the bindings to keep in the state file. They hold over reboots, which renumber GPUs.
func (m *Monitor) SavedBindings() *health.Latest[[]byte] { return &m.bindings.saved }

// RestoreBindings continues from the saved bindings of an earlier process, none if text is nil. They replace bindings made since the start.
// It may be called late, when the state file answers. Until it is called, nothing is saved and Rebind refuses. src is the configured
// source.
func (m *Monitor) RestoreBindings(text []byte, src health.SourceID) error {
	m.mu.Lock()
	defer m.unlock()
	b := &m.bindings
	var restored map[string]savedBindings
	var err error
	if text != nil {
		err = json.Unmarshal(text, &restored)
	}
	if b.source == (health.SourceID{}) {
		b.source = src
	}
	made := m.now.Bindings
	maps.Copy(b.all, restored)
	m.loadBindings(b.source, b.onBus)
	for _, one := range made { // bindings that the file lacks
		if m.now.Bindings.Find(one.IndexRef) == nil {
			m.now.Bindings = append(slices.Clip(m.now.Bindings), one)
		}
	}
	b.read = true
	m.storeBindings()
	if m.now.Polled() {
		m.bind(m.now.Devices)
		m.view(time.Now())
		m.store()
	}
	return err
}

// loadBindings replaces the bindings by a source's. m.mu is held.
func (m *Monitor) loadBindings(src health.SourceID, onBus func() []string) {
	m.bindings.source, m.bindings.onBus = src, onBus
	saved := m.bindings.all[src.Kind]
	if m.now.Bindings = saved.Bindings; saved.Inventory != simulatedInventory(src) {
		m.now.Bindings = nil
	}
}

// simulatedInventory returns the inventory of simulated devices, which no other inventory has.
func simulatedInventory(src health.SourceID) string {
	if src.Simulated {
		return src.Inventory
	}
	return ""
}

// bind binds the entries after a reading, or after a change of the configuration. m.mu is held.
func (m *Monitor) bind(devices []health.DeviceState) {
	entries := m.indexEntries()
	if entries == nil {
		return
	}
	before := m.now.Bindings
	m.now.Bindings = health.Bind(*entries, before, devices, m.gpusOnBus())
	m.logBindings(before)
	m.storeBindings()
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

// storeBindings stores the bindings for the state file, if they changed. m.mu is held.
func (m *Monitor) storeBindings() {
	b, entries := &m.bindings, m.indexEntries()
	b.all[b.source.Kind] = savedBindings{simulatedInventory(b.source), m.now.Bindings}
	if !b.read {
		return
	}
	all := make(map[string]savedBindings)
	for kind, of := range b.all {
		of.Bindings = slices.DeleteFunc(slices.Clone(of.Bindings), func(o health.Binding) bool {
			return o.GPU == "" || entries != nil && entries.Final && !slices.Contains(entries.Refs, o.IndexRef)
		})
		if len(of.Bindings) > 0 {
			all[kind] = of
		}
	}
	b.all = all
	text, err := json.Marshal(all)
	if err != nil {
		return // impossible: all values have texts
	}
	if last := b.saved.Load(); last == nil || !bytes.Equal(*last, text) {
		b.saved.Store(&text)
	}
}

// Rebind binds the entries with a text, such as 3, to the GPU that has this index now. It returns the new bindings.
func (m *Monitor) Rebind(entry string) (health.Bindings, error) {
	m.mu.Lock()
	defer m.unlock()
	switch {
	case !m.bindings.read:
		return nil, errors.New("the bindings from before the start are unknown: health.stateFile is not read yet; retry later, or name a UUID " +
			"instead")
	case m.now.Source.Status != health.SourceUp:
		return nil, fmt.Errorf("the source is %v, so which GPU has an index is unknown; see gpu-node-agent status", m.now.Source.Status)
	}
	before := m.now.Bindings
	rebound, err := health.Rebind(before, entry, m.now.Devices, m.gpusOnBus())
	if err != nil {
		return nil, err
	}
	m.now.Bindings = rebound
	m.storeBindings()
	m.view(time.Now())
	m.store()
	rebound = slices.DeleteFunc(slices.Clone(rebound), func(b health.Binding) bool { return b.Entry != entry })
	for _, b := range rebound {
		m.logLater(func() {
			m.log.Warn("bound by an operator", zap.String("key", b.Key), zap.String("entry", b.Entry), zap.String("device", string(b.GPU)))
		})
	}
	return rebound, nil
}
