package dra

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// ClaimDevice finds the device behind a device of a claim in the kubelet's pod resources: it is a podresources.ClaimResolver.
//
// A prepared claim names its devices. Other claims of the driver have devices of the published pool. While another driver of the same name
// serves the node, such as NVIDIA's, its names of devices are those that this driver would publish.
func (d *Driver) ClaimDevice(namespace, name string, c podresources.ClaimRef) (id health.DeviceID, admin, ok bool) {
	if prepared := d.prepared(namespace, name, c); prepared != nil {
		return prepared.Device, prepared.Admin, true
	}
	if id, ok = d.Device(c.Driver, c.Pool, name); ok {
		return id, false, true
	}
	cfg := d.Config.Load()
	if cfg == nil || c.Driver != cfg.DRA.DriverName || cfg.ServesDRA() {
		return "", false, false
	}
	id, ok = deviceByName(d.Snapshots.Load(), name)
	return id, false, ok
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

// nvidiaName matches the names of NVIDIA's driver: of a GPU by its minor number, of a MIG device also by its profile, the ID of the
// profile and its first memory slice.
var nvidiaName = regexp.MustCompile(`^gpu-([0-9]{1,9})(?:-mig-([a-z0-9-]+)-([0-9]{1,9})-([0-9]{1,9}))?$`)

// deviceByName returns the device that NVIDIA's driver publishes under a name. A MIG device whose placement is unknown is found by its
// profile, if its GPU has one of it only.
func deviceByName(snap *health.Snapshot, name string) (id health.DeviceID, ok bool) {
	m := nvidiaName.FindStringSubmatch(name)
	if m == nil || snap == nil {
		return "", false
	}
	number := func(i int) int {
		n, _ := strconv.Atoi(m[i]) // nine digits are no error
		return n
	}
	candidates := 0
	for i := range snap.Devices {
		v := &snap.Devices[i].Device
		if v.Minor != number(1) || (v.Kind == health.KindMIG) != (m[2] != "") {
			continue
		}
		if v.Kind == health.KindMIG {
			if profileInName(v.Profile) != m[2] {
				continue
			}
			if p := v.Properties; p != nil && p.MIG != nil {
				if p.MIG.ProfileID == number(3) && p.MIG.PlacementStart == number(4) {
					return v.ID, true
				}
				continue
			}
		}
		id = v.ID
		candidates++
	}
	if candidates != 1 {
		return "", false
	}
	return id, true
}

// profileInName returns a MIG profile as names of devices have it: 1g10gb for 1g.10gb.
func profileInName(profile string) string {
	return strings.ReplaceAll(strings.ReplaceAll(profile, ".", ""), "+", "-")
}
