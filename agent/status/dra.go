package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// DRA is the status of dynamic resource allocation.
type DRA struct {
	Driver          string          `json:"driver,omitempty"` // no key while the driver waits for the device plugin
	Pool            string          `json:"pool,omitempty"`
	Registered      bool            `json:"registered"`
	Error           string          `json:"error,omitempty"` // why it does not serve
	Warning         string          `json:"warning,omitempty"`
	Slices          int             `json:"slices"`  // desired
	Devices         int             `json:"devices"` // in them
	Tainted         int             `json:"tainted"` // of these, with a taint NoSchedule or NoExecute
	Published       time.Time       `json:"published,omitzero"`
	Behind          bool            `json:"behind"` // the API server has other slices than these, since Published
	PublishError    string          `json:"publishError,omitempty"`
	DroppedFeatures []string        `json:"droppedFeatures"` // feature gates that the API server lacks
	Claims          []PreparedClaim `json:"claims"`          // by namespace and name

	CheckpointError string `json:"checkpointError,omitempty"` // why the checkpoint cannot be written, and since when: claims are refused
	Unreserved      string `json:"unreserved,omitempty"`      // why a full disk would refuse claims
}

// PreparedClaim is a ResourceClaim whose devices pods can use.
type PreparedClaim struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       string    `json:"uid"`
	Prepared  time.Time `json:"prepared,omitzero"`
	Devices   []string  `json:"devices"`               // names in the pool
	Admin     bool      `json:"adminAccess,omitempty"` // it takes nothing from others
	Pods      []Pod     `json:"pods"`                  // as the kubelet lists them; it lists a pod shortly after its claims are prepared
}

// draStatus returns nil while the driver neither serves nor has claims, and nothing is wrong.
func draStatus(s dra.Status, claims *dra.Claims, h podresources.Holders) *DRA {
	if !s.Enabled && s.Warning == "" && s.Checkpoint.Err == "" && (claims == nil || len(claims.ByUID) == 0) {
		return nil
	}
	d := &DRA{
		Driver: s.DriverName, Pool: s.Pool, Registered: s.Registered, Error: s.Err, Warning: s.Warning, Slices: s.Slices, Devices: s.Devices,
		Tainted: s.Tainted, Published: s.Published.UTC(), Behind: s.Behind, PublishError: s.PublishErr, DroppedFeatures: list(s.DroppedFeatures),
		Claims: []PreparedClaim{},
	}
	if s.Checkpoint.Err != "" {
		d.CheckpointError = s.Checkpoint.String()
	}
	d.Unreserved = s.Unreserved
	if claims == nil {
		return d
	}
	type key struct{ namespace, claim string }
	pods := make(map[key][]Pod)
	for holder := range h.ByClaims() {
		k, pod := key{holder.Namespace, holder.Claim.Name}, Pod{holder.Namespace, holder.Pod}
		if !slices.Contains(pods[k], pod) {
			pods[k] = append(pods[k], pod)
		}
	}
	for uid, c := range claims.ByUID {
		p := PreparedClaim{
			Namespace: c.Namespace, Name: c.Name, UID: string(uid), Prepared: c.Prepared.UTC(), Devices: []string{},
			Pods: list(pods[key{c.Namespace, c.Name}]),
		}
		slices.SortFunc(p.Pods, func(a, b Pod) int { return strings.Compare(a.Pod, b.Pod) })
		for _, device := range c.Devices {
			p.Devices = append(p.Devices, device.Name)
			p.Admin = p.Admin || device.Admin
		}
		d.Claims = append(d.Claims, p)
	}
	slices.SortFunc(d.Claims, func(a, b PreparedClaim) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.UID, b.UID))
	})
	return d
}

// draText describes what is published: "8 devices in 1 slice, 2 tainted".
func draText(d *DRA) string {
	text := Plural(d.Devices, "device") + " in " + Plural(d.Slices, "slice")
	if d.Tainted > 0 {
		text += fmt.Sprintf(", %d tainted", d.Tainted)
	}
	if d.Behind {
		text += ", not up to date"
	}
	return text
}

// preparedTexts returns at most maxHolders texts like "team/train: gpu-0, gpu-1 for team/train-0", and how many more there are.
func preparedTexts(d *DRA) []string {
	texts := make([]string, len(d.Claims))
	for i, c := range d.Claims {
		pods := make([]string, len(c.Pods))
		for i, p := range c.Pods {
			pods[i] = p.Pod
		}
		texts[i] = c.Namespace + "/" + c.Name + ": " + strings.Join(limitTexts(c.Devices, maxHolders), ", ") +
			formatIf(" for %s", strings.Join(limitTexts(pods, maxHolders), ", "))
		if c.Admin {
			texts[i] += " (adminAccess)"
		}
	}
	return limitTexts(texts, maxHolders)
}

// dra writes the status of dynamic resource allocation.
func (p *printer) dra(d *DRA) {
	if d == nil {
		return
	}
	if d.Driver != "" {
		state := terminal.Cell{Text: "registered", Colour: terminal.Green}
		if !d.Registered {
			state = terminal.Cell{Text: "not registered", Colour: terminal.Red}
		}
		p.labelled("dra", plain(d.Driver+" "), state, plain("; "+draText(d)))
	}
	for _, c := range preparedTexts(d) {
		p.line("claim", "", c)
	}
}
