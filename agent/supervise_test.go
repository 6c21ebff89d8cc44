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

func waits(ctx context.Context) error { <-ctx.Done(); return nil }

func TestSuperviseEndsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := supervise(ctx, zap.NewNop(), part{name: "a", run: waits}, part{name: "b", run: waits}); err != nil {
			t.Fatal(err)
		}
	})
}

func TestTheFirstPartToReturnEndsAll(t *testing.T) {
	for _, end := range []error{nil, errors.New("boom")} {
		synctest.Test(t, func(t *testing.T) {
			others := 0
			err := supervise(t.Context(), zap.NewNop(),
				part{name: "short", run: func(context.Context) error { <-time.After(time.Second); return end }},
				part{name: "long", run: func(ctx context.Context) error { <-ctx.Done(); others++; return nil }},
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
		if err := supervise(ctx, zap.NewNop(), part{name: "stuck", run: func(context.Context) error { <-stuck; return nil }}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != time.Second+endWithin {
			t.Fatalf("ended after %v", took)
		}
		close(stuck)
	})
}

func TestSuperviseKeepsTheOrder(t *testing.T) {
	for _, first := range []time.Duration{0, time.Second, time.Hour} { // how long the first takes to end
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var order []string
			var took time.Duration
			begin := time.Now()
			stuck := make(chan struct{})
			err := supervise(ctx, zap.NewNop(),
				part{name: "second", after: []string{"first"}, run: func(ctx context.Context) error {
					<-ctx.Done()
					order, took = append(order, "second"), time.Since(begin)-time.Minute
					return nil
				}},
				part{name: "first", run: func(ctx context.Context) error {
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
			if want := min(first, orderWithin); took != want {
				t.Errorf("the second was asked to end after %v, want %v", took, want)
			}
			if inOrder := slices.Equal(order, []string{"first", "second"}); inOrder != (first < orderWithin) {
				t.Errorf("they ended in the order %q", order)
			}
			if took := time.Since(begin) - time.Minute; took > endWithin {
				t.Errorf("the end took %v", took)
			}
			close(stuck)
		})
	}
}
