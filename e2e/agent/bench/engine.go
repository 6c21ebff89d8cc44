package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	engineGPUs   = 8
	xidNumber    = 48
	dcgmScript   = "script"
	nvmlSocket   = "nvml.sock"
	scriptThread = "script" // name of the threads of e2e/agent/chaos/testdata/fault_script.c and of health/nvml/testdata/script.c
)

// measureEngine measures the agent with the scripted DCGM and NVML of the tests in its process: the time from NVML's event and from
// DCGM's record of an XID to the kubelet, and the idle cost. The time a real DCGM takes to record an XID is not included.
func (b *bench) measureEngine(ctx context.Context) (err error) {
	if b.repo == "" {
		b.table.notMeasured("DCGM's record of an XID to kubelet: no -repo")
		return nil
	}
	dir, err := os.MkdirTemp("", "gna-bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := b.buildScripted(ctx, dir, scriptedDCGM, scriptedNVML); err != nil {
		return err
	}
	r, err := scripted{b.agent, dir, dir}.start(ctx, "mode: embedded", "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := b.measureEngineIdle(ctx, r.Pid()); err != nil {
		return err
	}
	dcgm, err := openScript(dir)
	if err != nil {
		return err
	}
	defer func() { _ = dcgm.Close() }()
	if err := b.measureDriverEvents(ctx, r, filepath.Join(dir, nvmlSocket), dcgm); err != nil {
		return err
	}
	return b.measureXIDs(ctx, r, dcgm)
}

// The programs that build the scripted libraries, in the repository.
const (
	scriptedDCGM = "e2e/agent/chaos/testdata/build-libdcgm"
	scriptedNVML = "health/nvml/testdata/build-libnvidia-ml"
)

// buildScripted builds scripted libraries in a directory.
func (b *bench) buildScripted(ctx context.Context, dir string, scripts ...string) error {
	for _, script := range scripts {
		if out, err := exec.CommandContext(ctx, filepath.Join(b.repo, script),
			dir).CombinedOutput(); err != nil { //nolint:gosec // of the repository
			return fmt.Errorf("%s: %w\n%s", script, err, out)
		}
	}
	return nil
}

// scripted is an agent with scripted libraries.
type scripted struct {
	binary    string
	libraries string // the directory of the libraries
	control   string // the directory of the files that control them
}

// start starts the agent. DCGM's script has the GPUs and these lines from the start.
func (s scripted) start(ctx context.Context, source, lines string, env ...string) (*testNode, error) {
	script := []byte("up\n" + lines)
	for gpu := range engineGPUs {
		script = fmt.Appendf(script, "status %d 1\n", gpu) // dcgm_structs.h: DcgmEntityStatusOk
	}
	path := filepath.Join(s.control, dcgmScript)
	if err := os.WriteFile(path, append(script, "ready\n"...), 0o600); err != nil {
		return nil, err
	}
	return startSource(ctx, s.binary, source, engineGPUs,
		append(env, "LD_LIBRARY_PATH="+s.libraries, "CHAOS_DCGM="+path, "NVML_SCRIPT="+filepath.Join(s.control, nvmlSocket))...)
}

// engineScript controls the scripted DCGM in the agent.
type engineScript struct{ *os.File }

// openScript opens the script in the directory that controls the libraries.
func openScript(control string) (*engineScript, error) {
	f, err := os.OpenFile(filepath.Join(control, dcgmScript), os.O_APPEND|os.O_WRONLY, 0)
	return &engineScript{f}, err
}

// engineGPU returns the ID of a GPU of the scripted DCGM.
func engineGPU(gpu int) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", gpu) }

// report makes DCGM record XIDs of GPUs within 10 ms.
func (e *engineScript) report(code int, gpus ...int) error {
	var lines []byte
	for _, gpu := range gpus {
		lines = fmt.Appendf(lines, "xid %d %d\n", gpu, code)
	}
	_, err := e.Write(lines)
	return err
}

// clearXID clears the finding of an XID.
func (r *testNode) clearXID(ctx context.Context, id string) error {
	if err := r.Clear(ctx, id, fmt.Sprintf("xid-%d", xidNumber)); err != nil {
		return err
	}
	return r.awaitHealth(ctx, id, true)
}

// measureXIDs measures from the moment when the script reports an XID, which DCGM records within 10 ms, until the kubelet
// has it. NVML does not report these XIDs, whose number is the one of its earlier events. They come at random times: right after a
// poll, each would wait the longest.
func (b *bench) measureXIDs(ctx context.Context, r *testNode, dcgm *engineScript) error {
	b.progress("DCGM's record of an XID to kubelet")
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in each run
	var took []time.Duration
	for i := range b.scale(100) {
		gpu := i % engineGPUs
		id := engineGPU(gpu)
		if err := pause(ctx, time.Duration(random.Int64N(int64(time.Second)))); err != nil {
			return err
		}
		begin := time.Now()
		if err := dcgm.report(xidNumber, gpu); err != nil {
			return err
		}
		if err := r.awaitHealth(ctx, id, false); err != nil {
			return err
		}
		took = append(took, time.Since(begin))
		if err := r.clearXID(ctx, id); err != nil {
			return err
		}
	}
	b.table.addMedian("DCGM's record of an XID to kubelet", took, 300)
	return nil
}

// measureEngineIdle measures the idle CPU usage of an agent that polls DCGM, without the driver's thread.
func (b *bench) measureEngineIdle(ctx context.Context, pid int) error {
	return b.measureIdleCPU(ctx, " with DCGM and NVML, 8 GPUs", noAim, "of scripted libraries", func() (time.Duration, error) {
		return cpuWithout(pid, scriptThread)
	})
}

// cpuWithout returns the CPU time of a process without the threads of a name.
func cpuWithout(pid int, name string) (cpu time.Duration, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil {
		return 0, err
	}
	for _, thread := range threads {
		comm, commErr := os.ReadFile(filepath.Join(thread, "comm"))
		stat, err := os.ReadFile(filepath.Join(thread, "schedstat")) // the first number is nanoseconds on a CPU: sched-stats.rst
		if err := errors.Join(commErr, err); errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread has ended
		} else if err != nil {
			return 0, err
		}
		if strings.TrimSpace(string(comm)) == name {
			continue
		}
		first, _, _ := strings.Cut(string(stat), " ")
		ns, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s/schedstat: %w", thread, err)
		}
		cpu += time.Duration(ns)
	}
	return cpu, nil
}
