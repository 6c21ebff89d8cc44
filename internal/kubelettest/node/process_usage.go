package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Usage is the resource usage of a process.
type Usage struct {
	CPU     time.Duration // since its start, user and system
	RSS     uint64        // bytes
	Anon    uint64        // bytes of RSS that belong to no file and are not shared
	Threads int
	Files   int // open descriptors
}

// UsageOf reads the usage of a process from /proc; proc_pid_stat(5) describes the fields.
func UsageOf(pid int) (u Usage, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return u, err
	}
	// The process name, which may contain anything, is in parentheses; the third field follows it.
	rest := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	const state, utime, stime, threads, rss = 3, 14, 15, 20, 24
	if len(rest) <= rss-state {
		return u, fmt.Errorf("%s/stat: expected at least %d fields, got %d", dir, rss, len(rest)+state-1)
	}
	var n [rss + 1]uint64
	for _, field := range []int{utime, stime, threads, rss} {
		if n[field], err = strconv.ParseUint(rest[field-state], 10, 64); err != nil {
			return u, fmt.Errorf("%s/stat: field %d: %w", dir, field, err)
		}
	}
	const tick = time.Second / 100 // USER_HZ is 100 on all architectures of Go
	u = Usage{
		CPU: time.Duration(n[utime]+n[stime]) * tick, RSS: n[rss] * uint64(os.Getpagesize()), Threads: int(n[threads]),
	}
	if u.Anon, err = anonymous(dir); err != nil {
		return u, err
	}
	files, err := os.ReadDir(filepath.Join(dir, "fd"))
	u.Files = len(files)
	return u, err
}

// anonymous returns the RssAnon of proc_pid_status(5) in bytes. dir is the process's in /proc.
func anonymous(dir string) (uint64, error) {
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "RssAnon: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("%s/status: no RssAnon", dir)
}
