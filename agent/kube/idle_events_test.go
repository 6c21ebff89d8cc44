package kube

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// readyPod returns a pod of this node that has been Ready for a time.
func readyPod(name string, ready time.Duration) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: "uid-of-train"}, Spec: corev1.PodSpec{NodeName: "node1"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-100 * time.Hour))},
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-ready))},
		}},
	}
}

// idlePods returns pod team/train, which holds two GPUs, with GPU 1 idle for a time.
func idlePods(idle time.Duration) *IdlePods {
	return &IdlePods{After: 30 * time.Minute, Evidence: "process", Pods: []IdlePod{
		{Pod: Pod{"team", "train"}, Held: 2, Kind: "GPU", Idle: []IdleDevice{{"GPU 1", idle}}},
	}}
}

// withIdleRig runs a test while health.kubernetes.enabled is false.
func withIdleRig(t *testing.T, test func(t *testing.T, g *rig)) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI(t))
		g.enable(false)
		g.Put(readyPod("train", 10*time.Hour))
		g.start(t)
		test(t, g)
	})
}

func TestIdlePodGetsEvent(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.advance(time.Hour)
		if len(g.requests) != 0 {
			t.Errorf("%d requests without an idle pod", len(g.requests))
		}
		g.idle.Store(idlePods(45*time.Minute + 20*time.Second))
		g.advance(idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		for _, e := range g.Events() {
			wantWarning(t, &e, eventIdle, time.Now())
			if string(e.InvolvedObject.UID) != "uid-of-train" || e.Namespace != "team" ||
				!strings.HasPrefix(e.Message, "no process on 1 of 2 GPUs of the pod for 45m: GPU 1. ") ||
				!strings.Contains(e.Message, OptOutAnnotation) {
				t.Errorf("%+v", e)
			}
		}
		if s := g.reporter.Status(); !s.IdleEnabled || s.Enabled || s.Events != 1 || s.Errors != 0 {
			t.Errorf("%+v", s)
		}
		if g.writes() != 0 {
			t.Error("a condition is written while health.kubernetes.enabled is false")
		}
	})
}

// An idle pod has one event per hour.
func TestIdleEventsRepeatHourly(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.idle.Store(idlePods(time.Hour))
		g.advance(idleRepeat - time.Minute)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if len(g.requests) != 3 {
			t.Errorf("%d requests within an hour, want one for the pod and two for the event", len(g.requests))
		}
		g.advance(time.Minute + 2*idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×2")

		g.idle.Store(&IdlePods{After: 30 * time.Minute}) // the pod works for a moment
		g.advance(time.Minute)
		g.idle.Store(idlePods(30 * time.Minute))
		g.advance(time.Minute)
		g.wantEvents(t, "pod/train GPUIdle ×2")
		g.clearEvents() // the API server deletes events after an hour
		g.advance(idleRepeat)
		g.wantEvents(t, "pod/train GPUIdle ×1")
	})
}

// A restart of the agent, or a second agent, does not repeat the event.
func TestIdleEventsAfterRestart(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.idle.Store(idlePods(time.Hour))
		g.advance(time.Minute)
		next := newRig(g.apiServer)
		g.stop()
		next.enable(false)
		next.idle.Store(idlePods(time.Hour))
		next.start(t)
		next.advance(idleRepeat - 2*time.Minute)
		next.wantEvents(t, "pod/train GPUIdle ×1")
		next.advance(2 * time.Minute)
		next.wantEvents(t, "pod/train GPUIdle ×2")

		another := readyPod("train", time.Hour) // of a StatefulSet
		another.UID = "uid-of-the-next"
		next.Delete("pods", "team", "train")
		next.Put(another)
		next.advance(idleRepeat)
		next.wantEvents(t, "pod/train GPUIdle ×1", "pod/train GPUIdle ×2")
	})
}

// Before a pod is Ready, it may load a model.
func TestIdlePodIsReportedOnceReady(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		starting := readyPod("train", time.Hour)
		starting.Status.Conditions[1].Status = corev1.ConditionFalse
		g.Put(starting)
		g.idle.Store(idlePods(2 * time.Hour))
		g.advance(time.Hour)
		g.wantEvents(t)
		g.Put(readyPod("train", 10*time.Minute))
		g.advance(20*time.Minute - idleInterval)
		g.wantEvents(t)
		g.advance(idleRecheck + 2*idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if m := g.message(); !strings.Contains(m, " for 30m: ") && !strings.Contains(m, " for 35m: ") {
			t.Errorf("the time before the pod was Ready counts: %s", m)
		}
		if len(g.requests) > 20 {
			t.Errorf("%d requests in 90 minutes", len(g.requests))
		}
	})
}

func (g *rig) message() (text string) {
	for _, e := range g.Events() {
		text = e.Message
	}
	return text
}

func TestPodsThatAreNotReportedAsIdle(t *testing.T) {
	for name, change := range map[string]func(*corev1.Pod){
		"terminating":     func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()} },
		"of another node": func(p *corev1.Pod) { p.Spec.NodeName = "node2" },
		"opted out":       func(p *corev1.Pod) { p.Annotations = map[string]string{OptOutAnnotation: ""} },
		"not ready":       func(p *corev1.Pod) { p.Status.Conditions = nil },
	} {
		withIdleRig(t, func(t *testing.T, g *rig) {
			p := readyPod("train", time.Hour)
			change(p)
			g.Put(p)
			g.idle.Store(idlePods(time.Hour))
			g.advance(2 * idleRecheck)
			g.wantEvents(t)
			if len(g.requests) == 0 || len(g.requests) > 3 {
				t.Errorf("%s: %d requests in %v", name, len(g.requests), 2*idleRecheck)
			}
		})
	}
	withIdleRig(t, func(t *testing.T, g *rig) {
		p := readyPod("train", time.Hour)
		p.Annotations = map[string]string{OptOutAnnotation: "false"}
		g.Put(p)
		g.idle.Store(idlePods(time.Hour))
		g.advance(idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×1")
	})
	withIdleRig(t, func(t *testing.T, g *rig) { // the pod has ended
		g.Delete("pods", "team", "train")
		g.idle.Store(idlePods(time.Hour))
		g.advance(2 * idleRecheck)
		if s := g.reporter.Status(); s.Errors != 0 || len(g.requests) > 3 {
			t.Errorf("%d requests, %+v", len(g.requests), s)
		}
	})
}

// An outage neither drops the event nor repeats it, and the newest state counts once the API server is back.
func TestIdleEventsAfterOutage(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.failWith(errRefused)
		g.idle.Store(idlePods(time.Hour))
		g.advance(time.Hour)
		if n := len(g.requests); n < 50 || n > 100 {
			t.Errorf("%d requests in an hour, want one for each longest pause", n)
		}
		if s := g.reporter.Status(); s.IdleErr == "" || s.Errors != uint64(len(g.requests)) { // each request is made once
			t.Errorf("%+v", s)
		}
		g.idle.Store(idlePods(2 * time.Hour))
		g.failWith(nil)
		g.advance(2 * maxBackoff)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if m := g.message(); !strings.Contains(m, " for 120m: ") {
			t.Error(m)
		}
		if s := g.reporter.Status(); s.IdleErr != "" {
			t.Errorf("%+v", s)
		}
	})
}

// Without an answer, the other pods wait too.
func TestIdleEventsOfManyPodsInOutage(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.Put(readyPod("infer", time.Hour))
		g.failWith(errRefused)
		idle := idlePods(time.Hour)
		idle.Pods = append(idle.Pods, IdlePod{Pod: Pod{"team", "infer"}, Held: 1, Kind: "GPU", Idle: []IdleDevice{{"GPU 0", time.Hour}}})
		g.idle.Store(idle)
		g.advance(10 * time.Minute)
		if s := g.reporter.Status(); s.Errors == 0 || s.Errors != uint64(len(g.requests)) {
			t.Errorf("%d requests, %+v", len(g.requests), s)
		}
		g.failWith(nil)
		g.advance(2 * maxBackoff)
		g.wantEvents(t, "pod/infer GPUIdle ×1", "pod/train GPUIdle ×1")
	})
}

// The refusal for one pod does not keep others from being reported.
func TestIdleEventsInEndingNamespace(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.fail = func(r *http.Request) error {
			if r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/ending/") {
				return apiError(403, "Forbidden", "NamespaceTerminating")
			}
			return nil
		}
		ending := readyPod("one", time.Hour)
		ending.Namespace = "ending"
		g.Put(ending)
		idle := idlePods(time.Hour)
		idle.Pods = append([]IdlePod{{Pod: Pod{"ending", "one"}, Held: 1, Kind: "GPU", Idle: []IdleDevice{{"GPU 0", time.Hour}}}}, idle.Pods...)
		g.idle.Store(idle)
		g.advance(time.Minute)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if len(g.requests) > 10 {
			t.Errorf("%d requests", len(g.requests))
		}
		g.advance(4 * idleRecheck)
		if s := g.reporter.Status(); s.IdleErr == "" || g.logged.Len() != 1 {
			t.Errorf("error %q, log %v", s.IdleErr, g.logged.All())
		}
		g.idle.Store(idlePods(time.Hour)) // the refused one is not idle any more
		g.advance(2 * maxBackoff)
		if s := g.reporter.Status(); s.IdleErr != "" || g.logged.Len() != 2 {
			t.Errorf("error %q, log %v", s.IdleErr, g.logged.All())
		}
	})
}

// The outage after a success starts with short pauses again, also while a pod is refused.
func TestIdleEventsNextOutage(t *testing.T) {
	for _, refused := range []bool{false, true} {
		withIdleRig(t, func(t *testing.T, g *rig) {
			away := true
			g.fail = func(r *http.Request) error {
				switch {
				case away:
					return errRefused
				case refused && r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/ending/"):
					return apiError(403, "Forbidden", "NamespaceTerminating")
				}
				return nil
			}
			one := func(namespace, name string) IdlePod {
				pod := readyPod(name, time.Hour)
				pod.Namespace, pod.UID = namespace, types.UID("uid-of-"+name)
				g.Put(pod)
				return IdlePod{Pod: Pod{namespace, name}, Held: 1, Kind: "GPU", Idle: []IdleDevice{{"GPU 0", time.Hour}}}
			}
			idle := idlePods(time.Hour)
			idle.Pods = append(idle.Pods, one("ending", "one"))
			g.idle.Store(idle)
			g.advance(10 * time.Minute)
			away = false
			g.advance(2 * maxBackoff)
			want := []string{"pod/one GPUIdle ×1", "pod/train GPUIdle ×1"}
			if refused {
				want = want[1:]
			}
			g.wantEvents(t, want...)

			away = true
			idle.Pods = append(slices.Clone(idle.Pods), one("team", "infer"))
			g.idle.Store(idle)
			g.advance(idleInterval)
			away = false
			g.advance(idleInterval + minBackoff) // the refused event is no outage
			g.wantEvents(t, append([]string{"pod/infer GPUIdle ×1"}, want...)...)
		})
	}
}

// An event that exists although it could not be read was created by an earlier attempt, whose response was lost. It counts once.
func TestIdleEventWhoseResponseWasLost(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		lost, stale := false, false
		g.fail = func(r *http.Request) error {
			switch {
			case r.Method == http.MethodPost && !lost:
				lost = true
				return g.lose(r)
			case r.Method == http.MethodPatch && lost && !stale: // an empty patch reads
				stale = true
				return apiError(404, metav1.StatusReasonNotFound)
			}
			return nil
		}
		g.idle.Store(idlePods(time.Hour))
		g.advance(idleRepeat - time.Minute)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if s := g.reporter.Status(); !stale || s.Events != 1 || s.IdleErr != "" {
			t.Errorf("read as missing %v, %+v", stale, s)
		}
	})
}

// An event that is deleted after it was read is created again at once.
func TestIdleEventThatIsDeletedMeanwhile(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		g.idle.Store(idlePods(time.Hour))
		g.advance(idleInterval)
		g.fail = func(r *http.Request) error {
			if r.Method == http.MethodPatch && r.ContentLength > 2 { // the read is a patch by {}
				g.clearEvents()
			}
			return nil
		}
		g.advance(idleRepeat + idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if s := g.reporter.Status(); s.Events != 2 || s.Errors != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// Without access to the API server, the status says why, and the event is written once there is some.
func TestIdleEventsWithoutAccess(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		open := g.reporter.open
		g.reporter.open = func(kubeconfig string) (*client, error) {
			if kubeconfig == "" {
				return nil, errors.New("no service account")
			}
			return open(kubeconfig)
		}
		g.idle.Store(idlePods(time.Hour))
		g.advance(10 * time.Minute)
		if s := g.reporter.Status(); s.IdleErr != "no service account" || s.Errors == 0 || s.Errors > 22 {
			t.Errorf("%+v", s)
		}
		c := judge.DefaultConfig()
		c.Kubernetes.Kubeconfig = "/another"
		g.config.Store(&c)
		g.advance(maxBackoff + idleInterval)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if s := g.reporter.Status(); s.IdleErr != "" {
			t.Errorf("%+v", s)
		}
	})
}

// A pod that cannot be read is tried again after some minutes, and others are reported meanwhile.
func TestIdleEventsOfUnreadablePod(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		reads := 0
		g.fail = func(r *http.Request) error {
			if strings.HasSuffix(r.URL.Path, "/pods/secret") {
				reads++
				return apiError(403, metav1.StatusReasonForbidden)
			}
			return nil
		}
		idle := idlePods(time.Hour)
		idle.Pods = append([]IdlePod{{Pod: Pod{"other", "secret"}, Held: 1, Kind: "GPU", Idle: []IdleDevice{{"GPU 0", time.Hour}}}}, idle.Pods...)
		g.idle.Store(idle)
		g.advance(time.Minute)
		g.wantEvents(t, "pod/train GPUIdle ×1")
		if s := g.reporter.Status(); !strings.Contains(s.IdleErr, "pod other/secret: ") || reads != 1 {
			t.Errorf("%+v, %d reads", s, reads)
		}
		g.advance(2 * idleRecheck)
		if reads < 2 || reads > 3 {
			t.Errorf("%d reads in eleven minutes", reads)
		}
	})
}

// The reporter uses the kubeconfig that is in force.
func TestIdleEventsFollowKubeconfig(t *testing.T) {
	withIdleRig(t, func(t *testing.T, g *rig) {
		var opened []string
		open := g.reporter.open
		g.reporter.open = func(kubeconfig string) (*client, error) {
			opened = append(opened, kubeconfig)
			return open(kubeconfig)
		}
		g.idle.Store(idlePods(time.Hour))
		g.advance(idleRepeat)
		c := judge.DefaultConfig()
		c.Kubernetes.Kubeconfig = "/another"
		g.config.Store(&c)
		g.advance(idleRepeat)
		if strings.Join(opened, " ") != " /another" {
			t.Errorf("opened %q", opened)
		}
		g.wantEvents(t, "pod/train GPUIdle ×2")
	})
}

// After the clock was set back, the last event is from the future. It is neither repeated nor read again and again.
func TestIdleEventFromTheFuture(t *testing.T) {
	for ahead, want := range map[time.Duration]string{30 * time.Minute: "pod/train GPUIdle ×1", 3 * time.Hour: "pod/train GPUIdle ×2"} {
		withIdleRig(t, func(t *testing.T, g *rig) {
			g.idle.Store(idlePods(time.Hour))
			g.advance(idleInterval)
			for _, e := range g.Events() {
				e.LastTimestamp = metav1.NewTime(time.Now().Add(ahead))
				g.Put(&e)
			}
			g.idle.Store(new(IdlePods)) // forget it
			g.advance(idleInterval)
			g.idle.Store(idlePods(time.Hour))
			before := len(g.requests)
			g.advance(idleRepeat - idleInterval)
			g.wantEvents(t, want)
			if n := len(g.requests) - before; n > 3 {
				t.Errorf("%v ahead: %d requests within an hour", ahead, n)
			}
			g.advance(time.Hour)
			g.wantEvents(t, strings.NewReplacer("×2", "×3", "×1", "×2").Replace(want))
		})
	}
}

func TestIdleMessageLength(t *testing.T) {
	p := IdlePod{Held: 112, Kind: "MIG device"}
	for range 112 {
		p.Idle = append(p.Idle, IdleDevice{"MIG 15:13", 26*time.Hour + time.Second})
	}
	text, _ := idleMessage(p, IdlePods{After: time.Hour, Evidence: "work"}, 48*time.Hour)
	if len(text) > maxMessage || !strings.HasPrefix(text, "no work on 112 of 112 MIG devices of the pod for 26h: MIG 15:13, ") ||
		!strings.HasSuffix(text, "not reported") {
		t.Errorf("%d bytes: %s", len(text), text)
	}
	p = IdlePod{Held: 1, Kind: "GPU", Idle: []IdleDevice{{"GPU 3", 20*time.Second + time.Millisecond}}}
	text, _ = idleMessage(p, IdlePods{After: time.Second, Evidence: "work"}, time.Hour)
	if !strings.HasPrefix(text, "no work on the GPU of the pod for 20s: GPU 3. ") {
		t.Error(text)
	}
	text, _ = idleMessage(p, IdlePods{After: time.Second, Evidence: "work", ModelUnknown: true}, time.Hour)
	if !strings.HasPrefix(text, "no work on the GPU of the pod for 20s: GPU 3; whether a model is loaded is unknown. End the pod ") {
		t.Error(text)
	}
}
