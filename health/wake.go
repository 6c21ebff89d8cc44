package health

import (
	"context"
	"reflect"
)

// Replaceable is a Latest.
type Replaceable interface {
	replaced() <-chan struct{}
}

// replaced returns a channel that closes when a newer value is stored. A nil Latest never has one.
func (l *Latest[T]) replaced() <-chan struct{} {
	if l == nil {
		return nil
	}
	_, changed := l.Watch()
	return changed
}

// Wake returns a channel that receives after any of the values was replaced, until ctx ends. It holds one token: a loop that loads the
// values after each receive misses none, and runs once for several that were replaced meanwhile.
func Wake(ctx context.Context, values ...Replaceable) <-chan struct{} {
	wake := make(chan struct{}, 1)
	cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}}
	for _, v := range values {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(v.replaced())})
	}
	go func() {
		for {
			i, _, _ := reflect.Select(cases)
			if i == 0 {
				return
			}
			cases[i].Chan = reflect.ValueOf(values[i-1].replaced()) // before the token, so that the value loaded after it is watched
			select {
			case wake <- struct{}{}:
			default: // the loop has not taken the last one, and loads the values later
			}
		}
	}()
	return wake
}
