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

// bytesConn is a connection whose client has sent everything and then reads the responses.
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

// requests returns the lines in what a client sends, and whether a line above MaxRequest ends them.
func requests(text []byte) (lines []string, tooLong bool) {
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

// FuzzServeConn sends any bytes: the server handles each line once, in order, and responds with one line of JSON each.
func FuzzServeConn(f *testing.F) {
	for _, text := range []string{
		"", "\n", "a\nb\n", "a\r\n\r\n!b", "no newline", "\x00\n\xff\xfe\n", " \t \v\n", `{"clear":{"device":"GPU-1"}}` + "\n",
		"! two\u2028lines\u2029\n", "\"<>&\n",
		strings.Repeat("x", MaxRequest-1) + "\n", strings.Repeat("x", MaxRequest) + "\n", strings.Repeat("x", MaxRequest-1),
		strings.Repeat("x", MaxRequest),
		"a\n" + strings.Repeat(" ", MaxRequest) + "\nb\n", strings.Repeat("\n", 3*MaxRequest), strings.Repeat("y\n", MaxRequest),
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		want, tooLong := requests(text)
		var handled []string
		conn := &bytesConn{in: bytes.NewReader(text)}
		serveConn(t.Context(), conn, func(_ context.Context, line string) (any, error) {
			handled = append(handled, line)
			if strings.HasPrefix(line, "!") {
				return "ignored", errors.New(line + "\nand more")
			}
			return line, nil
		})
		if !slices.Equal(handled, want) {
			t.Fatalf("handled %q, want %q", handled, want)
		}
		responses := strings.SplitAfter(conn.out.String(), "\n")
		if last := len(responses) - 1; responses[last] != "" {
			t.Fatalf("partial response %q", responses[last])
		} else {
			responses = responses[:last]
		}
		if tooLong {
			want = append(want, "! too long")
		}
		if len(responses) != len(want) {
			t.Fatalf("%d responses to %d lines", len(responses), len(want))
		}
		for i, text := range responses {
			var r struct {
				OK            bool
				Error, Result string
			}
			if err := json.Unmarshal([]byte(text), &r); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			refused := strings.HasPrefix(want[i], "!")
			if r.OK == refused || refused == (r.Error == "") || strings.Contains(r.Error, "\n") {
				t.Errorf("response to %q: %s", want[i], text)
			}
			if !refused && r.Result != strings.ToValidUTF8(want[i], "\ufffd") && r.Result != string([]rune(want[i])) {
				t.Errorf("%q was handled as %q", want[i], r.Result)
			}
		}
	})
}
