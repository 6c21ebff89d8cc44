package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// savedNode is a directory with a valid configuration, the files that it names, and the saved copy of all of them.
type savedNode struct {
	t     testing.TB
	dir   string
	saved string // the path of the copy
	Loader
}

func newSavedNode(t testing.TB) *savedNode {
	dir := t.TempDir()
	n := &savedNode{t: t, dir: dir, Loader: Loader{File: filepath.Join(dir, "config.yaml"), StateDir: filepath.Join(dir, "state")}}
	n.saved = statefile.ConfigurationPath(n.StateDir)
	if err := os.Mkdir(n.StateDir, 0o750); err != nil {
		t.Fatal(err)
	}
	n.write("fields.csv", "DCGM_FI_DEV_GPU_TEMP, gauge, temperature\n")
	n.write("nvidia.yaml", "version: v1\nflags: {migStrategy: mixed}\n")
	n.write("web.yaml", "basic_auth_users: {ada: $2a$04$YIXGRwBYsnDMTyt.TgJF5OwQ5LYFPO9vwVmZN4E2lQFWJTFM5JZY.}\n")
	n.write("config.yaml", n.config("health: {temperature: 77}"))
	c, err := n.Load()
	if err != nil {
		t.Fatal(err)
	}
	write(t, n.saved, string(c.LastGood))
	return n
}

// config returns a configuration with a health section, in which DIR is the directory.
func (n *savedNode) config(health string) string {
	return strings.ReplaceAll(health+"\nsource: {mode: sim}\nplugin: {nvidiaConfig: DIR/nvidia.yaml}\n"+
		"metrics: {fieldsFile: DIR/fields.csv, webConfigFile: DIR/web.yaml}\n", "DIR", n.dir)
}

func (n *savedNode) write(name, text string) {
	n.t.Helper()
	write(n.t, filepath.Join(n.dir, name), text)
}

func (n *savedNode) remove(name string) {
	n.t.Helper()
	if err := os.Remove(filepath.Join(n.dir, name)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *savedNode) setFlags(flags ...string) {
	n.t.Helper()
	n.Flags = pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(n.Flags)
	if err := n.Flags.Parse(flags); err != nil {
		n.t.Fatal(err)
	}
}

// wantLastGood checks that the last good configuration is loaded with all its files, and why.
func (n *savedNode) wantLastGood(reason string) Config {
	n.t.Helper()
	c, r, err := n.LoadOrLastGood()
	if err != nil || r == nil {
		n.t.Fatalf("not loaded: %v, %v", r, err)
	}
	if !strings.Contains(r.Err.Error(), reason) || r.Path != n.saved || r.Since.IsZero() {
		n.t.Errorf("%+v, want the reason %q", r, reason)
	}
	if c.Health.Temperature != 77 || c.Plugin.MIGStrategy != "mixed" || len(c.Metrics.Chosen.Fields) != 1 || c.Web.Users() != 1 {
		n.t.Errorf("loaded %v with %d fields, %d users", c, len(c.Metrics.Chosen.Fields), c.Web.Users())
	}
	if saved, err := os.ReadFile(n.saved); err != nil || string(saved) != string(c.LastGood) {
		n.t.Errorf("saved again as\n%s, want\n%s, %v", c.LastGood, saved, err)
	}
	return c
}

// wantRefused checks that no configuration is loaded, and what the errors contain.
func (n *savedNode) wantRefused(parts ...string) {
	n.t.Helper()
	_, r, err := n.LoadOrLastGood()
	if err == nil || r != nil {
		n.t.Fatalf("loaded: %+v, %v", r, err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			n.t.Errorf("%q is not in %v", p, err)
		}
	}
}

func TestLastGoodReplacesInvalidFile(t *testing.T) {
	for name, c := range map[string]struct {
		spoil  func(*savedNode)
		reason string
	}{
		"invalid value": {
			func(n *savedNode) { n.write("config.yaml", n.config("health: {temperature: -1}")) },
			"health.temperature: ",
		},
		"wrong type": {
			func(n *savedNode) { n.write("config.yaml", n.config("health: {temperature: hot}")) },
			"health.temperature: ",
		},
		"unknown key":               {func(n *savedNode) { n.write("config.yaml", n.config("health: {temprature: 1}")) }, "health.temprature: "},
		"no fields file":            {func(n *savedNode) { n.remove("fields.csv") }, "metrics.fieldsFile: "},
		"invalid web configuration": {func(n *savedNode) { n.write("web.yaml", "basic_auth_users: {ada: plain}") }, "metrics.webConfigFile: "},
		"no web configuration":      {func(n *savedNode) { n.remove("web.yaml") }, "metrics.webConfigFile: "},
		"invalid file of NVIDIA":    {func(n *savedNode) { n.write("nvidia.yaml", "version: v2") }, "plugin.nvidiaConfig: "},
		"syntax error":              {func(n *savedNode) { n.write("config.yaml", "log: {") }, "config.yaml: "},
		"section twice":             {func(n *savedNode) { n.write("config.yaml", n.config("")+"metrics: {}\n") }, "config.yaml: "},
		"not a mapping":             {func(n *savedNode) { n.write("config.yaml", "- log") }, "config.yaml: "},
		"no file":                   {func(n *savedNode) { n.remove("config.yaml") }, "config.yaml: "},
		"empty file":                {func(n *savedNode) { n.write("config.yaml", " \n") }, "config.yaml: "},
		"a file of the state": {
			func(n *savedNode) { n.write("config.yaml", n.config("health: {stateFile: /elsewhere/state.json}")) },
			"health.stateFile: unknown key; set --state-dir or GPU_NODE_AGENT_STATE_DIR, a directory",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newSavedNode(t)
			c.spoil(n)
			n.wantLastGood(c.reason)
		})
	}
}

// The file is read once: another content a moment later is not loaded unseen.
func TestLastGoodReadsFileOnce(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() //nolint:errcheck // read to its end
	_, err = w.WriteString("log: {level: loud}\n")
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	c, rejection, err := Loader{File: fmt.Sprintf("/dev/fd/%d", r.Fd())}.LoadOrLastGood()
	if err == nil || rejection != nil || !strings.Contains(err.Error(), "log.level: ") {
		t.Errorf("loaded %v, %v, %v", c, rejection, err)
	}
}

// A configuration that loads needs no last good one.
func TestLastGoodUnused(t *testing.T) {
	n := newSavedNode(t)
	n.write("config.yaml", "log: {level: debug}")
	c, r, err := n.LoadOrLastGood()
	if err != nil || r != nil || c.Log.Level != "debug" {
		t.Errorf("%v %v %v", c, r, err)
	}
	for _, text := range []string{"", "# nothing\n"} { // without a copy an empty file has the defaults, and it is none itself
		file := filepath.Join(t.TempDir(), "config.yaml")
		write(t, file, text)
		l := Loader{File: file}
		if c, r, err := l.LoadOrLastGood(); err != nil || r != nil || (text == "" && c.LastGood != nil) {
			t.Errorf("%q: %q %v %v", text, c.LastGood, r, err)
		}
	}
	t.Chdir(t.TempDir())
	if c, r, err := (Loader{}).LoadOrLastGood(); err != nil || r != nil || (Loader{}).Path() == "" && c.LastGood != nil {
		t.Errorf("no file: %q %v %v", c.LastGood, r, err)
	}
}

// Flags and variables override the last good configuration as they override a file.
func TestLastGoodWithFlags(t *testing.T) {
	n := newSavedNode(t)
	n.remove("fields.csv")
	n.setFlags("--metrics.listen=:9500", "--log.level=debug")
	if c := n.wantLastGood("metrics.fieldsFile: "); c.Metrics.Listen != ":9500" || c.Log.Level != "debug" {
		t.Errorf("listens at %s, level %s", c.Metrics.Listen, c.Log.Level)
	}
	n.setFlags("--metrics.listen=nowhere")
	n.wantRefused("\nlast good configuration "+n.saved+": metrics.listen: ", "metrics.fieldsFile: ")
	n.setFlags()
	for _, dir := range []string{"", n.dir + "/other"} {
		n.StateDir = dir
		n.wantRefused("metrics.fieldsFile: ")
	}
}

func TestLastGoodRefused(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(n *savedNode, saved string) string // returns the text of the copy
		want  string                                  // in the error
	}{
		"truncated": {func(_ *savedNode, saved string) string { return saved[:len(saved)/2] }, "cannot be parsed"},
		"empty":     {func(*savedNode, string) string { return "" }, "cannot be parsed"},
		"not base64": {func(n *savedNode, _ string) string {
			return `{"format":"gpu-node-agent configuration","path":"` + n.File + `","files":{"` + n.File + `":"%"}}`
		}, "cannot be parsed"},
		"another document": {
			func(*savedNode, string) string { return `{"format":"gpu-node-agent state","version":1}` },
			"gpu-node-agent state",
		},
		"without the file": {func(n *savedNode, _ string) string {
			return `{"format":"gpu-node-agent configuration","path":"` + n.File + `","files":{}}`
		}, "expected the format"},
		"of another file": {
			func(n *savedNode, saved string) string { return strings.ReplaceAll(saved, n.File, n.dir+"/other.yaml") },
			"/other.yaml, not of ",
		},
		"invalid for this release": {func(n *savedNode, saved string) string {
			return edit(n.t, saved, n.File, func(text string) string { return strings.Replace(text, "temperature", "newKey", 1) })
		}, "health.newKey: "},
		"web configuration invalid for this release": {func(n *savedNode, saved string) string {
			return edit(n.t, saved, n.dir+"/web.yaml", func(text string) string { return text + "new_key: 1\n" })
		}, "new_key"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newSavedNode(t)
			saved, err := os.ReadFile(n.saved)
			if err != nil {
				t.Fatal(err)
			}
			n.remove("fields.csv")
			write(t, n.saved, c.spoil(n, string(saved)))
			n.wantRefused("metrics.fieldsFile: ", "\nlast good configuration "+n.saved+": ", c.want)
		})
	}
	t.Run("no copy", func(t *testing.T) {
		n := newSavedNode(t)
		n.remove("state/" + filepath.Base(n.saved))
		n.remove("fields.csv")
		_, want := n.Load()
		if _, r, err := n.LoadOrLastGood(); r != nil || fmt.Sprint(err) != fmt.Sprint(want) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v, %v, want %v", r, err, want)
		}
	})
}

// edit changes a file in the document of a copy.
func edit(t testing.TB, document, file string, change func(string) string) string {
	t.Helper()
	var g lastGood
	if err := json.Unmarshal([]byte(document), &g); err != nil {
		t.Fatal(err)
	}
	before := string(g.Files[file])
	g.Files[file] = []byte(change(before))
	if string(g.Files[file]) == before {
		t.Fatalf("%s is unchanged: %q", file, before)
	}
	text, err := json.Marshal(g)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A file that is not text is saved byte by byte.
func TestLastGoodKeepsBytes(t *testing.T) {
	n := newSavedNode(t)
	const latin1 = "DCGM_FI_DEV_GPU_TEMP, gauge, \xb0C\r\n"
	n.write("fields.csv", latin1)
	c, err := n.Load()
	if err != nil {
		t.Fatal(err)
	}
	write(t, n.saved, string(c.LastGood))
	g, _, err := readLastGood(n.saved)
	if got := string(g.Files[n.dir+"/fields.csv"]); err != nil || got != latin1 {
		t.Errorf("%q, %v", got, err)
	}
}

// Private keys are not copied. A web configuration that contains one is read from the disk, like the files that it names.
func TestLastGoodWithoutPrivateKeys(t *testing.T) {
	n := newSavedNode(t)
	n.write("config.yaml", n.config("health: {kubernetes: {kubeconfig: DIR/kubeconfig}}"))
	n.write("kubeconfig", "SECRET")
	n.write("web.yaml", "tls_server_config: {cert_file: server.crt, key_file: server.key}")
	agenttest.NewAuthority(t, n.dir).Issue(t, "server", "localhost")
	pem := func(name string) string { // indented, for a YAML block
		text, err := os.ReadFile(filepath.Join(n.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n    ")
	}
	inline := "tls_server_config:\n  cert: |\n    " + pem("server.crt") + "\n  key: |\n    " + pem("server.key") + "\n"
	c, err := n.Load()
	if err != nil {
		t.Fatal(err)
	}
	wantFiles(t, c, n.dir, "config.yaml", "fields.csv", "nvidia.yaml", "web.yaml")
	write(t, n.saved, string(c.LastGood))
	n.remove("web.yaml")
	again, r, err := n.LoadOrLastGood()
	if err != nil || r == nil || !again.Web.Certificate().Equal(c.Web.Certificate()) || !again.Web.Equal(c.Web) {
		t.Errorf("relative names are not those beside web.yaml: %v, %v", r, err)
	}
	n.remove("server.key")
	n.wantRefused("server.key")

	n.write("web.yaml", inline)
	if c, err = n.Load(); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, c, n.dir, "config.yaml", "fields.csv", "nvidia.yaml")
}

// wantFiles checks which files of a directory are saved.
func wantFiles(t *testing.T, c Config, dir string, want ...string) {
	t.Helper()
	var g lastGood
	if err := json.Unmarshal(c.LastGood, &g); err != nil {
		t.Fatal(err)
	}
	for _, name := range want {
		if _, ok := g.Files[filepath.Join(dir, name)]; !ok {
			t.Errorf("%s is not saved", name)
		}
	}
	if len(g.Files) != len(want) {
		t.Errorf("%d files are saved, want %q", len(g.Files), want)
	}
}

// A command gets the last good configuration, or the valid values, and an error that names what is invalid.
func TestLoadPartial(t *testing.T) {
	n := newSavedNode(t)
	if c, err := n.LoadPartial(); err != nil || c.Health.Temperature != 77 {
		t.Errorf("valid: %v, %v", c, err)
	}
	n.write("config.yaml", "health: {socket: /new.sock}\nmetrics: {listen: nowhere}")
	c, err := n.LoadPartial()
	if c.Health.Temperature != 77 || c.Metrics.Listen != ":9400" || c.Health.Socket == "/new.sock" {
		t.Errorf("not the last good configuration: %v", c)
	}
	wantError(t, "last good", err, "metrics.listen", `"nowhere"`)
	n.remove("state/" + filepath.Base(n.saved))
	c, err = n.LoadPartial()
	if c.Health.Temperature != 90 || c.Metrics.Listen != ":9400" || c.Health.Socket != "/new.sock" || c.Validate() != nil {
		t.Errorf("not the valid values: %v", c)
	}
	wantError(t, "valid values", err, "metrics.listen", `"nowhere"`)
	n.write("config.yaml", "metrics: {listen: ':9500'}\nlog: {level: ':9")
	n.setFlags("--health.socket=/flag.sock")
	if c, err = n.LoadPartial(); err == nil || c.Metrics.Listen != ":9500" || c.Health.Socket != "/flag.sock" {
		t.Errorf("syntax error: %v, %v", c, err)
	}
}

// Where an invalid file sets nothing valid, a command gets the values of an agent with another file. The agent itself does not.
func TestLoadPartialOfAnotherFile(t *testing.T) {
	n := newSavedNode(t)
	n.write("config.yaml", n.config("health: {socket: /its.sock, temperature: 77}")+"log: {level: debug}\n")
	c, err := n.Load()
	if err != nil {
		t.Fatal(err)
	}
	write(t, n.saved, string(c.LastGood))
	n.File = filepath.Join(n.dir, "other.yaml")
	for text, temperature := range map[string]float64{
		"health: {}\nlog: {": 77,
		"health: {temperature: 66}\nmetrics: {listen: nowhere}": 66,
		"health: {temperature: -1}":                             77,
	} {
		n.write("other.yaml", text)
		c, err := n.LoadPartial()
		if c.Health.Socket != "/its.sock" || c.Log.Level != "debug" || c.Metrics.Listen != ":9400" ||
			float64(c.Health.Temperature) != temperature {
			t.Errorf("%q: %v", text, c)
		}
		if !strings.Contains(fmt.Sprint(err), "other.yaml") || !strings.HasSuffix(fmt.Sprint(err), n.saved) {
			t.Errorf("%q: %v", text, err)
		}
		n.wantRefused("other.yaml")
	}
	n.remove("other.yaml")
	n.setFlags("--metrics.listen=:9700")
	if c, err := n.LoadPartial(); err == nil || c.Health.Socket != "/its.sock" || c.Metrics.Listen != ":9700" {
		t.Errorf("no file: %v, %v", c, err)
	}
}

func TestWithoutInvalid(t *testing.T) {
	c := DefaultConfig()
	c.Log.Level, c.Log.Format = "loud", "console"
	c.Source.Mode, c.Health.Confirm, c.Health.Cordon = "x", -1, []string{"0", "?"}
	c.Health.Flap.Trips, c.Health.Temperature = -1, 70
	want := DefaultConfig()
	want.Log.Format, want.Health.Temperature = "console", 70
	if got := c.withoutInvalid(DefaultConfig()); got.String() != want.String() {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if c.Log.Level != "loud" || len(c.Health.Cordon) != 2 {
		t.Error("the original changed")
	}
}

// FuzzLastGood reads any text as the last good configuration of an invalid file. What is loaded is valid, and is saved as it
// was read.
func FuzzLastGood(f *testing.F) {
	n := newSavedNode(f)
	saved, err := os.ReadFile(n.saved)
	if err != nil {
		f.Fatal(err)
	}
	n.remove("fields.csv")
	for _, text := range []string{
		string(saved), string(saved[:100]), "null", "[]", "{}", `{"format":"gpu-node-agent configuration","path":"PATH","files":{"PATH":"e30="}}`,
		`{"format":"gpu-node-agent configuration","path":"PATH","files":{"PATH":null}}`, `{"files":{"a":[1]}}`,
	} {
		f.Add(strings.ReplaceAll(strings.ReplaceAll(text, n.File, "PATH"), n.dir, "DIR"))
	}
	f.Fuzz(func(t *testing.T, text string) {
		text = strings.ReplaceAll(strings.ReplaceAll(text, "PATH", n.File), "DIR", n.dir)
		write(t, n.saved, text)
		c, r, err := n.LoadOrLastGood()
		switch {
		case (r == nil) != (err != nil):
			t.Fatalf("%+v, %v", r, err)
		case r != nil && c.Validate() != nil:
			t.Errorf("loaded, but invalid: %v", c.Validate())
		case r != nil && len(c.LastGood) > 0:
			write(t, n.saved, string(c.LastGood))
			if again, _, err := n.LoadOrLastGood(); err != nil || again.String() != c.String() || string(again.LastGood) != string(c.LastGood) {
				t.Errorf("loaded again as %v, %v", again, err)
			}
		}
	})
}
