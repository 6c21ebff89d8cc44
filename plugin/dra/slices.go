package dra

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// PublishedSlices are the ResourceSlices of a node, as kubectl prints them. The API server gives a slice its name and generation, so these
// are only placeholders.
type PublishedSlices struct {
	List resourceapi.ResourceSliceList `json:"list"`
	// NotPublished is why the API server does not have them; empty if it does.
	NotPublished string   `json:"notPublished,omitempty"`
	Warnings     []string `json:"warnings,omitempty"` // devices or values that are left out, with the reason
}

// Slices returns what the driver publishes or, while it publishes nothing, what it would publish. It asks neither the kubelet nor the API
// server. The error is that the devices are unknown.
func (d *Driver) Slices(ctx context.Context) (PublishedSlices, error) {
	cfg, snap := d.Config.Load(), d.Snapshots.Load()
	if cfg == nil || !snap.Polled() {
		return PublishedSlices{}, errNotPolled(snap)
	}
	status := d.Status()
	d.mu.Lock()
	session := d.session
	d.mu.Unlock()
	var pool Pool
	if built := d.pool.Load(); session != nil && cfg.ServesDRA() && built.ByName != nil {
		pool = *built
	} else {
		pool = BuildPool(d.plannedInput(ctx, cfg, snap))
	}
	s := PublishedSlices{List: listSlices(&pool, cfg.DRA.DriverName, d.Node), Warnings: pool.Warnings}
	switch {
	case !cfg.Enabled:
		s.NotPublished = "plugin.enabled is false"
	case !cfg.ServesDRA():
		s.NotPublished = "plugin.api is " + cfg.API
	case status.Err != "" && session == nil:
		s.NotPublished = status.Err
	case status.PublishErr != "":
		s.NotPublished = status.PublishErr
	case status.Behind:
		s.NotPublished = "the API server does not have the newest slices yet"
	}
	return s, nil
}

// errNotPolled is why nothing is known of the devices.
func errNotPolled(snap *health.Snapshot) error {
	reason := "no poll of the GPUs has succeeded yet"
	if snap != nil && snap.Source.Err != "" {
		reason += ": " + snap.Source.Err
	}
	return errors.New(reason)
}

// plannedInput returns the input of the pool that the driver would publish.
func (d *Driver) plannedInput(ctx context.Context, cfg *plugin.Config, snap *health.Snapshot) PoolInput {
	own := *cfg
	own.Enabled, own.API = true, plugin.APIDRA
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second) // a driver that hangs must not block the command
	defer cancel()
	d.AwaitProperties(ctx, snap)
	in := PoolInput{
		Config: &own, Snapshot: snap, Properties: *d.Properties.Load(), Names: d.namesOf(cfg), PCIeRoots: PCIeRoots(snap.Devices),
		Examined: d.capabilities != nil,
	}
	if in.Examined {
		in.Capabilities = d.capabilities.Load()
	}
	return in
}

// namesOf returns the names of devices that have been published before, also if the checkpoint is not open.
func (d *Driver) namesOf(cfg *plugin.Config) map[health.DeviceID]string {
	if s := d.preparer.state.Load(); s != nil && s.dir == cfg.DRADir() {
		return s.Names
	}
	c, err := readCheckpoint(cfg.DRADir())
	if err != nil {
		return nil // as the driver, which begins anew
	}
	return c.Names
}

// listSlices returns a pool as the publisher publishes it.
func listSlices(pool *Pool, driver, node string) resourceapi.ResourceSliceList {
	apiVersion := resourceapi.SchemeGroupVersion.String()
	list := resourceapi.ResourceSliceList{
		TypeMeta: metav1.TypeMeta{APIVersion: apiVersion, Kind: "ResourceSliceList"},
		Items:    []resourceapi.ResourceSlice{},
	}
	parts := pool.Slices
	if len(parts) == 0 {
		parts = []Slice{{}} // see publisher.update
	}
	for i, part := range parts {
		list.Items = append(list.Items, resourceapi.ResourceSlice{
			TypeMeta:   metav1.TypeMeta{APIVersion: apiVersion, Kind: "ResourceSlice"},
			ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(fmt.Sprintf("%s-%s-%d", node, driver, i))},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, NodeName: &node, Devices: part.Devices,
				Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(parts))},
			},
		})
	}
	return list
}
