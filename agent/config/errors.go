package config

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// origin describes where a key is set.
type origin struct {
	source string // the file, the variable or the flag
	value  string
}

// origins are the origins of the keys that are set.
type origins map[string]origin

// source returns the flag, variable or file whose value a key has.
func (l Loader) source(key string) string {
	if l.Flags != nil && l.Flags.Changed(key) {
		return "--" + key
	}
	if name := envName(key); os.Getenv(name) != "" { // an empty variable counts as unset
		return name
	}
	return l.Path()
}

// annotate appends to each joined error the source of the key that it starts with.
func (o origins) annotate(err error) error {
	return mapErrors(err, func(err error) error {
		text := err.Error()
		key := text[:max(0, strings.IndexAny(text, ":["))]
		for key != "" {
			if at, ok := o[key]; ok && !strings.HasPrefix(text, key+": "+at.value+": ") { // otherwise the error is in the file that the key names
				return inFile(at.source, err)
			}
			key = key[:max(0, strings.LastIndexByte(key, '.'))]
		}
		return err
	})
}

// inFile appends a source to each joined error.
func inFile(source string, err error) error {
	return mapErrors(err, func(err error) error { return fmt.Errorf("%w (in %s)", err, source) })
}

// withPrefix prepends a text, such as the name of a section and a dot, to each joined error.
func withPrefix(text string, err error) error {
	return mapErrors(err, func(err error) error { return fmt.Errorf("%s%w", text, err) })
}

// mapErrors applies a function to each joined error.
func mapErrors(err error, f func(error) error) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, e := range joined.Unwrap() {
			errs = append(errs, mapErrors(e, f))
		}
		return errors.Join(errs...)
	}
	return f(err)
}
