package binarytest

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// A line of the kernel log makes a GPU unhealthy and completes the XID that the source reports; a line of a process does not.
func TestKernelLog(t *testing.T) {
	t.Parallel()
	p := newProcess(t, "source: {mode: sim, kernelLog: true, kernelLogPath: DIR/kmsg, sim: {control: DIR/sim.sock}}")
	if err := syscall.Mkfifo(p.Dir+"/kmsg", 0o600); err != nil {
		t.Fatal(err)
	}
	k := p.launchRegistered()
	p.awaitMetrics(`gpu_node_agent_event_source_up{witness="kernel-log"} 1`)
	gpu := p.snapshot().GPUs[6]
	var log strings.Builder
	for i, line := range []string{
		"12,%d,9,-;NVRM: Xid (PCI:%s): 79, GPU has fallen off the bus.\n",
		"4,%d,9,-;NVRM: Xid (PCI:%s): 31, pid=7194, name=python3, Ch 00000008\n",
		"4,%d,9,-;NVRM: Xid (PCI:%s): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)\n",
	} {
		fmt.Fprintf(&log, line, i, strings.ToLower(strings.TrimSuffix(gpu.PCI, ".0")))
	}
	if err := os.WriteFile(p.Dir+"/kmsg", []byte(log.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	p.awaitAllocatable(k, 7)
	p.sim("{gpu: 6, xid: 31}")
	p.awaitPolls(3)
	events := 0
	for _, e := range p.snapshot().Events {
		if e.XID == 31 && strings.Contains(e.Text, "process python3 (pid 7194)") {
			events++
		}
	}
	if gpu = p.snapshot().GPUs[6]; events != 1 || gpu.Findings[0].Cause != "xid-149" || len(gpu.XIDs) != 2 {
		t.Errorf("%d events name the process; %+v, XIDs %+v; want one, XID 149, and two", events, gpu.Findings, gpu.XIDs)
	}
	for code, want := range map[string]float64{"31": 1, "149": 1, "79": 0} {
		if n := p.value("gpu_node_agent_xid_errors_total", "gpu", "6", "xid", code); n != want {
			t.Errorf("XID %s: %v, want %v", code, n, want)
		}
	}
}
