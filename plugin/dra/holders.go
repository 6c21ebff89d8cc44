package dra

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// ClaimDevice finds the device behind a device of a claim in the kubelet's pod resources: it is a podresources.ClaimResolver.
//
// A prepared claim names its devices. Other claims of the driver have devices of the published pool. While the driver has no pool yet, or
// another driver of the same name serves the node, such as NVIDIA's, ClaimDevice takes the names that this driver would publish. It takes
// them as well for claims that an agent has prepared, whatever the name of its driver was.
func (d *Driver) ClaimDevice(namespace, name string, c podresources.ClaimRef) (id health.DeviceID, admin, ok bool) {
	if prepared := d.prepared(namespace, name, c); prepared != nil {
		return prepared.Device, prepared.Admin, true
	}
	if id, ok = d.Device(c.Driver, c.Pool, name); ok {
		return id, false, true
	}
	cfg, snap := d.Config.Load(), d.Snapshots.Load()
	own := cdi.IsClaimDevice(c.CDI)
	if cfg == nil || !own && (c.Driver != cfg.DRA.DriverName || cfg.ServesDRA() && d.hasPool()) {
		return "", false, false
	}
	if id, ok = deviceByName(snap, name); !ok && own {
		id, ok = deviceByName(snap, gpuPrefix.FindString(name)) // the pod has one of its MIG devices
	}
	return id, false, ok
}

// hasPool reports whether the driver has published devices under names.
func (d *Driver) hasPool() bool {
	n := d.names.Load()
	return n != nil && len(n.published) > 0
}

// prepared returns a device of a prepared claim; nil if the claim or the device is not known.
func (d *Driver) prepared(namespace, name string, c podresources.ClaimRef) *ClaimDevice {
	claims := d.claims.Load()
	if claims == nil {
		return nil
	}
	var found *ClaimDevice
	var newest time.Time
	for _, claim := range claims.ByUID {
		if claim.Namespace != namespace || claim.Name != c.Name || found != nil && claim.Prepared.Before(newest) {
			continue
		}
		for i := range claim.Devices {
			if v := &claim.Devices[i]; v.Name == name && v.ShareID == types.UID(c.ShareID) {
				found, newest = v, claim.Prepared // the newest of one name: a claim that was deleted may still be prepared
			}
		}
	}
	return found
}

// PreparedAt returns when the claim by which a container holds a device was prepared; the zero time if it is not.
func (d *Driver) PreparedAt(h podresources.Holder) (at time.Time) {
	if claims := d.claims.Load(); claims != nil {
		for _, claim := range claims.ByUID {
			if claim.Namespace == h.Namespace && claim.Name == h.Claim.Name && claim.Prepared.After(at) {
				at = claim.Prepared
			}
		}
	}
	return at
}

// placedMIG matches the name of a MIG device in NVIDIA's driver: the GPU and the profile, then the ID of the profile and the first memory
// slice.
var placedMIG = regexp.MustCompile(`^(gpu-[0-9]+-mig-[a-z0-9-]+)-[0-9]+-[0-9]+$`)

// gpuPrefix matches the name of the GPU in the name of a MIG device.
var gpuPrefix = regexp.MustCompile(`^gpu-[0-9]+`)

// deviceByName returns the device that NVIDIA's driver publishes under a name. A MIG device whose placement is unknown is found by its
// profile, if its GPU has only one device of that profile.
func deviceByName(snap *health.Snapshot, name string) (id health.DeviceID, ok bool) {
	cfg := plugin.DefaultConfig() // without include and exclude
	devices, _ := cfg.SelectDevices(snap, nil, false)
	profile := ""
	if m := placedMIG.FindStringSubmatch(name); m != nil {
		profile = m[1]
	}
	alike := 0
	for i := range devices {
		d := &devices[i].State.Device
		var placed *health.MIGProperties
		if d.Properties != nil {
			placed = d.Properties.MIG
		}
		published := driverName(d, devices[i].Profile, placed)
		if d.Minor < 0 {
			continue
		}
		if published == name {
			return d.ID, true
		}
		if d.Kind == health.KindMIG && placed == nil && strings.TrimSuffix(published, fmt.Sprintf("-gi%d-ci%d", d.GI, d.CI)) == profile {
			id = d.ID
			alike++
		}
	}
	if alike != 1 {
		return "", false
	}
	return id, true
}

// Orphans describes the pods whose claims an earlier agent prepared and this agent has no driver for; empty if there is none. A rollback to
// a release without dra.enabled leaves such pods: the agent has neither the checkpoint nor the rights that their end needs.
func (d *Driver) Orphans() string {
	cfg, released := d.Config.Load(), d.released.Load()
	d.mu.Lock()
	serves := d.session != nil
	d.mu.Unlock()
	if cfg == nil || !cfg.Enabled || cfg.ServesDRA() || serves || released == nil || !released.Released {
		return ""
	}
	var pods []plugin.Pod
	var drivers []string
	for holder := range d.Holders.Load().ByClaims() {
		if cdi.IsClaimDevice(holder.Claim.CDI) {
			pods, drivers = append(pods, plugin.Pod{Namespace: holder.Namespace, Name: holder.Pod}), append(drivers, holder.Claim.Driver)
		}
	}
	if len(pods) == 0 {
		return ""
	}
	slices.Sort(drivers)
	return fmt.Sprintf("this agent has no driver %s for the claims of %s: such a pod cannot end, and 30 seconds after the end of the driver "+
		"the kubelet has removed its ResourceSlices; until the pods have ended, set plugin.api to devicePlugin and give the agent "+
		"the mounts and rights of DRA (in the chart --set dra.enabled=true --set config.plugin.api=devicePlugin)",
		strings.Join(slices.Compact(drivers), ", "), plugin.PodNames(pods))
}
