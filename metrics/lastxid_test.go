package metrics

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A GPU that is lost measures nothing, and its last XID is why: an alert on it must not end with it. A GPU that is there
// has what DCGM has, and no more.
func TestLastXIDOfALostDevice(t *testing.T) {
	for _, c := range []struct {
		presence health.Presence
		measured map[health.Field]float64
		last     int
		want     string // "": no series
	}{
		{health.Present, map[health.Field]float64{health.FieldXID: 31}, 79, "31"},
		{health.Present, nil, 79, ""},
		{health.Lost, nil, 79, "79"},
		{health.Missing, nil, 79, "79"},
		{health.Inaccessible, nil, 79, "79"},
		{health.Detached, nil, 79, "79"},
		{health.PresenceUnknown, nil, 79, "79"},
		{health.Lost, map[health.Field]float64{health.FieldXID: 48}, 79, "48"},
		{health.Lost, nil, 0, ""},
	} {
		s := node()
		lost := &s.Devices[1]
		lost.Sample = health.Sample{Presence: c.presence, Values: c.measured}
		lost.LastXID = health.XID{Code: c.last, At: now}
		if c.last == 0 {
			lost.LastXID = health.XID{}
		}
		page := exposition(t, NewGatherer(sources(s)))
		all := series(page, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`)
		right := series(page, "DCGM_FI_DEV_XID_ERRORS", `UUID="GPU-b"`, `err_code="`+c.want+`"`, "} "+c.want+"\n")
		if c.want == "" && len(all) > 0 || c.want != "" && (len(all) != 1 || len(right) != 1) {
			t.Errorf("%+v: %q", c, all)
		}
	}
}
