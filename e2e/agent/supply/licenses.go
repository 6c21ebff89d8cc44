package main

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// listName is the list of the agent's modules and licences, in the directory of its go.mod.
const listName = "THIRD_PARTY_LICENSES.csv"

// allowed returns the licences that require no more than their text and notices. Any other needs a decision.
func allowed() []string { return []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"} }

// minMatch is the percentage of a licence file that must match known licences.
const minMatch = 75

// classify reads the licences of modules. The error names every module without a licence, and with an unknown or
// disallowed one.
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
			errs = append(errs, fmt.Errorf("%s@%s: no licence found in %s", m.Path, m.Version, m.Dir))
		}
		for _, id := range m.IDs {
			if !slices.Contains(allowed(), id) {
				errs = append(errs, fmt.Errorf("%s@%s: licence %s is not allowed; use one of %s, or remove the module",
					m.Path, m.Version, id, strings.Join(allowed(), ", ")))
			}
		}
	}
	return errors.Join(errs...)
}

// identify returns the SPDX identifiers of the licences in a text.
func identify(text string) ([]string, error) {
	found := licensecheck.Scan([]byte(text))
	var ids []string
	for _, m := range found.Match {
		if !m.IsURL && !slices.Contains(ids, m.ID) {
			ids = append(ids, m.ID)
		}
	}
	if found.Percent < minMatch {
		return ids, fmt.Errorf("only %.0f %% of the text matches known licences (%s)", found.Percent, strings.Join(ids, ", "))
	}
	return ids, nil
}

// licenseList returns the list of modules as CSV. The standard library's version is empty: it depends on who builds.
func licenseList(modules []*Module) string {
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

// licenseTexts returns every licence and notice, which must accompany the binary.
func licenseTexts(modules []*Module) string {
	var b strings.Builder
	for _, m := range modules {
		for _, f := range m.files {
			title := strings.TrimSpace(m.Path + " " + m.Version + " " + f.name)
			fmt.Fprintf(&b, "%s\n%s\n\n%s\n\n", title, strings.Repeat("=", len(title)), strings.TrimSpace(f.text))
		}
	}
	return b.String()
}

// difference returns the lines that only one of two lists has.
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
