package monitor

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

const excludeKey = "plugin.exclude"

// bindingNode is a node whose driver lists the GPUs of slots. The engine numbers them at its start.
type bindingNode struct {
	*harness
	cards   []health.DeviceID // by slot; empty: none
	unbound []bool            // by slot: the driver does not list the GPU, which is on the PCI bus
	order   []int             // the slots that the engine lists, by index
	mig     bool              // each GPU has two MIG devices
	entries health.Latest[health.IndexEntries]
	file    health.Bindings // of the state file
	log     *zap.Logger
}

func newBindingNode(t *testing.T, n int, log *zap.Logger, cordon ...string) *bindingNode {
	b := &bindingNode{unbound: make([]bool, n), log: log}
	for i := range n {
		b.cards = append(b.cards, health.DeviceID("GPU-"+string(rune('a'+i))))
	}
	b.restartEngine()
	b.harness = &harness{fakeSource: newFakeSource()}
	b.startAgent(t, fileFound, cordon...)
	return b
}

func (b *bindingNode) pci(slot int) string { return fmt.Sprintf("00000000:%02X:00.0", 0x10+slot) }

func (b *bindingNode) onBus() (all []string) {
	for slot, card := range b.cards {
		if card != "" {
			all = append(all, strings.ToLower(b.pci(slot)[4:]))
		}
	}
	return all
}

// restartEngine numbers the GPUs that the driver lists.
func (b *bindingNode) restartEngine() {
	b.order = nil
	for slot, card := range b.cards {
		if card != "" && !b.unbound[slot] {
			b.order = append(b.order, slot)
		}
	}
}

// measure reports what the engine lists, and waits until it counts.
func (b *bindingNode) measure() {
	b.list()
	advance(outageWait)
}

// list sets what the engine lists: a GPU that was unbound since its start is detached.
func (b *bindingNode) list() {
	b.set(func(s *fakeSource) {
		s.reading.Devices, s.reading.Samples = nil, nil
		add := func(d health.Device, p health.Presence) {
			s.reading.Devices = append(s.reading.Devices, d)
			s.reading.Samples = append(s.reading.Samples, health.Sample{Device: d.ID, Presence: p})
		}
		for index, slot := range b.order {
			d := health.Device{ID: b.cards[slot], Kind: health.KindGPU, Index: index, PCI: b.pci(slot), GI: -1, CI: -1, MIGIndex: -1, MIGMode: b.mig}
			presence := health.Present
			if b.unbound[slot] {
				presence = health.Detached
			}
			add(d, presence)
			for i := range 2 {
				if b.mig {
					mig := d
					mig.ID, mig.Parent, mig.Kind, mig.MIGIndex, mig.GI = health.DeviceID(fmt.Sprintf("MIG-%s-%d", d.ID, i)), d.ID, health.KindMIG, i, i+1
					add(mig, presence)
				}
			}
		}
	})
}

// outageWait is longer than judge.OutageDelay.
const outageWait = judge.OutageDelay + 2*time.Second

// How the state file is after a restart of the agent.
const (
	fileFound = iota
	fileLost
	fileLate // it is not read yet
)

func (b *bindingNode) startAgent(t *testing.T, file int, cordon ...string) {
	source := b.fakeSource
	b.harness = newHarness(b.log)
	b.fakeSource = source
	src := b.fakeSource.source(health.SourceID{Kind: "dcgm"})
	src.OnBus = b.onBus
	b.source.Store(src)
	b.m.SetIndexEntries(&b.entries)
	b.load(cordon...)
	if file == fileLost {
		b.file = nil
	}
	if file == fileLate {
		b.m.AwaitRestore()
	} else {
		b.m.Restore(statefile.Restored{Bindings: b.file})
	}
	b.list()
	b.start(t)
	advance(outageWait)
}

func (b *bindingNode) readFile() { b.m.RestoreLate(statefile.Restored{Bindings: b.file}) }

// saved returns the bindings to save, none before the file is read.
func (b *bindingNode) saved() health.Bindings {
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	if b.m.unrestored {
		return nil
	}
	return statefile.FromSnapshot(&b.m.now, "boot").Bindings
}

func (b *bindingNode) stopAgent() {
	b.stop()
	if !b.m.unrestored {
		b.file = b.saved()
	}
}

// load puts a configuration in force, with the same entries in both keys.
func (b *bindingNode) load(cordon ...string) {
	b.configure(func(c *judge.Config) { c.Cordon = cordon })
	b.entries.Store(&health.IndexEntries{
		Refs: append(health.IndexRefs(judge.KeyCordon, cordon), health.IndexRefs(excludeKey, cordon)...), Final: true,
	})
	synctest.Wait()
}

// withheld returns the cordoned devices, after a check that the same devices are excluded.
func (b *bindingNode) withheld(t *testing.T, when string) []health.DeviceID {
	t.Helper()
	s := b.out.Load()
	var cordoned, excluded []health.DeviceID
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Verdict.Has(health.CauseCordoned) {
			cordoned = append(cordoned, d.Device.ID)
		}
		if slices.ContainsFunc(b.config.Load().Cordon, func(entry string) bool {
			match,
				_ := s.Bindings.Match(excludeKey, entry, &d.Device)
			return match
		}) {
			excluded = append(excluded, d.Device.ID)
		}
	}
	slices.Sort(cordoned)
	if slices.Sort(excluded); !slices.Equal(cordoned, excluded) {
		t.Fatalf("%s: cordoned %v, excluded %v", when, cordoned, excluded)
	}
	return cordoned
}

func (b *bindingNode) want(t *testing.T, when, reason string, devices ...health.DeviceID) {
	t.Helper()
	if got := b.withheld(t, when); !slices.Equal(got, devices) {
		t.Fatalf("%s: %v withheld, want %v", when, got, devices)
	}
	for _, one := range b.out.Load().Bindings {
		if one.Warning.Reason != reason || (one.Warning.Text == "") != (reason == "") {
			t.Errorf("%s: %s %q warns of %q: %s; want %q", when, one.Key, one.Entry, one.Warning.Reason, one.Warning.Text, reason)
		}
	}
}

func runBindings(t *testing.T, n int, test func(t *testing.T, b *bindingNode), cordon ...string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBindingNode(t, n, zap.NewNop(), cordon...)
		defer func() { b.stop() }()
		test(t, b)
	})
}

// GPU 3 is unbound and the host engine restarted: another GPU has its index.
func TestCordonStaysAtGPUWhenIndexesChange(t *testing.T) {
	runBindings(t, 5, func(t *testing.T, b *bindingNode) {
		b.want(t, "start", "", "GPU-d")
		b.unbound[3] = true
		b.measure()
		b.want(t, "unbound", "", "GPU-d")
		b.restartEngine()
		b.measure()
		b.want(t, "engine restarted", health.BindingRenumbered, "GPU-d")
		if d := b.out.Load().Devices; d[len(d)-1].Device.ID != "GPU-d" || d[len(d)-1].Device.Index != -1 || d[3].Device.ID != "GPU-e" ||
			d[3].Device.Index != 3 {
			t.Errorf("indexes: %+v", d)
		}
		b.stopAgent()
		b.startAgent(t, fileFound, "3") // GPU-d is not listed, and nothing but the binding is saved of it
		b.want(t, "agent restarted", health.BindingRenumbered)
		b.unbound[3] = false
		b.restartEngine()
		b.measure()
		b.want(t, "bound again", "", "GPU-d")
	}, "3")
}

func TestRebind(t *testing.T) {
	runBindings(t, 4, func(t *testing.T, b *bindingNode) {
		b.unbound[0] = true
		b.restartEngine()
		b.measure()
		b.want(t, "renumbered", health.BindingRenumbered, "GPU-b")
		for _, entry := range []string{"2", "GPU-b", "x"} {
			if _, err := b.m.Rebind(entry); err == nil || !strings.Contains(err.Error(), strconv.Quote(entry)) {
				t.Errorf("%s: %v", entry, err)
			}
		}
		rebound, err := b.m.Rebind("1")
		if err != nil || len(rebound) != 2 || rebound[0].GPU != "GPU-c" {
			t.Errorf("%+v, %v", rebound, err)
		}
		b.want(t, "bound anew", "", "GPU-c")
		b.stopAgent()
		b.startAgent(t, fileFound, "1")
		b.want(t, "after a restart", "", "GPU-c")
		b.load("GPU-b", "3")
		b.want(t, "no GPU has the index", health.BindingIncomplete, "GPU-b")
		if _, err := b.m.Rebind("3"); err == nil || !strings.Contains(err.Error(), "no GPU has index 3") {
			t.Error(err)
		}
		b.load("1", "GPU-b") // 1 had left the configuration
		b.want(t, "back", health.BindingIncomplete, "GPU-b", "GPU-c")
	}, "1")
}

// A new entry is bound by the latest reading, not by one after a renumbering.
func TestBindingOfNewEntryWhileStalled(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		defer b.hangPolls()()
		advance(time.Minute)
		b.load("1")
		b.want(t, "stalled", "", "GPU-b")
		if all := b.out.Load().Bindings; len(all) != 2 || all[0].GPU != "GPU-b" {
			t.Errorf("bindings %+v", all)
		}
	})
}

// Which GPU has an index is unknown while the source is down.
func TestRebindWhileSourceIsDown(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		b.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("died"), errors.New("refused") })
		advance(time.Minute)
		if _, err := b.m.Rebind("0"); err == nil || !strings.Contains(err.Error(), "the source is down") {
			t.Error(err)
		}
	}, "0")
}

func TestBindingWithoutSavedState(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		b.stopAgent()
		b.unbound[0] = true
		b.restartEngine()
		b.startAgent(t, fileLost, "0")
		b.want(t, "lost file, two of three GPUs", health.BindingIncomplete, "GPU-b")
		b.stopAgent()
		b.startAgent(t, fileFound, "0")
		b.want(t, "restart", health.BindingIncomplete, "GPU-b")
		b.unbound[0] = false
		b.restartEngine()
		b.measure()
		b.want(t, "all GPUs", health.BindingRenumbered, "GPU-b")
	}, "0")
}

// A state file that answers late has the older bindings, and they count.
func TestBindingOfLateStateFile(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		b.stopAgent()
		b.unbound[0] = true
		b.restartEngine()
		b.startAgent(t, fileLate, "0", "1")
		if saved := b.saved(); saved != nil {
			t.Errorf("saved before the file was read: %+v", saved)
		}
		if _, err := b.m.Rebind("0"); err == nil || !strings.Contains(err.Error(), "not read yet") {
			t.Error(err)
		}
		b.want(t, "not read", health.BindingIncomplete, "GPU-b", "GPU-c")
		b.readFile()
		if got := b.withheld(t, "read"); !slices.Equal(got, []health.DeviceID{"GPU-c"}) { // 0 means GPU-a, which is not listed
			t.Errorf("%v withheld", got)
		}
		b.unbound[0] = false
		b.restartEngine()
		b.measure()
		if got := b.withheld(t, "all"); !slices.Equal(got, []health.DeviceID{"GPU-a", "GPU-c"}) {
			t.Errorf("%v withheld", got)
		}
	}, "0")
}

// A new card at the address of the bound GPU replaces it, unless the bound GPU may be elsewhere.
func TestBindingFollowsReplacedCard(t *testing.T) {
	runBindings(t, 4, func(t *testing.T, b *bindingNode) {
		b.stopAgent()
		b.cards[1], b.unbound[3] = "GPU-new", true // GPU-d may be at the address, for all that is known
		b.restartEngine()
		b.startAgent(t, fileFound, "1")
		b.want(t, "a GPU is not listed", health.BindingRenumbered)
		b.unbound[3] = false
		b.restartEngine()
		b.measure()
		b.want(t, "replaced", health.BindingReplaced, "GPU-new")
		b.stopAgent()
		b.startAgent(t, fileFound, "1")
		b.want(t, "restart", health.BindingReplaced, "GPU-new")
		if _, err := b.m.Rebind("1"); err != nil {
			t.Error(err)
		}
		b.want(t, "confirmed", "", "GPU-new")
		b.stopAgent()
		b.cards = []health.DeviceID{"GPU-a", "GPU-d", "GPU-c", ""} // a known card takes the address
		b.restartEngine()
		b.startAgent(t, fileFound, "1")
		b.want(t, "moved card", health.BindingRenumbered)
	}, "1")
}

func TestMIGBindingMeansParentAndNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBindingNode(t, 3, zap.NewNop(), "1:1")
		defer func() { b.stop() }()
		b.mig = true
		b.measure()
		b.want(t, "start", "", "MIG-GPU-b-1")
		b.unbound[0] = true
		b.restartEngine()
		b.measure()
		b.want(t, "renumbered", health.BindingRenumbered, "MIG-GPU-b-1")
		b.unbound[0], b.unbound[1] = false, true
		b.restartEngine()
		b.measure()
		b.want(t, "its GPU is missing", health.BindingRenumbered, "MIG-GPU-b-1")
		if _, err := b.m.Rebind("1:1"); err != nil {
			t.Error(err)
		}
		b.want(t, "bound anew", "", "MIG-GPU-c-1")
	})
}

// Bindings of simulated GPUs are none of the real ones.
func TestBindingsOfAnotherSource(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		for _, id := range []health.SourceID{
			{Kind: "sim", Inventory: "sim 1", Simulated: true},
			{Kind: "dcgm", Inventory: "dcgm localhost:5555"},
		} {
			b.unbound[0] = id.Simulated
			b.restartEngine()
			src := b.fakeSource.source(id)
			src.OnBus = b.onBus
			b.source.Store(src)
			b.measure()
			want, reason := health.DeviceID("GPU-c"), health.BindingIncomplete
			if !id.Simulated {
				want, reason = "GPU-b", ""
			}
			b.want(t, id.Kind, reason, want)
		}
		if saved := b.saved(); len(saved) != 2 {
			t.Errorf("saved: %+v", saved)
		}
		b.load()
		if saved := b.saved(); saved != nil {
			t.Errorf("saved without entries: %+v", saved)
		}
	}, "1")
}

// meaning is what an entry means by the model of the random test.
type meaning struct {
	card health.DeviceID
	slot int                      // where it was listed last
	seen map[health.DeviceID]bool // cards listed beside it, or elsewhere since
}

// For random sequences of renumberings, replaced and moved cards, restarts of the agent with the saved, a lost or a late state file,
// changes of the configuration and bindings by an operator:
//   - exactly the listed GPUs that the entries mean are cordoned, and the same excluded;
//   - nothing is kept of an entry that has left the configuration;
//   - two GPUs never have one index;
//   - an entry whose index another GPU has warns.
func TestBindingsRandomSequences(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) { playBindings(t, seed) })
	}
}

func playBindings(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 33))
	const n = 4
	configurations := [][]string{{}, {"1"}, {"1", "2"}, {"3"}, {"0", "3"}}
	entries := configurations[1]
	b := newBindingNode(t, n, zap.NewNop(), entries...)
	defer func() { b.stop() }()
	meanings := make(map[string]*meaning)
	newCards := 0
	present := func(slot int) bool { return b.cards[slot] != "" }
	b.updateMeanings(entries, meanings)
	for step := range 30 {
		what := ""
		switch r.IntN(8) {
		case 0, 1:
			slot := r.IntN(n)
			b.unbound[slot] = !b.unbound[slot]
			if !slices.ContainsFunc([]int{0, 1, 2, 3}, func(s int) bool { return present(s) && !b.unbound[s] }) {
				b.unbound[slot] = false
				b.cards[slot] = max(b.cards[slot], "GPU-z")
			}
			what = fmt.Sprintf("slot %d unbound %v", slot, b.unbound[slot])
			b.restartEngine()
			b.measure()
		case 2:
			newCards++
			slot := r.IntN(n)
			b.stopAgent()
			b.cards[slot], b.unbound[slot] = health.DeviceID(fmt.Sprintf("GPU-new%d", newCards)), false
			what = fmt.Sprintf("slot %d: %s", slot, b.cards[slot])
			b.restartEngine()
			b.startAgent(t, fileFound, entries...)
		case 3:
			x, y := r.IntN(n), r.IntN(n)
			b.stopAgent()
			b.cards[x], b.cards[y] = b.cards[y], b.cards[x]
			what = fmt.Sprintf("slots %d and %d exchanged", x, y)
			b.restartEngine()
			if len(b.order) == 0 {
				b.unbound[x], b.unbound[y] = false, false
				b.restartEngine()
			}
			b.startAgent(t, fileFound, entries...)
		case 4:
			b.stopAgent()
			what = "file lost"
			clear(meanings)
			b.startAgent(t, fileLost, entries...)
		case 5:
			b.stopAgent()
			what = "file late"
			b.startAgent(t, fileLate, entries...)
			b.readFile()
		case 6:
			entries = configurations[r.IntN(len(configurations))]
			what = fmt.Sprintf("entries %v", entries)
			b.load(entries...)
		case 7:
			if len(entries) == 0 {
				continue
			}
			entry := entries[r.IntN(len(entries))]
			what = "operator " + entry
			if _, err := b.m.Rebind(entry); err == nil {
				delete(meanings, entry)
			} else if index, _ := strconv.Atoi(entry); index < len(b.order) {
				t.Fatalf("seed %d step %d: %v", seed, step, err)
			}
		}
		b.updateMeanings(entries, meanings)
		where := fmt.Sprintf("seed %d step %d: %s", seed, step, what)
		b.check(t, where, entries, meanings)
	}
}

// updateMeanings updates the model after a measurement.
func (b *bindingNode) updateMeanings(entries []string, meanings map[string]*meaning) {
	maps.DeleteFunc(meanings, func(entry string, _ *meaning) bool { return !slices.Contains(entries, entry) })
	complete := len(b.order) == len(b.onBus())
	for _, entry := range entries {
		m := meanings[entry]
		index, _ := strconv.Atoi(entry)
		if m == nil {
			if index < len(b.order) {
				m = &meaning{card: b.cards[b.order[index]]}
			} else if d := b.missing(index); d != nil {
				m = &meaning{card: d.ID, slot: b.slotOf(d.PCI), seen: make(map[health.DeviceID]bool)}
			} else {
				continue
			}
			meanings[entry] = m
		}
		at := slices.IndexFunc(b.order, func(slot int) bool { return b.cards[slot] == m.card })
		if at < 0 && complete && slices.Contains(b.order, m.slot) && !m.seen[b.cards[m.slot]] {
			m.card = b.cards[m.slot]
			at = slices.Index(b.order, m.slot)
		}
		if at >= 0 {
			m.slot, m.seen = b.order[at], make(map[health.DeviceID]bool)
		}
		for _, slot := range b.order {
			if slot != m.slot {
				m.seen[b.cards[slot]] = true
			}
		}
	}
}

// missing returns the missing GPU that had an index, nil if there is none.
func (b *bindingNode) missing(index int) *health.Device {
	for _, d := range b.out.Load().Devices {
		if d.Sample.Presence == health.Missing && d.Device.Index == index {
			return &d.Device
		}
	}
	return nil
}

func (b *bindingNode) slotOf(pci string) int {
	for slot := range b.cards {
		if b.pci(slot) == pci {
			return slot
		}
	}
	return -1
}

// check compares the agent with the model.
func (b *bindingNode) check(t *testing.T, where string, entries []string, meanings map[string]*meaning) {
	t.Helper()
	s := b.out.Load()
	var want []health.DeviceID
	indexes := make(map[int]health.DeviceID)
	for i := range s.Devices {
		d := &s.Devices[i].Device
		for _, m := range meanings {
			if m.card == d.ID && !slices.Contains(want, d.ID) {
				want = append(want, d.ID)
			}
		}
		if other, taken := indexes[d.Index]; taken && d.Index >= 0 {
			t.Fatalf("%s: %s and %s have index %d", where, other, d.ID, d.Index)
		}
		indexes[d.Index] = d.ID
	}
	slices.Sort(want)
	if got := b.withheld(t, where); !slices.Equal(got, want) {
		t.Fatalf("%s: %v withheld, want %v; %+v", where, got, want, s.Bindings)
	}
	for _, one := range s.Bindings {
		index, _ := strconv.Atoi(one.Entry)
		renumbered := index < len(b.order) && b.cards[b.order[index]] != one.GPU
		if !slices.Contains(entries, one.Entry) || renumbered && one.Warning.Reason != health.BindingRenumbered {
			t.Fatalf("%s: %+v; entries %v", where, one, entries)
		}
	}
	for _, one := range b.saved() {
		if !slices.Contains(entries, one.Entry) {
			t.Fatalf("%s: %s is saved: %+v", where, one.Entry, one)
		}
	}
}

// An entry that is missing from a configuration which is not final keeps its binding, because the earlier configuration may come back in
// force.
func TestBindingOutlivesRejectedConfiguration(t *testing.T) {
	runBindings(t, 3, func(t *testing.T, b *bindingNode) {
		b.entries.Store(&health.IndexEntries{})
		b.configure(func(*judge.Config) {})
		b.unbound[0] = true
		b.restartEngine()
		b.measure()
		b.want(t, "rejected", "")
		b.load("1")
		b.want(t, "the one before", health.BindingRenumbered, "GPU-b")
	}, "1")
}
