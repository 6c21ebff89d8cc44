package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// documents returns the Markdown files of the repository at root.
func documents(root string) ([]string, error) {
	var files []string
	for _, pattern := range []string{"*.md", "docs/*.md", "charts/*/*.md", "e2e/*.md", "health/dcgm/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return files, nil
}

// generate returns the document with its generated parts written anew.
func generate(root, document string) (string, error) {
	parts := map[string]func(root string) (string, error){
		"configuration": configuration,
		"xids":          xids,
		"incidents":     incidents,
		"actions":       actions,
		"events":        events,
		"alerts":        alerts,
	}
	var failed error
	block := regexp.MustCompile(`(?s)(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)`)
	document = block.ReplaceAllStringFunc(document, func(old string) string {
		match := block.FindStringSubmatch(old)
		part, ok := parts[match[2]]
		if !ok {
			failed = fmt.Errorf("generated part %q is unknown", match[2])
			return old
		}
		text, err := part(root)
		if err != nil {
			failed = fmt.Errorf("%s: %w", match[2], err)
		}
		return match[1] + "\n" + text + "\n" + match[3]
	})
	return document, failed
}

// table returns a Markdown table.
func table(header []string, rows [][]string) string {
	var b strings.Builder
	row := func(cells []string) {
		for _, cell := range cells {
			b.WriteString("| " + strings.ReplaceAll(cell, "|", `\|`) + " ")
		}
		b.WriteString("|\n")
	}
	row(header)
	row(slices.Repeat([]string{"---"}, len(header)))
	for _, r := range rows {
		row(r)
	}
	return b.String()
}

func code(s string) string { return "`" + s + "`" }

// configuration returns a table for each section of config.yaml: the keys with their defaults and comments.
func configuration(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "config.yaml"))
	if err != nil {
		return "", err
	}
	var (
		b     strings.Builder
		rows  [][]string
		path  []string // the keys above the current line, by indentation
		last  *string  // the description that a continuation line extends
		line  = regexp.MustCompile(`^( *)(\w+):(?: +(.*?))??(?: +# (.*))?$`)
		more  = regexp.MustCompile(`^ +# (.*)$`)
		snake = regexp.MustCompile(`([a-z])([A-Z])`)
	)
	flush := func() {
		if len(rows) > 0 {
			b.WriteString(table([]string{"Key", "Type", "Default", "Environment variable", "Description"}, rows) + "\n")
		}
		rows = nil
	}
	for s := range strings.Lines(string(text)) {
		s = strings.TrimRight(s, "\n")
		if match := more.FindStringSubmatch(s); match != nil && last != nil {
			*last += " " + match[1]
			continue
		}
		match := line.FindStringSubmatch(s)
		if match == nil {
			continue
		}
		path = append(path[:len(match[1])/2], match[2])
		key, value, comment := strings.Join(path, "."), match[3], match[4]
		switch {
		case len(path) == 1:
			flush()
			b.WriteString("### " + key + "\n\n")
			if comment != "" {
				b.WriteString(comment + "\n\n")
			}
			continue
		case value == "":
			rows = append(rows, []string{code(key), "section", "", "", comment})
		default:
			env := "GPU_NODE_AGENT_" + strings.ToUpper(snake.ReplaceAllString(strings.ReplaceAll(key, ".", "_"), "${1}_$2"))
			rows = append(rows, []string{code(key), typeOf(value), code(value), code(env), comment})
		}
		last = &rows[len(rows)-1][4]
	}
	flush()
	return strings.TrimRight(b.String(), "\n") + "\n", nil
}

// typeOf names the type of a default as it is written in config.yaml.
func typeOf(value string) string {
	var v any
	if err := yaml.Unmarshal([]byte(value), &v); err != nil {
		return err.Error()
	}
	switch v := v.(type) {
	case string:
		if _, err := time.ParseDuration(v); err == nil {
			return "duration"
		}
		return "string"
	case bool:
		return "boolean"
	case int, float64:
		return "number"
	case []any:
		return "list"
	}
	return fmt.Sprintf("%T", v)
}

// xids returns the table of XIDs.
func xids(string) (string, error) {
	var rows [][]string
	unknown := health.LookupXID(0).Source
	for n := 1; health.LookupXID(n).Source != unknown; n++ {
		x := health.LookupXID(n)
		effect := x.Effect.String()
		if x.FollowsRecoveryAction {
			effect += "¹"
		}
		if x.WholeGPU {
			effect += "²"
		}
		clears := ""
		if x.Effect != health.EffectIgnore {
			clears = x.Clears.String()
		}
		source := x.Source
		if x.Deviation != "" {
			source += "; differs: " + x.Deviation
		}
		rows = append(rows, []string{strconv.Itoa(n), x.Symbol, x.Name, effect, code(string(x.Action)), clears, source})
	}
	return table([]string{"XID", "Symbol", "Meaning", "Effect", "Action", "Clears", "Source"}, rows), nil
}

// incidents returns the table of the codes of DCGM's health checks.
func incidents(string) (string, error) {
	var rows [][]string
	unknown := health.LookupIncident(0).Source
	for n := range 1000 { // DCGM 4.6 has about 130 codes
		if i := health.LookupIncident(n); i.Source != unknown {
			rows = append(rows, []string{i.Name, i.Effect.String(), code(string(i.Action)), i.Source})
		}
	}
	return table([]string{"Code", "Effect of a FAIL", "Action", "Source"}, rows), nil
}

// actions returns the table of the actions that findings suggest.
func actions(string) (string, error) {
	var rows [][]string
	for _, a := range health.Actions() {
		rows = append(rows, []string{code(string(a)), a.Advice()})
	}
	return table([]string{"Action", "Advice"}, rows), nil
}

// events returns the table of the effects of simulated events.
func events(string) (string, error) {
	var rows [][]string
	for _, e := range sim.Effects() {
		rows = append(rows, []string{code(e.Key), e.Help})
	}
	return table([]string{"Key", "Effect"}, rows), nil
}

// alertRule is an alert of the chart's rules.
type alertRule struct {
	Alert, For  string
	Labels      map[string]string
	Annotations map[string]string
}

// alertRules returns the alerts of the chart's rules, in the order of the files.
func alertRules(root string) ([]alertRule, error) {
	files, err := filepath.Glob(filepath.Join(root, "charts/gpu-node-agent/rules/*.yaml"))
	if err != nil {
		return nil, err
	}
	var all []alertRule
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var rules struct{ Groups []struct{ Rules []alertRule } }
		if err := yaml.Unmarshal(text, &rules); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, g := range rules.Groups {
			all = append(all, slices.DeleteFunc(g.Rules, func(r alertRule) bool { return r.Alert == "" })...)
		}
	}
	return all, nil
}

// alerts returns the table of the chart's alerts.
func alerts(root string) (string, error) {
	rules, err := alertRules(root)
	var rows [][]string
	for _, r := range rules {
		rows = append(rows, []string{fmt.Sprintf("[%s](#%s)", r.Alert, strings.ToLower(r.Alert)), r.Labels["severity"], r.For})
	}
	return table([]string{"Alert", "Severity", "For"}, rows), err
}
