package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// reserve is the space in bytes that the disk keeps for the state at least, twice. The state of 8 GPUs with every XID that a flood leaves
// in Ledger.Rows takes half of it.
const reserve = 1 << 20

func fileOptions() durable.Options { return durable.WithSpare(reserve) }

// readFunc reads a file like durable.Options.Read.
type readFunc func(path string) (text []byte, info fs.FileInfo, err error)

// saved reads a state file. If there is no file, it returns no text and no error.
func (read readFunc) saved(path string) (s Saved, text []byte, info fs.FileInfo, err error) {
	text, info, err = read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Saved{}, nil, nil, nil
	case err == nil:
		if err = json.Unmarshal(text, &s); err != nil {
			err = fmt.Errorf("cannot be parsed: %w", err)
		}
	default:
		text, err = nil, fmt.Errorf("cannot be read: %w", err)
	}
	return s, text, info, err
}

// Read reads a state file that another process may write. If there is no file, it returns the zero Saved.
func Read(path string) (Saved, error) {
	if path == "" {
		return Saved{}, nil
	}
	s, _, _, err := readFunc(fileOptions().Read).saved(path)
	if err != nil {
		err = fmt.Errorf("%s %w", path, err)
	}
	return s, err
}
