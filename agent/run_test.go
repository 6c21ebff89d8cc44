package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

func waits(ctx context.Context) error { <-ctx.Done(); return nil }

func TestSuperviseEndsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := supervise(ctx, zap.NewNop(), part{"a", waits}, part{"b", waits}); err != nil {
			t.Fatal(err)
		}
	})
}

func TestTheFirstPartToReturnEndsAll(t *testing.T) {
	for _, end := range []error{nil, errors.New("boom")} {
		synctest.Test(t, func(t *testing.T) {
			others := 0
			err := supervise(t.Context(), zap.NewNop(),
				part{"short", func(context.Context) error { <-time.After(time.Second); return end }},
				part{"long", func(ctx context.Context) error { <-ctx.Done(); others++; return nil }},
			)
			if err == nil || !strings.Contains(err.Error(), "short") || end != nil && !errors.Is(err, end) {
				t.Fatalf("got %v, want an error that names the part", err)
			}
			if others != 1 {
				t.Fatal("the other part was not ended")
			}
		})
	}
}

func TestAPartThatDoesNotEndIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		stuck := make(chan struct{})
		begin := time.Now()
		if err := supervise(ctx, zap.NewNop(), part{"stuck", func(context.Context) error { <-stuck; return nil }}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != time.Second+endWithin {
			t.Fatalf("ended after %v", took)
		}
		close(stuck)
	})
}
