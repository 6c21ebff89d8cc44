package metrics

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	c := Config{
		Listen: "nine", FieldsFile: "here.csv", HPCJobDir: "jobs", WebConfigFile: "web.yaml",
		Attribution: "x", IdleBelow: -1, Window: 1, Compat: CompatConfig{HostnameLabel: "host"},
		Names: []string{fields.Names49, "dcgm-exporter-4.7", fields.Names49}, Processes: processes.Config{Proc: "", PodLogs: "logs"},
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("an invalid configuration is valid")
	}
	keys := []string{
		"listen", "names[1]", "names[2]", "fieldsFile", "webConfigFile", "hpcJobDir", "attribution", "idleBelow", "window",
		"compat.hostnameLabel", "processes.proc", "processes.podLogs",
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(keys) {
		t.Fatalf("got errors %q, want one for each of %q", lines, keys)
	}
	for i, key := range keys {
		if !strings.HasPrefix(lines[i], key+": ") {
			t.Errorf("got error %q, want one for %s", lines[i], key)
		}
	}
}

func TestConfigNotesNameKeyAndEntry(t *testing.T) {
	c := DefaultConfig()
	c.Fields = []fields.Spec{{Name: "nonsense"}, {Name: fields.SetDefault}}
	c, err := c.Resolve(os.ReadFile)
	if notes := c.Notes(); err != nil || len(notes) != 1 || !strings.HasPrefix(notes[0], "metrics.fields: nonsense: ") {
		t.Errorf("got notes %q, %v", notes, err)
	}
	c.FieldsFile = filepath.Join(t.TempDir(), "none.csv")
	if _, err := c.Resolve(os.ReadFile); err == nil || !strings.HasPrefix(err.Error(), "fieldsFile: ") {
		t.Errorf("missing file: got %v", err)
	}
	if notes := c.Notes(); len(notes) != 1 || !strings.HasPrefix(notes[0], "metrics.fieldsFile: "+c.FieldsFile+": nonsense: ") {
		t.Errorf("got notes %q", notes)
	}
}

func TestConfigValidateNames(t *testing.T) {
	for key, names := range map[string][]string{
		"": {fields.Names49, fields.Names48}, "names": {}, "names[0]": {""},
		"names[1]": {fields.Names48, fields.Names48},
	} {
		c := DefaultConfig()
		c.Names = names
		if err := c.Validate(); (err == nil) != (key == "") || err != nil && !strings.HasPrefix(err.Error(), key+": ") {
			t.Errorf("%q: got error %v, want one for %q", names, err, key)
		}
	}
}

func TestConfigRequirementsNameKeyAndField(t *testing.T) {
	c := DefaultConfig()
	c.Names = []string{fields.Names49}
	c, err := c.Resolve(os.ReadFile)
	if got := c.Requirements(); err != nil || len(got) != 1 || !strings.HasPrefix(got[0],
		"metrics.fields: DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND: ") {
		t.Errorf("got %q, %v", got, err)
	}
	if notes := c.Notes(); len(notes) > 0 {
		t.Errorf("warnings %q of a valid selection", notes)
	}
}
