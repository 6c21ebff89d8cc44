package dra

import (
	"encoding/json"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func opaque(kind, sharing string) string {
	return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `"` + sharing + `}`
}

func TestParseOpaque(t *testing.T) {
	tests := map[string]struct {
		text string
		err  string // a part; empty: none
	}{
		"nothing":               {opaque("GpuConfig", ""), ""},
		"default time slice":    {opaque("GpuConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Default"}}`), ""},
		"time slicing":          {opaque("MigDeviceConfig", `,"sharing":{"strategy":"TimeSlicing"}`), ""},
		"MPS":                   {opaque("MigDeviceConfig", `,"sharing":{"strategy":"MPS"}`), ""},
		"limits of MPS":         {gpuConfigMPS, ""},
		"long time slice":       {opaque("GpuConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), `"Long"`},
		"time slice of MIG":     {opaque("MigDeviceConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), "timeSlicingConfig"},
		"no strategy":           {opaque("GpuConfig", `,"sharing":{}`), "strategy"},
		"MPS with time slices":  {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`), "timeSlicingConfig"},
		"time slicing with MPS": {opaque("GpuConfig", `,"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`), "mpsConfig"},
		"unknown field":         {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","replicas":2}`), "replicas"},
		"all threads":           {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":100}}`), ""},
		"a few threads":         {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":1}}`), ""},
		"no threads": {
			opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":0}}`),
			"found 0",
		},
		"the least memory": {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1Mi"}}`), ""},
		"less than the least memory": {opaque("GpuConfig",
			`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1048575"}}`), "1Mi"},
		"too many threads":  {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":101}}`), "101"},
		"too little memory": {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1k"}}`), "1Mi"},
		"too little of one": {opaque("GpuConfig",
			`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"-1Gi"}}}`), "[0]"},
		"several users":             {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":true}}`), "multiUser"},
		"one user":                  {opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":false}}`), ""},
		"VFIO":                      {opaque("VfioDeviceConfig", ""), "VfioDeviceConfig"},
		"another version":           {`{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`, "resource.nvidia.com/v1"},
		"no JSON":                   {`kind: GpuConfig`, "JSON"},
		"empty":                     {``, "JSON"},
		"text after the parameters": {opaque("GpuConfig", "") + "{}", "JSON"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			config, err := parseOpaque([]byte(test.text))
			switch {
			case test.err == "" && err != nil, test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
				t.Errorf("got %v, want %q", err, test.err)
			case err == nil && config == nil:
				t.Error("no configuration")
			}
		})
	}
}

func TestMPSLimits(t *testing.T) {
	const gpu = health.DeviceID("GPU-0")
	tests := map[string]struct {
		text    string
		threads int
		pinned  uint64
		wrong   bool
	}{
		"default":          {`{}`, 100, 0, false},
		"all":              {`{"defaultActiveThreadPercentage":30,"defaultPinnedDeviceMemoryLimit":"10.5Mi"}`, 30, 10 << 20, false},
		"by UUID":          {`{"defaultPinnedDeviceMemoryLimit":"1Gi","defaultPerDevicePinnedMemoryLimit":{"GPU-0":"2Gi"}}`, 100, 2 << 30, false},
		"by index":         {`{"defaultPerDevicePinnedMemoryLimit":{"0":"2Gi"}}`, 100, 2 << 30, false},
		"by both":          {`{"defaultPerDevicePinnedMemoryLimit":{"0":"2Gi","GPU-0":"3Gi"}}`, 100, 3 << 30, false},
		"by another index": {`{"defaultPerDevicePinnedMemoryLimit":{"1":"2Gi"}}`, 0, 0, true},
		"by another UUID":  {`{"defaultPerDevicePinnedMemoryLimit":{"GPU-1":"2Gi"}}`, 0, 0, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			config, err := parseOpaque([]byte(opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":`+test.text+`}`)))
			if err != nil {
				t.Fatal(err)
			}
			threads, pinned, err := config.Sharing.MPSConfig.limits(gpu, 0)
			if (err != nil) != test.wrong || threads != test.threads || pinned != test.pinned {
				t.Errorf("got %d, %d, %v", threads, pinned, err)
			}
		})
	}
}

// The class comes before the claim, the last one wins, a request selects, and another driver's is skipped.
func TestConfigFor(t *testing.T) {
	mps, slices := opaque("GpuConfig", `,"sharing":{"strategy":"MPS"}`), opaque("GpuConfig", `,"sharing":{"strategy":"TimeSlicing"}`)
	type config struct{ source, text, request string }
	tests := map[string]struct {
		configs []config
		request string
		kind    health.Kind
		want    string // strategy; empty: none
		wrong   bool
	}{
		"none":             {nil, "a", health.KindGPU, "", false},
		"claim over class": {[]config{{"FromClaim", mps, ""}, {"FromClass", slices, ""}}, "a", health.KindGPU, strategyMPS, false},
		"the last of the claim": {
			[]config{{"FromClaim", mps, ""}, {"FromClaim", slices, ""}},
			"a", health.KindGPU, strategyTimeSlicing,
			false,
		},
		"another request":           {[]config{{"FromClaim", mps, "b"}}, "a", health.KindGPU, "", false},
		"its request":               {[]config{{"FromClaim", mps, "a"}}, "a", health.KindGPU, strategyMPS, false},
		"its request, of a sub":     {[]config{{"FromClaim", mps, "a"}}, "a/big", health.KindGPU, strategyMPS, false},
		"its subrequest":            {[]config{{"FromClaim", mps, "a/big"}}, "a/big", health.KindGPU, strategyMPS, false},
		"another subrequest":        {[]config{{"FromClaim", mps, "a/small"}}, "a/big", health.KindGPU, "", false},
		"of GPUs, for a MIG device": {[]config{{"FromClass", mps, ""}}, "a", health.KindMIG, "", false},
		"of GPUs, for its request":  {[]config{{"FromClaim", mps, "a"}}, "a", health.KindMIG, "", true},
		"wrong, then right":         {[]config{{"FromClass", `{}`, ""}, {"FromClaim", mps, ""}}, "a", health.KindGPU, "", true},
		"of another driver":         {[]config{{"other", `{}`, ""}}, "a", health.KindGPU, "", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := claim("c", result("gpu-0", byRequest(test.request)))
			for _, one := range test.configs {
				var requests []string
				if one.request != "" {
					requests = []string{one.request}
				}
				withConfig(c, resourceapi.AllocationConfigSource(one.source), one.text, requests...)
				if all := c.Status.Allocation.Devices.Config; one.source == "other" {
					all[len(all)-1].Opaque.Driver = "nic.example.com"
				}
			}
			devices := &c.Status.Allocation.Devices
			config, err := configFor(devices.Config, plugin.DefaultDRADriver, &devices.Results[0], test.kind)
			got := ""
			if config != nil {
				got = config.Sharing.Strategy
			}
			if (err != nil) != test.wrong || got != test.want {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

// FuzzOpaqueConfig checks that what is accepted has only values that the agent can set.
func FuzzOpaqueConfig(f *testing.F) {
	f.Add([]byte(gpuConfigMPS))
	f.Add([]byte(opaque("MigDeviceConfig", `,"sharing":{"strategy":"TimeSlicing"}`)))
	f.Add([]byte(opaque("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"2Gi"}}}`)))
	f.Fuzz(func(t *testing.T, text []byte) {
		config, err := parseOpaque(text)
		if err != nil {
			return
		}
		if config.APIVersion != opaqueVersion || config.Kind != kindGPUConfig && config.Kind != kindMIGConfig {
			t.Fatalf("accepted %+v", config)
		}
		if config.Sharing != nil {
			threads, pinned, err := config.Sharing.MPSConfig.limits("GPU-0", 0)
			if err == nil && (threads < 1 || threads > 100 || pinned%(1<<20) != 0) {
				t.Fatalf("accepted %d and %d", threads, pinned)
			}
		}
		if again, err := json.Marshal(config); err != nil {
			t.Fatal(err)
		} else if _, err := parseOpaque(again); err != nil {
			t.Fatalf("%s: %v", again, err)
		}
	})
}
