package status

import (
	"strings"
	"time"
)

// How the page and the table say what is not right with the agent itself.

// apiText is "12 condition writes, 4 events, 1 event given up, 2 failed requests".
func apiText(s APIServer) string {
	return strings.Join([]string{
		counted(s.Writes, "condition write", "condition writes"), counted(s.Events, "event", "events"),
		counted(s.Dropped, "event given up", "events given up"), counted(s.Errors, "failed request", "failed requests"),
	}, ", ")
}

// apiErrors are what cannot be written to the API server now.
func apiErrors(s APIServer) []string {
	var all []string
	for _, e := range []string{orNot("condition: %s", s.ConditionError), orNot("events: %s", s.EventError)} {
		if e != "" {
			all = append(all, e)
		}
	}
	return all
}

// memoryTrouble says that findings are not kept, and why.
func memoryTrouble(m StateFile) string {
	return "a restart of the agent would forget findings: " + m.Error
}

// configTrouble says what is wrong with the configuration's file, or how to find out, and what is in force.
func configTrouble(now time.Time, c Config) string {
	const most = 200 // of an error that may be long, or many
	why, more, _ := strings.Cut(c.Error, "\n")
	if text := []rune(why); len(text) > most {
		why, more = string(text[:most])+"…", why
	}
	switch {
	case why == "":
		why = "see the log, or gpu-node-agent check-config"
	case more != "":
		why += " (gpu-node-agent check-config says all of it)"
	}
	inForce := "; the one before it is in force"
	if d := forText(now, c.Since); d != "" {
		inForce = "; the one before it has been in force " + d
	}
	return why + inForce
}
