package health

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"testing"
)

func TestActionAdvice(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "action.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	codes, unique := 0, make(map[string]Action)
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		text, err := strconv.Unquote(call.Args[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		codes++
		a := Action(text)
		if !regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`).MatchString(text) || !a.Valid() {
			t.Errorf("%q: expected a lower-case code with advice, got %q", a, a.Advice())
		}
		if other := unique[a.Advice()]; other != "" {
			t.Errorf("%q and %q have the same advice", a, other)
		}
		unique[a.Advice()] = a
		return true
	})
	if codes != len(actionAdvice) {
		t.Errorf("%d constants, %d rows of advice", codes, len(actionAdvice))
	}
	if Action("dance").Valid() || Action("").Valid() {
		t.Error("an unknown action is valid")
	}
}
