package node

import "strings"

// The largest lengths of a label: of its value, and of its key after the prefix.
const (
	maxValue = 63
	maxName  = 63
)

// labelValue returns a valid value of a label: sanitize, then trimValue.
func labelValue(text string) string { return trimValue(sanitize(text)) }

// sanitize replaces blanks and removes other characters that a label cannot have, as GFD does.
func sanitize(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case isAlphanumeric(r), strings.ContainsRune("-_. ", r):
			return r
		}
		return -1
	}, text)
	return strings.Join(strings.Fields(text), "-")
}

// trimValue cuts a sanitized text to maxValue. A value begins and ends with a letter or digit.
func trimValue(text string) string {
	notAlphanumeric := func(r rune) bool { return !isAlphanumeric(r) }
	text = strings.TrimLeftFunc(text, notAlphanumeric)
	return strings.TrimRightFunc(text[:min(len(text), maxValue)], notAlphanumeric)
}

func isAlphanumeric(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
}

// profileInKey returns a MIG profile for the key of a label, in which + is invalid.
func profileInKey(profile string) string { return sanitize(strings.ReplaceAll(profile, "+", ".")) }
