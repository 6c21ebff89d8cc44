package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestHappenings(t *testing.T) {
	xid79, lost, hot := finding("xid-79", health.Unhealthy), finding("lost", health.Unhealthy), finding("temperature", health.Degraded)
	pods := map[health.DeviceID][]Pod{
		"GPU-0": {{"team", "train"}, {"team", "train"}, {"other", "infer"}}, "MIG-0-1": {{"team", "slice"}},
	}
	type list = []health.DeviceState
	for _, c := range []struct {
		name          string
		before, after list
		want          []string
	}{
		{"nothing", list{gpu(0, nil)}, list{gpu(0, nil)}, nil},
		{"a healthy device comes", nil, list{gpu(0, nil)}, nil},
		{"a device goes", list{gpu(0, nil)}, nil, nil},
		{
			"unhealthy",
			list{gpu(0, nil)},
			list{gpu(0, nil, xid79)},
			[]string{"node Warning GPUUnhealthy", "team/train Warning GPUUnhealthy", "other/infer Warning GPUUnhealthy"},
		},
		{"nobody holds it", list{gpu(1, nil)}, list{gpu(1, nil, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"unhealthy from the start", nil, list{gpu(1, nil, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"still unhealthy", list{gpu(1, nil, xid79)}, list{gpu(1, nil, xid79)}, nil},
		{"a worse cause", list{gpu(1, nil, xid79)}, list{gpu(1, nil, lost, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"the worse of two causes goes", list{gpu(1, nil, lost, xid79)}, list{gpu(1, nil, xid79)}, nil},
		{"degraded", list{gpu(1, nil)}, list{gpu(1, nil, hot)}, []string{"node Warning GPUDegraded"}},
		{"better, not well", list{gpu(1, nil, lost, hot)}, list{gpu(1, nil, hot)}, []string{"node Warning GPUDegraded"}},
		{"recovered", list{gpu(1, nil, lost)}, list{gpu(1, nil)}, []string{"node Normal GPURecovered"}},
		{
			"XIDs",
			list{gpu(1, map[int]uint64{31: 4})},
			list{gpu(1, map[int]uint64{31: 6, 79: 1})},
			[]string{"node Warning XID ×2", "node Warning XID"},
		},
		{
			"an XID of a GPU is told to those who hold a part",
			list{gpu(0, nil), mig(0, 1, nil)},
			list{gpu(0, map[int]uint64{79: 1}), mig(0, 1, nil)},
			[]string{"node Warning XID", "team/train Warning XID", "other/infer Warning XID", "team/slice Warning XID"},
		},
		{
			"a GPU's finding goes to its parts' pods, not twice to the node",
			list{gpu(1, nil), mig(0, 1, nil)},
			list{gpu(1, nil, lost), mig(0, 1, nil, from("GPU-1", lost))},
			[]string{"node Warning GPUUnhealthy", "team/slice Warning GPUUnhealthy"},
		},
		{
			"a part recovers with its GPU",
			list{mig(0, 1, nil, from("GPU-0", lost))},
			list{mig(0, 1, nil)},
			[]string{"team/slice Normal GPURecovered"},
		},
		{
			"a part's own finding",
			list{mig(0, 1, nil)},
			list{mig(0, 1, nil, xid79)},
			[]string{"node Warning GPUUnhealthy", "team/slice Warning GPUUnhealthy"},
		},
	} {
		var got []string
		for _, h := range happenings(c.before, c.after, "n", func(id health.DeviceID) []Pod { return pods[id] }, time.Now()) {
			s := strings.TrimPrefix(h.key.object.namespace+"/"+h.key.object.name, "/")
			if s == "n" {
				s = "node"
			}
			s += " " + h.typ + " " + h.key.reason
			if h.count != 1 {
				s += fmt.Sprintf(" ×%d", h.count)
			}
			got = append(got, s)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestHappeningSaysWhatToDo(t *testing.T) {
	nobody := func(health.DeviceID) []Pod { return nil }
	before := []health.DeviceState{gpu(3, nil)}
	broken := []health.DeviceState{gpu(3, map[int]uint64{79: 1}, finding("xid-79", health.Unhealthy))}
	var got []string
	for _, h := range append(happenings(before, broken, "n", nobody, time.Now()), happenings(broken, before, "n", nobody, time.Now())...) {
		got = append(got, h.message)
	}
	x := health.LookupXID(79)
	want := []string{
		"XID 79 of GPU 3 (GPU-3): " + x.Name + "; " + x.Action.Advice(),
		"GPU 3 (GPU-3) is unhealthy (xid-79): it is xid-79; drain the node and reset the GPU",
		"GPU 3 (GPU-3) is healthy again; cleared: xid-79",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
