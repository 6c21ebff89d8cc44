package catalog

import "testing"

func TestValidCause(t *testing.T) {
	for _, cause := range []string{"xid-79", "xid-1", "xid-999", "lost", "cordoned", "mps-hung", "dcgm-nvlink-down", "dcgm-10000"} {
		if !ValidCause(cause) {
			t.Errorf("%q is not valid", cause)
		}
	}
	for _, cause := range []string{
		"", "xid", "xid-", "xid-0", "xid-079", "xid--1", "xid79", "XID-79", "Lost", "lost ", "dcgm-", "dcgm-0",
		"dcgm-NVLINK-DOWN", "dcgm-nvlink_down", "dcgm-fr-nvlink-down", "dcgm-010000",
	} {
		if ValidCause(cause) {
			t.Errorf("%q is valid", cause)
		}
	}
	for code := 1; code < len(incidentRows())+3; code++ {
		if cause := LookupIncident(code).Cause(); !ValidCause(cause) {
			t.Errorf("%q is not valid", cause)
		}
	}
}
