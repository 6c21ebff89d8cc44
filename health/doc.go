// Package health judges GPUs: it derives a verdict for each device from what a source measures and what event sources report.
//
// Judging is pure: the previous devices and a Reading or Observations go in, the new devices come out. One XID takes these steps:
//
//  1. A source lists its row in Sample.Rows, in one reading after another. An event source passes it to EventReceiver.Receive.
//  2. health/monitor has Measure take the reading, and Observe the event.
//  3. Ledger.list finds out whether the row is new. An event has no row.
//  4. Ledger.report counts it, unless another witness has reported it before.
//  5. XIDConfig.Lookup gives its effect: the row in xids.csv, and the configuration.
//  6. xidFinding makes a finding of it, which merge adds to Memory.Findings.
//  7. escalate makes it worse if the driver asks for a reset, and flapping adds what follows from all findings of the device.
//  8. View gives the finding of a GPU to its MIG devices, adds decisions, and derives the Verdict.
//  9. health/monitor stores the devices in an immutable Snapshot, in a Latest.
//  10. The kubelet's view, the metrics, the status page and the node's condition derive from the same snapshot, so they cannot disagree.
package health
