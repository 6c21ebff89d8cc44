package apiserver

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// After each exchange of the checkpoint, which has the names of devices, and of the state file, the directory is synced before the spare
// file is written again: until then a crash of the node could make that the file.
func TestDRASyncsDirectories(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("strace"); err != nil {
		t.Fatal("strace is missing; e2e/apiserver/need.sh installs it")
	}
	n := newDRANode(t, "dra-durable", "h100-8", "")
	trace := n.File("strace")
	n.StartAgentUnder("strace", "-D", "-f", "-y", "-s", "16", "-e", "trace=renameat2,fsync,pwrite64", "-o", trace)
	n.awaitDevices(8, nil)
	n.Inject(`{"gpu":0,"xid":79}`)
	n.awaitDevices(8, map[string][]string{"gpu-0": {"gpu-node-agent/xid=79 NoSchedule"}})
	n.EndAgent()
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	renamed := regexp.MustCompile(`renameat2\(.*"([^"]+)\.spare", .*"([^"]+)", (RENAME_EXCHANGE|0)`)
	synced, written := regexp.MustCompile(`fsync\(\d+<([^>]+)>`), regexp.MustCompile(`pwrite64\(\d+<([^>]+)\.spare>.* 0(\)| <)`)
	unsynced, exchanges := make(map[string]bool), make(map[string]int)
	for line := range strings.Lines(string(text)) {
		if m := renamed.FindStringSubmatch(line); m != nil {
			unsynced[m[1]] = true
			if m[3] != "0" {
				exchanges[filepath.Base(m[1])]++
			}
		} else if m := synced.FindStringSubmatch(line); m != nil {
			for path := range unsynced {
				if filepath.Dir(path) == m[1] {
					delete(unsynced, path)
				}
			}
		} else if m := written.FindStringSubmatch(line); m != nil && unsynced[m[1]] {
			t.Errorf("the spare file of %s is written before its directory is synced:\n%s", m[1], text)
		}
	}
	if len(unsynced) > 0 || exchanges["state.sim.json"] == 0 || exchanges["gpu-node-agent.json"] == 0 {
		t.Errorf("not synced: %v, exchanges: %v\n%s", unsynced, exchanges, text)
	}
}
