package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// snapshot is the part of /api/v1/snapshot that these tests check.
type snapshot struct {
	GPUs   []device `json:"gpus"`
	Source struct {
		Status   string    `json:"status"`
		Until    time.Time `json:"until"` // of a detach
		Measured time.Time `json:"measured"`
	} `json:"source"`
	Memory struct {
		Error string `json:"error"`
	} `json:"memory"`
	Config struct {
		OK bool `json:"ok"`
	} `json:"config"`
	Kubelet struct {
		HoldersError string `json:"holdersError"` // also that a new kubelet may not have read its pods
		Resources    []struct {
			Name       string `json:"name"`
			Registered bool   `json:"registered"`
			Error      string `json:"error"`
		} `json:"resources"`
	} `json:"kubelet"`
}

type device struct {
	UUID    string   `json:"uuid"`
	Index   int      `json:"index"`
	Profile string   `json:"profile"`
	State   string   `json:"state"`
	MIGMode bool     `json:"migMode"`
	MIG     []device `json:"mig"`

	Findings []struct {
		Cause string `json:"cause"`
	} `json:"findings"`
}

// causes returns the causes of a device's findings.
func (d device) causes() map[string]bool {
	all := map[string]bool{}
	for _, f := range d.Findings {
		all[f.Cause] = true
	}
	return all
}

func (w *world) snapshot(ctx context.Context) (snapshot, error) { return getSnapshot(ctx, w.Node) }

func getSnapshot(ctx context.Context, n *node.Node) (s snapshot, err error) {
	status, text, err := n.Get(ctx, "/api/v1/snapshot")
	if err != nil {
		return s, err
	}
	if status != http.StatusOK {
		return s, fmt.Errorf("/api/v1/snapshot: status %d", status)
	}
	return s, json.Unmarshal(text, &s)
}

// summary summarizes the world.
func (w *world) summary() string {
	out := w.source
	for word, is := range map[string]bool{
		"unseen": w.unmeasured, "away": w.detached && !w.detachPending, "stuck": w.detachPending,
		"engine-away": w.engineDetached && !w.detached,
	} {
		if is {
			out += " " + word
		}
	}
	if w.logBlocked {
		out += " blocked"
	}
	if w.clock != "0" {
		out += " clock:" + w.clock
	}
	if w.kubeletFrozen {
		out += " frozen"
	}
	if w.kubeletStopped {
		out += " no-kubelet"
	}
	if w.diskFull {
		out += " disk-full"
	}
	if w.configInvalid {
		out += " bad-config"
	}
	for i, g := range w.gpu {
		if g.lost {
			out += fmt.Sprintf(" lost:%d", i)
		}
		if g.xid48 {
			out += fmt.Sprintf(" xid48:%d", i)
		}
		if g.mig != "off" {
			out += fmt.Sprintf(" %s:%d", g.mig, i)
		}
	}
	return out
}
