package mpstest

import (
	"encoding/json"
	"os"
	"time"
)

// Faults are what a test has the stand-in do wrong. A daemon reads them again before each command.
type Faults struct {
	// While it starts.
	StartDelay    Duration `json:"startDelay,omitzero"` // before the daemon serves its socket; DefaultStartDelay if zero
	ServerDelay   Duration `json:"serverDelay,omitzero"`
	ExitAtStart   bool     `json:"exitAtStart,omitempty"`
	HangAtStart   bool     `json:"hangAtStart,omitempty"`   // the daemon runs, and never serves its socket
	NoMultiUser   bool     `json:"noMultiUser,omitempty"`   // an older driver: -multiuser-server is a usage error
	NoServers     bool     `json:"noServers,omitempty"`     // servers exit while they start
	OwnSession    bool     `json:"ownSession,omitempty"`    // servers leave the process group and the session of the daemon
	NoMemoryLimit bool     `json:"noMemoryLimit,omitempty"` // an older driver: it cannot report the memory limit

	// By command, such as get_server_list; AllCommands for any.
	Delay  map[string]Duration `json:"delay,omitempty"`  // before the answer; the daemon serves no other command meanwhile
	Hang   []string            `json:"hang,omitempty"`   // no answer
	Refuse []string            `json:"refuse,omitempty"` // an error, and no effect
	Ignore []string            `json:"ignore,omitempty"` // the usual answer, and no effect
	Answer map[string]string   `json:"answer,omitempty"` // another answer
	Die    []string            `json:"die,omitempty"`    // the daemon kills itself after the effect, before the answer
}

// AllCommands stands for each command of the control program.
const AllCommands = "*"

// DefaultStartDelay is how long a daemon takes until it serves its socket, a server until it is active.
const DefaultStartDelay = 100 * time.Millisecond

// AllDevices is the key of the faults of daemons without faults of their own.
const AllDevices = "*"

// Duration is a time.Duration that JSON has as text.
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

// FaultsFile returns the path of the faults of all daemons of a control program: a JSON object of Faults by device.
func FaultsFile(control string) string { return control + ".faults.json" }

// CommandsFile returns the path of the log of all commands that reached a daemon of a control program.
func CommandsFile(control string) string { return control + ".commands" }

// ReadFaults returns the faults of a device; none if there is no file.
func ReadFaults(control, device string) (Faults, error) {
	data, err := os.ReadFile(FaultsFile(control))
	if err != nil {
		if os.IsNotExist(err) {
			err = nil
		}
		return Faults{}, err
	}
	var byDevice map[string]Faults
	if err := json.Unmarshal(data, &byDevice); err != nil {
		return Faults{}, err
	}
	if f, ok := byDevice[device]; ok {
		return f, nil
	}
	return byDevice[AllDevices], nil
}
