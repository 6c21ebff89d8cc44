package web

// Limits for the tests outside of the package.
const (
	MaxConnections = maxConnections
	MaxStreams     = maxStreams
)
