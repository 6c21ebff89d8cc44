package unixsock

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo answers a line with itself, and refuses "no".
func echo(_ context.Context, line string) (any, error) {
	if line == `"no"` {
		return "what is shown of a refusal", errors.New("because\nof that")
	}
	return map[string]string{"line": line}, nil
}

func TestConversation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, path, zap.NewNop(), echo) }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	text, err := Call(t.Context(), path, "yes")
	for err != nil { // not open yet
		<-tick.C
		text, err = Call(t.Context(), path, "yes")
	}
	if want := `{"ok":true,"result":{"line":"\"yes\""}}`; text != want {
		t.Errorf("got %s, want %s", text, want)
	}
	if text, err := Call(t.Context(), path, "no"); err == nil || err.Error() != "because; of that" || text != `{"ok":false,"error":"because; of that"}` {
		t.Errorf("a refusal is %s, %v", text, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := Call(t.Context(), path, "yes"); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("nobody listens: %v", err)
	}
}

func TestIdleConnectionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		ended := make(chan struct{})
		var heard []string
		go func() {
			defer close(ended)
			converse(t.Context(), theirs, func(_ context.Context, line string) (any, error) {
				heard = append(heard, line)
				return nil, nil
			})
		}()
		start := time.Now()
		<-time.After(IdleTimeout - time.Second)
		if _, err := io.WriteString(ours, "whole\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := bufio.NewReader(ours).ReadString('\n'); err != nil || got != "{\"ok\":true}\n" {
			t.Errorf("just in time gets %q, %v", got, err)
		}
		// Bytes that make no line do not count, nor are they a question.
		if _, err := io.WriteString(ours, "half"); err != nil {
			t.Error(err)
		}
		<-ended
		if took := time.Since(start); took != 2*IdleTimeout-time.Second {
			t.Errorf("ended after %v; want a minute after the last line", took)
		}
		if !slices.Equal(heard, []string{"whole"}) {
			t.Errorf("heard %q, want the whole line only", heard)
		}
		_ = ours.Close()
	})
}
