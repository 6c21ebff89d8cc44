package statefile

import (
	"encoding/json"
	"fmt"
	"maps"
)

// Node is what the directory keeps of the node, whatever the source is: the states of other components, by name.
type Node struct {
	BootID   string
	Sections map[string]json.RawMessage

	newer int // as Saved.newer
}

const nodeFormatName = "gpu-node-agent node"

type nodeFormat struct {
	Format   string                     `json:"format"`
	Version  int                        `json:"version"`
	BootID   string                     `json:"bootID"`
	Sections map[string]json.RawMessage `json:"sections,omitempty"`
}

// Section returns the state of a component from the same boot, nil if there is none.
func (n Node) Section(name, bootID string) []byte {
	if !sameBoot(n.BootID, bootID) {
		return nil
	}
	return n.Sections[name]
}

// withSections returns n in this boot, with newer texts of sections.
func (n Node) withSections(bootID string, texts sectionTexts) Node {
	next := Node{BootID: bootID, Sections: make(map[string]json.RawMessage)}
	if sameBoot(n.BootID, bootID) {
		maps.Copy(next.Sections, n.Sections)
	}
	for name, text := range texts {
		next.Sections[name] = *text
	}
	return next
}

func (n *Node) newerVersion() int { return n.newer }

// MarshalJSON writes the format of the file.
func (n Node) MarshalJSON() ([]byte, error) {
	return json.Marshal(nodeFormat{nodeFormatName, formatVersion, n.BootID, n.Sections})
}

// UnmarshalJSON reads the format of the file. It ignores unknown keys.
func (n *Node) UnmarshalJSON(text []byte) error {
	var file nodeFormat
	if err := json.Unmarshal(text, &file); err != nil {
		return err
	}
	newer, err := checkFormat(file.Format, nodeFormatName, file.Version)
	if err != nil {
		return err
	}
	*n = Node{BootID: file.BootID, Sections: file.Sections, newer: newer}
	return nil
}

// checkFormat returns the version if a newer release wrote it, else 0.
func checkFormat(format, want string, version int) (newer int, err error) {
	switch {
	case format != want || version < formatVersion:
		return 0, fmt.Errorf("format %q version %d is not %q version %d", format, version, want, formatVersion)
	case version > formatVersion:
		return version, nil
	}
	return 0, nil
}
