package logonce

import (
	"errors"
	"testing"
)

func TestState(t *testing.T) {
	var s State
	disk, full := errors.New("no disk"), errors.New("disk is full")
	for i, step := range []struct {
		err     error
		changed bool
	}{{nil, false}, {disk, true}, {disk, false}, {full, true}, {disk, true}, {nil, true}, {nil, false}, {disk, true}, {disk, false}} {
		if changed := s.ErrorChanged(step.err); changed != step.changed {
			t.Errorf("step %d, %v: changed %v", i, step.err, changed)
		}
	}
	if s.Changed(disk.Error()) {
		t.Error("an error and its text differ")
	}
	if s.Clear(); !s.Changed(disk.Error()) {
		t.Error("not changed after Clear")
	}
}
