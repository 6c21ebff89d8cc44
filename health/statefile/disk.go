package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// tempInfix is between the name of the state file and the number of a temporary file.
const tempInfix = "tmp-"

// maxSetAside limits the files that are set aside for one path and suffix.
const maxSetAside = 100

// readFile reads a state file. If there is no file, it returns no text and no error.
func readFile(path string) (s Saved, text []byte, err error) {
	text, err = os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Saved{}, nil, nil
	case err == nil:
		if err = json.Unmarshal(text, &s); err != nil {
			err = fmt.Errorf("cannot be parsed: %w", err)
		}
	default:
		text, err = nil, fmt.Errorf("cannot be read: %w", err)
	}
	return s, text, err
}

// Read reads a state file that another process may write. If there is no file, it returns the zero Saved.
func Read(path string) (Saved, error) {
	if path == "" {
		return Saved{}, nil
	}
	s, _, err := readFile(path)
	if err != nil {
		err = fmt.Errorf("%s %w", path, err)
	}
	return s, err
}

// WriteFile replaces a file atomically: a reader finds the old or the new text, also after a crash. Its errors do not contain
// the number of the temporary file, so that a repeated failure has the same text.
func WriteFile(path string, text []byte) (info fs.FileInfo, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	defer func() { err = WithPath(err, path) }()
	f, err := os.CreateTemp(dir, filepath.Base(path)+"."+tempInfix+"*")
	if err != nil {
		return nil, err
	}
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Sync())
	info, statErr := f.Stat()
	err = errors.Join(err, statErr, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()))
	}
	return info, nil
}

// WithPath returns an error of a file with the path of another one. The name of a temporary file differs each time.
func WithPath(err error, path string) error {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("%s %s: %w", pathErr.Op, path, pathErr.Err)
	}
	if linkErr, ok := errors.AsType[*os.LinkError](err); ok {
		return fmt.Errorf("%s %s: %w", linkErr.Op, path, linkErr.Err)
	}
	return err
}

// RemoveTemporaries removes the temporary files of writers that were killed. The caller holds the lock, so that no writer
// uses them.
func RemoveTemporaries(path string) error {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil //nolint:nilerr // the next write fails too and reports it
	}
	var errs []error
	for _, e := range entries {
		if e.Type().IsRegular() && isTemporary(filepath.Base(path), e.Name()) {
			errs = append(errs, os.Remove(filepath.Join(filepath.Dir(path), e.Name())))
		}
	}
	return errors.Join(errs...)
}

// isTemporary reports whether name is a temporary file of WriteFile. Before formatMinor 1 such names had no infix, only the
// number of os.CreateTemp, which nearly always has nine or ten digits.
func isTemporary(base, name string) bool {
	rest, ours := strings.CutPrefix(name, base+".")
	number, infix := strings.CutPrefix(rest, tempInfix)
	digits := number != "" && strings.Trim(number, "0123456789") == ""
	return ours && digits && (infix || len(number) == 9 || len(number) == 10)
}

// SetAside renames a file to an unused name with the suffix, and returns the name.
func SetAside(path, suffix string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() && info.Mode().Type() != fs.ModeSymlink {
		return "", errors.New("not a regular file")
	}
	for n := range maxSetAside {
		aside := path + suffix
		if n > 0 {
			aside += "." + strconv.Itoa(n)
		}
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			return aside, os.Rename(path, aside)
		} else if err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("%d files %s%s* exist already; remove some", maxSetAside, path, suffix)
}
