// Package grouped collects what concerns several devices, pods or other things, so that a message names them together.
package grouped

import (
	"fmt"
	"iter"
	"slices"
	"strings"
)

// By holds values by key, in the order in which the keys were added first. The zero value is empty.
type By[K comparable, V any] struct {
	keys   []K
	values map[K][]V
}

// Add adds values of a key.
func (b *By[K, V]) Add(key K, values ...V) {
	if b.values == nil {
		b.values = make(map[K][]V)
	}
	if _, exists := b.values[key]; !exists {
		b.keys = append(b.keys, key)
	}
	b.values[key] = append(b.values[key], values...)
}

// All yields each key with its values.
func (b By[K, V]) All() iter.Seq2[K, []V] {
	return func(yield func(K, []V) bool) {
		for _, key := range b.keys {
			if !yield(key, b.values[key]) {
				return
			}
		}
	}
}

// Texts are texts with the names that each concerns.
type Texts struct{ By[string, string] }

// Addf adds a text, and a name to it unless it is empty.
func (t *Texts) Addf(name, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if name == "" {
		t.Add(text)
		return
	}
	t.Add(text, name)
}

// Strings returns each text, followed by its names: "left out: GPU 0, GPU 1".
func (t Texts) Strings() (all []string) {
	for text, names := range t.All() {
		if len(names) > 0 {
			text += ": " + Abbreviate(names)
		}
		all = append(all, text)
	}
	return all
}

// NamesFirst returns each text after its names: "GPU 0, GPU 1 left out".
func (t Texts) NamesFirst(separator string) (all []string) {
	for text, names := range t.All() {
		all = append(all, Abbreviate(names)+separator+text)
	}
	return all
}

const (
	maxListed = 8 // IDs in a message, which may become a Kubernetes event of at most 1 KiB
	maxNamed  = 5 // by Named, whose names are longer
)

// Abbreviate joins the first of many IDs for a message: "GPU-1, GPU-2" or "GPU-1, … and 3 more".
func Abbreviate(ids []string) string {
	if more := len(ids) - maxListed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(ids[:maxListed], ", "), more)
	}
	return strings.Join(ids, ", ")
}

// Named lists names after their noun, and only the first of many: "pod a/b" or "pods a/b, a/c and 3 more".
func Named(noun string, names []string) string {
	if more := len(names) - maxNamed; more > 0 {
		names = append(slices.Clone(names[:maxNamed]), fmt.Sprintf("%d more", more))
	}
	last := len(names) - 1
	if last < 1 {
		return noun + " " + strings.Join(names, "")
	}
	return noun + "s " + strings.Join(names[:last], ", ") + " and " + names[last]
}
