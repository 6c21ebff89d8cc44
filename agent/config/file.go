package config

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

var errEmpty = errors.New("file is empty; for the defaults write {}")

// read returns the file's text and its sections, both nil without a file.
func (l Loader) read() (text []byte, sections *yaml.Node, err error) {
	path := l.Path()
	if path == "" {
		return nil, nil, nil
	}
	if text, err = l.readFile(path); err != nil {
		return nil, nil, fmt.Errorf("configuration: %w", err)
	}
	if l.Running && len(bytes.TrimSpace(text)) == 0 {
		return nil, nil, fmt.Errorf("%s: %w", path, errEmpty)
	}
	if sections, err = parse(text); err != nil {
		if l.partial {
			sections = parsePartial(text)
		}
		return nil, sections, fmt.Errorf("%s: %w", path, err)
	}
	return text, sections, nil
}

// parse returns the sections of a configuration file, which is one YAML document: a mapping whose scalars are texts, nil without keys.
func parse(text []byte) (sections *yaml.Node, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for documents := 0; ; documents++ {
		var document yaml.Node
		err := decoder.Decode(&document)
		switch {
		case errors.Is(err, io.EOF):
			return sections, nil
		case err != nil:
			return nil, explainYAML(err, string(text))
		case document.Content[0].Tag == "!!null": // only comments
		case documents > 0:
			return nil, errors.New("expected one YAML document, got another after ---")
		case document.Content[0].Kind != yaml.MappingNode:
			return nil, errors.New("expected sections, such as log: {level: info}")
		default:
			scalarsAsText(&document)
			var tree map[string]any // finds the keys that are written twice, and aliases that contain themselves
			if err = document.Decode(&tree); err != nil {
				return nil, err
			}
			sections = document.Content[0]
		}
	}
}

// maxPartial is the size of the largest text that parsePartial reads. The time grows with the square of the size: this takes a
// second at most.
const maxPartial = 32 << 10

var sectionStart = regexp.MustCompile(`(?m)^[^\s#]`)

// parsePartial returns what can be read of a text that parse refuses: of each section as many lines from its start as are valid.
// Of two equal sections it returns the first.
func parsePartial(text []byte) *yaml.Node {
	if len(text) > maxPartial {
		return nil
	}
	sections := make(map[string]yaml.Node)
	end := len(text)
	for _, start := range slices.Backward(sectionStart.FindAllIndex(text, -1)) {
		section := text[start[0]:end]
		end = start[0]
		for len(section) > 0 {
			if part, err := parse(section); err == nil {
				if part != nil && part.Decode(&sections) != nil { // over a later section
					return nil // unreachable: parse has decoded it
				}
				break
			}
			section = section[:bytes.LastIndexByte(bytes.TrimSuffix(section, []byte("\n")), '\n')+1]
		}
	}
	all := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for _, name := range slices.Sorted(maps.Keys(sections)) {
		all.Content = append(all.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name}, new(sections[name]))
	}
	return all
}

// explainYAML adds the remedy to an error of frequent mistakes.
func explainYAML(err error, text string) error {
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "cannot start any token") && strings.Contains(text, "\t"):
		return fmt.Errorf("%w; indent with spaces instead of tabs", err)
	case strings.Contains(err.Error(), "unknown anchor"), strings.Contains(err.Error(), "alphabetic or numeric character"):
		return fmt.Errorf(`%w; write text that starts with * or & in quotes, such as "*H100*"`, err)
	}
	return err
}

// Sum returns the sum of the current content of the configuration file and of the files that the sections name. If it
// differs from Config.Sum, the configuration has changed.
func (l Loader) Sum(p plugin.Config, m metrics.Config) [sha256.Size]byte {
	text, _ := os.ReadFile(l.Path()) // Load reports an unreadable file
	return sumOf(text, p, m)
}

// sumOf returns the sum of a configuration's text and of the current content of the files that it names: the
// configuration of NVIDIA's plugin, the list of fields, and the web configuration with its certificates.
func sumOf(text []byte, p plugin.Config, m metrics.Config) [sha256.Size]byte {
	for _, file := range []string{p.NVIDIAConfig, m.FieldsFile} {
		if file != "" {
			more, _ := os.ReadFile(file) // Load reports an unreadable file
			text = append(text, more...)
		}
	}
	if m.WebConfigFile != "" {
		text = append(text, web.FileContent(m.WebConfigFile)...)
	}
	return sha256.Sum256(text)
}
