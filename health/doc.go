// Package health judges GPUs: it derives a verdict for each device from what a source measures.
//
// The package is pure and has no goroutines: a Reading of a Session goes in, an immutable Snapshot comes out. health/monitor
// polls the source and stores the snapshots in a Latest. The kubelet's view, the metrics, the status page and the node's
// condition all derive from the same snapshot, so they cannot disagree.
package health
