module github.com/gpu-node-agent/gpu-node-agent/e2e/supply

go 1.26.8

require (
	github.com/CycloneDX/cyclonedx-go v0.12.0
	github.com/google/licensecheck v0.3.1
)
