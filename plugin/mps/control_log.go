package mps

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// controlLogName is the daemon's log in Root.LogDir.
const controlLogName = "control.log"

const (
	maxLogRead    = 64 << 10 // bytes of the log in one examination; older ones are skipped
	maxLogUsers   = 64       // users that the log is searched for
	pendingLimit  = 10 * time.Second
	unknownUserID = -1
)

// The lines of the control log that tell who waits (from NVIDIA's forums and manuals; the text is not a documented interface):
//
//	[2021-06-27 07:30:26.216 Control     6] NEW CLIENT 0 from user 0: Server is not ready, push client to pending list
//	[2021-06-27 07:30:26.216 Control     6] Starting new server 17 for user 0
//	[2021-06-27 07:30:26.316 Control     6] NEW SERVER 17: Ready
//	[2021-06-27 07:31:02.011 Control     6] NEW CLIENT 0 from user 0: Server already exists
//
//nolint:gochecknoglobals // constants
var (
	newClientPattern = regexp.MustCompile(`NEW CLIENT \d+ from user (\d{1,10}):(.*)`)
	newServerPattern = regexp.MustCompile(`Starting new server (\d{1,10}) for user (\d{1,10})`)
	pendingText      = []byte("pending")
)

// controlLog follows the log of a daemon. It finds the users of the servers, and the users whose clients wait. A line that it does
// not understand changes nothing.
type controlLog struct {
	path    string
	file    fs.FileInfo
	offset  int64
	servers map[int]int       // users by process ID
	pending map[int]time.Time // by user: when the first of the waiting clients was found
}

func newControlLog(dir string) *controlLog {
	return &controlLog{path: filepath.Join(dir, controlLogName), servers: make(map[int]int), pending: make(map[int]time.Time)}
}

// read reads the lines since the previous call, at most maxLogRead. A log that was replaced or truncated is read from its beginning. One
// that cannot be read changes nothing.
func (l *controlLog) read(now time.Time) {
	f, err := os.OpenFile(l.path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return
	}
	if l.file == nil || !os.SameFile(l.file, info) || info.Size() < l.offset {
		l.offset = 0
	}
	l.file = info
	partial := info.Size()-l.offset > maxLogRead // the first line is cut off
	if partial {
		l.offset = info.Size() - maxLogRead
	}
	text := make([]byte, info.Size()-l.offset)
	n, _ := f.ReadAt(text, l.offset) // the rest is for the next call
	text = text[:n]
	end := bytes.LastIndexByte(text, '\n') + 1 // the last line may be incomplete
	if end == 0 && n == maxLogRead {
		end = n // not a line of the daemon
	}
	l.offset += int64(end)
	if text = text[:end]; partial {
		text = text[bytes.IndexByte(text, '\n')+1:]
	}
	for line := range bytes.Lines(text) {
		l.apply(line, now)
	}
}

func (l *controlLog) apply(line []byte, now time.Time) {
	if m := newServerPattern.FindSubmatch(line); m != nil {
		if pid, uid := number(m[1]), number(m[2]); pid > 0 && uid >= 0 {
			if len(l.servers) >= maxLogUsers {
				clear(l.servers)
			}
			l.servers[pid] = uid
			delete(l.pending, uid)
		}
		return
	}
	m := newClientPattern.FindSubmatch(line)
	if m == nil {
		return
	}
	uid := number(m[1])
	_, waits := l.pending[uid]
	switch isPending := bytes.Contains(m[2], pendingText); {
	case uid < 0:
	case !isPending:
		delete(l.pending, uid)
	case !waits && len(l.pending) < maxLogUsers:
		l.pending[uid] = now
	}
}

func number(text []byte) int {
	n, err := strconv.Atoi(string(text))
	if err != nil {
		return -1
	}
	return n
}

// user returns the user of a server.
func (l *controlLog) user(server int) int {
	if uid, ok := l.servers[server]; ok {
		return uid
	}
	return unknownUserID
}

// forgetPending forgets the clients that have been waiting since before a time. The log does not tell that one of them has exited.
func (l *controlLog) forgetPending(before time.Time) {
	maps.DeleteFunc(l.pending, func(_ int, since time.Time) bool { return since.Before(before) })
}

// waiting returns the users whose clients have been waiting for pendingLimit while all of the servers are those of other users.
func (l *controlLog) waiting(servers []int, now time.Time) (users []int) {
	if len(servers) == 0 {
		return nil
	}
	for uid, since := range l.pending {
		others := !slices.ContainsFunc(servers, func(pid int) bool { u := l.user(pid); return u == unknownUserID || u == uid })
		if others && now.Sub(since) >= pendingLimit {
			users = append(users, uid)
		}
	}
	slices.Sort(users)
	return users
}
