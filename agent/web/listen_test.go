package web_test

import (
	"errors"
	"net"
	"testing"
)

// A port that is taken is told once, with what comes of it, and had as soon as it is free.
func TestPortInUse(t *testing.T) {
	t.Parallel()
	other, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, "")
	s.Address()
	s.Listen(other.Addr().String())
	const what = "web server cannot listen; retrying"
	s.Eventually("it says that the port is taken", func() error {
		if s.Logs.FilterMessage(what).Len() == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	s.Eventually("it has the port", func() error {
		if got := s.Address(); got != other.Addr().String() {
			return errors.New(got)
		}
		return nil
	})
	all := s.Logs.FilterMessage(what).All()
	if len(all) != 1 || all[0].ContextMap()["key"] != "metrics.listen" || all[0].ContextMap()["every"] == nil {
		t.Errorf("said: %v", all)
	}
}
