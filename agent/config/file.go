package config

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// read returns the file's text and tree, empty ones if there is no file.
func (l Loader) read() (text []byte, tree map[string]any, err error) {
	path := l.Path()
	if path == "" {
		return nil, make(map[string]any), nil
	}
	if text, err = os.ReadFile(path); err != nil {
		return nil, nil, fmt.Errorf("configuration: %w", err)
	}
	if l.Running && len(bytes.TrimSpace(text)) == 0 {
		return nil, nil, fmt.Errorf("%s: is empty; for the defaults write {}", path)
	}
	if tree, err = parse(text); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return text, tree, nil
}

// parse returns the tree of the one document that a configuration file is.
func parse(text []byte) (map[string]any, error) {
	tree := make(map[string]any)
	documents := yaml.NewDecoder(bytes.NewReader(text))
	var first yaml.Node
	switch err := documents.Decode(&first); {
	case errors.Is(err, io.EOF): // nothing but comments
		return tree, nil
	case err != nil:
		return nil, err
	}
	if root := first.Content[0]; root.Kind != yaml.MappingNode && root.Tag != "!!null" {
		return nil, errors.New("is not a configuration; write sections, such as log: {level: info}")
	}
	if err := first.Decode(&tree); err != nil {
		return nil, err
	}
	for {
		var more any
		switch err := documents.Decode(&more); {
		case errors.Is(err, io.EOF):
			return tree, nil
		case err != nil:
			return nil, err
		case more != nil:
			return nil, errors.New("has a second document behind ---, which would not be read; write all in one, and each section once")
		}
	}
}

// noKubeconfig returns a note if the kubeconfig cannot be used. It is no error, unlike with other files: a kubelet's may
// come later than the agent, and the kubelet's devices wait for nothing of the API server's.
func (c Config) noKubeconfig() []string {
	if c.Health.Kubernetes.Kubeconfig == "" {
		return nil
	}
	if _, err := kube.Reach(c.Health.Kubernetes.Kubeconfig); err != nil {
		return []string{err.Error() + "; until it can be used, the API server is neither told nor asked anything"}
	}
	return nil
}

// origin is where a key is set.
type origin struct {
	where string // the file, the variable or the flag
	value string
}

// origins are those of the keys that are set.
type origins map[string]origin

// origin is where a key that is set is so.
func (l Loader) origin(key string) string {
	if l.Flags != nil && l.Flags.Changed(key) {
		return "--" + key
	}
	for _, name := range envNames(key) {
		if os.Getenv(name) != "" { // an empty one is none
			return name
		}
	}
	return l.Path()
}

// behind puts behind each of the errors that are joined where the key is set that it begins with.
func (o origins) behind(err error) error {
	return each(err, func(err error) error {
		text := err.Error()
		key := text[:max(0, strings.IndexAny(text, ":["))]
		for key != "" {
			if at, ok := o[key]; ok && !strings.HasPrefix(text, key+": "+at.value+": ") { // else it is in the file that it names
				return behind(err, at.where)
			}
			key = key[:max(0, strings.LastIndexByte(key, '.'))]
		}
		return err
	})
}

// behind puts behind each of the errors that are joined where it is.
func behind(err error, where string) error {
	return each(err, func(err error) error { return fmt.Errorf("%w (in %s)", err, where) })
}

// within puts a section's name before each error's key.
func within(section string, err error) error { return prefixed(section+".", err) }

// prefixed puts a text before each of the errors that are joined.
func prefixed(text string, err error) error {
	return each(err, func(err error) error { return fmt.Errorf("%s%w", text, err) })
}

// each changes each of the errors that are joined.
func each(err error, change func(error) error) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, e := range joined.Unwrap() {
			errs = append(errs, each(e, change))
		}
		return errors.Join(errs...)
	}
	return change(err)
}

// Sum returns the sum of the current content of the configuration file and of the files that the sections name. If it
// differs from Config.Sum, there is something to load.
func (l Loader) Sum(p plugin.Config, m metrics.Config) [sha256.Size]byte {
	text, _ := os.ReadFile(l.Path()) // Load reports an unreadable file
	return sumOf(text, p, m)
}

// sumOf is the sum of a configuration's text, and of what the files that it names hold now, if it names any: that of
// NVIDIA's plugin, the list of fields, and the web configuration with its certificates.
func sumOf(text []byte, p plugin.Config, m metrics.Config) [sha256.Size]byte {
	for _, file := range []string{p.NVIDIAConfig, m.FieldsFile} {
		if file != "" {
			more, _ := os.ReadFile(file) // LoadConfig and Load report an unreadable file
			text = append(text, more...)
		}
	}
	if m.WebConfigFile != "" {
		text = append(text, web.FileContent(m.WebConfigFile)...)
	}
	return sha256.Sum256(text)
}
