// Package manifests reads the Kubernetes objects in the documents.
package manifests

import (
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// Block is one block of a document, with objects that are applied together.
type Block struct {
	Heading string // above the block
	Objects []*unstructured.Unstructured
	Text    string // the first block of plain text between it and the next heading, such as a message; "" if there is none
}

// Read returns the YAML blocks of a document that begin with apiVersion.
func Read(document string) ([]Block, error) {
	text, err := os.ReadFile(document)
	if err != nil {
		return nil, err
	}
	var blocks []Block
	heading, block, in := "", "", "" // in: the language of the current block
	for line := range strings.Lines(string(text)) {
		switch trimmed := strings.TrimRight(line, "\n"); {
		case in == "text" && trimmed == "```":
			in = ""
			if n := len(blocks); n > 0 && blocks[n-1].Heading == heading && blocks[n-1].Text == "" {
				blocks[n-1].Text = strings.TrimSpace(block)
			}
		case in == "yaml" && trimmed == "```":
			in = ""
			if !strings.HasPrefix(block, "apiVersion:") {
				continue
			}
			objects, err := Parse(block)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", document, heading, err)
			}
			blocks = append(blocks, Block{Heading: heading, Objects: objects})
		case in != "":
			block += line
		case trimmed == "```yaml", trimmed == "```text":
			in, block = strings.TrimPrefix(trimmed, "```"), ""
		case strings.HasPrefix(trimmed, "#"):
			heading = strings.TrimLeft(trimmed, "# ")
		}
	}
	return blocks, nil
}

// Parse returns the objects of a text with YAML documents.
func Parse(text string) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	for document := range strings.SplitSeq("\n"+text, "\n---\n") {
		object := make(map[string]any)
		if err := yaml.UnmarshalStrict([]byte(document), &object); err != nil {
			return nil, err
		}
		if len(object) > 0 {
			objects = append(objects, &unstructured.Unstructured{Object: object})
		}
	}
	return objects, nil
}
