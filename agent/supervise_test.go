package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

func TestSuperviseStopsAllWhenOneReturns(t *testing.T) {
	for _, end := range []error{nil, errors.New("boom")} {
		synctest.Test(t, func(t *testing.T) {
			stopped := 0
			err := supervise(t.Context(), zap.NewNop(),
				component{name: "short", run: func(context.Context) error { <-time.After(time.Second); return end }},
				component{name: "long", run: func(ctx context.Context) error { <-ctx.Done(); stopped++; return nil }},
			)
			if err == nil || !strings.Contains(err.Error(), "short") || end != nil && !errors.Is(err, end) {
				t.Fatalf("got %v, want an error that names the component", err)
			}
			if stopped != 1 {
				t.Fatal("the other component was not stopped")
			}
		})
	}
}

func TestSuperviseAbandonsStuckComponent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		stuck := make(chan struct{})
		begin := time.Now()
		if err := supervise(ctx, zap.NewNop(), component{name: "stuck", run: func(context.Context) error { <-stuck; return nil }}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != time.Second+stopTimeout {
			t.Fatalf("stopped after %v", took)
		}
		close(stuck)
	})
}

func TestSuperviseStopsInOrder(t *testing.T) {
	for _, first := range []time.Duration{0, time.Second, time.Hour} { // how long the first takes to stop
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var order []string
			var took time.Duration
			begin := time.Now()
			stuck := make(chan struct{})
			err := supervise(ctx, zap.NewNop(),
				component{name: "second", after: []string{"first"}, run: func(ctx context.Context) error {
					<-ctx.Done()
					order, took = append(order, "second"), time.Since(begin)-time.Minute
					return nil
				}},
				component{name: "first", run: func(ctx context.Context) error {
					<-ctx.Done()
					select {
					case <-time.After(first):
						order = append(order, "first")
					case <-stuck:
					}
					return nil
				}},
			)
			if err != nil {
				t.Fatal(err)
			}
			if want := min(first, orderTimeout); took != want {
				t.Errorf("the second was stopped after %v, want %v", took, want)
			}
			if inOrder := slices.Equal(order, []string{"first", "second"}); inOrder != (first < orderTimeout) {
				t.Errorf("stopped in the order %q", order)
			}
			if took := time.Since(begin) - time.Minute; took > stopTimeout {
				t.Errorf("stopping took %v", took)
			}
			close(stuck)
		})
	}
}
