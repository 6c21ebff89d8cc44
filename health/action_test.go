package health

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestActionAdvice(t *testing.T) {
	code := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)
	unique := make(map[string]Action)
	for _, a := range Actions() {
		if !code.MatchString(string(a)) || !a.Valid() {
			t.Errorf("%q: expected a lower-case code with advice, got %q", a, a.Advice())
		}
		if other := unique[a.Advice()]; other != "" {
			t.Errorf("%q and %q have the same advice", a, other)
		}
		unique[a.Advice()] = a
	}
	if Action("dance").Valid() || Action("").Valid() {
		t.Error("an unknown action is valid")
	}
}

// Every action has its place in the order, once.
func TestActionsAreOrdered(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "action.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var declared []Action
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Action") {
			return true
		}
		code, err := strconv.Unquote(spec.Values[0].(*ast.CallExpr).Args[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		declared = append(declared, Action(code))
		return true
	})
	ordered := Actions()
	if len(declared) < 30 {
		t.Fatalf("%d actions are declared; expected more", len(declared))
	}
	for _, a := range declared {
		if n := len(slices.DeleteFunc(slices.Clone(ordered), func(b Action) bool { return a != b })); n != 1 {
			t.Errorf("%s is %d times in the order", a, n)
		}
	}
	if len(ordered) != len(declared) {
		t.Errorf("%d actions in the order, %d declared", len(ordered), len(declared))
	}
	falling := []Action{
		ActionReplaceGPU, ActionRebootNode, ActionResetGPU, ActionResetGPUNow, ActionResetGPUWhenFree, ActionResetGPUAtDrain, ActionRestartApp,
		ActionCheckPCIe,
		ActionCheckCooling, ActionWatch, ActionNone, "dance",
	}
	if !slices.IsSortedFunc(falling, Action.Compare) {
		t.Errorf("%v are not in their order", falling)
	}
}
