package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// sbom writes a CycloneDX SBOM of the modules that the linker recorded in the binary. It is reproducible: it has no
// time, and the serial number derives from the binary's hash.
func sbom(dir, binary, version, out string) error {
	text, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	modules, err := linkedModules(dir)
	if err != nil {
		return err
	}
	if err := classify(modules); err != nil {
		return err
	}
	byPath := make(map[string]*Module)
	for _, m := range modules {
		byPath[m.Path] = m
	}
	components := []cdx.Component{component(stdlib, info.GoVersion, byPath[stdlib])}
	for _, d := range info.Deps {
		m := byPath[d.Path]
		if m == nil || m.Version != d.Version {
			return fmt.Errorf("%s@%s is in %s but not in %s; rebuild it", d.Path, d.Version, binary, filepath.Join(dir, "go.mod"))
		}
		c := component(d.Path, d.Version, m)
		if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(d.Sum, "h1:")); err == nil && len(sum) == sha256.Size {
			c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}} // hash of the module, as in go.sum
		}
		components = append(components, c)
	}
	bom := newBOM(info, version, sha256.Sum256(text), components)
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	if err := cdx.NewBOMEncoder(f, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		_ = f.Close()
		return err
	}
	fmt.Printf("%s: %d components\n", out, len(components))
	return f.Close()
}

func newBOM(info *buildinfo.BuildInfo, version string, hash [sha256.Size]byte, components []cdx.Component) *cdx.BOM {
	main := component(info.Main.Path, version, &Module{IDs: []string{"Apache-2.0"}})
	main.Type = cdx.ComponentTypeApplication
	main.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(hash[:])}}
	properties := []cdx.Property{{Name: "go:version", Value: info.GoVersion}}
	for _, s := range info.Settings {
		properties = append(properties, cdx.Property{Name: "go:build:" + s.Key, Value: s.Value})
	}
	main.Properties = &properties
	bom := cdx.NewBOM()
	bom.SerialNumber = serialNumber(hash)
	bom.Metadata = &cdx.Metadata{Component: &main}
	bom.Components = &components
	refs := make([]string, len(components))
	for i, c := range components {
		refs[i] = c.BOMRef
	}
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	return bom
}

// serialNumber derives a custom UUID (version 8) from a hash.
func serialNumber(hash [sha256.Size]byte) string {
	hash[6], hash[8] = hash[6]&0x0f|0x80, hash[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", hash[0:4], hash[4:6], hash[6:8], hash[8:10], hash[10:16])
}

func component(path, version string, m *Module) cdx.Component {
	purl := "pkg:golang/" + path + "@" + version
	c := cdx.Component{BOMRef: purl, PackageURL: purl, Type: cdx.ComponentTypeLibrary, Name: path, Version: version}
	if m != nil {
		var licences cdx.Licenses
		for _, id := range m.IDs {
			licences = append(licences, cdx.LicenseChoice{License: &cdx.License{ID: id}})
		}
		c.Licenses = &licences
	}
	return c
}
