// Command docs writes the generated parts of the documents, between the markers <!-- generated: NAME --> and
// <!-- end generated -->. Run it from the repository's root: make docs.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := write("."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// write rewrites every document below root whose generated parts are out of date.
func write(root string) error {
	files, err := documents(root)
	if err != nil {
		return err
	}
	for _, file := range files {
		before, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		after, err := generate(root, string(before))
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if after != string(before) {
			if err := os.WriteFile(file, []byte(after), 0o644); err != nil { //nolint:gosec // a document
				return err
			}
		}
	}
	return nil
}
