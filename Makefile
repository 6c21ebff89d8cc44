GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.revision=$(REVISION)
# go run builds it with its own go.mod: nothing of it reaches ours.
LINT := $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
FUZZTIME ?= 20s
# go-dcgm needs cgo; the race detector too.
export CGO_ENABLED ?= 1

.PHONY: all build demo test test-unit test-e2e lint bench fuzz fmt screenshots clean

all: build

build:
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/gpu-node-agent .

# The agent on simulated GPUs with a stand-in kubelet. Ctrl-C ends it; DEMO_FLAGS=-once ends it by itself.
demo: build
	$(GO) run ./plugin/kubelettest/demo -agent bin/gpu-node-agent $(DEMO_FLAGS)

test: test-unit test-e2e

test-unit:
	$(GO) test -race ./...

# The built binary against the kubelet's own device manager: its first build takes some minutes.
test-e2e:
	cd e2e && $(GO) test -vet=off -count=1 ./...

lint:
	$(LINT) run ./...
	cd e2e && $(GO) mod tidy -diff
	$(GO) mod tidy -diff

fmt:
	$(LINT) fmt ./...

bench:
	$(GO) test -run '^$$' -bench . -benchmem ./...

# Each fuzz target for FUZZTIME.
fuzz:
	@for pkg in $$($(GO) list ./...); do \
	  for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
	    echo "$$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$pkg || exit 1; \
	  done; \
	done

# The status page as people see it, to be looked at. Needs chromium.
screenshots:
	mkdir -p bin/screenshots
	$(GO) test ./agent -count=1 -run TestScreenshots -v -screenshots=$(CURDIR)/bin/screenshots

clean:
	rm -rf bin
