package offer

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const driver = "gpu.nvidia.com"

var now = time.Unix(1e9, 0)

// known are holders of a settled answer.
func known(held map[health.DeviceID][]podresources.Holder) podresources.Holders {
	if held == nil {
		held = map[health.DeviceID][]podresources.Holder{}
	}
	return podresources.Holders{At: now, By: held}
}

func byPlugin(id string) podresources.Holder {
	return podresources.Holder{Namespace: "ml", Pod: "train", Container: "main", Resource: "nvidia.com/gpu", DeviceID: id}
}

func byClaim(name, share string) podresources.Holder {
	return podresources.Holder{
		Namespace: "ml", Pod: "train", Container: "main", DeviceID: "gpu-0",
		Claim: podresources.ClaimRef{Name: name, Driver: driver, Pool: "node", ShareID: share},
	}
}

func preparedClaim(name string, parts ...Part) Claim {
	return Claim{UID: "uid-" + name, Namespace: "ml", Name: name, Driver: driver, Parts: parts}
}

// The rule at Decide: each input, for each purpose and API.
func TestDecide(t *testing.T) {
	unhealthy := &health.Verdict{
		State:    health.Unhealthy,
		Findings: []health.Finding{{Cause: "xid-79", State: health.Unhealthy, Reason: "lost"}},
	}
	gpu := func(r *Request) {
		r.Device = &health.Device{ID: "GPU-0", Kind: health.KindGPU}
		r.Related = []health.DeviceID{"MIG-0"}
	}
	mig := func(r *Request) {
		r.Device = &health.Device{ID: "MIG-0", Parent: "GPU-0", Kind: health.KindMIG}
		r.Related = []health.DeviceID{"GPU-0"}
	}
	held := func(id health.DeviceID, h podresources.Holder) func(*Facts) {
		return func(f *Facts) { f.Holders = known(map[health.DeviceID][]podresources.Holder{id: {h}}) }
	}
	claimed := func(p Part) func(*Facts) {
		return func(f *Facts) { f.Claims.List = []Claim{preparedClaim("a", p)} }
	}
	unknown := func(f *Facts) { f.Holders = podresources.Holders{Err: "denied"} }
	settling := func(f *Facts) { f.Holders.Settling = true }
	const a = Allowed
	for name, c := range map[string]struct {
		facts   func(*Facts)
		request []func(*Request)
		// Offer and Give by the device plugin, Offer and Give by DRA, Take.
		want [5]Code
		text string
	}{
		"nothing": {want: [5]Code{a, a, a, a, a}},
		"not serving": {
			facts: func(f *Facts) { f.NotServing = "the lock" }, want: [5]Code{NotServing, NotServing, NotServing, NotServing, a},
			text: "the lock",
		},
		"detached": {facts: func(f *Facts) { f.Detached = "by an operator" }, want: [5]Code{a, Detached, a, Detached, a}, text: "by an operator"},
		"admin": {
			facts: held("GPU-0", byPlugin("GPU-0")), request: []func(*Request){func(r *Request) { r.Admin = true }},
			want: [5]Code{a, a, a, a, Held},
		},
		"admin, not serving": {
			facts: func(f *Facts) { f.NotServing = "x" }, request: []func(*Request){func(r *Request) { r.Admin = true }},
			want: [5]Code{NotServing, NotServing, NotServing, NotServing, a},
		},
		"MIG mode": {request: []func(*Request){func(r *Request) { r.Device.MIGMode = true }}, want: [5]Code{a, a, a, MIGMode, a}},
		"unhealthy": {
			request: []func(*Request){func(r *Request) { r.Verdict = unhealthy }},
			want:    [5]Code{Unhealthy, Unhealthy, Unhealthy, Unhealthy, a}, text: "lost (xid-79)",
		},
		"unhealthy, tolerated": {
			request: []func(*Request){func(r *Request) {
				r.Verdict, r.Tolerates = unhealthy, func(f *health.Finding) bool { return f.Cause == "xid-79" }
			}}, want: [5]Code{a, a, a, a, a},
		},
		"unhealthy, no finding": {
			request: []func(*Request){func(r *Request) { r.Verdict = &health.Verdict{State: health.Unhealthy} }},
			want:    [5]Code{Unhealthy, Unhealthy, Unhealthy, Unhealthy, a},
		},
		"degraded": {
			request: []func(*Request){func(r *Request) { r.Verdict = &health.Verdict{State: health.Degraded} }},
			want:    [5]Code{a, a, a, a, a},
		},
		"not ready": {
			request: []func(*Request){func(r *Request) { r.NotReady = "no daemon" }},
			want:    [5]Code{NotReady, NotReady, NotReady, NotReady, a}, text: "no daemon",
		},
		"held": {
			facts: held("GPU-0", byPlugin("GPU-0")), want: [5]Code{Held, Held, Held, Held, Held},
			text: "ml/train (main) holds it as GPU-0 of nvidia.com/gpu",
		},
		"held by a claim":  {facts: held("GPU-0", byClaim("c", "")), want: [5]Code{Held, Held, Held, Held, Held}, text: "holds it by claim c"},
		"its part is held": {facts: held("MIG-0", byPlugin("MIG-0")), want: [5]Code{Held, Held, Held, Held, Held}},
		"its GPU is held": {
			facts: held("GPU-0", byPlugin("GPU-0")), request: []func(*Request){mig},
			want: [5]Code{Held, Held, Held, Held, Held},
		},
		"another is held": {facts: held("GPU-1", byPlugin("GPU-1")), want: [5]Code{a, a, a, a, a}},
		"held, not settled": {
			facts: func(f *Facts) { held("GPU-0", byPlugin("GPU-0"))(f); settling(f) },
			want:  [5]Code{Held, Held, Held, Held, Held},
		},
		"held by a partner": {
			facts:   held("GPU-0", byPlugin("GPU-0")),
			request: []func(*Request){func(r *Request) { r.Except = func(podresources.Holder) bool { return true } }}, want: [5]Code{a, a, a, a, a},
		},
		"just allocated": {
			facts: func(f *Facts) {
				f.Recent = map[health.DeviceID][]podresources.Holder{"GPU-0": {{Resource: "nvidia.com/gpu", DeviceID: "GPU-0"}}}
			}, want: [5]Code{Held, Held, Held, Held, Held}, text: "it was just allocated as GPU-0 of nvidia.com/gpu",
		},
		"monitored": {
			facts: func(f *Facts) {
				f.Holders.Admin = map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("m", "")}}
			}, want: [5]Code{a, a, a, a, a},
		},
		"monitored, for good": {
			facts: func(f *Facts) {
				f.Holders.Admin = map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("m", "")}}
			}, request: []func(*Request){monitors}, want: [5]Code{Held, Held, Held, Held, Held},
		},
		"prepared": {
			facts: claimed(Part{Name: "gpu-0", Device: "GPU-0"}), want: [5]Code{Held, Held, Held, Held, Held},
			text: "claim ml/a has gpu-0",
		},
		"its part prepared":  {facts: claimed(Part{Device: "MIG-0", Parent: "GPU-0"}), want: [5]Code{Held, Held, Held, Held, Held}},
		"prepared for admin": {facts: claimed(Part{Device: "GPU-0", Admin: true}), want: [5]Code{a, a, a, a, a}},
		"prepared for admin, for good": {
			facts: claimed(Part{Device: "GPU-0", Admin: true}), request: []func(*Request){monitors},
			want: [5]Code{Held, Held, Held, Held, Held},
		},
		"prepared, excepted": {
			facts:   claimed(Part{Device: "GPU-0"}),
			request: []func(*Request){func(r *Request) { r.ExceptClaim = func(*Claim, *Part) bool { return true } }}, want: [5]Code{a, a, a, a, a},
		},
		"unknown, may guess": {facts: unknown, want: [5]Code{a, a, a, a, Unknown}, text: "denied"},
		"unknown": {
			facts: unknown, request: []func(*Request){mustKnow}, want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
			text: "denied",
		},
		"settling": {
			facts: settling, request: []func(*Request){mustKnow}, want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
			text: "all its pods",
		},
		"stale": {
			facts:   func(f *Facts) { f.Now = now.Add(podresources.MaxHoldersAge + time.Second) },
			request: []func(*Request){mustKnow}, want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
		},
		"unknown, no plugin": {
			facts: func(f *Facts) { unknown(f); f.NoPlugin = true }, request: []func(*Request){mustKnow},
			want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
		},
		"silent": {
			facts: func(f *Facts) { unknown(f); f.Holders.Silent = true }, request: []func(*Request){mustKnow},
			want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
		},
		"silent, no plugin": {
			facts:   func(f *Facts) { unknown(f); f.Holders.Silent, f.NoPlugin = true, true },
			request: []func(*Request){mustKnow}, want: [5]Code{a, a, a, a, Unknown},
		},
		"silent, no plugin, lost claims": {
			facts:   func(f *Facts) { unknown(f); f.Holders.Silent, f.NoPlugin, f.Claims.Lost = true, true, true },
			request: []func(*Request){mustKnow}, want: [5]Code{Unknown, Unknown, Unknown, Unknown, Unknown},
		},
		"releasing": {
			facts: func(f *Facts) { f.Releasing = "handover" }, want: [5]Code{Releasing, Releasing, Releasing, Releasing, a},
			text: "handover",
		},
		"no CDI": {facts: noCDI, want: [5]Code{NoCDI, NoCDI, NoCDI, NoCDI, a}, text: "ignores CDI"},
		"no CDI, admin": {
			facts: noCDI, request: []func(*Request){func(r *Request) { r.Admin = true }},
			want: [5]Code{NoCDI, NoCDI, NoCDI, NoCDI, a},
		},
		"no CDI, unknown": {
			facts: func(f *Facts) { unknown(f); noCDI(f) }, request: []func(*Request){mustKnow},
			want: [5]Code{NoCDI, NoCDI, NoCDI, NoCDI, Unknown},
		},
		"no CDI, held": {facts: func(f *Facts) { held("GPU-0", byPlugin("GPU-0"))(f); noCDI(f) }, want: [5]Code{Held, Held, Held, Held, Held}},
		"no CDI, unhealthy": {
			facts: noCDI, request: []func(*Request){func(r *Request) { r.Verdict = unhealthy }},
			want: [5]Code{Unhealthy, Unhealthy, Unhealthy, Unhealthy, a},
		},
		"reserved": {
			request: []func(*Request){func(r *Request) { r.Reserved = "for MPS" }},
			want:    [5]Code{Reserved, Reserved, Reserved, Reserved, a}, text: "for MPS",
		},
		"blocked": {
			request: []func(*Request){func(r *Request) { r.Blocked = "no limits" }}, want: [5]Code{Blocked, Blocked, Blocked, Blocked, a},
			text: "no limits",
		},
		"held, unhealthy": {
			facts: held("GPU-0", byPlugin("GPU-0")), request: []func(*Request){func(r *Request) { r.Verdict = unhealthy }},
			want: [5]Code{Unhealthy, Unhealthy, Unhealthy, Unhealthy, Held},
		},
		"held, releasing": {
			facts: func(f *Facts) { held("GPU-0", byPlugin("GPU-0"))(f); f.Releasing = "x" },
			want:  [5]Code{Held, Held, Held, Held, Held},
		},
	} {
		f := Facts{Now: now, Holders: known(nil)}
		if c.facts != nil {
			c.facts(&f)
		}
		for i, purpose := range []Purpose{Offer, Give, Offer, Give, Take} {
			r := Request{Purpose: purpose, API: DevicePlugin, MustKnow: purpose == Take}
			if i == 2 || i == 3 {
				r.API = DRA
			}
			gpu(&r)
			for _, edit := range c.request {
				edit(&r)
			}
			answer := f.Decide(&r)
			if got := answer.Code(); got != c.want[i] || answer.Allows(purpose) != (got == Allowed) || (answer.Reason() == "") != (got == Allowed) {
				t.Errorf("%s, purpose %d: got code %d, want %d; %+v", name, i, got, c.want[i], answer)
			}
			for _, other := range []Purpose{Offer, Give, Take} {
				if other != purpose && answer.Allows(other) {
					t.Errorf("%s: the answer to purpose %d allows %d", name, purpose, other)
				}
			}
			if answer.Code() != Allowed && !strings.Contains(answer.Reason(), c.text) {
				t.Errorf("%s, purpose %d: got %q, want %q", name, i, answer.Reason(), c.text)
			}
		}
	}
	if none := (Answer{}); none.Allows(Offer) || none.Allows(Give) || none.Allows(Take) {
		t.Error("an answer that was not decided allows something")
	}
}

func noCDI(f *Facts)      { f.NoCDI = "the runtime ignores CDI devices" }
func mustKnow(r *Request) { r.MustKnow = true }
func monitors(r *Request) { r.Monitors = true }

// A container keeps what it holds, whatever keeps others from it, but not a device that is unfit.
func TestKeeps(t *testing.T) {
	keeps := map[Code]bool{Allowed: true, Unknown: true, Held: true, NoCDI: true, Releasing: true, Reserved: true, Blocked: true}
	for code := Allowed; code <= Blocked; code++ {
		if got := (Answer{code: code}).Keeps(); got != keeps[code] {
			t.Errorf("code %d: %v", code, got)
		}
	}
}

// A claim gets devices that nobody has, shares beside other shares, and what it has already.
func TestGrant(t *testing.T) {
	const gib = uint64(1) << 30
	gpu := &health.Device{ID: "GPU-0", Kind: health.KindGPU}
	whole := Part{Name: "gpu-0", Device: "GPU-0"}
	share := func(memory uint64) Part { return Part{Name: "gpu-0", Device: "GPU-0", Memory: memory * gib} }
	for name, c := range map[string]struct {
		part      Part
		facts     Facts
		code      Code     // of a denial
		conflicts []string // names of claims
	}{
		"free":              {part: whole, facts: Facts{Holders: known(nil)}},
		"unknown":           {part: whole, facts: Facts{Holders: podresources.Holders{Err: "x"}}, code: Unknown},
		"silent, no plugin": {part: whole, facts: Facts{Holders: podresources.Holders{Err: "x", Silent: true}, NoPlugin: true}},
		"held by a device plugin": {
			part:  whole,
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byPlugin("GPU-0")}})}, code: Held,
		},
		"share, held by a plugin": {
			part:  share(8),
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byPlugin("GPU-0")}})}, code: Held,
		},
		"held by itself": {part: whole, facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("new", "")}})}},
		"held by an unprepared claim": {
			part:  whole,
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("a", "")}})}, code: Held,
		},
		"held by another driver": {
			part: whole,
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{
				"GPU-0": {{Claim: podresources.ClaimRef{Name: "new", Driver: "x"}}},
			})}, code: Held,
		},
		"share beside a share": {
			part:  share(8),
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("a", "s")}})},
		},
		"share beside a lost share": {
			part:  share(8),
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("a", "s")}}), Claims: Claims{Lost: true}},
			code:  Held,
		},
		"whole beside a share": {
			part:  whole,
			facts: Facts{Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("a", "s")}})}, code: Held,
		},
		"prepared": {
			part: whole, facts: Facts{Holders: known(nil), Claims: Claims{List: []Claim{preparedClaim("a", whole)}}},
			conflicts: []string{"a"},
		},
		"prepared and held": {
			part: whole,
			facts: Facts{
				Holders: known(map[health.DeviceID][]podresources.Holder{"GPU-0": {byClaim("a", "")}}),
				Claims:  Claims{List: []Claim{preparedClaim("a", whole)}},
			}, conflicts: []string{"a"},
		},
		"prepared for itself": {part: whole, facts: Facts{Holders: known(nil), Claims: Claims{List: []Claim{preparedClaim("new", whole)}}}},
		"prepared for admin": {part: whole, facts: Facts{
			Holders: known(nil),
			Claims:  Claims{List: []Claim{preparedClaim("a", Part{Device: "GPU-0", Admin: true})}},
		}},
		"part prepared": {part: whole, facts: Facts{
			Holders: known(nil),
			Claims:  Claims{List: []Claim{preparedClaim("a", Part{Device: "MIG-0", Parent: "GPU-0"})}},
		}, conflicts: []string{"a"}},
		"enough memory": {part: share(8), facts: Facts{
			Holders: known(nil),
			Claims:  Claims{List: []Claim{preparedClaim("a", share(30)), preparedClaim("b", share(40))}},
		}},
		"too little memory": {part: share(11), facts: Facts{
			Holders: known(nil),
			Claims:  Claims{List: []Claim{preparedClaim("a", share(30)), preparedClaim("b", share(40))}},
		}, conflicts: []string{"a", "b"}},
		"a share by MPS beside one not": {
			part:  Part{Device: "GPU-0", Memory: gib, MPS: true},
			facts: Facts{Holders: known(nil), Claims: Claims{List: []Claim{preparedClaim("a", share(1))}}}, conflicts: []string{"a"},
		},
	} {
		c.facts.Now = now
		claim := preparedClaim("new", c.part)
		grant, conflicts, err := c.facts.Grant(&claim, []Request{{Device: gpu, Related: []health.DeviceID{"MIG-0"}}},
			map[health.DeviceID]uint64{"GPU-0": 80 * gib})
		var names []string
		for _, c := range conflicts {
			names = append(names, c.Claim.Name)
		}
		code := Allowed
		if denial, ok := err.(*Denial); ok { //nolint:errorlint // not wrapped
			code = denial.Answer.Code()
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if code != c.code || !slices.Equal(names, c.conflicts) {
			t.Errorf("%s: got %d, %v, %v", name, code, names, err)
		}
		if want := c.code == Allowed && c.conflicts == nil; grant.Allows(claim.UID) != want || grant.Allows("uid-other") || grant.Allows("") {
			t.Errorf("%s: got the permission %+v", name, grant)
		}
	}
}

func TestDoubled(t *testing.T) {
	c := Claims{List: []Claim{
		preparedClaim("a", Part{Device: "GPU-0"}), preparedClaim("b", Part{Device: "GPU-1"}, Part{Device: "GPU-0", Admin: true}),
		preparedClaim("c", Part{Device: "MIG-1", Parent: "GPU-1"}), preparedClaim("d", Part{Device: "GPU-2", Memory: 1}),
		preparedClaim("e", Part{Device: "GPU-2", Memory: 1}),
	}}
	claims, devices := c.Doubled()
	if len(claims) != 2 || claims[0].Name != "b" || claims[1].Name != "c" || len(devices) != 2 || !devices["GPU-1"] || !devices["MIG-1"] {
		t.Errorf("got %v, %v", claims, devices)
	}
}
