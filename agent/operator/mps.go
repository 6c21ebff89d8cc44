package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// TerminateRequest asks to terminate an MPS client.
type TerminateRequest struct {
	Device string `json:"device"` // a device reference
	Client int    `json:"client"` // PID
}

// MPSResponse lists the MPS daemons.
type MPSResponse struct {
	Error   string             `json:"error,omitempty"` // why the daemons cannot be followed
	Daemons []status.MPSDaemon `json:"daemons"`
}

// TerminateResponse is the result of a TerminateRequest.
type TerminateResponse struct {
	Device health.DeviceID `json:"device"`
	Client int             `json:"client"`
}

// MPS is the agent's part of MPS.
type MPS interface {
	Clients(ctx context.Context, device health.DeviceID) (byServer map[int][]int, err error)
	TerminateClient(ctx context.Context, device health.DeviceID, client int) error
	Err() string // why the daemons cannot be followed; empty if they can
}

// mpsTimeout limits `mps`: the control program has ten seconds for each of its answers.
const mpsTimeout = 30 * time.Second

// mpsUnused is what `mps` prints on a node without MPS daemons.
const mpsUnused = "MPS serves no device of this node; plugin.sharing.mps.resources selects the devices that it serves"

func (s *Server) mps(ctx context.Context) (MPSResponse, error) {
	daemons := status.MPSDaemons(s.Snapshots.Load(), s.Processes())
	s.updateClients(ctx, daemons)
	return MPSResponse{s.MPS.Err(), daemons}, nil
}

// updateClients asks the ready daemons for their current clients. If a daemon does not answer in time, its clients stay as they were listed
// last: a daemon that hangs must not hide the others.
func (s *Server) updateClients(ctx context.Context, daemons []status.MPSDaemon) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout/2)
	defer cancel()
	p := s.Processes()
	var all sync.WaitGroup
	for i := range daemons {
		if d := &daemons[i]; d.Ready {
			all.Go(func() {
				if clients, err := s.MPS.Clients(ctx, d.Device); err == nil {
					d.SetClients(clients, p)
				}
			})
		}
	}
	all.Wait()
}

func (s *Server) terminate(ctx context.Context, req TerminateRequest) (TerminateResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, mpsTimeout)
	defer cancel()
	if req.Client <= 0 {
		return TerminateResponse{}, unixsock.WithStatus(http.StatusBadRequest,
			fmt.Errorf("client: expected the PID of an MPS client, as gpu-node-agent mps shows it, got %d", req.Client))
	}
	id, err := resolveDevice(s.Snapshots.Load(), req.Device)
	if err != nil {
		return TerminateResponse{}, err
	}
	if err := checkRuns(status.MPSDaemons(s.Snapshots.Load(), s.Processes()), id); err != nil {
		return TerminateResponse{}, unixsock.WithStatus(http.StatusConflict, err)
	}
	switch err := s.MPS.TerminateClient(ctx, id, req.Client); {
	case errors.Is(err, mps.ErrNoClient):
		return TerminateResponse{}, unixsock.WithStatus(http.StatusNotFound, err)
	case err != nil:
		return TerminateResponse{}, err
	}
	s.Log.Info("terminated MPS client on request", zap.String("device", string(id)), zap.Int("client", req.Client))
	return TerminateResponse{id, req.Client}, nil
}

// checkRuns returns an error unless a daemon of the device runs.
func checkRuns(daemons []status.MPSDaemon, id health.DeviceID) error {
	i := slices.IndexFunc(daemons, func(d status.MPSDaemon) bool { return d.Device == id })
	switch {
	case len(daemons) == 0:
		return errors.New(mpsUnused)
	case i < 0:
		indexes := make([]string, len(daemons))
		for i, d := range daemons {
			indexes[i] = d.Index
		}
		return fmt.Errorf("%s: MPS does not serve this device; expected one of %s", id, strings.Join(indexes, ", "))
	case daemons[i].PID == 0:
		return fmt.Errorf("%s: the MPS daemon does not run, so it has no clients: %s", id, cmp.Or(daemons[i].Reason, "starting"))
	}
	return nil
}

func (r TerminateResponse) err() error { return nil }
func (r TerminateResponse) text() string {
	return fmt.Sprintf("terminated MPS client %d of %s", r.Client, r.Device)
}

func (r MPSResponse) err() error { return nil }
func (r MPSResponse) text() string {
	var lines []string
	if r.Error != "" {
		lines = append(lines, "error: "+r.Error)
	}
	if len(r.Daemons) > 0 {
		lines = append(lines, strings.TrimSuffix(status.MPSTable(r.Daemons, time.Now(), terminal.Of(os.Stdout)), "\n"))
	} else {
		lines = append(lines, mpsUnused)
	}
	return strings.Join(lines, "\n")
}

func mpsCommand(loader *config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mps",
		Short: "List the MPS daemons of this node and their clients",
		Long: `List the MPS daemons of this node, their servers and clients. Only root may do so.
The PIDs belong to the PID namespace of gpu-node-agent mps-daemon: the node's, unless it runs without hostPID. The pods of the
clients need metrics.processes.enabled.`,
		Example: `  gpu-node-agent mps
  gpu-node-agent mps -o json | jq '.daemons[] | select(.ready | not)'`,
	}
	format := terminal.AddFormat(cmd.Flags(), "text", terminal.JSON)
	cmd = onSocket(cmd, socketKey, loader, healthSocket, requestTimeout, func(ctx context.Context, socket string) (string, error) {
		res, err := call[MPSResponse](ctx, socket, mpsRoute, nil)
		if err != nil {
			return "", err
		}
		var b strings.Builder
		err = format.Print(&b, res.text, res)
		return strings.TrimSuffix(b.String(), "\n"), err
	})
	cmd.AddCommand(terminateCommand(loader))
	return cmd
}

func terminateCommand(loader *config.Loader) *cobra.Command {
	var req TerminateRequest
	cmd := &cobra.Command{
		Use:   "terminate",
		Short: "Terminate a client of an MPS daemon",
		Long: `Terminate a client of an MPS daemon, which ends its work on the GPU. Only root may do so.
Do this before you kill a process that hangs in a kernel: killed in the middle of one, it can block the other clients of the GPU.`,
		Example: `  gpu-node-agent mps terminate --gpu 3 --client 4711`,
		PreRunE: func(*cobra.Command, []string) error {
			switch {
			case req.Device == "":
				return errors.New("--gpu is not set; expected a UUID, an index such as 3, a MIG index such as 3:0 or a PCI bus ID, as gpu-node-agent " +
					"mps shows")
			case req.Client <= 0:
				return fmt.Errorf("--client: expected the PID of an MPS client, as gpu-node-agent mps shows it, got %d", req.Client)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&req.Device, "gpu", "", "device: a UUID, an index such as 3, a MIG index such as 3:0 or a PCI bus ID")
	cmd.Flags().IntVar(&req.Client, "client", 0, "PID of the client")
	return onAgentSocket[TerminateResponse](cmd, loader, mpsTimeout+requestTimeout, terminateRoute, &req)
}
