package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/control"
)

// Clear is an operator's word that a device is well again.
type Clear struct {
	Device health.DeviceID `json:"device"`
	Cause  string          `json:"cause,omitempty"` // "" for all
}

// question is a line on the operator's socket.
type question struct {
	Clear *Clear `json:"clear"`
}

// Cleared is the answer to a Clear.
type Cleared struct {
	Cleared []string `json:"cleared"` // causes
}

// runOperator serves the operator's socket where the configuration wants it.
func (a *Agent) runOperator(ctx context.Context) error {
	for ctx.Err() == nil {
		path, same, cancel := health.While(ctx, &a.health, func(c *health.Config) string { return c.Socket })
		if path == "" {
			<-same.Done()
		} else {
			// Where nothing can be made, listening fails, says so and is tried again.
			_ = os.MkdirAll(filepath.Dir(path), 0o750)
			_ = control.Serve(same, path, a.log.Named("operator"), a.operate) // it ends with same only, and well
		}
		cancel()
	}
	return nil
}

func (a *Agent) operate(line string) (any, error) {
	var q question
	dec := json.NewDecoder(strings.NewReader(line))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil || q.Clear == nil || strings.TrimSpace(line[dec.InputOffset():]) != "" {
		return nil, fmt.Errorf(`%s is not understood; say {"clear":{"device":"GPU-…","cause":"xid-79"}}`, line)
	}
	causes, err := a.monitor.Clear(q.Clear.Device, q.Clear.Cause)
	return Cleared{causes}, err
}

// AskToClear tells the agent that listens on the socket that a device is well again. It returns the causes
// that the agent has dropped.
func AskToClear(ctx context.Context, socket string, c Clear) ([]string, error) {
	text, err := control.Ask(ctx, socket, question{Clear: &c})
	if err != nil {
		return nil, err
	}
	var answer struct {
		Result Cleared `json:"result"`
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		return nil, err
	}
	return answer.Result.Cleared, nil
}
