// Supply checks the licences of the agent's modules and writes its SBOM.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const usage = `usage:
  supply licenses [-write] [-texts FILE] DIR   compare DIR/` + listName + ` with what the module in DIR is built of, or write it
  supply sbom -version V [-o FILE] DIR BINARY  a CycloneDX SBOM of a binary built of the module in DIR`

func run(args []string) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	write := flags.Bool("write", false, "write the list")
	texts := flags.String("texts", "", "file for all licence texts")
	out := flags.String("o", "sbom.json", "file for the SBOM")
	version := flags.String("version", "", "version of the agent")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	rest := flags.Args()
	switch {
	case args[0] == "licenses" && len(rest) == 1:
		return licenses(rest[0], *write, *texts)
	case args[0] == "sbom" && len(rest) == 2 && *version != "":
		return sbom(rest[0], rest[1], *version, *out)
	}
	return errors.New(usage)
}

// licenses fails on disallowed licences, then writes the list or compares it with the existing file.
func licenses(dir string, write bool, texts string) error {
	modules, err := linkedModules(dir)
	if err != nil {
		return err
	}
	if err := classify(modules); err != nil {
		return err
	}
	if texts != "" {
		if err := os.WriteFile(texts, []byte(licenseTexts(modules)), 0o644); err != nil {
			return err
		}
	}
	path, list := filepath.Join(dir, listName), licenseList(modules)
	if write {
		return os.WriteFile(path, []byte(list), 0o644)
	}
	have, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if string(have) != list {
		return fmt.Errorf("%s is out of date; run make licenses. Differences:\n%s", listName, difference(string(have), list))
	}
	fmt.Printf("%d modules, all licences allowed\n", len(modules))
	return nil
}
