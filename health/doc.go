// Package health judges GPUs: it derives a verdict for each device from what a source measures.
//
// Judging is pure: the previous devices and a Reading go in, the new devices come out. A Reading lists the rows of XIDs that the source
// has, again and again; the Ledger of a device is the only memory of which are known. health/monitor polls a Session and stores the result
// as an immutable Snapshot in a Latest. The kubelet's view, the metrics, the status page and the node's condition all derive from the same
// snapshot, so they cannot disagree.
package health
