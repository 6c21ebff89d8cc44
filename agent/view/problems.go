package view

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Level is how much a problem matters.
type Level string

// The levels, the worst first.
const (
	Unready Level = "unready" // the agent cannot do its whole job
	Warning Level = "warning" // an operator must correct it, although the agent does its whole job
	Note    Level = "note"    // it may be on purpose
)

// Problem is why the agent cannot do its whole job, or what an operator should correct. A finding of a device is none.
type Problem struct {
	Part  string `json:"part"` // of the agent or its configuration: see the Part constants
	Level Level  `json:"level"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"` // what an operator can do
}

// The values of Problem.Part.
const (
	PartSource    = "source"
	PartChecks    = "checks" // DCGM's health checks
	PartXIDs      = "xids"   // the event sources
	PartConfig    = "config"
	PartState     = "state" // the state directory
	PartPlugin    = "plugin"
	PartDRA       = "dra"
	PartMPS       = "mps"
	PartMemory    = "memory" // its limits
	PartProcesses = "processes"
	PartNode      = "node" // the Node object, the NodeFeature, and the file with labels
	PartAPI       = "api"  // condition and events
)

func (p Problem) String() string {
	if p.Part == "" {
		return p.Text
	}
	return p.Part + ": " + p.Text
}

// Problems are the problems of one moment, the worst level first.
type Problems []Problem

// Ready reports whether the agent does its whole job.
func (all Problems) Ready() bool { return len(all) == 0 || all[0].Level != Unready }

// Texts returns the problems of a level as texts.
func (all Problems) Texts(level Level) (texts []string) {
	for _, p := range all {
		if p.Level == level {
			texts = append(texts, p.String())
		}
	}
	return texts
}

// Ready reports whether the agent does its whole job. It needs what NotOffered needs, and is cheaper than Problems.
func (v *View) Ready() bool { return v.unready().Ready() }

// Problems returns what is wrong now.
func (v *View) Problems() Problems {
	all := slices.Concat(v.unready(), v.ofSource(), v.ofPlugin(), v.ofDRA(), v.ofSharing(), v.ofNode(), v.ofConfig())
	slices.SortStableFunc(all, func(a, b Problem) int { return cmp.Compare(rank(a.Level), rank(b.Level)) })
	return all
}

func rank(l Level) int { return slices.Index([]Level{Unready, Warning, Note}, l) }

// add adds a problem, or nothing if the text is empty.
func (all *Problems) add(part string, level Level, text, fix string) {
	if text != "" {
		*all = append(*all, Problem{part, level, text, fix})
	}
}

// unready returns every reason why the agent cannot do its whole job.
func (v *View) unready() (all Problems) {
	switch s := v.Snapshot; {
	case s == nil:
		all.add(PartSource, Unready, health.SourceStarting.String(), "")
	case s.Source.Status != health.SourceUp:
		all.add(PartSource, Unready, withReason(s.Source.Status.String(), s.Source.Err), "")
	case v.At.Sub(s.At) > v.MaxAge: // by the monotonic clock
		all.add(PartSource, Unready, "GPUs were last measured "+age(v.At, s.At)+" ago, though the source is up", "")
	}
	if !v.Plugin.WaitsForPods {
		text := v.Plugin.Err
		if s := v.Snapshot; s != nil && s.Source.Status != health.SourceUp {
			text = strings.TrimSuffix(text, ": "+s.Source.Err)
		}
		all.add(PartPlugin, Unready, text, "")
	}
	unregistered := make(map[string][]string) // by reason
	for i := range v.Plugin.Resources {
		if r := &v.Plugin.Resources[i]; !r.Registered {
			unregistered[r.Err] = append(unregistered[r.Err], r.Name)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(unregistered)) {
		all.add(PartPlugin, Unready, strings.Join(unregistered[reason], ", ")+": "+cmp.Or(reason, "not registered"), "")
	}
	if !v.DRA.WaitsForPods && v.DRA.Err != v.Plugin.Err { // both wait for one lock
		all.add(PartDRA, Unready, v.DRA.Err, "")
	}
	return all
}

// ofConfig returns the problems of the configuration and of the state directory.
func (v *View) ofConfig() (all Problems) {
	if !v.Reload.OK {
		all.add(PartConfig, Warning, configText(v.At, v.Reload), "")
	}
	if v.Snapshot != nil {
		for _, b := range v.Snapshot.Bindings {
			all.add(PartConfig, Warning, b.Warning.Text, "")
		}
	}
	for _, n := range v.Notes {
		all.add(PartConfig, Note, n, "")
	}
	for _, u := range v.UnmatchedRefs {
		all.add(PartConfig, Note, u.String(), "")
	}
	all.add(PartState, Warning, v.StateLoss, "")
	for _, text := range v.StateDir.Problems() {
		all.add(PartState, Warning, text, "")
	}
	all.add(PartState, Warning, because("a full disk would lose findings", v.StateDir.Unreserved), "")
	return all
}

// maxConfigText is how much of an error of the configuration a problem has.
const maxConfigText = 200

// configText says what is wrong with the configuration, or how to find out, and which one is in force.
func configText(now time.Time, r Reload) string {
	first, more, _ := strings.Cut(r.Err, "\n")
	if text := []rune(first); len(text) > maxConfigText {
		first, more = string(text[:maxConfigText])+"…", first
	}
	switch {
	case first == "":
		first = "see the log, or gpu-node-agent check-config"
	case more != "":
		first += " (all errors: gpu-node-agent check-config)"
	}
	inForce := "is in force"
	if !r.At.IsZero() {
		inForce = "has been in force for " + age(now, r.At)
	}
	return "invalid: " + first + "; the last good configuration " + inForce
}

// ofSource returns the problems of what measures the devices.
func (v *View) ofSource() (all Problems) {
	if v.Snapshot != nil {
		if c := v.Snapshot.Source.Checks; c.Status == health.ChecksDown {
			all.add(PartChecks, Warning, withReason("down for "+age(v.At, c.Since), c.Err), "")
		}
		for _, e := range v.Snapshot.Source.Events {
			if e.Err != "" && e.Status != health.EventsOff {
				all.add(PartXIDs, Warning, "event source "+e.Witness.String()+" "+e.Status.String()+": "+e.Err, "")
			}
		}
	}
	if p := v.Processes; p != nil {
		all.add(PartProcesses, Warning, cmp.Or(p.Err, p.Warning), "")
	}
	return all
}

// ofPlugin returns the problems of the device plugin.
func (v *View) ofPlugin() (all Problems) {
	if v.Plugin.WaitsForPods {
		all.add(PartPlugin, Warning, v.Plugin.Err, "")
	}
	for _, text := range plugin.OtherPluginTexts(v.Plugin.OtherPlugins) {
		all.add(PartPlugin, Warning, text, "")
	}
	for i := range v.Plugin.Resources {
		if u := v.Plugin.Resources[i].Unschedulable; u != nil && u.Devices > 0 {
			all.add(PartPlugin, Warning, u.String(), "")
		}
	}
	for _, text := range v.Plugin.Warnings {
		all.add(PartPlugin, Warning, text, "")
	}
	all.add(PartPlugin, Warning, v.Lock.Warning, "")
	level := Warning
	if !v.PluginConfig.Enabled { // there may be no kubelet
		level = Note
	}
	if audit, holders := v.Plugin.AuditErr, v.Holders.Err; audit == holders {
		all.add(PartPlugin, level, because("not audited, holders unknown", audit), "")
	} else {
		all.add(PartPlugin, level, because("not audited", audit), "")
		all.add(PartPlugin, level, because("holders unknown", holders), "")
	}
	if v.Holders.Settling {
		all.add(PartPlugin, Note, because("holders unknown", v.HoldersErr()), "")
	}
	return all
}

// HoldersErr returns why the holders are unknown or out of date; empty if they are known.
func (v *View) HoldersErr() string {
	if v.Holders.Settling {
		return v.Holders.Unknown(v.Holders.At)
	}
	return v.Holders.Err
}

// ofDRA returns why dynamic resource allocation cannot publish, and what of it works only in part.
func (v *View) ofDRA() (all Problems) {
	d := &v.DRA
	if d.WaitsForPods {
		all.add(PartDRA, Warning, d.Err, "")
	}
	if d.PublishErr != "" {
		published := "not published"
		if !d.Published.IsZero() {
			published = "not up to date; last published " + age(v.At, d.Published) + " ago"
		}
		all.add(PartDRA, Warning, published+": "+d.PublishErr,
			"check the network, the rights of the agent's service account and the chart's policy; the agent keeps trying")
	}
	if len(d.DroppedFeatures) > 0 {
		all.add(PartDRA, Warning, "the API server lacks "+strings.Join(d.DroppedFeatures, ", "),
			"enable these feature gates, or upgrade Kubernetes; docs/dra.md says what works without them")
	}
	if d.Checkpoint.Err != "" {
		all.add(PartDRA, Warning, d.Checkpoint.String()+"; claims are refused", "")
	}
	all.add(PartDRA, Warning, because("a full disk would refuse claims", d.Unreserved), "")
	all.add(PartDRA, Warning, d.Warning, "")
	return all
}

// ofSharing returns the problems of devices that several pods use.
func (v *View) ofSharing() (all Problems) {
	all.add(PartMPS, Warning, v.MPSErr, "")
	all.add(PartMPS, Warning, v.SingleUserMPS(),
		"give the pods of a device one runAsUser, or install a driver whose MPS has a multi-user server")
	if v.Memory != nil {
		all.add(PartMemory, Warning, because("limits unknown", v.Memory.Err), "")
	}
	if v.Snapshot == nil || v.PluginConfig.Sharing.Memory.Enforcement != plugin.EnforceDriver {
		return all
	}
	unlimited := make(map[string][]string) // by reason
	for i := range v.Snapshot.Devices {
		d := &v.Snapshot.Devices[i].Device
		for _, u := range v.Shares {
			if u.Device == d.ID && u.Enforcement == memlimits.None {
				unlimited[u.Reason] = append(unlimited[u.Reason], d.Name())
			}
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(unlimited)) {
		all.add(PartMemory, Warning, fmt.Sprintf("nothing limits the containers on %s: %s", strings.Join(unlimited[reason], ", "), reason),
			"correct that, or set plugin.sharing.memory.enforcement to mps, or to none if applications limit themselves")
	}
	return all
}

// SingleUserMPS names the devices that two or more pods hold although their MPS daemon serves one user at a time, with the consequence; it
// returns "" if there is none. Which users the pods run as is unknown.
func (v *View) SingleUserMPS() string {
	var names []string
	if v.Snapshot == nil {
		return ""
	}
	for i := range v.Snapshot.Devices {
		d := &v.Snapshot.Devices[i]
		if d.MPS == nil || d.MPS.PID == 0 || d.MPS.MultiUser {
			continue
		}
		holders := v.Holders.By[d.Device.ID]
		another := func(other podresources.Holder) bool {
			return other.Namespace != holders[0].Namespace || other.Pod != holders[0].Pod
		}
		if slices.ContainsFunc(holders, another) {
			names = append(names, d.Device.Name())
		}
	}
	if len(names) == 0 {
		return ""
	}
	return strings.Join(names, ", ") + ": this driver serves one user at a time; pods of other users wait: give them one runAsUser"
}

// ofNode returns why the API server, and the file with labels, are not as configured.
func (v *View) ofNode() (all Problems) {
	startup, o, api := "", &v.NodeObject, v.Kube
	if v.StartupTaint {
		startup = strings.Join(v.notOffered(), "; ") // unready has the other reasons
	}
	if !api.On() {
		api = kube.Status{} // it writes nothing any more
	}
	for _, p := range []struct{ part, what, err string }{
		{PartNode, "node.labels.file", v.LabelsErr},
		{PartNode, "labels", o.LabelsErr},
		{PartNode, "NodeFeature", o.FeatureErr},
		{PartNode, "taints", o.TaintsErr},
		{PartNode, "condition", o.ConditionErr},
		{PartNode, "startup taint stays", startup},
		{PartAPI, "condition", api.ConditionErr},
		{PartAPI, "events", cmp.Or(api.EventErr, api.IdleErr)},
	} {
		all.add(p.part, Warning, because(p.what, p.err), "")
	}
	return all
}

// because returns what is wrong with its reason, or nothing without a reason.
func because(what, reason string) string {
	if reason == "" {
		return ""
	}
	return what + ": " + reason
}

// withReason returns what is wrong, with its reason if that is known.
func withReason(what, reason string) string { return cmp.Or(because(what, reason), what) }

func age(now, since time.Time) string { return duration.HumanDuration(max(0, now.Sub(since))) }
