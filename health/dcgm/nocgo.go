//go:build !cgo || !linux

package dcgm

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Open fails: DCGM needs Linux and cgo.
func Open(context.Context, Config, *zap.Logger) (health.Session, error) {
	return nil, errors.New("built without DCGM; build for Linux with CGO_ENABLED=1, or set source.mode to sim")
}

// MeasureOnce fails as Open does.
func MeasureOnce(ctx context.Context, cfg Config, log *zap.Logger) (*health.Reading, []health.Field, error) {
	_, err := Open(ctx, cfg, log)
	return nil, nil, err
}

// Library fails as Open does.
func Library() (string, error) {
	_, err := Open(context.Background(), Config{}, nil)
	return "", err
}
