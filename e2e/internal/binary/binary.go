// Package binary has the program that the tests of the packages beside it run.
package binary

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Agent returns the path of the agent: $AGENT_BIN, which must be absolute because tests run in their own directory,
// or what it builds into dir from this repository. It is called in the directory of a test two levels down.
func Agent(dir string) (string, error) {
	path := os.Getenv("AGENT_BIN")
	switch {
	case path == "":
		path = filepath.Join(dir, "gpu-node-agent")
		build := exec.Command("go", "build", "-o", path, ".")
		build.Dir = filepath.Join("..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", build, err, out)
		}
	case !filepath.IsAbs(path):
		return "", errors.New("AGENT_BIN must be an absolute path: tests run in their own directory")
	}
	return path, nil
}
