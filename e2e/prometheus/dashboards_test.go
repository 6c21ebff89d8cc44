package prometheus

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is the part of Grafana's model that these tests check.
type dashboard struct {
	UID           string   `json:"uid"`
	Title         string   `json:"title"`
	Description   string   `json:"description"`
	Tags          []string `json:"tags"`
	SchemaVersion int      `json:"schemaVersion"`
	Refresh       string   `json:"refresh"`
	Links         []struct {
		Tags        []string `json:"tags"`
		IncludeVars bool     `json:"includeVars"`
	} `json:"links"`
	Annotations struct {
		List []annotation `json:"list"`
	} `json:"annotations"`
	Templating struct {
		List []variable `json:"list"`
	} `json:"templating"`
	Panels []panel `json:"panels"`
}

// all returns the panels, also in collapsed rows.
func (d dashboard) all() (all []panel) {
	for _, p := range d.Panels {
		all = append(append(all, p), p.Panels...)
	}
	return all
}

type annotation struct {
	Name       string     `json:"name"`
	Datasource datasource `json:"datasource"`
	Target     target     `json:"target"`
	Title      string     `json:"titleFormat"`
}

// variable is a variable of a dashboard. Query is an object, or a string for type datasource.
type variable struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Query      json.RawMessage `json:"query"`
	Multi      bool            `json:"multi"`
	IncludeAll bool            `json:"includeAll"`
	AllValue   string          `json:"allValue"`
}

// query returns the query of a variable of type query.
func (v variable) query(t *testing.T) string {
	t.Helper()
	var q struct {
		Query string `json:"query"`
	}
	if err := json.Unmarshal(v.Query, &q); err != nil {
		t.Fatalf("variable %s: %v", v.Name, err)
	}
	return q.Query
}

// text returns the query of a variable of another type, its default value.
func (v variable) text(t *testing.T) (text string) {
	t.Helper()
	if err := json.Unmarshal(v.Query, &text); err != nil {
		t.Fatalf("variable %s: %v", v.Name, err)
	}
	return text
}

type panel struct {
	ID          int          `json:"id"`
	Type        string       `json:"type"`
	Title       string       `json:"title"`
	Description string       `json:"description"`
	Collapsed   bool         `json:"collapsed"`
	Position    gridPosition `json:"gridPos"`
	Datasource  datasource   `json:"datasource"`
	Interval    string       `json:"interval"`
	Targets     []target     `json:"targets"`
	FieldConfig struct {
		Defaults  field      `json:"defaults"`
		Overrides []override `json:"overrides"`
	} `json:"fieldConfig"`
	Options struct {
		GraphMode string `json:"graphMode"`
		PerPage   int    `json:"perPage"`
		Legend    struct {
			Calcs    []string `json:"calcs"`
			SortBy   string   `json:"sortBy"`
			SortDesc bool     `json:"sortDesc"`
		} `json:"legend"`
		SortBy []struct {
			DisplayName string `json:"displayName"`
		} `json:"sortBy"`
	} `json:"options"`
	Transformations []struct {
		ID      string `json:"id"`
		Options struct {
			Exclude map[string]bool   `json:"excludeByName"`
			Index   map[string]int    `json:"indexByName"`
			Rename  map[string]string `json:"renameByName"`
		} `json:"options"`
	} `json:"transformations"`
	Panels []panel `json:"panels"` // of a collapsed row
}

// field is the configuration of the fields of a panel.
type field struct {
	Unit     string    `json:"unit"`
	Decimals *int      `json:"decimals"`
	NoValue  string    `json:"noValue"`
	Mappings []mapping `json:"mappings"`
	Color    struct {
		Mode string `json:"mode"`
	} `json:"color"`
	Thresholds struct {
		Steps []struct{} `json:"steps"`
	} `json:"thresholds"`
	Custom struct {
		DrawStyle  string  `json:"drawStyle"`
		Line       string  `json:"lineInterpolation"`
		Filterable *bool   `json:"filterable"`
		MinWidth   float64 `json:"minWidth"`
	} `json:"custom"`
}

type mapping struct {
	Type    string `json:"type"`
	Options struct {
		Match  string `json:"match"`
		Result struct {
			Text  string `json:"text"`
			Color string `json:"color"`
		} `json:"result"`
	} `json:"options"`
}

type override struct {
	Matcher struct {
		ID      string `json:"id"`
		Options string `json:"options"`
	} `json:"matcher"`
	Properties []struct {
		ID    string          `json:"id"`
		Value json.RawMessage `json:"value"`
	} `json:"properties"`
}

type datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type target struct {
	RefID   string `json:"refId"`
	Expr    string `json:"expr"`
	Legend  string `json:"legendFormat"`
	Format  string `json:"format"`
	Instant bool   `json:"instant"`
}

type gridPosition struct {
	H, W, X, Y int
}

func (p gridPosition) overlaps(q gridPosition) bool {
	return p.X < q.X+q.W && q.X < p.X+p.W && p.Y < q.Y+q.H && q.Y < p.Y+p.H
}

// dashboards returns the chart's dashboards by file.
func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	all := make(map[string]dashboard)
	for _, name := range []string{"fleet.json", "node.json", "usage.json"} {
		text, err := os.ReadFile(filepath.Join(chart, "dashboards", name))
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all[name] = d
	}
	return all
}

var (
	// reference matches a variable in an expression: $name, ${name} or ${name:format}; $1 is Prometheus' own.
	reference   = regexp.MustCompile(`\$(?:\{([A-Za-z_]\w*)(?::\w+)?\}|([A-Za-z_]\w*))`)
	labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
	legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)
)

// TestDashboards checks what makes the dashboards work in any Grafana. make dashboards, which needs node, checks that
// Grafana knows each option.
func TestDashboards(t *testing.T) {
	uids := make(map[string]string)
	for name, d := range dashboards(t) {
		if other, twice := uids[d.UID]; twice || d.UID == "" {
			t.Errorf("%s: uid %q is missing or used by %s", name, d.UID, other)
		}
		uids[d.UID] = name
		if d.Title == "" || d.Description == "" || d.Refresh == "" || d.SchemaVersion < 39 {
			t.Errorf("%s: expected title, description, refresh and schemaVersion 39 or later, got %q, %q, %q, %d",
				name, d.Title, d.Description, d.Refresh, d.SchemaVersion)
		}
		if len(d.Links) != 1 || !d.Links[0].IncludeVars || !slices.Equal(d.Links[0].Tags, []string{"gpu-node-agent"}) ||
			!slices.Contains(d.Tags, "gpu-node-agent") {
			t.Errorf("%s: the dashboards link to each other by the tag gpu-node-agent; tags %v, links %+v", name, d.Tags, d.Links)
		}
		var variables []string
		for _, v := range d.Templating.List {
			variables = append(variables, v.Name)
			if v.Type == "query" && v.IncludeAll && v.AllValue != ".*" {
				t.Errorf("%s: variable %s: allValue %q; use .*, which matches series without the label too", name, v.Name, v.AllValue)
			}
		}
		if !slices.Contains(variables, "cluster") || !slices.Contains(variables, "node") {
			t.Errorf("%s: variables %v, want cluster and node among them", name, variables)
		}
		for _, fault := range panelFaults(d, variables) {
			t.Errorf("%s: %s", name, fault)
		}
	}
	for name, d := range dashboards(t) {
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range regexp.MustCompile(`/d/([\w-]+)`).FindAllStringSubmatch(string(text), -1) {
			if uids[link[1]] == "" {
				t.Errorf("%s links to the dashboard %s, which does not exist", name, link[1])
			}
		}
	}
}

// panelFaults returns what is wrong with the panels and annotations of a dashboard, which may use these variables.
func panelFaults(d dashboard, variables []string) (faults []string) {
	bad := func(p panel, format string, args ...any) {
		faults = append(faults, fmt.Sprintf("panel %d %q: ", p.ID, p.Title)+fmt.Sprintf(format, args...))
	}
	variables = append(slices.Clone(variables), "__range", "__interval", "__interval_ms", "__rate_interval")
	ids, titles := make(map[int]string), make(map[string]bool)
	checkPositions(d.Panels, bad)
	for _, p := range d.all() {
		if other, twice := ids[p.ID]; twice {
			bad(p, "has the id of %q", other)
		}
		ids[p.ID] = p.Title
		if p.ID <= 0 || p.Title == "" || p.Position.W <= 0 || p.Position.H <= 0 || p.Position.X < 0 || p.Position.X+p.Position.W > 24 {
			bad(p, "lacks an id, title or position: %+v", p.Position)
		}
		if p.Type == "row" {
			if checkPositions(p.Panels, bad); p.Collapsed != (len(p.Panels) > 0) {
				bad(p, "a collapsed row contains its panels, another row none")
			}
			continue
		}
		if titles[p.Title] {
			bad(p, "has the title of another panel")
		}
		titles[p.Title] = true
		for _, fault := range slices.Concat(contentFaults(p, variables), drawingFaults(p)) {
			bad(p, "%s", fault)
		}
	}
	for _, a := range d.Annotations.List {
		p := panel{Title: "annotation " + a.Name}
		if a.Title == "" || a.Datasource != (datasource{"prometheus", "${datasource}"}) {
			bad(p, "lacks a title or the data source's variable")
		}
		for _, fault := range queryFaults(a.Target, variables) {
			bad(p, "%s", fault)
		}
	}
	return faults
}

// contentFaults returns what is wrong with the description and the queries of a panel other than a row.
func contentFaults(p panel, variables []string) (faults []string) {
	if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.FieldConfig.Defaults.Thresholds.Steps) == 0 {
		faults = append(faults, "lacks a description, unit or thresholds")
	}
	if p.Datasource != (datasource{"prometheus", "${datasource}"}) {
		faults = append(faults, fmt.Sprintf("datasource %+v; use the variable", p.Datasource))
	}
	if len(p.Targets) == 0 {
		faults = append(faults, "has no query")
	}
	var refs []string
	for _, q := range p.Targets {
		if q.Expr == "" || q.RefID == "" || slices.Contains(refs, q.RefID) {
			faults = append(faults, fmt.Sprintf("query %q: %q", q.RefID, q.Expr))
		}
		refs = append(refs, q.RefID)
		faults = append(faults, queryFaults(q, variables)...)
		if p.Type == "table" && (q.Format != "table" || !q.Instant) {
			faults = append(faults, fmt.Sprintf("query %s of a table must be instant and of format table", q.RefID))
		}
	}
	return faults
}

// queryFaults returns what is wrong with the variables and selectors of a query.
func queryFaults(q target, variables []string) (faults []string) {
	for _, m := range reference.FindAllStringSubmatch(q.Expr, -1) {
		if !slices.Contains(variables, m[1]+m[2]) {
			faults = append(faults, fmt.Sprintf("query %s uses the undefined variable %s", q.RefID, m[0]))
		}
	}
	// A copied query easily sums over all clusters or nodes.
	if n := strings.Count(q.Expr, "{"); strings.Count(q.Expr, `cluster=~"$cluster", instance`) != n {
		faults = append(faults, fmt.Sprintf("query %s: each of its %d selectors must begin with the cluster and the node", q.RefID, n))
	}
	return faults
}

func checkPositions(panels []panel, bad func(p panel, format string, args ...any)) {
	for i, p := range panels {
		for _, q := range panels[:i] {
			if p.Position.overlaps(q.Position) {
				bad(p, "overlaps %q", q.Title)
			}
		}
	}
}
