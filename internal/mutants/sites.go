package main

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strconv"
	"strings"
)

// Kind is what a mutant changes.
type kind int

const (
	condition kind = iota
	result
	constant
	assignment
	call
	kinds
)

func (k kind) String() string {
	return [...]string{"condition", "return", "constant", "assignment", "call"}[k]
}

// Mutant is one change of one file: new replaces the bytes from start to end.
type mutant struct {
	kind       kind
	file       string // relative to the package's directory
	line       int
	function   string // that declares the code; empty at the top level
	start, end int
	old, new   string
}

// text returns old and new in one line each.
func (m mutant) text() (string, string) { return oneLine(m.old), oneLine(m.new) }

func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 80 {
		s = string(r[:80]) + "…"
	}
	return s
}

// finder collects the mutants of one file.
type finder struct {
	fset     *token.FileSet
	info     *types.Info
	source   []byte
	file     string
	function string
	found    []mutant
}

// find returns the mutants of a file, in the order of its text. They do not change what the code logs. Types may be
// incomplete: what has none keeps fewer mutants.
func find(fset *token.FileSet, info *types.Info, name string, source []byte, tree *ast.File) []mutant {
	f := &finder{fset: fset, info: info, source: source, file: name}
	for _, d := range tree.Decls {
		f.function = ""
		if fn, ok := d.(*ast.FuncDecl); ok {
			f.function = fn.Name.Name
		}
		ast.Inspect(d, f.visit)
	}
	return f.found
}

func (f *finder) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.ImportSpec, *ast.ArrayType:
		return false
	case *ast.CallExpr:
		return !f.logs(n)
	case *ast.IfStmt:
		f.negate(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			f.negate(n.Cond)
		}
	case *ast.BinaryExpr:
		f.operator(n)
	case *ast.CaseClause:
		for _, e := range n.List {
			f.word(e)
			if f.is(e, types.IsBoolean) {
				f.negate(e)
			}
		}
	case *ast.ReturnStmt:
		for _, e := range n.Results {
			f.result(e)
		}
	case *ast.BasicLit:
		f.number(n)
	case *ast.Ident:
		f.truth(n)
	case *ast.AssignStmt:
		f.assignment(n)
	case *ast.IncDecStmt:
		f.replace(assignment, n, "")
	case *ast.CompositeLit:
		f.fields(n)
	case *ast.ExprStmt:
		if c, ok := n.X.(*ast.CallExpr); ok && !f.logs(c) {
			f.replace(call, n, "")
		}
	case *ast.DeferStmt:
		f.replace(call, n, "")
	case *ast.GoStmt:
		f.replace(call, n, "")
	}
	return true
}

// replace adds a mutant that has text in the place of n.
func (f *finder) replace(k kind, n ast.Node, text string) {
	f.replaceRange(k, n.Pos(), n.End(), text)
}

func (f *finder) replaceRange(k kind, from, to token.Pos, text string) {
	at, end := f.fset.Position(from), f.fset.Position(to)
	f.found = append(f.found, mutant{
		kind: k, file: f.file, line: at.Line, function: f.function, start: at.Offset, end: end.Offset,
		old: string(f.source[at.Offset:end.Offset]), new: text,
	})
}

func (f *finder) text(n ast.Node) string {
	return string(f.source[f.fset.Position(n.Pos()).Offset:f.fset.Position(n.End()).Offset])
}

func (f *finder) negate(e ast.Expr) {
	if u, ok := e.(*ast.UnaryExpr); ok && u.Op == token.NOT {
		f.replace(condition, e, f.text(u.X))
		return
	}
	f.replace(condition, e, "!("+f.text(e)+")")
}

// operator replaces an operator by its neighbour.
func (f *finder) operator(n *ast.BinaryExpr) {
	other, ok := map[token.Token]token.Token{
		token.EQL: token.NEQ, token.NEQ: token.EQL, token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR,
		token.LAND: token.LOR, token.LOR: token.LAND, token.ADD: token.SUB, token.SUB: token.ADD,
	}[n.Op]
	if !ok || n.Op == token.ADD && !f.is(n.X, types.IsNumeric) {
		return
	}
	f.replaceRange(condition, n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), other.String())
	f.word(n.X)
	f.word(n.Y)
}

// word empties a string that the code compares. Other strings are mostly text for people.
func (f *finder) word(e ast.Expr) {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING && l.Value != `""` {
		f.replace(constant, l, `""`)
	}
}

func (f *finder) number(l *ast.BasicLit) {
	if l.Kind == token.FLOAT {
		f.replace(constant, l, "2*"+l.Value)
		return
	}
	n, err := strconv.ParseInt(l.Value, 0, 64)
	if l.Kind != token.INT || err != nil {
		return
	}
	f.replace(constant, l, strconv.FormatInt(max(2*n, 1), 10))
}

func (f *finder) truth(n *ast.Ident) {
	if other := map[string]string{"true": "false", "false": "true"}[n.Name]; other != "" && f.info.Uses[n] == types.Universe.Lookup(n.Name) {
		f.replace(constant, n, other)
	}
}

// result replaces a returned value by another of its type, mostly the zero value.
func (f *finder) result(e ast.Expr) {
	if id, ok := e.(*ast.Ident); ok && (id.Name == "nil" || id.Name == "true" || id.Name == "false") {
		return // constant has the latter
	}
	t := f.info.TypeOf(e)
	if t == nil {
		return
	}
	switch u := t.Underlying().(type) {
	case *types.Basic:
		switch {
		case u.Info()&types.IsBoolean != 0:
			f.replace(result, e, "!("+f.text(e)+")")
		case u.Info()&types.IsNumeric != 0:
			f.replace(result, e, "("+f.text(e)+")+1")
		case u.Info()&types.IsString != 0 && f.text(e) != `""`:
			f.replace(result, e, `""`)
		}
	case *types.Pointer, *types.Slice, *types.Map, *types.Signature, *types.Chan, *types.Interface:
		f.replace(result, e, "nil")
	}
}

// assignment drops an assignment to something that exists, but not the calls that it makes.
func (f *finder) assignment(n *ast.AssignStmt) {
	blank := func(e ast.Expr) bool { id, ok := e.(*ast.Ident); return ok && id.Name == "_" }
	if n.Tok == token.DEFINE || !slices.ContainsFunc(n.Lhs, func(e ast.Expr) bool { return !blank(e) }) {
		return
	}
	calls := false
	ast.Inspect(n, func(n ast.Node) bool {
		_, ok := n.(*ast.CallExpr)
		calls = calls || ok
		return true
	})
	if !calls || n.Tok != token.ASSIGN {
		f.replace(assignment, n, "")
		return
	}
	blanks := strings.TrimSuffix(strings.Repeat("_, ", len(n.Lhs)), ", ")
	f.replaceRange(assignment, n.Lhs[0].Pos(), n.Lhs[len(n.Lhs)-1].End(), blanks)
}

// fields leaves a field of a struct at its zero value.
func (f *finder) fields(n *ast.CompositeLit) {
	t := f.info.TypeOf(n)
	if t == nil {
		return
	}
	if p, ok := t.Underlying().(*types.Pointer); ok {
		t = p.Elem()
	}
	if _, ok := t.Underlying().(*types.Struct); !ok {
		return
	}
	for i, e := range n.Elts {
		if _, ok := e.(*ast.KeyValueExpr); !ok {
			continue
		}
		end := e.End()
		if i+1 < len(n.Elts) {
			end = n.Elts[i+1].Pos()
		} else if rest := f.source[f.fset.Position(end).Offset:]; len(rest) > 0 && rest[0] == ',' {
			end++
		}
		f.replaceRange(assignment, e.Pos(), end, "")
	}
}

// logs reports whether a call writes to the log: wording and levels are no behaviour.
func (f *finder) logs(c *ast.CallExpr) bool {
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	t := f.info.TypeOf(s.X)
	return t != nil && strings.HasSuffix(t.String(), "go.uber.org/zap.Logger")
}

func (f *finder) is(e ast.Expr, info types.BasicInfo) bool {
	t := f.info.TypeOf(e)
	if t == nil {
		return false
	}
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&info != 0
}
