package health

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// The table has every constant of a cause in this package.
func TestCausesAreListed(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for spec := range ast.Preorder(tree) {
			value, ok := spec.(*ast.ValueSpec)
			if !ok || len(value.Names) != 1 || !strings.HasPrefix(value.Names[0].Name, "Cause") || len(value.Values) != 1 {
				continue
			}
			text, ok := value.Values[0].(*ast.BasicLit)
			if !ok {
				continue
			}
			found++
			name, _ := strconv.Unquote(text.Value)
			if _, ok := causes[name]; !ok {
				t.Errorf("%s: %s is not in causes", file, value.Names[0].Name)
			}
		}
	}
	if found != len(causes) {
		t.Errorf("%d constants, %d in causes", found, len(causes))
	}
}
