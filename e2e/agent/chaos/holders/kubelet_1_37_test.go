//go:build kubelet1.37

package holders

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	realkubelet "github.com/gpu-node-agent/gpu-node-agent/e2e/internal/kubelet"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// others are the kubelets that this program has beside the stand-ins.
func others() []newKubelet {
	klog.SetLogger(logr.Discard()) // of the device manager
	return []newKubelet{newReal}
}

// deviceManager is the kubelet's own device manager with its own pod resources API.
type deviceManager struct {
	dir   string
	blind time.Duration

	mu     sync.Mutex // guards the fields below
	k      *realkubelet.Kubelet
	sight  time.Time // until then no pod is listed
	pods   []*corev1.Pod
	claims map[types.UID][]kubelettest.HeldClaim
}

func newReal(dir string, blind time.Duration) kubelet {
	return &deviceManager{dir: dir, blind: blind, claims: make(map[types.UID][]kubelettest.HeldClaim)}
}

func (m *deviceManager) start() error {
	m.mu.Lock()
	if m.k != nil {
		m.sight = time.Now().Add(m.blind)
	}
	m.mu.Unlock()
	k, err := realkubelet.StartWith(m.dir, realkubelet.Pods{Bound: m.bound, Listed: m.listed, Claims: m.claimsOf})
	m.mu.Lock()
	defer m.mu.Unlock()
	m.k = k
	return err
}

func (m *deviceManager) stop() error { return m.kubelet().Stop() }

func (m *deviceManager) kubelet() *realkubelet.Kubelet {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.k
}

func (m *deviceManager) bound() []*corev1.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.pods)
}

func (m *deviceManager) listed() []*corev1.Pod {
	m.mu.Lock()
	blind := time.Now().Before(m.sight)
	m.mu.Unlock()
	if blind {
		return nil
	}
	return m.bound()
}

func (m *deviceManager) claimsOf(p *corev1.Pod) (all []*podsapi.DynamicResource) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, h := range m.claims[p.UID] {
		claim := &podsapi.DynamicResource{ClaimName: h.Claim, ClaimNamespace: h.Container.Namespace}
		for _, d := range h.Devices {
			r := &podsapi.ClaimResource{DriverName: h.Driver, PoolName: h.Pool, DeviceName: d.Name}
			if d.ShareID != "" {
				r.ShareId = &d.ShareID
			}
			claim.ClaimResources = append(claim.ClaimResources, r)
		}
		all = append(all, claim)
	}
	return all
}

// object returns a pod as the kubelet gets it.
func object(p *pod) *corev1.Pod {
	limits := corev1.ResourceList{}
	if p.resource != "" {
		limits[corev1.ResourceName(p.resource)] = *resource.NewQuantity(int64(p.count), resource.DecimalSI)
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: p.name, UID: types.UID("pod-" + p.name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name:      p.container().Name,
			Resources: corev1.ResourceRequirements{Limits: limits, Requests: limits},
		}}},
	}
}

func (m *deviceManager) add(o *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.ContainsFunc(m.pods, func(p *corev1.Pod) bool { return p.UID == o.UID }) {
		m.pods = append(m.pods, o)
	}
}

func (m *deviceManager) admit(ctx context.Context, p *pod) (ids []string, env map[string]string, err error) {
	o := object(p)
	m.add(o)
	if env, err = m.kubelet().Admit(ctx, o); err != nil {
		return nil, nil, err
	}
	return m.kubelet().Allocated(o)[p.resource], env, nil
}

func (m *deviceManager) remove(p *pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	uid := object(p).UID
	delete(m.claims, uid)
	m.pods = slices.DeleteFunc(slices.Clone(m.pods), func(o *corev1.Pod) bool { return o.UID == uid })
}

func (m *deviceManager) allocatable() map[string]int {
	all := make(map[string]int)
	for _, name := range m.kubelet().Resources() {
		_, all[name] = m.kubelet().Count(corev1.ResourceName(name))
	}
	return all
}

func (m *deviceManager) free() map[string][]string {
	taken := make(map[string]bool)
	for _, p := range m.bound() {
		for name, ids := range m.kubelet().Allocated(p) {
			for _, id := range ids {
				taken[name+"/"+id] = true
			}
		}
	}
	all := make(map[string][]string)
	for _, name := range m.kubelet().Resources() {
		for id := range m.kubelet().Healthy(corev1.ResourceName(name)) {
			if !taken[name+"/"+id] {
				all[name] = append(all[name], id)
			}
		}
	}
	return all
}

func (m *deviceManager) hold(p *pod, claim kubelettest.HeldClaim) {
	o := object(p)
	m.add(o)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.claims[o.UID] = append(m.claims[o.UID], claim)
}
