GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.revision=$(REVISION)
BUILD := build -ldflags '$(LDFLAGS)'
# The tools are built with their own go.mod, so their dependencies stay out of ours. They are installed once, because each
# go run of a version queries the module proxy.
LINT := $(CURDIR)/bin/tools/golangci-lint-v2.15.0
VULNCHECK := $(CURDIR)/bin/tools/govulncheck-v1.9.0
ACTIONLINT := $(CURDIR)/bin/tools/actionlint-v1.7.12
# Installs the tool of a module at the version in its name, with several tries, because the go command has only one.
INSTALL = for pause in 2 10 30 ''; do \
	    GOBIN=$(@D) $(GO) install $(1)@$(lastword $(subst -, ,$(@F))) && break; test -n "$$pause" && sleep $$pause || exit 1; \
	  done; mv $(@D)/$(notdir $(1)) $@
# A mirror, such as file:///path, has the layout that https://go.dev/doc/security/vuln/database describes.
VULNDB ?= https://vuln.go.dev
FUZZTIME ?= 20s
# go-dcgm and the race detector need cgo.
export CGO_ENABLED ?= 1
# go-nvml binds every function of NVML, also functions that its header calls deprecated.
export CGO_CFLAGS ?= -g -O2 -Wno-deprecated-declarations
# One set of flags, so that nothing is compiled twice. With them the binary does not depend on the machine, the directory or the time: see
# reproducible. Besides, go build and go list fail with VCS stamps if git does not trust the owner of the checkout.
export GOFLAGS := $(strip $(filter-out -trimpath -buildvcs=false,$(GOFLAGS)) -trimpath -buildvcs=false)

.PHONY: all help build demo docs test test-unit test-e2e test-e2e-1.37 nightly lint actionlint bench fuzz fmt screenshots clean
.PHONY: bench-outside reproducible vuln licenses check-licenses sbom

all: build

# Lists the targets. Each has the first sentence of the comment above it, which fits on one line.
help:
	@awk '/^# / && text == "" { text = substr($$0, 3); sub(/\.( .*)?$$/, "", text) } \
	  /^[a-z][a-z0-9.-]*:([^=]|$$)/ && text != "" { sub(/:.*/, "", $$1); printf "  %-15s %s\n", $$1, text } \
	  /^$$|^\t/ { text = "" }' Makefile

BUILD_AGENT := $(GO) $(BUILD) -o bin/gpu-node-agent .

# Builds bin/gpu-node-agent.
build:
	$(BUILD_AGENT)

# Runs the agent on simulated GPUs with a stand-in kubelet. Ctrl-C ends it; DEMO_FLAGS=-once stops after one pass.
# One shell builds and runs, and ends without an error at a signal: make would report each target that it interrupts.
demo:
	@trap 'exit 0' INT TERM; echo 'building bin/gpu-node-agent'; $(BUILD_AGENT) && \
	  $(GO) build -o bin/demo ./internal/kubelettest/demo && exec bin/demo -agent bin/gpu-node-agent $(DEMO_FLAGS)

# The tests take this agent instead of linking one for each package. internal/binarytest builds its own, with the race detector.
test-unit test-e2e test-e2e-1.37 e2e-restarts helm-lint chaos-faults chaos-holders: build
test-unit test-e2e test-e2e-1.37 e2e-restarts helm-lint chaos-faults chaos-holders: export AGENT_BIN ?= $(CURDIR)/bin/gpu-node-agent

# Writes the generated parts of the documents.
docs:
	$(GO) run ./internal/docs

# Runs all tests.
test: test-unit test-e2e test-e2e-1.37

# Tests this module with the race detector. make lint vets it.
test-unit:
	$(GO) test -race -vet=off -timeout 40m ./...

# The flags of the go command for the tests with the device manager of Kubernetes 1.37: see e2e/mkmod.sh.
KUBELET_1_37 := -modfile=go.kubelet1.37.mod -tags=kubelet1.37

# Tests the binary against the kubelet's own device manager. The first build takes minutes.
test-e2e:
	e2e/prometheus/need.sh
	e2e/page/need.sh
	e2e/apiserver/need.sh
	cd e2e && $(GO) test -vet=off -count=1 -timeout 30m ./...
	cd e2e/agent && $(GO) test -vet=off -timeout 40m ./bench ./supply

# Tests the binary against the device manager of Kubernetes 1.37.
test-e2e-1.37:
	cd e2e && $(GO) test -vet=off -count=1 -timeout 30m $(KUBELET_1_37) ./devicemanager

.PHONY: e2e-restarts
RESTARTS := -vet=off -count=1 -v -timeout 30m -run TestImmediateRestarts

# Restarts the agent 200 times in each way.
# Plays SIGKILL and SIGTERM with both device managers; takes ten minutes.
e2e-restarts:
	cd e2e && $(GO) test $(RESTARTS) ./devicemanager -restarts 200
	cd e2e && $(GO) test $(RESTARTS) $(KUBELET_1_37) ./devicemanager -restarts 200

$(LINT):
	$(call INSTALL,github.com/golangci/golangci-lint/v2/cmd/golangci-lint)

$(VULNCHECK):
	$(call INSTALL,golang.org/x/vuln/cmd/govulncheck)

$(ACTIONLINT):
	$(call INSTALL,github.com/rhysd/actionlint/cmd/actionlint)

# What -modfile does, for golangci-lint, which runs the go command also outside of modules.
KUBELET_1_37_OVERLAY := $(CURDIR)/bin/kubelet1.37.json
$(KUBELET_1_37_OVERLAY):
	@mkdir -p $(@D)
	echo '{"Replace": {"go.mod": "go.kubelet1.37.mod", "go.sum": "go.kubelet1.37.sum"}}' >$@

# Runs golangci-lint over every module, and actionlint.
lint: $(LINT) $(KUBELET_1_37_OVERLAY) actionlint
	$(LINT) run ./...
	cd e2e && $(LINT) run ./...
	cd e2e && GOFLAGS='$(GOFLAGS) -overlay=$(KUBELET_1_37_OVERLAY)' $(LINT) run --build-tags=kubelet1.37 ./internal/kubelet ./devicemanager
	cd e2e/agent && $(LINT) run ./...
	cd e2e/helm && $(LINT) run ./...
	cd e2e && $(GO) mod tidy -diff
	cd e2e && $(GO) mod tidy -diff -modfile=go.kubelet1.37.mod
	cd e2e/agent && $(GO) mod tidy -diff
	cd e2e/containerd && $(GO) mod tidy -diff
	cd e2e/helm && $(GO) mod tidy -diff
	$(GO) mod tidy -diff

# Checks the GitHub workflows.
actionlint: $(ACTIONLINT)
	$(ACTIONLINT) .github/workflows/*.yml

.PHONY: helm-lint e2e-cluster image image-sim image-check

# Checks the chart against Helm, Kubernetes' types and the agent.
# It renders every values file. The first build of Helm takes minutes.
helm-lint:
	cd e2e/helm && $(GO) test -count=1 -timeout 40m .

# Tests the chart on a real cluster of one node. Needs root and Linux; installs what it needs on Debian. Takes minutes.
# KUBERNETES=1.37 runs another release of Kubernetes, CLUSTER_FLAGS='-run TestDRA' only some tests. .ci/run has one release: the first
# build of another takes 7 to 20 minutes.
e2e-cluster:
	e2e/cluster/run $(CLUSTER_FLAGS)

# Plays a random sequence on a real cluster. Needs root and Linux.
# It plays at least STEPS steps of helm, pods of both APIs and faults, until each situation of the model has occurred, and checks after each step
# what containers have, what the node offers and what is left on it. Takes ten minutes, so CI does not run it.
.PHONY: sequences-cluster
SEED ?= 1
STEPS ?= 30
sequences-cluster:
	e2e/cluster/run -run '^TestSequence$$' -skip '^$$' -timeout 3h -sequence-seed $(SEED) -sequence-steps $(STEPS) $(CLUSTER_FLAGS)

# The builder: docker, podman or buildah. For two architectures: DOCKER='docker buildx' IMAGE=HOST/NAME
# IMAGE_FLAGS='--platform linux/amd64,linux/arm64 --push'.
DOCKER ?= docker
IMAGE ?= gpu-node-agent
# The chart names images without v: v0.1.0 has the tag 0.1.0.
TAG = $(VERSION:v%=%)
IMAGE_BUILD = $(DOCKER) build $(IMAGE_FLAGS) --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION)

# Builds the image; DOCKER=podman selects another builder.
image: licenses
	$(IMAGE_BUILD) -t $(IMAGE):$(TAG) .

# Builds the image for simulated GPUs, without DCGM.
image-sim: licenses
	$(IMAGE_BUILD) --target sim -t $(IMAGE):$(TAG)-sim .

# Builds and checks both images without a registry.
# It uses substitutes for their bases. Needs root and Linux; installs what it needs on Debian.
image-check:
	e2e/image/run

# Formats all code.
fmt: $(LINT)
	$(LINT) fmt ./...

BENCH_OUTSIDE = cd e2e/agent/bench && $(GO) run . -agent $(CURDIR)/bin/gpu-node-agent -repo $(CURDIR) $(BENCH_FLAGS)

# Measures the agent from inside, then from outside.
bench: build
	$(GO) test -run '^$$' -bench . -benchmem ./...
	$(BENCH_OUTSIDE)

# Measures the agent from outside. e2e/agent/bench prints one table; BENCH_FLAGS=-quick checks only that it works.
# BENCH_FLAGS='-against /path/to/BINARY' compares it with another version.
bench-outside: build
	$(BENCH_OUTSIDE)

# Plays random sequences of faults, and of values and pods. Equal seeds give equal sequences; 0 is a random one.
# CHAOS_FLAGS: -run '...' -replay '...' replays a failure; -only fatal,heal,empty plays only these kinds of steps.
CHAOS_SEED ?= 0
CHAOS_SLACK ?= 1
CHAOS_TIME ?= 3m
CHAOS_TEST := cd e2e/agent/chaos && $(GO) test -count=1 -timeout 60m -v
CHAOS_ALL = -seed $(CHAOS_SEED) -slack $(CHAOS_SLACK)
.PHONY: chaos chaos-faults chaos-holders
chaos:
	$(MAKE) -j2 --output-sync=target chaos-faults chaos-holders

# Plays faults of GPUs, DCGM, the kubelet and the node. CHAOS_FLAGS=-raced builds the agent with the race detector.
chaos-faults:
	$(CHAOS_TEST) . $(CHAOS_ALL) -time $(CHAOS_TIME) $(CHAOS_FLAGS)

# Plays the sequences of values, pods of both APIs and faults.
# Each device has one holder. They run in one process and with the binary; the first build takes minutes.
chaos-holders:
	$(CHAOS_TEST) -tags=kubelet1.37 ./holders $(CHAOS_ALL) $(CHAOS_FLAGS)

# Runs each fuzz target for FUZZTIME, of two packages at once.
fuzz:
	@$(MAKE) -j2 --output-sync=target \
	  $$(grep -rlE '^func Fuzz' --include='*_test.go' --exclude-dir=e2e . | xargs -n 1 dirname | sort -u | sed 's|^\.|fuzz|')

# The fuzz targets of one package, which is built once: go test would link it anew for each target.
fuzz/%:
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; cache="$$($(GO) env GOCACHE)/fuzz/$$($(GO) list ./$*)"; \
	$(GO) test -c -vet=off -ldflags=-w -fuzz . -o "$$dir/test" ./$*; cd ./$*; \
	for target in $$("$$dir/test" -test.list '^Fuzz'); do \
	  echo "$* $$target"; \
	  "$$dir/test" -test.run '^$$' -test.fuzz "^$$target$$" -test.fuzztime $(FUZZTIME) -test.fuzzminimizetime 20x -test.fuzzcachedir "$$cache"; \
	done

# Plants mistakes and counts which ones the unit tests notice.
# PKG='plugin plugin/dra' names packages, SEED draws the mistakes; equal seeds draw equal mistakes from equal code. Results are kept after each
# mistake, so a later run goes on. Takes up to three hours for all packages.
.PHONY: mutants
mutants:
	$(GO) run ./internal/mutants -seed $(SEED) $(MUTANTS_FLAGS) $(PKG)

# Takes pictures of the status page. Needs chromium and pngquant.
# They go into bin/screenshots, and the README's picture into docs/images.
screenshots:
	mkdir -p bin/screenshots
	$(GO) test ./agent/status -count=1 -run TestScreenshots -v -screenshots=$(CURDIR)/bin/screenshots
	pngquant --quality 70-90 --speed 1 --force --output docs/images/status.png bin/screenshots/h100-8-light.png

# Checks that two builds in two directories give the same file. Takes a minute.
reproducible: build
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && mkdir "$$dir/tree" "$$dir/tmp" && \
	  ln -s "$$($(GO) env GOMODCACHE)" "$$dir/modules" && \
	  tar -c --exclude=./bin --exclude=./.git . | tar -x -C "$$dir/tree" && \
	  (cd "$$dir/tree" && TMPDIR="$$dir/tmp" GOMODCACHE="$$dir/modules" GOCACHE="$$dir/cache" $(GO) $(BUILD) -o "$$dir/agent" .) && \
	  sha256sum bin/gpu-node-agent "$$dir/agent" && cmp bin/gpu-node-agent "$$dir/agent"

# Searches for known vulnerabilities in called functions. Fails if the database does not answer.
vuln: $(VULNCHECK)
	$(VULNCHECK) -db $(VULNDB) ./...

# Lists the linked modules and their licences.
# It collects the licence texts for distribution with the binary.
licenses:
	@mkdir -p bin
	cd e2e/agent/supply && $(GO) run . licenses -write -texts $(CURDIR)/bin/third-party-licenses.txt $(CURDIR)

# Compares THIRD_PARTY_LICENSES.csv with the linked modules.
check-licenses:
	cd e2e/agent/supply && $(GO) run . licenses $(CURDIR)

# Writes bin/sbom.json.
sbom: build
	cd e2e/agent/supply && $(GO) run . sbom -version $(VERSION) -o $(CURDIR)/bin/sbom.json $(CURDIR) $(CURDIR)/bin/gpu-node-agent

# Checks the dashboards against Grafana's types. Needs node.
.PHONY: dashboards
dashboards:
	cd e2e/prometheus/grafana && npm ci --ignore-scripts --no-audit --no-fund && npm run schema && \
	  npm run check -- $(CURDIR)/charts/gpu-node-agent/dashboards/*.json

# Runs every part of .ci/run, with random sequences.
# Records the commit in .ci/full: later runs of .ci/run skip the costly parts whose paths have not changed since. Commit that file. The seed
# is a multiple of four, because chaos-faults plays all its worlds only then.
nightly:
	@test -z "$$(git status --porcelain)" || { echo 'nightly: commit first, because .ci/full names a commit' >&2; exit 1; }
	commit=$$(git rev-parse HEAD) && CI_ALL=1 CHAOS_SEED=$$(($$(date +%s) % 250000 * 4 + 4)) .ci/run && echo "$$commit" >.ci/full

# Removes bin.
clean:
	rm -rf bin
