package dra

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Claim is a prepared ResourceClaim.
type Claim struct {
	UID       types.UID
	Namespace string
	Name      string
	Prepared  time.Time
	Devices   []ClaimDevice
}

// ClaimDevice is a device, or a share of one, that a claim has.
type ClaimDevice struct {
	Request string // the name in the claim, without that of a subrequest
	Name    string // of the published device
	Device  health.DeviceID
	Admin   bool // the claim has adminAccess: it takes nothing from others

	ShareID types.UID // of a share; empty for a whole device
	Memory  uint64    // bytes of a share; 0 for a whole device
	MPS     bool      // MPS serves the device for this claim
	CDI     []string  // the CDI names that the kubelet got
}

// Claims are the prepared claims, by UID. It is immutable once published.
type Claims struct{ ByUID map[types.UID]Claim }
