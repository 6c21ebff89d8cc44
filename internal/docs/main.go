// Command docs writes the generated parts of the documents, between the markers <!-- generated: NAME --> and
// <!-- end generated -->. Run it from the repository's root: make docs.
package main

import (
	"cmp"
	"encoding/csv"
	"errors"
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
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

func main() {
	for _, file := range documents(".") {
		before, err := os.ReadFile(file)
		if err == nil {
			var after string
			if after, err = generate(".", string(before)); err == nil {
				err = os.WriteFile(file, []byte(after), 0o644)
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, file+":", err)
			os.Exit(1)
		}
	}
}

// documents returns the Markdown files of the repository at root.
func documents(root string) (files []string) {
	for _, pattern := range []string{"*.md", "docs/*.md", "charts/*/*.md", "e2e/*.md", "health/dcgm/*.md"} {
		found, _ := filepath.Glob(filepath.Join(root, pattern)) // fails only for a bad pattern
		files = append(files, found...)
	}
	return files
}

// generate returns the document with its generated parts written anew.
func generate(root, document string) (string, error) {
	parts := map[string]func(root string) (string, error){
		"actions": actions, "alerts": alerts, "configuration": configuration, "events": events,
		"fields": dcgmFields, "incidentDeviations": incidentDeviations, "incidents": incidents, "metrics": agentMetrics,
		"names": newNames, "xidDeviations": xidDeviations, "xids": xids,
	}
	var errs []error
	block := regexp.MustCompile(`(?s)(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)`)
	document = block.ReplaceAllStringFunc(document, func(old string) string {
		match := block.FindStringSubmatch(old)
		part, ok := parts[match[2]]
		if !ok {
			errs = append(errs, fmt.Errorf("generated part %q is unknown", match[2]))
			return old
		}
		text, err := part(root)
		errs = append(errs, err)
		return match[1] + "\n" + text + "\n" + match[3]
	})
	return document, errors.Join(errs...)
}

// table returns a Markdown table. The header is one string: cells separated by " | ".
func table(header string, rows [][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %s |\n|%s\n", header, strings.Repeat("---|", strings.Count(header, " | ")+1))
	for _, row := range rows {
		for _, cell := range row {
			b.WriteString("| " + strings.ReplaceAll(cell, "|", `\|`) + " ")
		}
		b.WriteString("|\n")
	}
	return b.String()
}

func code[S ~string](s S) string { return "`" + string(s) + "`" }

// configuration returns a table for each section of config.yaml: the keys with their defaults and comments.
func configuration(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "config.yaml"))
	if err != nil {
		return "", err
	}
	var (
		sections []string
		rows     [][]string
		path     []string // the keys above the current line, by indentation
		line     = regexp.MustCompile(`^( *)(\w+):(?: +(.*?))??(?: +# (.*))?$`)
		more     = regexp.MustCompile(`^ +# (.*)$`)
		camel    = regexp.MustCompile(`([a-z])([A-Z])`)
	)
	endSection := func() {
		if len(rows) > 0 {
			sections = append(sections, table("Key | Type | Default | Environment variable | Description", rows))
		}
		rows = nil
	}
	for s := range strings.Lines(string(text)) {
		s = strings.TrimRight(s, "\n")
		if match := more.FindStringSubmatch(s); match != nil && len(rows) > 0 {
			rows[len(rows)-1][4] += " " + match[1]
		}
		match := line.FindStringSubmatch(s)
		if match == nil {
			continue
		}
		path = append(path[:len(match[1])/2], match[2])
		key, value, comment := strings.Join(path, "."), match[3], match[4]
		switch {
		case len(path) == 1:
			endSection()
			sections = append(sections, "### "+key+"\n")
			if comment != "" {
				sections = append(sections, comment+"\n")
			}
		case value == "":
			rows = append(rows, []string{code(key), "section", "", "", comment})
		default:
			env := strings.ToUpper(camel.ReplaceAllString(strings.ReplaceAll(key, ".", "_"), "${1}_$2"))
			rows = append(rows, []string{code(key), typeOf(value), code(value), code("GPU_NODE_AGENT_" + env), comment})
		}
	}
	endSection()
	return strings.Join(sections, "\n"), nil
}

// typeOf names the type of a default as config.yaml writes it.
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
	case []any:
		return "list"
	}
	return "number"
}

// catalogue returns the rows of a table in health/catalog/, by the names of its columns.
func catalogue(root, file string) (rows []map[string]string, err error) {
	f, err := os.Open(filepath.Join(root, "health", "catalog", file))
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // opened for reading
	lines, err := csv.NewReader(f).ReadAll()
	for i := 1; i < len(lines); i++ {
		row := make(map[string]string)
		for j, column := range lines[0] {
			row[column] = lines[i][j]
		}
		rows = append(rows, row)
	}
	return rows, err
}

// xidCatalogue returns the XIDs of the table.
func xidCatalogue(root string) ([]map[string]string, error) {
	rows, err := catalogue(root, "xids.csv")
	return slices.DeleteFunc(rows, func(x map[string]string) bool { return x["code"] == "0" }), err // 0 is any other XID
}

func xids(root string) (string, error) {
	all, err := xidCatalogue(root)
	var rows [][]string
	for _, x := range all {
		effect, clears := x[catalog.XIDPresetDefault], ""
		if effect != catalog.EffectIgnore.String() {
			clears = code(x["clears"])
		}
		if x["follows"] == "yes" {
			effect += " ¹"
		}
		if x["scope"] == "gpu" {
			effect += " ²"
		}
		if x["reason"] != "" {
			effect += " ³"
		}
		source := "NVIDIA XID catalogue: " + cmp.Or(x["catalogue"], "no resolution")
		if x["sources"] != "" {
			source += "; " + x["sources"]
		}
		rows = append(rows, []string{x["code"], x["symbol"], x["name"], effect, code(x["action"]), clears, source})
	}
	return table("XID | Symbol | Meaning | Effect | Action | Clears | Source", rows), err
}

// incidentCatalogue returns the codes that DCGM's health checks report.
func incidentCatalogue(root string) ([]map[string]string, error) {
	rows, err := catalogue(root, "incidents.csv")
	return slices.DeleteFunc(rows, func(i map[string]string) bool { return i["severity"] == "" }), err
}

func incidents(root string) (string, error) {
	all, err := incidentCatalogue(root)
	var rows [][]string
	for _, i := range all {
		effect, source := i["effect"], "DCGM 4.6 health: FAIL"
		if i["reason"] != "" {
			effect += " ¹"
		}
		if i["severity"] == "WARN" {
			source = "DCGM 4.6 health: never more than WARN"
		}
		if i["advice"] != "" {
			source += ", " + i["advice"]
		}
		rows = append(rows, []string{code("DCGM_FR_" + i["name"]), effect, code(i["action"]), source})
	}
	return table("Code | Effect of a FAIL | Action | Source", rows), err
}

func xidDeviations(root string) (string, error) {
	all, err := xidCatalogue(root)
	var d deviations
	for _, x := range all {
		d.add(x["code"], x["differs"], x["reason"])
	}
	return table("XID | Differs from | Reason", d), err
}

func incidentDeviations(root string) (string, error) {
	all, err := incidentCatalogue(root)
	var d deviations
	for _, i := range all {
		d.add(code("DCGM_FR_"+i["name"]), i["differs"], i["reason"])
	}
	return table("Code | Differs from | Reason", d), err
}

// deviations are rows with names, the sources from which the agent differs, and the reason.
type deviations [][]string

// add adds a name to the row with the same sources and reason. A name without a reason is left out.
func (d *deviations) add(name, from, reason string) {
	i := slices.IndexFunc(*d, func(row []string) bool { return row[1] == from && row[2] == reason })
	switch {
	case reason == "":
	case i < 0:
		*d = append(*d, []string{name, from, reason})
	default:
		(*d)[i][0] += ", " + name
	}
}

func actions(string) (string, error) {
	var rows [][]string
	for _, a := range health.Actions() {
		rows = append(rows, []string{code(a), a.Advice()})
	}
	return table("Action | Advice", rows), nil
}

func events(string) (string, error) {
	var rows [][]string
	for _, e := range sim.Effects() {
		rows = append(rows, []string{code(e.Key), e.Help})
	}
	return table("Key | Effect", rows), nil
}

// agentMetrics returns the agent's own metrics, without the metrics of the process and of the Go runtime.
func agentMetrics(string) (string, error) {
	var rows [][]string
	for _, m := range metrics.Describe() {
		if strings.HasPrefix(m.Name, "gpu_node_agent_") {
			labels := strings.Replace(strings.Join(m.Labels, ", "), "gpu, UUID, GPU_I_PROFILE, GPU_I_ID, hostname", "*device*", 1)
			rows = append(rows, []string{code(m.Name), m.Type, labels, m.Help})
		}
	}
	return table("Metric | Type | Labels | Help", rows), nil
}

func dcgmFields(string) (string, error) {
	var rows [][]string
	for _, f := range fields.List(nil) {
		number := strings.TrimPrefix(strconv.Itoa(int(f.ID)), "0") // 0: the agent computes it
		if f.Since != "" {
			number += ", from DCGM " + f.Since
		}
		rows = append(rows, []string{code(f.Name), number, f.Type, f.Unit, f.Set, nameIn49(f), f.Help})
	}
	return table("Field | Number | Type | Unit | Set | In dcgm-exporter 4.9 | Help", rows), nil
}

// nameIn49 returns the cell with a field's name in dcgm-exporter 4.9, "" if it is the same. An asterisk marks what is inferred.
func nameIn49(f fields.Info) string {
	name := ""
	switch {
	case f.Name49 != "":
		name = code(f.Name49)
	case f.Replaces != "":
		name = "instead of " + code(f.Replaces)
	}
	if f.Inferred {
		name += " *"
	}
	return name
}

// newNames returns the fields of the default and the profiling set that have another name in dcgm-exporter 4.9, with the units.
func newNames(string) (string, error) {
	units := make(map[string]string)
	for _, f := range fields.List(nil) {
		units[f.Name] = f.Unit
	}
	var rows [][]string
	for _, f := range fields.List(nil) {
		if f.Name49 == "" || f.Set != fields.SetDefault && f.Set != fields.SetProfiling {
			continue
		}
		unit := f.Unit
		if newer, changed := units[f.Name49]; changed {
			unit += " → " + newer
		}
		rows = append(rows, []string{code(f.Name), nameIn49(f), unit})
	}
	return table("dcgm-exporter 4.8 | dcgm-exporter 4.9 | Unit", rows), nil
}

// alertRule is an alert of the chart's rules.
type alertRule struct {
	Alert, For          string
	Labels, Annotations map[string]string
}

// alertRules returns the alerts of the chart's rules, in the order of the files.
func alertRules(root string) (all []alertRule, err error) {
	files, err := filepath.Glob(filepath.Join(root, "charts/gpu-node-agent/rules/*.yaml"))
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
	return all, err
}

func alerts(root string) (string, error) {
	rules, err := alertRules(root)
	var rows [][]string
	for _, r := range rules {
		rows = append(rows, []string{fmt.Sprintf("[%s](#%s)", r.Alert, strings.ToLower(r.Alert)), r.Labels["severity"], r.For})
	}
	return table("Alert | Severity | For", rows), err
}
