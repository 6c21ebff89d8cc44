GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.revision=$(REVISION)
# Nothing of the machine, the directory or the time gets into the binary: see reproducible. The revision comes from above.
BUILD := build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'
# Built with its own go.mod: nothing of it reaches ours. Once, because each go run of a version asks the module proxy.
LINT_VERSION := v2.15.0
LINT := $(CURDIR)/bin/tools/golangci-lint-$(LINT_VERSION)
VULNCHECK := $(GO) run golang.org/x/vuln/cmd/govulncheck@v1.8.0
# Or a mirror, such as file:///path: what https://go.dev/doc/security/vuln/database describes.
VULNDB ?= https://vuln.go.dev
FUZZTIME ?= 20s
# go-dcgm needs cgo; the race detector too.
export CGO_ENABLED ?= 1
# Nobody reads it, and go build and go list fail where git does not trust the owner of the checkout, as in a container.
export GOFLAGS := $(strip $(GOFLAGS) -buildvcs=false)

.PHONY: all build demo test test-unit test-e2e lint bench fuzz fmt screenshots clean
.PHONY: bench-outside reproducible vuln licenses check-licenses sbom

all: build

build:
	$(GO) $(BUILD) -o bin/gpu-node-agent .

# The agent on simulated GPUs with a stand-in kubelet. Ctrl-C ends it; DEMO_FLAGS=-once ends it by itself.
demo: build
	$(GO) run ./internal/kubelettest/demo -agent bin/gpu-node-agent $(DEMO_FLAGS)

test: test-unit test-e2e

test-unit:
	$(GO) test -race ./...

# The built binary against the kubelet's own device manager: its first build takes some minutes.
test-e2e:
	e2e/prometheus/need.sh
	cd e2e && $(GO) test -vet=off -count=1 ./...
	cd e2e/bench && $(GO) test ./...
	cd e2e/supply && $(GO) test ./...

$(LINT):
	GOBIN=$(@D) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	mv $(@D)/golangci-lint $@

lint: $(LINT)
	$(LINT) run ./...
	cd e2e && $(LINT) run ./...
	cd e2e/bench && $(LINT) run ./...
	cd e2e/chaos && $(LINT) run ./...
	cd e2e/helm && $(LINT) run ./...
	cd e2e/supply && $(LINT) run ./...
	cd e2e && $(GO) mod tidy -diff
	cd e2e/supply && $(GO) mod tidy -diff
	cd e2e/bench && $(GO) mod tidy -diff
	cd e2e/chaos && $(GO) mod tidy -diff
	cd e2e/helm && $(GO) mod tidy -diff
	$(GO) mod tidy -diff
	$(MAKE) helm-lint

.PHONY: helm-lint e2e-cluster image image-sim image-check

# The chart: helm lint and helm template with every values file, the objects against Kubernetes' own types, the
# configuration against the agent. Helm's first build takes some minutes.
helm-lint:
	cd e2e/helm && $(GO) test -count=1 .

# The chart on a real cluster of one node. Root and Linux; it installs what it needs on Debian. Minutes.
e2e-cluster:
	e2e/cluster/run

# Or podman, buildah. For two architectures: DOCKER='docker buildx' IMAGE=HOST/NAME
# IMAGE_FLAGS='--platform linux/amd64,linux/arm64 --push'.
DOCKER ?= docker
IMAGE ?= gpu-node-agent
# As the chart names them: v0.1.0 is the tag 0.1.0.
TAG = $(VERSION:v%=%)
IMAGE_BUILD = $(DOCKER) build $(IMAGE_FLAGS) --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION)

image: licenses
	$(IMAGE_BUILD) -t $(IMAGE):$(TAG) .

image-sim: licenses
	$(IMAGE_BUILD) --target sim -t $(IMAGE):$(TAG)-sim .

# Both, where no image can be pulled: on stand-ins for their bases. Root and Linux; it installs what it needs on Debian.
image-check:
	e2e/image/run

fmt: $(LINT)
	$(LINT) fmt ./...

# The agent from inside, then from outside: e2e/bench prints one table. BENCH_FLAGS=-quick only shows that it works.
BENCH_OUTSIDE = cd e2e/bench && $(GO) run . -agent $(CURDIR)/bin/gpu-node-agent -repo $(CURDIR) $(BENCH_FLAGS)

bench: build
	$(GO) test -run '^$$' -bench . -benchmem ./...
	$(BENCH_OUTSIDE)

bench-outside: build
	$(BENCH_OUTSIDE)

# Whatever happens to a node, at random, and after each step all that must hold; the same seed is the same sequence.
# CHAOS_FLAGS=-raced builds the agent with the race detector; -run '...' -replay '...' does what a failure has printed;
# -only fatal,heal,empty plays these kinds of steps alone.
CHAOS_SEED ?= 0
CHAOS_TIME ?= 3m
.PHONY: chaos
chaos:
	cd e2e/chaos && $(GO) test -count=1 -timeout 60m -v . -seed $(CHAOS_SEED) -time $(CHAOS_TIME) $(CHAOS_FLAGS)

# Each fuzz target for FUZZTIME.
fuzz:
	@set -e; pkgs=$$($(GO) list ./...); for pkg in $$pkgs; do \
	  names=$$($(GO) test -list '^Fuzz' $$pkg); \
	  for target in $$(echo "$$names" | grep '^Fuzz'); do \
	    echo "$$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 5s $$pkg; \
	  done; \
	done

# The status page as people see it, to be looked at. Needs chromium.
screenshots:
	mkdir -p bin/screenshots
	$(GO) test ./agent/status -count=1 -run TestScreenshots -v -screenshots=$(CURDIR)/bin/screenshots

# Two builds, from two directories and with nothing shared but the modules, are the same file. A minute: all is compiled.
reproducible: build
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && mkdir "$$dir/tree" "$$dir/tmp" && \
	  ln -s "$$($(GO) env GOMODCACHE)" "$$dir/modules" && \
	  tar -c --exclude=./bin --exclude=./.git . | tar -x -C "$$dir/tree" && \
	  (cd "$$dir/tree" && TMPDIR="$$dir/tmp" GOMODCACHE="$$dir/modules" GOCACHE="$$dir/cache" $(GO) $(BUILD) -o "$$dir/agent" .) && \
	  sha256sum bin/gpu-node-agent "$$dir/agent" && cmp bin/gpu-node-agent "$$dir/agent"

# Known vulnerabilities in what the agent calls. It fails too if the database does not answer: nothing is known then.
vuln:
	$(VULNCHECK) -db $(VULNDB) ./...

# What the agent is linked of, and under which licences. The texts are for whoever ships the binary.
licenses:
	@mkdir -p bin
	cd e2e/supply && $(GO) run . licenses -write -texts $(CURDIR)/bin/third-party-licenses.txt $(CURDIR)

check-licenses:
	cd e2e/supply && $(GO) run . licenses $(CURDIR)

sbom: build
	cd e2e/supply && $(GO) run . sbom -version $(VERSION) -o $(CURDIR)/bin/sbom.json $(CURDIR) $(CURDIR)/bin/gpu-node-agent

# The dashboards against Grafana's own types. Needs node.
.PHONY: dashboards
dashboards:
	cd e2e/prometheus/grafana && npm ci --ignore-scripts --no-audit --no-fund && npm run schema && \
	  npm run check -- $(CURDIR)/charts/gpu-node-agent/dashboards/*.json

clean:
	rm -rf bin
