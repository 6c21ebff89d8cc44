// Package logonce tells when a state differs from what was logged last, so that not each attempt is logged. It imports nothing of this
// project, so every package can use it.
package logonce

// State is what was logged last of a state. The zero value has logged nothing.
type State struct{ last string }

// Changed stores a text, "" for nothing to log, and reports whether it differs from the last one. So Changed("") reports whether there was
// something to log before.
func (s *State) Changed(text string) bool {
	changed := text != s.last
	s.last = text
	return changed
}

// ErrorChanged is Changed of an error's text, "" for none.
func (s *State) ErrorChanged(err error) bool {
	if err == nil {
		return s.Changed("")
	}
	return s.Changed(err.Error())
}

// Clear forgets the last text, so that the same one is logged again.
func (s *State) Clear() { s.last = "" }
