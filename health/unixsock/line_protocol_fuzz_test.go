package unixsock

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// bytesConn is a connection whose client has sent everything, waits for the answers and goes.
type bytesConn struct {
	net.Conn
	in  *bytes.Reader
	out bytes.Buffer
}

func (c *bytesConn) Read(b []byte) (int, error)       { return c.in.Read(b) }
func (c *bytesConn) Write(b []byte) (int, error)      { return c.out.Write(b) }
func (c *bytesConn) Close() error                     { return nil }
func (c *bytesConn) SetReadDeadline(time.Time) error  { return nil }
func (c *bytesConn) SetWriteDeadline(time.Time) error { return nil }

// questions is what is in the bytes that a client sends, and whether a line too long ends it.
func questions(text []byte) (lines []string, tooLong bool) {
	for len(text) > 0 {
		line, rest, whole := bytes.Cut(text, []byte("\n"))
		if whole && len(line)+1 > MaxRequest || !whole && len(line) >= MaxRequest {
			return lines, true
		}
		if s := strings.TrimSpace(string(line)); s != "" {
			lines = append(lines, s)
		}
		text = rest
	}
	return lines, false
}

// FuzzConverse sends anything: each line is asked once, in order, and has one line of JSON for an answer.
func FuzzConverse(f *testing.F) {
	for _, text := range []string{
		"", "\n", "a\nb\n", "a\r\n\r\n!b", "no newline", "\x00\n\xff\xfe\n", " \t \v\n", `{"clear":{"device":"GPU-1"}}` + "\n", "! two\u2028lines\u2029\n", "\"<>&\n",
		strings.Repeat("x", MaxRequest-1) + "\n", strings.Repeat("x", MaxRequest) + "\n", strings.Repeat("x", MaxRequest-1), strings.Repeat("x", MaxRequest),
		"a\n" + strings.Repeat(" ", MaxRequest) + "\nb\n", strings.Repeat("\n", 3*MaxRequest), strings.Repeat("y\n", MaxRequest),
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		want, tooLong := questions(text)
		var heard []string
		conn := &bytesConn{in: bytes.NewReader(text)}
		converse(t.Context(), conn, func(_ context.Context, line string) (any, error) {
			heard = append(heard, line)
			if strings.HasPrefix(line, "!") {
				return "not shown", errors.New(line + "\nand more")
			}
			return line, nil
		})
		if !slices.Equal(heard, want) {
			t.Fatalf("heard %q, want %q", heard, want)
		}
		answers := strings.SplitAfter(conn.out.String(), "\n")
		if last := len(answers) - 1; answers[last] != "" {
			t.Fatalf("%q is half an answer", answers[last])
		} else {
			answers = answers[:last]
		}
		if tooLong {
			want = append(want, "! too long")
		}
		if len(answers) != len(want) {
			t.Fatalf("%d answers to %d lines", len(answers), len(want))
		}
		for i, text := range answers {
			var r struct {
				OK            bool
				Error, Result string
			}
			if err := json.Unmarshal([]byte(text), &r); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			refused := strings.HasPrefix(want[i], "!")
			if r.OK == refused || refused == (r.Error == "") || strings.Contains(r.Error, "\n") {
				t.Errorf("%q is answered %s", want[i], text)
			}
			if !refused && r.Result != strings.ToValidUTF8(want[i], "\ufffd") && r.Result != string([]rune(want[i])) {
				t.Errorf("%q is heard as %q", want[i], r.Result)
			}
		}
	})
}
