package response

import (
	"strconv"
	"strings"
)

// ForEachAccepted calls f for every entry of an Accept or Accept-Encoding header, in lower case and with its quality
// value (RFC 9110, 12.5), which is 1 if absent or malformed.
func ForEachAccepted(header []string, f func(value string, q float64)) {
	for part := range strings.SplitSeq(strings.Join(header, ","), ",") {
		value, params, _ := strings.Cut(part, ";")
		q := 1.0
		for param := range strings.SplitSeq(params, ";") {
			if k, v, _ := strings.Cut(param, "="); strings.EqualFold(strings.TrimSpace(k), "q") {
				if n, err := strconv.ParseFloat(strings.TrimSpace(v), 64); err == nil {
					q = n
				}
			}
		}
		f(strings.ToLower(strings.TrimSpace(value)), q)
	}
}

// acceptsGzip reports whether a client names gzip and does not prefer an uncompressed response.
func acceptsGzip(acceptEncoding []string) bool {
	gzip, identity := 0.0, 0.0
	ForEachAccepted(acceptEncoding, func(coding string, q float64) {
		switch coding {
		case "gzip":
			gzip = q
		case "identity":
			identity = q
		}
	})
	return gzip > 0 && gzip >= identity
}
