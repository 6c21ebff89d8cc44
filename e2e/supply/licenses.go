package main

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// listName is the list of what the agent is made of, beside its go.mod.
const listName = "THIRD_PARTY_LICENSES.csv"

// allowed are licences that ask for no more than their text and notices: what is not here needs a decision.
func allowed() []string { return []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"} }

// enough is the part of a licence file, in percent, that must be the text of known licences.
const enough = 75

// classify reads the licences of modules. The error names every module that has none, an unknown one, or one
// that is not allowed.
func classify(modules []*Module) error {
	var errs []error
	for _, m := range modules {
		if err := m.read(); err != nil {
			errs = append(errs, err)
			continue
		}
		for _, f := range m.files {
			if !licenceName.MatchString(path.Base(f.name)) {
				continue
			}
			ids, err := identify(f.text)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s@%s: %s: %w", m.Path, m.Version, f.name, err))
			}
			m.IDs = append(m.IDs, ids...)
		}
		slices.Sort(m.IDs)
		m.IDs = slices.Compact(m.IDs)
		if len(m.IDs) == 0 {
			errs = append(errs, fmt.Errorf("%s@%s: no licence is known; look into %s", m.Path, m.Version, m.Dir))
		}
		for _, id := range m.IDs {
			if !slices.Contains(allowed(), id) {
				errs = append(errs, fmt.Errorf("%s@%s: the licence %s is not allowed; use one of %s, or do without the module",
					m.Path, m.Version, id, strings.Join(allowed(), ", ")))
			}
		}
	}
	return errors.Join(errs...)
}

// identify returns the SPDX identifiers of the licences that a text is.
func identify(text string) ([]string, error) {
	found := licensecheck.Scan([]byte(text))
	var ids []string
	for _, m := range found.Match {
		if !m.IsURL && !slices.Contains(ids, m.ID) {
			ids = append(ids, m.ID)
		}
	}
	if found.Percent < enough {
		return ids, fmt.Errorf("only %.0f %% of it are a licence that is known (%s)", found.Percent, strings.Join(ids, ", "))
	}
	return ids, nil
}

// listOf is the list as it should be. The version of Go's own library is that of whoever builds.
func listOf(modules []*Module) string {
	var b strings.Builder
	b.WriteString("module,version,licences,files\n")
	for _, m := range modules {
		var names []string
		for _, f := range m.files {
			names = append(names, f.name)
		}
		fmt.Fprintf(&b, "%s,%s,%s,%s\n", m.Path, m.Version, strings.Join(m.IDs, " AND "), strings.Join(names, " "))
	}
	return b.String()
}

// allTexts is what has to come with the binary: every licence and notice.
func allTexts(modules []*Module) string {
	var b strings.Builder
	for _, m := range modules {
		for _, f := range m.files {
			title := strings.TrimSpace(m.Path + " " + m.Version + " " + f.name)
			fmt.Fprintf(&b, "%s\n%s\n\n%s\n\n", title, strings.Repeat("=", len(title)), strings.TrimSpace(f.text))
		}
	}
	return b.String()
}

// difference is the lines that only one of two lists has.
func difference(have, want string) string {
	h, w := strings.Split(have, "\n"), strings.Split(want, "\n")
	var b strings.Builder
	for _, line := range h {
		if !slices.Contains(w, line) {
			b.WriteString("- " + line + "\n")
		}
	}
	for _, line := range w {
		if !slices.Contains(h, line) {
			b.WriteString("+ " + line + "\n")
		}
	}
	return b.String()
}
