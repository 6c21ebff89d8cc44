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

func TestValidCause(t *testing.T) {
	for _, cause := range []string{"xid-79", "xid-1", "xid-999", "lost", "cordoned", "mps-hung", "dcgm-nvlink-down", "dcgm-10000"} {
		if !ValidCause(cause) {
			t.Errorf("%q is not valid", cause)
		}
	}
	for _, cause := range []string{
		"", "xid", "xid-", "xid-0", "xid-079", "xid--1", "xid79", "XID-79", "Lost", "lost ", "dcgm-", "dcgm-0",
		"dcgm-NVLINK-DOWN", "dcgm-nvlink_down", "dcgm-fr-nvlink-down", "dcgm-010000",
	} {
		if ValidCause(cause) {
			t.Errorf("%q is valid", cause)
		}
	}
	for code := 1; code < len(incidentRows())+3; code++ {
		if cause := incidentCause(LookupIncident(code)); !ValidCause(cause) {
			t.Errorf("%q is not valid", cause)
		}
	}
}

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

// Measured values show exactly the causes of that family.
func TestCausesOfConditions(t *testing.T) {
	for name, info := range causes {
		if (conditionOf(name) != nil) != (info.family == familyCondition) {
			t.Errorf("%s is of the family %d, its condition is %v", name, info.family, conditionOf(name))
		}
		if info.endProvesReset && info.family != familyCondition {
			t.Errorf("%s has no condition that a reset ends", name)
		}
	}
}
