package sequence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// Simulated returns the devices of a simulation, the value of source.sim in YAML, and their IDs by the names in slices. It asks an agent
// that it runs for that.
func Simulated(ctx context.Context, binary, sim string) (devices Node, byName map[string]string, err error) {
	dir, err := os.MkdirTemp("", "gna") // short: the path of a socket is limited
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file, socket := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "agent.sock")
	text := fmt.Sprintf("source: {mode: sim, sim: %s}\nhealth: {socket: %s}\n"+
		"plugin: {enabled: false, kubeletDir: %s}\nmetrics: {listen: '127.0.0.1:0'}\n", sim, socket, dir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	agent := exec.CommandContext(ctx, binary, "--config", file, "--state-dir=")
	if err := agent.Start(); err != nil {
		return nil, nil, err
	}
	defer func() {
		cancel()
		_ = agent.Wait()
	}()
	for {
		out, err := exec.CommandContext(ctx, binary, "dra", "slices", "--socket", socket, "-o", "json").Output()
		if err == nil {
			var list resourceapi.ResourceSliceList
			if err := json.Unmarshal(out, &list); err != nil {
				return nil, nil, err
			}
			devices, byName = devicesOf(list.Items)
			return devices, byName, nil
		}
		select {
		case <-ctx.Done():
			return nil, nil, errors.Join(errors.New("the simulation publishes no devices"), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
