package dra

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sessionHolders is what a session knows of the containers that hold devices. Since the slices on the API server were written, device
// plugins may have given devices to containers: the plugin of another agent, or of an agent that could not see the checkpoint.
type sessionHolders struct {
	known  health.Latest[struct{}] // stored when the kubelet has said, since the devices are known, which containers hold them
	before health.Latest[publishedBefore]

	last podresources.Holders // the last ones that were known; belongs to run
}

// publishedBefore are the taints of the devices on the API server, by name. They are read only if the kubelet does not say at once who
// holds devices.
type publishedBefore struct {
	taints map[string][]resourceapi.DeviceTaint
	err    string // why they are unknown; empty if they are not
}

// learnHolders asks the kubelet which containers hold devices until it says so, or ctx ends.
func (s *session) learnHolders(ctx context.Context) {
	for snap, changed := s.Snapshots.Watch(); !snap.Polled(); snap, changed = s.Snapshots.Watch() { // before, no holder resolves
		if !wait.For(ctx, changed) {
			return
		}
	}
	since := time.Now()
	for ctx.Err() == nil {
		if h := s.Ask(ctx, holdersTimeout); !h.At.Before(since) && h.Unknown(time.Now()) == "" {
			s.holders.known.Store(&struct{}{})
			return
		}
		if last := s.holders.before.Load(); last == nil || last.err != "" {
			s.readPublished(ctx)
		}
		wait.Sleep(ctx, s.timing.poll)
	}
}

// readPublished reads what the API server has.
func (s *session) readPublished(ctx context.Context) {
	taints, err := s.publishedTaints(ctx)
	b := &publishedBefore{taints: taints}
	if err != nil {
		b.err = "cannot read the ResourceSlices of the node: " + err.Error()
	}
	if last := s.holders.before.Load(); last == nil || last.err != b.err {
		s.holders.before.Store(b)
	}
}

func (s *session) publishedTaints(ctx context.Context) (map[string][]resourceapi.DeviceTaint, error) {
	client, err := s.Connect()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: sliceSelector(s.driver, s.Node)})
	if err != nil {
		return nil, err
	}
	taints := make(map[string][]resourceapi.DeviceTaint)
	for i := range list.Items {
		for _, d := range list.Items[i].Spec.Devices {
			taints[d.Name] = d.Taints
		}
	}
	return taints, nil
}

// offers returns for each device of a snapshot whether it may be offered, and why that is unknown for some; empty if it is known. The
// health of a device and the claims of this driver do not matter: the scheduler knows them by taints and allocations.
func (s *session) offers(noCDI string, snap *health.Snapshot) (answers map[health.DeviceID]offer.Answer, unknown string) {
	known := s.holders.known.Load() != nil
	facts := s.facts()
	facts.NoCDI = noCDI
	switch {
	case facts.Unknown() == "" && !known:
		facts.Holders.Err = "the kubelet has not been asked since the start"
	case facts.Unknown() == "":
		s.holders.last = facts.Holders
	case known && facts.Holders.Forgotten(): // who had a device may still have it
		facts.Holders.By, facts.Holders.Admin = s.holders.last.By, s.holders.last.Admin //nolint:forbidigo // completes the facts
	}
	_, doubled := facts.Claims.Doubled()
	related := offer.RelatedTo(snap)
	answers = make(map[health.DeviceID]offer.Answer, len(snap.Devices))
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		answers[d.ID] = facts.Decide(&offer.Request{
			Purpose: offer.Offer, API: offer.DRA, Device: d, Related: related[d.ID], MustKnow: !known,
			Except:      func(h podresources.Holder) bool { return h.ByClaim() && h.Claim.Driver == s.driver },
			ExceptClaim: func(_ *offer.Claim, p *offer.Part) bool { return !doubled[p.Device] },
		})
		if answers[d.ID].Code() == offer.Unknown {
			unknown = answers[d.ID].Reason()
		}
	}
	return answers, unknown
}

// facts returns what the decisions of a session depend on.
func (s *session) facts() offer.Facts {
	return offer.Facts{Now: time.Now(), Holders: lastAnswer(*s.Holders.Load()), Claims: *s.preparer.prepared.Load(), NoPlugin: s.NoPlugin()}
}

// refusal returns why no new claim is prepared, because the kubelet does not tell who holds devices; empty if claims are.
func (s *session) refusal() string {
	facts := s.facts()
	if unknown := facts.Unknown(); unknown != "" && !facts.NobodyHas() {
		return "new claims are refused: " + unknown
	}
	return ""
}
