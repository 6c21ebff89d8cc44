// Package health is the vocabulary of GPU health: devices, what a source measures and event sources report of them, findings, verdicts, and
// the Snapshot that everything else derives from.
//
// health/judge judges, and is pure: the previous devices and a Reading or Observations go in, the new devices come out. One XID takes these
// steps:
//
//  1. A source lists its row in Sample.Rows, in one reading after another. An event source passes it to EventReceiver.Receive.
//  2. health/monitor has judge.OutageFilter.Measure take the reading, and judge.Observe the event.
//  3. Ledger.List finds out whether the row is new. An event has no row.
//  4. Ledger.Take counts it, unless another witness has reported it before.
//  5. catalog.XIDConfig.LookupDetailed gives its effect: the row in xids.csv, and the configuration.
//  6. judge.xidFinding makes a finding of it, which merge adds to Memory.Findings.
//  7. escalate makes it worse if the driver asks for a reset, and flapping adds what follows from all findings of the device.
//  8. judge.View gives the finding of a GPU to its MIG devices, adds decisions, and derives the Verdict.
//  9. health/monitor stores the devices in an immutable Snapshot, in a Latest.
//  10. The kubelet's view, the metrics, the status page and the node's condition derive from the same snapshot, so they cannot disagree.
package health
