package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

const publishDriver, publishNode = "gpu.nvidia.com", "node1"

// publishRig runs a publisher with a stand-in for the API server, under synctest.
type publishRig struct {
	*publisher
	t      *testing.T
	api    *apiservertest.Server
	logged *observer.ObservedLogs
	end    func() // ends run
	seen   int    // requests that writes has returned
}

// withPublisher runs a test with a publisher that runs and has no pool yet.
func withPublisher(t *testing.T, test func(*publishRig)) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.start()
		test(g)
	})
}

func newPublishRig(t *testing.T, api *apiservertest.Server) *publishRig {
	core, logged := observer.New(zap.InfoLevel)
	return &publishRig{publisher: newPublisher(publishDriver, publishNode, api.Client, zap.New(core)), t: t, api: api, logged: logged}
}

func (g *publishRig) start() {
	ctx, cancel := context.WithCancel(g.t.Context())
	done := make(chan error, 1)
	go func() { done <- g.run(ctx) }()
	ended := false
	g.end = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			g.t.Error(err)
		}
	}
	g.t.Cleanup(g.end)
}

// advance lets time pass and waits until all is idle.
func (g *publishRig) advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // synctest's time
	synctest.Wait()
}

// publish sets a pool and waits for it.
func (g *publishRig) publish(devices ...resourceapi.Device) {
	g.t.Helper()
	g.update(Pool{Slices: []Slice{{Devices: devices}}})
	g.advance(5 * time.Second)
	g.wantPublished(true)
}

func (g *publishRig) status() (s Status) {
	g.report(&s)
	return s
}

func (g *publishRig) wantPublished(want bool) {
	g.t.Helper()
	if s := g.status(); s.Behind == want || want && s.PublishErr != "" {
		g.t.Errorf("behind %v, error %q, want published %v", s.Behind, s.PublishErr, want)
	}
}

// wantDevices checks the devices that the API server has, each as "name" or "name!taint,taint".
func (g *publishRig) wantDevices(want ...string) {
	g.t.Helper()
	var have []string
	for _, s := range g.api.Slices() {
		for _, d := range s.Spec.Devices {
			text := d.Name
			for i, taint := range d.Taints {
				text += map[bool]string{true: "!", false: ","}[i == 0] + taintName(taint)
			}
			have = append(have, text)
		}
	}
	if !slices.Equal(have, want) {
		g.t.Errorf("published %q, want %q", have, want)
	}
}

// writes returns the requests since the last call that are no reads and no dry runs.
func (g *publishRig) writes() (list []string) {
	all := g.api.Requests()
	for _, r := range all[g.seen:] {
		if !r.DryRun && slices.Contains([]string{"create", "update", "delete"}, r.Verb) {
			list = append(list, r.String())
		}
	}
	g.seen = len(all)
	return list
}

func (g *publishRig) wantWrites(want ...string) {
	g.t.Helper()
	if have := g.writes(); !slices.Equal(have, want) {
		g.t.Errorf("writes %q, want %q", have, want)
	}
}

// wantError checks the present error, and that its reason is counted and logged once.
func (g *publishRig) wantError(reason, text string) {
	g.t.Helper()
	s := g.status()
	if s.PublishErrors[reason] == 0 || !strings.Contains(s.PublishErr, text) {
		g.t.Errorf("errors %v, %q, want %s with %q", s.PublishErrors, s.PublishErr, reason, text)
	}
	if n := g.logged.FilterField(zap.String("reason", reason)).Len(); n != 1 {
		g.t.Errorf("%s logged %d times, want once", reason, n)
	}
}

// wantRecoveries checks how often the end of all failures was logged.
func (g *publishRig) wantRecoveries(want int) {
	g.t.Helper()
	if n := g.logged.FilterMessage("ResourceSlices are updated again").Len(); n != want {
		g.t.Errorf("%d recoveries logged, want %d", n, want)
	}
}

func publishedGPU(i int, taints ...string) resourceapi.Device {
	d := resourceapi.Device{
		Name: fmt.Sprintf("gpu-%d", i),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": {StringValue: new("gpu")}, "uuid": {StringValue: new(fmt.Sprintf("GPU-%d", i))},
		},
	}
	for _, cause := range taints {
		d.Taints = append(d.Taints, resourceapi.DeviceTaint{
			Key: Domain + "/" + cause, Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: &metav1.Time{Time: time.Unix(1000, 0)},
		})
	}
	return d
}

func TestPublisherWritesOnlyDifferences(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.advance(time.Minute)
		g.wantWrites() // nothing is desired yet
		g.wantPublished(true)
		g.publish(publishedGPU(0), publishedGPU(1))
		g.wantDevices("gpu-0", "gpu-1")
		g.wantWrites("create resourceslices 201")
		for range 1000 {
			g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0), publishedGPU(1)}}}})
			g.wantPublished(true) // it is not even behind for a moment
			g.advance(time.Second)
		}
		empty := publishedGPU(1)
		empty.Capacity, empty.Taints = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}, []resourceapi.DeviceTaint{}
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0), empty}}}, Warnings: []string{"other"}})
		g.advance(time.Minute)
		g.wantWrites()
		g.publish(publishedGPU(0), publishedGPU(1, "xid-79", "ecc"))
		g.wantDevices("gpu-0", "gpu-1!gpu-node-agent/xid-79,gpu-node-agent/ecc")
		g.publish(publishedGPU(0), publishedGPU(1, "ecc"))
		g.wantDevices("gpu-0", "gpu-1!gpu-node-agent/ecc")
		g.wantWrites("update resourceslices 200", "update resourceslices 200")
		if s := g.status(); s.Slices != 1 || s.Devices != 2 || s.Tainted != 1 {
			t.Errorf("status %+v, want 1 slice, 2 devices, 1 tainted", s)
		}
	})
}

// The library's own copy of the time overwrites all but one taint; ours is set by the pool.
func TestPublisherKeepsTimeOfTaints(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		for _, causes := range [][]string{{"a"}, {"a", "b"}, {"a", "b", "c"}} {
			g.publish(publishedGPU(0, causes...))
			g.advance(time.Hour)
		}
		for _, taint := range g.api.Slices()[0].Spec.Devices[0].Taints {
			if !taint.TimeAdded.Equal(&metav1.Time{Time: time.Unix(1000, 0)}) {
				t.Errorf("%s since %v, want 1000 s after the epoch", taint.Key, taint.TimeAdded)
			}
		}
	})
}

func TestPublisherWithSeveralSlices(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		var pool Pool
		for s := range 3 {
			var list []resourceapi.Device
			for d := range 64 {
				list = append(list, publishedGPU(s*64+d))
			}
			pool.Slices = append(pool.Slices, Slice{list})
		}
		g.update(pool)
		g.advance(10 * time.Second)
		g.wantPublished(true)
		g.wantWrites("create resourceslices 201", "create resourceslices 201", "create resourceslices 201")
		changed := Pool{Slices: slices.Clone(pool.Slices)}
		changed.Slices[1].Devices = slices.Clone(pool.Slices[1].Devices)
		changed.Slices[1].Devices[0] = publishedGPU(64, "xid-79")
		g.update(changed)
		g.advance(10 * time.Second)
		g.wantPublished(true)
		g.wantWrites("update resourceslices 200")
	})
}

// A kubelet that starts during an outage of the API server may wipe slices that were just created, so that no watch shows them.
func TestPublisherRestoresUnseenSlices(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		refuse := func(verb string) {
			g.api.Answer(func(r apiservertest.Request) error {
				if r.Verb == verb && !r.DryRun {
					return apierrors.NewServiceUnavailable("away")
				}
				return nil
			})
		}
		refuse("create") // the controller starts without slices
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0)}}}})
		g.advance(2 * time.Second)
		g.api.SetRefused(true) // ends its watch
		refuse("watch")
		g.api.SetRefused(false)
		g.advance(6 * time.Second)
		g.wantDevices("gpu-0")
		g.api.WipeSlices(publishNode)
		g.api.Compact()
		g.api.Answer(nil)
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "xid-79")}}}})
		g.advance(20 * time.Second)
		g.wantDevices("gpu-0!gpu-node-agent/xid-79")
		g.wantPublished(true)
	})
}

// What another writer does is corrected within seconds.
func TestPublisherRestores(t *testing.T) {
	for name, disturb := range map[string]func(*publishRig){
		"after the kubelet's wipe": func(g *publishRig) { g.api.WipeSlices(publishNode) },
		"after an edit": func(g *publishRig) {
			s := g.api.Slices()[0]
			s.Spec.Devices[1].Taints = nil
			g.api.Put(&s)
		},
		"beside a foreign slice": func(g *publishRig) {
			s := g.api.Slices()[0]
			s.Name, s.UID = "other", "other"
			s.Spec.Devices = []resourceapi.Device{publishedGPU(7)}
			g.api.Put(&s)
		},
		"after versions have expired": func(g *publishRig) {
			g.api.Compact()
			g.api.WipeSlices(publishNode)
		},
	} {
		t.Run(name, func(t *testing.T) {
			withPublisher(t, func(g *publishRig) {
				g.publish(publishedGPU(0), publishedGPU(1, "xid-79"))
				disturb(g)
				g.advance(3 * time.Second)
				g.wantDevices("gpu-0", "gpu-1!gpu-node-agent/xid-79")
				g.wantPublished(true)
			})
		})
	}
}

// After an outage the newest pool is there within seconds, however long the outage was.
func TestPublisherAfterOutage(t *testing.T) {
	for name, outage := range map[string]func(*apiservertest.Server, bool){
		"refused": func(s *apiservertest.Server, on bool) { s.SetRefused(on) },
		"frozen":  func(s *apiservertest.Server, on bool) { s.Freeze(on) },
		"errors": func(s *apiservertest.Server, on bool) {
			s.Answer(func(apiservertest.Request) error {
				if on {
					return apierrors.NewInternalError(errors.New("etcd has no leader"))
				}
				return nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			withPublisher(t, func(g *publishRig) {
				g.publish(publishedGPU(0))
				outage(g.api, true)
				for i := range 20 {
					g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, fmt.Sprint("xid-", i))}}}})
					g.advance(30 * time.Second)
				}
				g.wantPublished(false)
				g.wantError(reasonUnreachable, "")
				g.writes()
				outage(g.api, false)
				g.advance(6 * time.Second)
				g.wantDevices("gpu-0!gpu-node-agent/xid-19")
				g.wantPublished(true)
				stored := slices.DeleteFunc(g.writes(), func(w string) bool { return !strings.HasSuffix(w, " 200") })
				if len(stored) > 3 {
					t.Errorf("writes %q after the outage", stored)
				}
				g.api.WipeSlices(publishNode)
				g.advance(8 * time.Second)
				g.wantDevices("gpu-0!gpu-node-agent/xid-19")
			})
		})
	}
}

// The API server is away when the agent starts.
func TestPublisherStartsDuringOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.api.SetRefused(true)
		g.start()
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0)}}}})
		g.advance(10 * time.Minute)
		g.wantError(reasonUnreachable, "refused")
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(1)}}}})
		g.api.SetRefused(false)
		g.advance(7 * time.Second)
		g.wantPublished(true)
		g.wantDevices("gpu-1")
		g.wantWrites("create resourceslices 201") // never the older pool
	})
}

// A restart writes nothing, and neither does the end.
func TestPublisherLeavesSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := apiservertest.New(t, publishNode)
		var before []resourceapi.ResourceSlice
		for i := range 3 {
			g := newPublishRig(t, api)
			g.start()
			g.advance(5 * time.Second) // before the first pool nothing is deleted
			g.publish(publishedGPU(0, "xid-79"))
			g.end()
			g.advance(time.Minute)
			if i > 0 && api.Slices()[0].ResourceVersion != before[0].ResourceVersion {
				t.Error("a restart has written the slice")
			}
			before = api.Slices()
		}
	})
}

func TestPublisherWithoutFeatures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.api.Lack(apiservertest.TaintsGate, apiservertest.SharesGate)
		g.api.SetRefused(true) // what it lacks is unknown
		g.start()
		shared := publishedGPU(1)
		shared.AllowMultipleAllocations = new(true)
		full := Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "xid-79"), shared}}}}
		g.update(full)
		g.advance(10 * time.Second)
		g.api.SetRefused(false)
		g.advance(10 * time.Second)
		f := g.features()
		_, changed := g.lacks.Watch()
		if s := g.status(); !f.noTaints || !f.noShares || !slices.Equal(s.DroppedFeatures, []string{taintsGate, sharesGate}) {
			t.Errorf("features %+v, status %q", f, s.DroppedFeatures)
		}
		g.wantWrites() // a taint that is dropped would offer the unhealthy GPU
		g.wantPublished(false)
		g.publish(publishedGPU(1))
		g.wantWrites("create resourceslices 201")

		// The API server is upgraded while the watch lasts.
		g.api.Lack()
		g.advance(featureCheck + time.Second)
		select {
		case <-changed:
		default:
			t.Fatal("the features of the upgraded API server were not found")
		}
		g.update(full)
		g.advance(5 * time.Second)
		g.wantDevices("gpu-0!gpu-node-agent/xid-79", "gpu-1")
		g.wantPublished(true)
	})
}

// An upgrade restarts the API server.
func TestPublisherFindsFeaturesAfterReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.api.Lack(apiservertest.TaintsGate)
		g.start()
		g.publish(publishedGPU(0))
		g.api.SetRefused(true)
		g.advance(20 * time.Second)
		g.api.Lack()
		g.api.SetRefused(false)
		g.advance(6 * time.Second)
		if f := g.features(); f != (features{}) {
			t.Errorf("features %+v after the upgrade", f)
		}
	})
}

// While it is unknown what an API server lacks, it is asked again within minutes, and then each hour again.
func TestPublisherAsksForFeatures(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		asked := func(during time.Duration) (n int) {
			before := len(g.api.Requests())
			g.advance(during)
			for _, r := range g.api.Requests()[before:] {
				if r.DryRun {
					n++
				}
			}
			return n
		}
		g.publish(publishedGPU(0))
		if n := asked(50 * time.Minute); n != 0 {
			t.Errorf("asked %d times in 50 minutes", n)
		}
		g.api.Answer(func(r apiservertest.Request) error {
			if r.DryRun {
				return apierrors.NewServiceUnavailable("away")
			}
			return nil
		})
		if n := asked(15 * time.Minute); n < 5 || n > 15 {
			t.Errorf("asked %d times in minutes without an answer", n)
		}
		g.api.Answer(nil)
		if n := asked(time.Minute); n == 0 {
			t.Error("not asked again")
		}
		if n := asked(50 * time.Minute); n != 0 {
			t.Errorf("asked %d times in 50 minutes after an answer", n)
		}
	})
}

// One of several API servers is older: it drops what the other accepted.
func TestPublisherFieldsDropped(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0), publishedGPU(1))
		g.api.Lack(apiservertest.TaintsGate)
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0), publishedGPU(1, "xid-79")}}}})
		g.advance(2 * time.Second)
		g.wantPublished(false)
		g.wantError(reasonDropped, taintsGate)
		if f := g.features(); !f.noTaints {
			t.Error("the dropped taint was not found")
		}
		g.publish(publishedGPU(0))
		g.wantDevices("gpu-0")
	})
}

// A webhook changes what the publisher writes. No feature gate is off, so the pool stays, and is not what the API server has.
func TestPublisherFieldsChanged(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		g.api.Mutate(func(s *resourceapi.ResourceSlice) {
			for _, d := range s.Spec.Devices {
				delete(d.Attributes, "uuid")
			}
		})
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "xid-79")}}}})
		g.advance(5 * time.Minute)
		g.wantPublished(false)
		g.wantError(reasonDropped, "dropped")
		if n := len(g.writes()); n > 3 {
			t.Errorf("%d writes in 5 minutes", n)
		}
		g.api.Mutate(nil)
		g.advance(featureCheck)
		g.wantPublished(true)
		if d := g.api.Slices()[0].Spec.Devices[0]; d.Attributes["uuid"].StringValue == nil {
			t.Error("the attribute is still missing")
		}
	})
}

// A slice of the node in a pool of another name is not the publisher's, and is deleted. A failure of that ends with the next try.
func TestPublisherDeletesOtherPool(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		g.api.Deny("delete resourceslices")
		s := g.api.Slices()[0]
		s.Name, s.UID, s.Spec.Pool.Name = "other", "other", "other"
		g.api.Put(&s)
		g.advance(time.Minute)
		g.wantError(reasonForbidden, "delete")
		g.wantPublished(false)
		g.api.Deny()
		g.advance(maxRefusedPause + 2*time.Second)
		g.wantDevices("gpu-0")
		g.wantPublished(true)
	})
}

// A refused device is left out, so that neither its taint is lost nor the others are hidden.
func TestPublisherInvalidDevice(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0), publishedGPU(1), publishedGPU(2))
		last := g.status().Published
		invalid := publishedGPU(1, "xid-79")
		invalid.Taints[0].Value = "not a label"
		long := publishedGPU(2)
		long.Attributes["serial"] = resourceapi.DeviceAttribute{StringValue: new(strings.Repeat("x", 65))}
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "ecc"), invalid, long}}}})
		g.advance(2 * time.Second)
		g.wantDevices("gpu-0!gpu-node-agent/ecc")
		g.wantPublished(false)
		g.wantError(reasonInvalid, "gpu-1")
		g.wantError(reasonInvalid, "gpu-2")
		g.writes()
		g.advance(30 * time.Minute)
		g.wantWrites()
		g.wantRecoveries(0)
		if at := g.status().Published; at.Sub(last) > time.Minute {
			t.Errorf("published at %v without two devices, want at most %v", at, last)
		}
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "ecc"), publishedGPU(1, "xid-79"), long}}}})
		g.advance(5 * time.Second)
		g.wantDevices("gpu-0!gpu-node-agent/ecc", "gpu-1!gpu-node-agent/xid-79")
		g.wantPublished(false)
		g.wantRecoveries(0)
		g.publish(publishedGPU(0, "ecc"), publishedGPU(1, "xid-79"), publishedGPU(2))
		g.wantRecoveries(1)
		g.wantDevices("gpu-0!gpu-node-agent/ecc", "gpu-1!gpu-node-agent/xid-79", "gpu-2")
	})
}

// Of several slices the valid devices stay in a complete pool.
func TestPublisherInvalidDeviceInSeveralSlices(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		pool := func(first, last resourceapi.Device) Pool {
			return Pool{Slices: []Slice{
				{Devices: []resourceapi.Device{first, publishedGPU(1)}},
				{Devices: []resourceapi.Device{publishedGPU(2), last}},
			}}
		}
		g.update(pool(publishedGPU(0), publishedGPU(3)))
		g.advance(3 * time.Second)
		bad0, bad3 := publishedGPU(0, "a"), publishedGPU(3, "b")
		bad0.Taints[0].Effect, bad3.Taints[0].Key = "Sometimes", "not a name"
		g.update(pool(bad0, bad3))
		g.advance(3 * time.Second)
		g.wantDevices("gpu-1", "gpu-2")
		list := g.api.Slices()
		if len(list) != 2 || list[0].Spec.Pool != list[1].Spec.Pool || list[0].Spec.Pool.ResourceSliceCount != 2 {
			t.Errorf("incomplete pool: %+v", list)
		}
	})
}

// A slice that is refused as a whole, such as by a limit of a later release, has no devices.
func TestPublisherTooManyDevices(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		var list []resourceapi.Device
		for i := range 65 {
			list = append(list, publishedGPU(i, "xid-79"))
		}
		g.update(Pool{Slices: []Slice{{Devices: list}}})
		g.advance(2 * time.Second)
		g.wantDevices()
		g.wantError(reasonInvalid, "gpu-15 and 57 more: not published, because the API server refuses it: spec.devices: Too many")
	})
}

// An admission policy refuses the slice with the code of an invalid one, but names no field: no device is the cause.
func TestPublisherAdmissionPolicy(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		g.api.Answer(func(r apiservertest.Request) error {
			if r.Verb == "update" {
				return &apierrors.StatusError{ErrStatus: metav1.Status{
					Status: "Failure", Code: 422, Reason: metav1.StatusReasonInvalid, Message: "denied request: policy p",
					Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Message: "policy p"}}},
				}}
			}
			return nil
		})
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "xid-79")}}}})
		g.advance(time.Minute)
		g.wantDevices("gpu-0")
		g.wantError(reasonInvalid, "policy p")
		g.api.Answer(nil)
		g.advance(6 * time.Second)
		g.wantDevices("gpu-0!gpu-node-agent/xid-79")
		g.wantPublished(true)
	})
}

func TestPublisherNeedsRights(t *testing.T) {
	for _, denied := range []string{"watch resourceslices", "create resourceslices", "get nodes"} {
		t.Run(denied, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newPublishRig(t, apiservertest.New(t, publishNode))
				g.api.Deny(denied)
				g.start()
				g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0)}}}})
				g.advance(5 * time.Minute)
				verb, resource, _ := strings.Cut(denied, " ")
				g.wantError(reasonForbidden, fmt.Sprintf("cannot %s resource %q", verb, resource))
				if n := len(g.api.Requests()); n > 40 {
					t.Errorf("%d requests in 5 minutes", n)
				}
				g.api.Deny()
				g.advance(32 * time.Second) // half a minute and the writes
				g.wantPublished(true)
				g.wantDevices("gpu-0")
			})
		})
	}
}

func TestPublisherNeedsKubernetes134(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.api.SetAbsent(resourceapi.GroupName)
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0)}}}})
		g.advance(10 * time.Minute)
		g.wantError(reasonUnsupported, "Kubernetes 1.34")
		for _, r := range g.api.Requests() {
			if strings.Contains(r.Path, "beta") {
				t.Fatalf("request for a beta API: %s", r.Path)
			}
		}
		g.api.SetAbsent()
		g.advance(maxRefusedPause + 2*time.Second)
		g.wantDevices("gpu-0")
	})
}

// An API server that does not stream lists is asked for them, until it answers.
func TestPublisherLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := apiservertest.New(t, publishNode)
		first := newPublishRig(t, api)
		first.start()
		first.publish(publishedGPU(0))
		first.end()
		g := newPublishRig(t, api)
		g.writes()
		var lists atomic.Int32
		api.Answer(func(r apiservertest.Request) error {
			switch {
			case r.Verb == "list" && lists.Add(1) < 3:
				return apierrors.NewServiceUnavailable("away")
			case r.Verb == "watch" && lists.Load() < 3:
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil) // sendInitialEvents is unknown
			}
			return nil
		})
		g.start()
		g.publish(publishedGPU(0))
		if n := lists.Load(); n != 3 {
			t.Errorf("%d lists, want 3", n)
		}
		g.wantWrites() // it has found the slice
	})
}

// The Node object is created late, and may be created again: then the garbage collector deletes what the former one owned.
func TestPublisherNodeObject(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.api.Delete("nodes", "", publishNode)
		g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0)}}}})
		g.advance(time.Minute)
		g.wantError(reasonNode, "Node")
		for _, uid := range []string{"first", "second"} {
			g.api.Delete("nodes", "", publishNode)
			g.api.WipeSlices(publishNode)
			g.advance(time.Minute)
			g.api.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: publishNode, UID: types.UID(uid)}})
			g.advance(6 * time.Second)
			g.wantPublished(true)
			if owner := g.api.Slices()[0].OwnerReferences; len(owner) != 1 || owner[0].UID != types.UID(uid) || owner[0].Name != publishNode {
				t.Errorf("owner %+v, want node %s", owner, uid)
			}
		}
	})
}

func TestPublisherConflict(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		conflicts := 3
		g.api.Answer(func(r apiservertest.Request) error {
			if r.Verb == "update" && conflicts > 0 {
				conflicts--
				return apierrors.NewConflict(schema.GroupResource{Resource: "resourceslices"}, r.Name, errors.New("modified"))
			}
			return nil
		})
		g.publish(publishedGPU(0, "xid-79"))
		if n := g.logged.Len(); n != 0 || g.status().PublishErrors[reasonConflict] != 3 {
			t.Errorf("%d lines logged, errors %v, want none and 3 conflicts", n, g.status().PublishErrors)
		}
	})
}

// What the API server answers to an update is counted by its reason, and is not the end.
func TestPublisherCountsReasons(t *testing.T) {
	resource := schema.GroupResource{Group: resourceapi.GroupName, Resource: "resourceslices"}
	for name, c := range map[string]struct {
		err    error
		reason string
	}{
		"deleted by another writer": {apierrors.NewNotFound(resource, "x"), reasonConflict},
		"changed by another writer": {apierrors.NewConflict(resource, "x", errors.New("modified")), reasonConflict},
		"created by another writer": {apierrors.NewAlreadyExists(resource, "x"), reasonConflict},
		"no rights":                 {apierrors.NewForbidden(resource, "x", errors.New("RBAC")), reasonForbidden},
		"no credentials":            {apierrors.NewUnauthorized("token expired"), reasonForbidden},
		"overloaded":                {apierrors.NewTooManyRequestsError("later"), reasonUnreachable},
		"broken": {
			&apierrors.StatusError{ErrStatus: metav1.Status{Status: "Failure", Code: 500, Message: "etcd"}},
			reasonUnreachable,
		},
		"another code": {apierrors.NewBadRequest("what"), reasonOther},
	} {
		t.Run(name, func(t *testing.T) {
			withPublisher(t, func(g *publishRig) {
				g.publish(publishedGPU(0))
				first := true
				g.api.Answer(func(r apiservertest.Request) error {
					if r.Verb != "update" || !first {
						return nil
					}
					first = false
					return c.err
				})
				before := g.status().Published
				g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0, "xid-79")}}}})
				g.advance(maxRefusedPause + 5*time.Second)
				s := g.status()
				if !slices.Contains(PublishErrors(), c.reason) {
					t.Errorf("%s is no reason for a counter that starts at 0", c.reason)
				}
				for reason, n := range s.PublishErrors {
					if n > 0 != (reason == c.reason) {
						t.Errorf("%d errors by %s, want some by %s only", n, reason, c.reason)
					}
				}
				if s.PublishErr != "" || s.Behind || !s.Published.After(before) {
					t.Errorf("%+v, published before at %v", s, before)
				}
				g.wantDevices("gpu-0!gpu-node-agent/xid-79")
			})
		})
	}
}

func TestPublisherEmptyPoolAndWithdraw(t *testing.T) {
	withPublisher(t, func(g *publishRig) {
		g.publish(publishedGPU(0))
		g.update(Pool{})
		g.advance(2 * time.Second)
		if list := g.api.Slices(); len(list) != 1 || len(list[0].Spec.Devices) != 0 {
			t.Errorf("slices %+v, want an empty one", list)
		}
		g.publish(publishedGPU(0))
		g.end()
		g.api.SetRefused(true)
		done := make(chan error, 1)
		go func() { done <- g.withdraw(g.t.Context()) }()
		g.advance(time.Minute)
		select {
		case err := <-done:
			t.Fatalf("withdraw returned %v without an API server", err)
		default:
		}
		g.wantError(reasonUnreachable, "refused")
		g.api.SetRefused(false)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		g.wantDevices()
		if n := len(g.api.Slices()); n != 0 {
			t.Errorf("%d slices after withdraw", n)
		}
		if s := g.status(); s.Slices != 0 || s.Devices != 0 {
			t.Errorf("%+v after withdraw, want nothing desired", s)
		}
		g.start() // the node changes back
		g.publish(publishedGPU(0))
		g.wantDevices("gpu-0")
	})
}

// The pauses between tries start anew after a success.
func TestPublisherRetriesSoonAfterSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.start()
		g.publish(publishedGPU(0))
		for i := range 2 {
			g.api.SetRefused(true)
			g.update(Pool{Slices: []Slice{{Devices: []resourceapi.Device{publishedGPU(0), publishedGPU(1 + i)}}}})
			if i == 0 {
				g.advance(time.Minute) // the pauses have grown
				g.api.SetRefused(false)
				g.advance(maxPause)
			} else {
				g.advance(minPause / 4)
				g.api.SetRefused(false)
				g.advance(minPause)
			}
			g.wantPublished(true)
		}
	})
}

func TestPublisherWithdrawEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		g.api.Freeze(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := g.withdraw(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("withdraw returned %v", err)
		}
	})
}

func TestPublisherConnectFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		open := g.connect
		var fail atomic.Bool
		fail.Store(true)
		g.connect = func() (kubernetes.Interface, error) {
			if fail.Load() {
				return nil, errors.New("health.kubernetes.kubeconfig: no such file")
			}
			return open()
		}
		g.start()
		g.update(Pool{})
		g.advance(time.Minute)
		g.wantError(reasonUnreachable, "no such file")
		fail.Store(false)
		g.advance(7 * time.Second)
		g.wantPublished(true)
	})
}

// No pause is longer than five seconds, except while the agent lacks a right or the API server lacks the API.
func TestRetryPauses(t *testing.T) {
	refused := errors.New("refused")
	forbidden := apierrors.NewForbidden(schema.GroupResource{}, "", refused)
	for range 100 {
		var p retryPauses
		for i := range 20 {
			err, longest := refused, maxPause
			if i >= 12 && i < 16 {
				err, longest = forbidden, min(maxPause<<(i-11), maxRefusedPause)
			}
			most := min(minPause<<i, longest)
			if pause := p.after(err); pause < most/2 || pause > most {
				t.Fatalf("pause %d is %v, want up to %v", i, pause, most)
			}
		}
	}
}

// Before the first update the controller has no resources: it would delete the slices that it finds.
func TestSliceQueueWaitsForFirstUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newPublishRig(t, apiservertest.New(t, publishNode))
		q := newSliceQueue(t.Context(), g.publisher)
		defer q.ShutDown()
		q.Add(publishNode)
		pools := make(chan string, 1)
		go func() {
			pool, _ := q.Get()
			pools <- pool
		}()
		g.advance(time.Hour)
		select {
		case pool := <-pools:
			t.Errorf("Get returned %s before the first update", pool)
		default:
		}
		g.change(func() { g.applied = &givenPool{pool: &Pool{}} })
		q.open()
		if pool := <-pools; pool != publishNode {
			t.Errorf("Get returned %q", pool)
		}
	})
}

func TestSliceQueueEndsBeforeFirstUpdate(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	q := newSliceQueue(ctx, newPublishRig(t, apiservertest.New(t, publishNode)).publisher)
	defer q.ShutDown()
	q.Add(publishNode)
	cancel()
	if pool, shutdown := q.Get(); !shutdown {
		t.Errorf("Get returned %q without resources", pool)
	}
}
