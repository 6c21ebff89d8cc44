package main

import (
	"errors"
	"os"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// A terminal that is closed without a signal ends the demo.
func TestTimelineEndsWithItsOutput(t *testing.T) {
	kubelet, err := kubelettest.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = r.Close(), w.Close()
	l := timeline{kubelet: kubelet, out: w}
	l.log("kubelet", "an event")
	if err := l.print(t.Context(), false); !errors.Is(err, os.ErrClosed) {
		t.Errorf("%v", err)
	}
}
